"""Repositories with triggers, a clock that tests advance, and an endpoint that receives webhooks."""

import asyncio
import contextlib
import functools
import json
import random
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
import sqlalchemy as sa
from joserfc import jwt
from joserfc.jwk import KeySet

from stead.identity.accounts import Accounts
from stead.limits import UNLIMITED, Limits
from stead.repos.committing import Change, commit
from stead.repos.repos import Repos
from stead.repos.ssrf import SsrfGuard
from stead.repos.webhooks.deliveries import Clock
from stead.repos.webhooks.retries import DeliveryState
from stead.repos.webhooks.signing import EdDsaRegistry, WebhookSigner
from stead.repos.webhooks.triggers import Delivery, Trigger, Triggers
from stead.store.database import Database, open_database
from support.waiting import until

LIMIT = 20.0
SECOND = 10**9
T = TypeVar("T")


async def look_up(host: str, _: int) -> list[str]:
    """Resolves two names to this host, and no others."""
    if host not in ("localhost", "beside.test"):
        raise OSError(host)
    return ["127.0.0.1"]


LOOPBACK = SsrfGuard([IPv4Network("127.0.0.0/8")], resolve=look_up)
INTERNET = SsrfGuard(resolve=look_up)


# Endpoint and clock


@dataclass(frozen=True)
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Play = Callable[[asyncio.StreamWriter], Any]


def reply(status: int, content: bytes = b"", **headers: str) -> Play:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return lambda writer: writer.write("\r\n".join([*lines, "", ""]).encode() + content)


OK = reply(200, b"thank you")


@dataclass
class Endpoint:
    """Answers each path by its script, then with 200."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    script: dict[str, deque[Play]] = field(default_factory=dict)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """Paths that get no response until their event is set."""

    def plan(self, path: str, *plays: Play) -> str:
        self.script[path] = deque(plays)
        return self.url + path

    def hold(self, path: str) -> str:
        self.held[path] = asyncio.Event()
        return self.url + path

    def told(self, path: str = "/") -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    async def count(self, number: int, path: str = "/") -> list[Seen]:
        """The received requests, once there are this many."""

        await until(lambda: len(self.told(path)) >= number, LIMIT)
        return self.told(path)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path = head[0].split()[1]
            self.seen.append(Seen(path, headers, body))
            if path in self.held:
                await self.held[path].wait()
            plays = self.script.get(path)
            (plays.popleft() if plays else OK)(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(endpoint.answer(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield endpoint
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.wait_closed()


class Hours(Clock):
    """A clock that advances when a test says so."""

    def __init__(self) -> None:
        self._now = time.time_ns()
        self._sleeping: list[tuple[int, asyncio.Future[None]]] = []

    def now(self) -> int:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleeping.append((self._now + int(seconds * SECOND), future))
        await future

    @property
    def sleeping(self) -> int:
        return sum(not future.done() for _, future in self._sleeping)

    def go_to(self, at: int) -> None:
        self._now = max(self._now, at)
        for _, future in [each for each in self._sleeping if each[0] <= self._now]:
            if not future.done():
                future.set_result(None)
        self._sleeping = [each for each in self._sleeping if each[0] > self._now]

    def pass_by(self, seconds: float) -> None:
        self.go_to(self._now + int(seconds * SECOND))


# Repositories with triggers


@dataclass
class World:
    """One installation, whose triggers can be closed and opened again."""

    database: Database
    repos: Repos
    account: str
    folder: Path
    clock: Hours
    triggers: Triggers = field(init=False)

    @functools.cached_property
    def signing(self) -> WebhookSigner:
        return WebhookSigner.open(self.folder, "https://git.example")

    @contextlib.asynccontextmanager
    async def opened(
        self, *, grace: float = 5, timeout: float = 10, guard: SsrfGuard = LOOPBACK
    ) -> AsyncIterator[Triggers]:
        async with Triggers.open(
            self.database,
            self.repos,
            self.signing,
            guard,
            clock=self.clock,
            timeout=timeout,
            grace=grace,
        ) as self.triggers:
            yield self.triggers

    @contextlib.asynccontextmanager
    async def triggered(self, url: str, **rules: Any) -> AsyncIterator[tuple[str, Trigger]]:
        """A new repository with one trigger, until the triggers are closed."""
        repo = await self.repo()
        async with self.opened() as triggers:
            yield repo, await triggers.create(repo, url, **rules)

    async def repo(self) -> str:
        return (await self.repos.create(self.account)).id

    async def write(
        self, repo: str, path: str = "file", text: str | None = None, branch: str = "main"
    ) -> str:
        """Commit to a branch without calling the trigger hook."""
        change = Change(path, (text or str(random.random())).encode())
        return (await commit(self.repos.repository(repo), [change], "change", branch=branch)).sha

    async def push(self, repo: str, path: str = "file", text: str | None = None, branch: str = "main") -> str:
        sha = await self.write(repo, path, text, branch)
        await self.triggers.refs_changed(repo)
        return sha

    async def git(self, repo: str, *arguments: str) -> None:
        repository = self.repos.repository(repo)
        await repository.git.run(repository.path, *arguments)

    async def log(self, repo: str, trigger: str) -> list[Delivery]:
        """The deliveries of a trigger, oldest first."""
        return [*(await self.triggers.deliveries(repo, trigger, limit=1000)).items][::-1]

    async def settled(self, repo: str, trigger: str) -> list[Delivery]:
        """The same, when no attempt is running or due."""

        async def quiet() -> list[Delivery] | None:
            found = await self.log(repo, trigger)
            first = next((each for each in found if each.next_at is not None), None)
            due = first is not None and (
                first.state is DeliveryState.SENDING or (first.next_at or 0) <= self.clock.now() / 1e9
            )
            return None if due else found

        return await until(quiet, LIMIT) or []

    async def later(self, condition: Callable[[], T]) -> T:
        """The condition's value after some minutes of test time."""

        async def passed() -> T:
            self.clock.pass_by(61)
            return condition()

        return await until(passed, LIMIT)

    async def rows(self, table: sa.TableClause) -> int:
        with self.database.look_up() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


async def unlimited(_: str) -> Limits:
    return UNLIMITED


@pytest_asyncio.fixture(scope="module")
async def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A database with an account."""
    path = tmp_path_factory.mktemp("template") / "stead.db"
    database = await open_database(path)
    account = await Accounts(database).create("tests")
    await database.dispose()
    return path, account.id


@pytest_asyncio.fixture
async def world(template: tuple[Path, str], tmp_path: Path) -> AsyncIterator[World]:
    path, account = template
    shutil.copy(path, tmp_path)
    database = await open_database(tmp_path / path.name)
    async with Repos.open(database, tmp_path / "repos", unlimited) as repos:
        yield World(database, repos, account, tmp_path, Hours())
    await database.dispose()


def verified(signing: WebhookSigner, seen: Seen) -> dict[str, Any]:
    keys = KeySet.import_key_set(signing.jwks())  # type: ignore[arg-type]
    token = jwt.decode(
        seen.headers["x-freestyle-signature"], keys, registry=EdDsaRegistry(algorithms=["EdDSA"])
    )
    return dict(token.claims)
