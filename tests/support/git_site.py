"""An API server with repositories and without VMs, on its own port."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from stead.api.app import create_app, surrounded
from stead.api.protocol import Protocol
from stead.api.server import _Server
from stead.api.wire.triggers import push_payload
from stead.github.links import Links
from stead.repos.search.search import Search
from stead.repos.ssrf import Network, SsrfGuard
from stead.repos.transfer.imports import Imports
from stead.repos.transfer.serving import PackServer
from stead.repos.webhooks.signing import WebhookSigner
from stead.repos.webhooks.triggers import Triggers
from stead.settings import Settings
from support.git_stage import Stage, staged


@dataclass(frozen=True)
class Site:
    """A server, with a key for each of two accounts."""

    url: str
    stage: Stage
    key: str
    their_key: str


@contextlib.asynccontextmanager
async def served(folder: Path, dialled: Sequence[Network] = ()) -> AsyncIterator[Site]:
    async with staged(folder) as stage, contextlib.AsyncExitStack() as stack:
        signing = WebhookSigner.open(folder, "http://stead.test")
        triggers = await stack.enter_async_context(
            Triggers.open(stage.database, stage.repos, signing, SsrfGuard(), push_payload)
        )
        links = Links(stage.database, stage.repos, stage.writer, SsrfGuard(dialled))
        await stack.enter_async_context(links.running())
        stage.writer.subscribe(triggers)
        stage.writer.subscribe(links)
        services: Any = SimpleNamespace(
            settings=Settings(),
            accounts=stage.accounts,
            callers=stage.callers,
            identities=stage.identities,
            repos=stage.repos,
            access=stage.access,
            imports=Imports(SsrfGuard(dialled)),
            search=Search(),
            signing=signing,
            triggers=triggers,
            links=links,
            writer=stage.writer,
            serving=PackServer(stage.repos, stage.writer),
        )
        app, calls = surrounded(create_app(services), services)
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        server = _Server(config, calls)
        _, key = await stage.accounts.create_key(stage.ours)
        _, their_key = await stage.accounts.create_key(stage.theirs)
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
            task = asyncio.create_task(server._serve([listening]))
            up = asyncio.create_task(server.up.wait())
            try:
                await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
                yield Site(f"http://127.0.0.1:{listening.getsockname()[1]}", stage, key, their_key)
            finally:
                server.should_exit = True
                await task
                await up
