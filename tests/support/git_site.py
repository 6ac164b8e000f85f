"""An API server with repositories and without VMs, on its own port."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stead.api.server import running
from stead.repos.ssrf import Network
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
    async with (
        staged(folder, git_url="http://stead.test", dial_private=tuple(dialled)) as stage,
        running(Settings(listen="127.0.0.1:0"), stage.installation) as url,
    ):
        _, key = await stage.accounts.create_key(stage.ours)
        _, their_key = await stage.accounts.create_key(stage.theirs)
        yield Site(url, stage, key, their_key)
