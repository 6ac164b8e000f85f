"""Push triggers: webhooks to real endpoints, at least once and in order, despite failures and restarts."""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import stat
import sys
import textwrap
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
from joserfc.errors import BadSignatureError
from joserfc.jwk import KeySet

from stead.api.wire.triggers import push_payload
from stead.errors import HostError
from stead.identity.accounts import Accounts
from stead.limits import UNLIMITED, Limits
from stead.repos.committing import Change, commit
from stead.repos.errors import RepoNotFound
from stead.repos.globs import InvalidPattern
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.repos.ssrf import AddressRefused, SsrfGuard
from stead.repos.webhooks import triggers as triggers_module
from stead.repos.webhooks.deliveries import Clock
from stead.repos.webhooks.pushes import MAX_CHANGED_FILES, BranchUpdate, branches_of, changed_files
from stead.repos.webhooks.retries import DELAYS, JITTER, MAX_ATTEMPTS, DeliveryState
from stead.repos.webhooks.signing import EdDsaRegistry, WebhookSigner
from stead.repos.webhooks.triggers import (
    MAX_BRANCHES,
    MAX_GLOBS,
    MAX_TRIGGERS,
    Delivery,
    DeliveryNotFound,
    InvalidTrigger,
    TriggerLimitExceeded,
    TriggerNotFound,
    Triggers,
)
from stead.store import tables
from stead.store.database import Database, open_database
from support.npm import Npm
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

        async def enough() -> bool:
            return len(self.told(path)) >= number

        await until(enough, LIMIT)
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
            push_payload,
            clock=self.clock,
            timeout=timeout,
            grace=grace,
        ) as self.triggers:
            yield self.triggers

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

    async def rows(self, table: sa.Table) -> int:
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


# Signatures


def test_signing_key_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    first, second = WebhookSigner.open(tmp_path, "a"), WebhookSigner.open(tmp_path, "a")
    assert first.jwks() == second.jwks()
    (key,) = first.jwks()["keys"]
    assert {name: key[name] for name in ("kty", "crv", "alg", "use")} == {
        "kty": "OKP",
        "crv": "Ed25519",
        "alg": "EdDSA",
        "use": "sig",
    }
    assert key["kid"]
    assert "d" not in key, "the private half is not published"
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("nonsense")
    with pytest.raises(HostError, match="not a private key"):
        WebhookSigner.open(tmp_path, "a")


def verified(signing: WebhookSigner, seen: Seen) -> dict[str, Any]:
    keys = KeySet.import_key_set(signing.jwks())  # type: ignore[arg-type]
    token = jwt.decode(
        seen.headers["x-freestyle-signature"], keys, registry=EdDsaRegistry(algorithms=["EdDSA"])
    )
    return dict(token.claims)


async def test_push_sends_signed_webhook(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/hook?key=1")
        first = await world.push(repo)
        second = await world.push(repo)
        one, two = await endpoint.count(2, "/hook?key=1")
        log = await world.settled(repo, trigger.id)
    assert one.json == {
        "event": "branchUpdate",
        "repoId": repo,
        "branch": "main",
        "commit": first,
        "previousCommit": None,
        "deliveryId": log[0].id,
        "timestamp": one.json["timestamp"],
    }
    assert (two.json["commit"], two.json["previousCommit"]) == (second, first)
    assert one.headers["content-type"] == "application/json"
    assert one.headers["user-agent"] == "stead"
    assert [one.headers["x-stead-delivery"], two.headers["x-stead-delivery"]] == [each.id for each in log]
    claims = verified(world.signing, one)
    assert claims["body_sha256"] == hashlib.sha256(one.body).hexdigest()
    assert claims["iss"] == "https://git.example"
    assert claims["iat"] == world.clock.now() // SECOND
    assert 0 < claims["exp"] - claims["iat"] <= 600
    assert [(each.state, each.status, each.response, each.attempts) for each in log] == [
        (DeliveryState.DELIVERED, 200, "thank you", 1)
    ] * 2


async def test_signature_of_another_installation_is_rejected(
    world: World, endpoint: Endpoint, tmp_path: Path
) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/")
        await world.push(repo)
        (seen,) = await endpoint.count(1)
    (tmp_path / "other").mkdir()
    stranger = WebhookSigner.open(tmp_path / "other", "https://git.example")
    keys = {"keys": [stranger.jwks()["keys"][0] | {"kid": world.signing.jwks()["keys"][0]["kid"]}]}
    with pytest.raises(BadSignatureError):
        jwt.decode(
            seen.headers["x-freestyle-signature"],
            KeySet.import_key_set(keys),  # type: ignore[arg-type]
            registry=EdDsaRegistry(algorithms=["EdDSA"]),
        )


async def test_node_receiver_verifies_webhooks_with_jwks(
    world: World, endpoint: Endpoint, package: Npm
) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/")
        sha = await world.push(repo)
        (seen,) = await endpoint.count(1)
    keys = endpoint.plan(
        "/.well-known/jwks.json",
        reply(200, json.dumps(world.signing.jwks()).encode(), **{"Content-Type": "application/json"}),
    )
    environment = {
        "JWKS_URL": keys,
        "SIGNATURE": seen.headers["x-freestyle-signature"],
        "BODY": seen.body.decode(),
        "COMMIT": sha,
    }
    await package.script("webhooks", environment, limit=60)


# Which pushes are delivered


async def test_branch_and_glob_filters_select_triggers(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    rules: dict[str, dict[str, Any]] = {
        "/all": {},
        "/main": {"branches": ["main"]},
        "/releases": {"branches": ["release/*", "hotfix"]},
        "/scripts": {"globs": ["*.js"]},
        "/docs-of-main": {"branches": ["main"], "globs": ["docs/**", "*.md"]},
    }
    pushes = [
        ("main", "a.js", {"/all", "/main", "/scripts"}),
        ("main", "docs/x/a.txt", {"/all", "/main", "/docs-of-main"}),
        ("main", "other.txt", {"/all", "/main"}),
        ("release/1", "src/b.js", {"/all", "/releases", "/scripts"}),
        ("release/1/rc", "README.md", {"/all"}),
        ("hotfix", "README.md", {"/all", "/releases"}),
    ]
    expected: dict[str, list[str]] = {path: [] for path in rules}
    async with world.opened() as triggers:
        for path, rule in rules.items():
            await triggers.create(repo, endpoint.url + path, **rule)
        for branch, file, concerned in pushes:
            if branch == "release/1/rc":
                await world.git(repo, "update-ref", "-d", "refs/heads/release/1")
            sha = await world.push(repo, file, branch=branch)
            for path in concerned:
                expected[path].append(sha)
        for path in rules:
            await endpoint.count(len(expected[path]), path)
    assert {path: [seen.json["commit"] for seen in endpoint.told(path)] for path in rules} == expected


async def test_changed_files_of_a_push(world: World) -> None:
    """New branches are compared with their merge base, updated ones with their old commit."""
    repo = await world.repo()
    repository = world.repos.repository(repo)
    first = await world.write(repo, "a")
    second = await world.write(repo, "b")
    await world.git(repo, "branch", "side", first)
    side = await world.write(repo, "c", branch="side")
    alone = await world.write(repo, "d", branch="alone")

    async def files(branch: str, old: str | None, new: str) -> list[str] | None:
        return await changed_files(repository, BranchUpdate(branch, old, new))

    assert await files("main", None, second) == ["a", "b"]
    assert await files("main", first, second) == ["b"]
    assert await files("side", None, side) == ["c"]
    assert await files("main", second, side) == ["b", "c"], "a force push, with what it takes away"
    assert await files("alone", None, alone) == ["d"]
    assert await files("main", "1" * 40, second) is None, "nobody knows what was there before"


async def test_push_with_too_many_files_matches_all_globs(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/", globs=["*.js"])
        changes = [Change(f"file-{number}", b"") for number in range(MAX_CHANGED_FILES + 1)]
        await commit(world.repos.repository(repo), changes, "many")
        await triggers.refs_changed(repo)
        await endpoint.count(1)


async def test_deleted_branch_sends_nothing_and_recreated_one_does(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/")
        sha = await world.push(repo)
        await world.git(repo, "branch", "side", sha)
        await triggers.refs_changed(repo)
        await world.git(repo, "branch", "-D", "side")
        await triggers.refs_changed(repo)
        await world.git(repo, "branch", "side", sha)
        await triggers.refs_changed(repo)
        told = await endpoint.count(3)
    assert [(each.json["branch"], each.json["previousCommit"]) for each in told] == [
        ("main", None),
        ("side", None),
        ("side", None),
    ]


async def test_new_trigger_ignores_earlier_pushes(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    await world.write(repo)
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/first")
        await triggers.refs_changed(repo)
        unobserved = await world.write(repo)
        await triggers.create(repo, endpoint.url + "/second")
        last = await world.push(repo)
        await endpoint.count(2, "/first")
        await endpoint.count(1, "/second")
    assert [each.json["commit"] for each in endpoint.told("/first")] == [unobserved, last]
    assert [each.json["commit"] for each in endpoint.told("/second")] == [last]


async def test_tags_and_other_refs_send_nothing(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        sha = await world.push(repo)
        await world.git(repo, "tag", "v1", sha)
        await world.git(repo, "update-ref", "refs/other/x", sha)
        await triggers.refs_changed(repo)
        assert len(await world.settled(repo, trigger.id)) == 1


async def test_pushes_while_stopped_are_delivered_at_start(
    world: World, endpoint: Endpoint, tmp_path: Path
) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/")
        await world.push(repo)
        await endpoint.count(1)
    clone = tmp_path / "clone"
    place = world.repos.repository(repo).path
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    commands = [
        ["clone", "-q", str(place), str(clone)],
        ["-C", str(clone), *author, "commit", "-qm", "x", "--allow-empty"],
        ["-C", str(clone), "push", "-q", "origin", "HEAD:main", "HEAD:side"],
    ]
    for command in commands:
        git = await asyncio.create_subprocess_exec("git", *command, env={"PATH": os.environ["PATH"]})
        assert await git.wait() == 0
    async with world.opened():
        told = await endpoint.count(3)
    tip = (await world.repos.repository(repo).branch("main")).sha
    assert [(each.json["branch"], each.json["commit"]) for each in told[1:]] == [("main", tip), ("side", tip)]


async def test_failed_detection_does_not_fail_the_push_and_is_retried(
    world: World, endpoint: Endpoint
) -> None:
    repo = await world.repo()
    place = world.repos.repository(repo).path
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/")
        sha = await world.write(repo)
        await world.repos.cat_files.stop(place)
        place.rename(place.with_suffix(".away"))
        await triggers.refs_changed(repo)
        place.with_suffix(".away").rename(place)
        assert endpoint.seen == []
        (told,) = await world.later(endpoint.told)
    assert told.json["commit"] == sha


@pytest.mark.parametrize(
    ("what", "sleeping"),
    [("INSERT ON deliveries", 1), ("INSERT ON observed_refs", 1), ("UPDATE ON deliveries", 2)],
)
async def test_database_write_failure_loses_no_delivery(
    world: World, endpoint: Endpoint, what: str, sleeping: int
) -> None:
    """Changes and deliveries are recorded in one transaction."""
    repo = await world.repo()
    await world.write(repo)
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        refuse = f"CREATE TRIGGER refuse BEFORE {what} BEGIN SELECT RAISE(ABORT, 'full'); END"
        await world.database.execute(sa.text(refuse))
        sha = await world.push(repo)

        async def given_up_for_now() -> bool:
            return world.clock.sleeping == sleeping

        await until(given_up_for_now, LIMIT)
        await world.database.execute(sa.text("DROP TRIGGER refuse"))
        assert endpoint.seen == []
        (told,) = await world.later(endpoint.told)
        assert [each.state for each in await world.settled(repo, trigger.id)] == [DeliveryState.DELIVERED]
    assert told.json["commit"] == sha


async def test_every_changed_branch_is_delivered_once(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        names = [f"branch-{number}" for number in range(12)]
        pushed = await asyncio.gather(*(world.push(repo, branch=name) for name in names))
        told = await endpoint.count(len(names))
        await world.settled(repo, trigger.id)
    assert sorted((each.json["branch"], each.json["commit"]) for each in told) == sorted(
        zip(names, pushed, strict=True)
    )


async def test_repository_without_triggers_is_not_read(
    world: World, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = await world.repo()
    read: list[str] = []

    async def recorded(repository: Repository) -> dict[str, str]:
        read.append(repository.id)
        return await branches_of(repository)

    async with world.opened() as triggers:
        monkeypatch.setattr(triggers_module, "branches_of", recorded)
        await world.push(repo)
        assert read == []
        await triggers.create(repo, endpoint.url + "/")
        await world.push(repo)
        assert read == [repo] * 2, "by the create and by the push"


# Order and retries


async def test_failed_delivery_is_retried_with_backoff_and_then_fails(
    world: World, endpoint: Endpoint
) -> None:
    repo = await world.repo()
    url = endpoint.plan("/", *[reply(500, b"no")] * MAX_ATTEMPTS)
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, url)
        await world.push(repo)
        second = await world.push(repo)
        for attempt, delay in enumerate(DELAYS, 1):
            now = world.clock.now() / 1e9
            first, waiting = await world.settled(repo, trigger.id)
            assert (first.state, first.attempts) == (DeliveryState.PENDING, attempt)
            assert (first.status, first.error, first.response) == (500, "the endpoint answered 500", "no")
            assert first.next_at is not None
            assert delay - 0.001 <= first.next_at - now <= delay * (1 + JITTER) + 0.001
            assert waiting.attempts == 0, "the next one waits for the one before"
            assert len(endpoint.seen) == attempt
            world.clock.go_to(int(first.next_at * SECOND) + 1000)
            await endpoint.count(attempt + 1)
        first, waiting = await world.settled(repo, trigger.id)
        assert (first.state, first.attempts, first.next_at) == (DeliveryState.FAILED, MAX_ATTEMPTS, None)
        await endpoint.count(MAX_ATTEMPTS + 1)
    assert len({seen.body for seen in endpoint.seen[:-1]}) == 1
    assert endpoint.seen[-1].json["commit"] == second
    for seen in (endpoint.seen[0], endpoint.seen[-2]):
        assert verified(world.signing, seen)["body_sha256"] == hashlib.sha256(seen.body).hexdigest()
    times = [verified(world.signing, seen)["iat"] for seen in endpoint.seen]
    assert times[-1] - times[0] > sum(DELAYS), "every attempt is signed anew"


async def test_deliveries_are_ordered_despite_failures(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    endpoint.plan("/", reply(503), OK, reply(500), reply(404), OK)
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        pushed = [await world.push(repo) for _ in range(5)]

        async def done() -> bool:
            world.clock.pass_by(20)
            return all(each.state is DeliveryState.DELIVERED for each in await world.log(repo, trigger.id))

        await until(done, LIMIT)
    told = [seen.json["commit"] for seen in endpoint.seen]
    assert told == [pushed[0]] * 2 + [pushed[1]] * 3 + pushed[2:]


def never_ending(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 202 Whatever\r\nContent-Length: 100000000000\r\n\r\n" + b"x" * 10_000)


@pytest.mark.parametrize(
    ("play", "status", "said"),
    [
        (
            reply(302, location="http://127.0.0.1:1/x"),
            302,
            "a redirect to http://127.0.0.1:1/x: webhooks do not",
        ),
        (reply(304), 304, "a redirect: webhooks do not follow redirects"),
        (reply(410), 410, "answered 410"),
        (lambda writer: None, None, "request to"),
        (lambda writer: writer.write(b"hello\r\n\r\n"), None, "request to"),
    ],
    ids=["redirect", "not modified", "gone", "closed", "no HTTP"],
)
async def test_non_2xx_response_is_a_failed_attempt(
    world: World, endpoint: Endpoint, play: Play, status: int | None, said: str
) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.plan("/", play))
        await world.push(repo)
        (delivery,) = await world.settled(repo, trigger.id)
        assert (delivery.state, delivery.attempts, delivery.status) == (DeliveryState.PENDING, 1, status)
        assert delivery.error is not None
        assert said in delivery.error
        assert len(endpoint.seen) == 1
        world.clock.pass_by(10)
        await endpoint.count(2)
        (delivery,) = await world.settled(repo, trigger.id)
    assert (delivery.state, delivery.attempts, delivery.status, delivery.error) == (
        DeliveryState.DELIVERED,
        2,
        200,
        None,
    )


@pytest.mark.parametrize(
    "play", [reply(204), never_ending, reply(200, b"\0\xff" * 50_000)], ids=["empty", "endless", "large"]
)
async def test_any_2xx_response_is_delivered(world: World, endpoint: Endpoint, play: Play) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.plan("/", play))
        await world.push(repo)
        await endpoint.count(1)
        (delivery,) = await world.settled(repo, trigger.id)
    assert delivery.state is DeliveryState.DELIVERED
    assert len(delivery.response or "") <= 1000


async def test_hanging_or_missing_endpoint_is_a_failed_attempt(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened(timeout=0.2) as triggers:
        hanging = await triggers.create(repo, endpoint.hold("/"))
        nobody = await triggers.create(repo, "http://127.0.0.1:1/")
        unknown = await triggers.create(repo, "http://nobody.invalid/")
        await world.push(repo)
        errors = [(await world.settled(repo, each.id))[0].error for each in (hanging, nobody, unknown)]
    for error, said in zip(errors, ("0.2 s", "request to", "cannot resolve"), strict=True):
        assert error is not None
        assert said in error


async def test_endpoint_refused_by_ssrf_guard_is_a_failed_attempt(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
    async with world.opened(guard=INTERNET):
        await world.push(repo)
        (delivery,) = await world.settled(repo, trigger.id)
        assert delivery.error is not None
        assert "not a public address" in delivery.error
    assert endpoint.seen == []


async def test_hanging_endpoint_does_not_delay_others(world: World, endpoint: Endpoint) -> None:
    slow, fast = await world.repo(), await world.repo()
    async with world.opened(grace=0) as triggers:
        for number in range(8):
            await triggers.create(slow, endpoint.hold(f"/slow-{number}"))
        other = endpoint.url.replace("127.0.0.1", "beside.test")
        beside = await triggers.create(slow, other + "/beside")
        await triggers.create(fast, other + "/fast")
        await world.push(slow)
        await world.push(fast)
        await endpoint.count(1, "/fast")
        await endpoint.count(1, "/beside")
        assert (await world.settled(slow, beside.id))[0].state is DeliveryState.DELIVERED

        async def held() -> bool:
            return sum(seen.path.startswith("/slow") for seen in endpoint.seen) >= 4

        await until(held, LIMIT)
    slow_ones = [seen for seen in endpoint.seen if seen.path.startswith("/slow")]
    assert len(slow_ones) == 4, "for one account, so many are sent to one host at once"


# Restarts


async def test_interrupted_delivery_is_sent_again(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened(grace=0) as triggers:
        trigger = await triggers.create(repo, endpoint.hold("/"))
        await world.push(repo)
        await world.push(repo)
        await endpoint.count(1)
        assert (await world.log(repo, trigger.id))[0].state is DeliveryState.SENDING
    endpoint.held["/"].set()
    async with world.opened():
        await endpoint.count(3)
        log = await world.settled(repo, trigger.id)
    assert [seen.headers["x-stead-delivery"] for seen in endpoint.seen] == [log[0].id, log[0].id, log[1].id]
    assert [(each.state, each.attempts) for each in log] == [(DeliveryState.DELIVERED, 1)] * 2


async def test_shutdown_waits_for_deliveries_in_flight(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.hold("/"))
        await world.push(repo)
        await endpoint.count(1)
        asyncio.get_running_loop().call_later(0.1, endpoint.held["/"].set)
    assert (await world.log(repo, trigger.id))[0].state is DeliveryState.DELIVERED
    assert len(endpoint.seen) == 1


async def test_restart_keeps_the_retry_schedule(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.plan("/", *[reply(500)] * 3))
        await world.push(repo)
        for number in (1, 2):
            await endpoint.count(number)
            (before,) = await world.settled(repo, trigger.id)
            world.clock.go_to(int((before.next_at or 0) * SECOND) + 1000)
        await endpoint.count(3)
        (before,) = await world.settled(repo, trigger.id)
    async with world.opened():
        assert await world.settled(repo, trigger.id) == [before]
        world.clock.pass_by(59)
        assert await world.settled(repo, trigger.id) == [before]
        assert len(endpoint.seen) == 3
        world.clock.pass_by(20)
        await endpoint.count(4)


async def test_delivery_survives_kill_9(world: World, endpoint: Endpoint, tmp_path: Path) -> None:
    """A process is killed while it sends; no other process has detected the push."""
    repo = await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.hold("/"))
    await world.write(repo)
    program = textwrap.dedent(
        """
        import asyncio, sys
        from ipaddress import IPv4Network
        from pathlib import Path
        from stead.limits import UNLIMITED
        from stead.repos.ssrf import SsrfGuard
        from stead.repos.repos import Repos
        from stead.repos.webhooks.signing import WebhookSigner
        from stead.repos.webhooks.triggers import Triggers
        from stead.store.database import open_database

        async def unlimited(account):
            return UNLIMITED

        async def main(folder):
            database = await open_database(folder / "stead.db")
            guard = SsrfGuard([IPv4Network("127.0.0.0/8")])
            async with Repos.open(database, folder / "repos", unlimited) as repos:
                async with Triggers.open(database, repos, WebhookSigner.open(folder, "x"), guard, str):
                    await asyncio.sleep(60)

        asyncio.run(main(Path(sys.argv[1])))
        """
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    try:
        await endpoint.count(1)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    endpoint.held["/"].set()
    async with world.opened():
        await endpoint.count(2)
        (delivery,) = await world.settled(repo, trigger.id)
    assert delivery.state is DeliveryState.DELIVERED
    assert [seen.headers["x-stead-delivery"] for seen in endpoint.seen] == [delivery.id] * 2
    assert endpoint.seen[0].body == endpoint.seen[1].body


@pytest.mark.parametrize("seed", range(3))
async def test_deliveries_converge_to_the_state_of_every_branch(
    world: World, endpoint: Endpoint, seed: int
) -> None:
    """Commits, deletions, failures and crashes in random order."""
    chance = random.Random(seed)
    repo = await world.repo()
    endpoint.plan("/", *(reply(500) if chance.random() < 0.4 else OK for _ in range(40)))
    names = ["main", "one", "two"]
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
    for _ in range(5):
        for _ in range(chance.randrange(3)):
            await world.write(repo, branch=chance.choice(names))
        async with world.opened(grace=0) as triggers:
            for _ in range(chance.randrange(1, 5)):
                name = chance.choice(names)
                if chance.random() < 0.2:
                    await world.git(repo, "update-ref", "-d", f"refs/heads/{name}")
                else:
                    await world.write(repo, branch=name)
                if chance.random() < 0.7:
                    await triggers.refs_changed(repo)
                world.clock.pass_by(chance.choice([0, 0, 7, 20]))
    async with world.opened() as triggers:
        await triggers.refs_changed(repo)

        async def done() -> bool:
            world.clock.pass_by(120)
            return all(each.state is DeliveryState.DELIVERED for each in await world.log(repo, trigger.id))

        await until(done, LIMIT)
        log = [json.loads(each.body) for each in await world.log(repo, trigger.id)]
    told = [seen.json for seen in endpoint.seen]
    tips = {branch.name: branch.sha for branch in await world.repos.repository(repo).branches()}
    for name, sha in tips.items():
        assert [each["commit"] for each in told if each["branch"] == name][-1] == sha
    assert [body for body, _ in itertools.groupby(told)] == log, "in order, each until it arrived"
    for each in names:
        commits = [body["commit"] for body in log if body["branch"] == each]
        assert len(commits) == len(set(commits)), "nothing is told twice of its own accord"


# Delivery log and retention


async def test_delivery_log_pages_and_redelivers(world: World, endpoint: Endpoint) -> None:
    repo, other = await world.repo(), await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        stranger = await triggers.create(other, endpoint.url + "/other")
        pushed = [await world.push(repo) for _ in range(5)]
        await endpoint.count(5)
        log = await world.settled(repo, trigger.id)
        page = await triggers.deliveries(repo, trigger.id, limit=2, offset=1)
        assert (page.total, page.offset) == (5, 1)
        assert page.items == log[3:1:-1]
        assert [json.loads(each.body)["commit"] for each in log] == pushed
        again = await triggers.redeliver(repo, trigger.id, log[1].id)
        assert again.redelivery_of == log[1].id
        told = await endpoint.count(6)
        assert told[5].body == told[1].body
        assert told[5].headers["x-stead-delivery"] == again.id
        assert verified(world.signing, told[5])["body_sha256"] == hashlib.sha256(told[1].body).hexdigest()
        once_more = await triggers.redeliver(repo, trigger.id, again.id)
        assert once_more.redelivery_of == log[1].id
        for wrong in ((repo, stranger.id, log[0].id), (other, trigger.id, log[0].id)):
            with pytest.raises(TriggerNotFound):
                await triggers.redeliver(*wrong)
        with pytest.raises(DeliveryNotFound):
            await triggers.redeliver(other, stranger.id, log[0].id)
        with pytest.raises(TriggerNotFound):
            await triggers.deliveries(other, trigger.id, limit=1)
        await endpoint.count(7)


async def test_retention_removes_only_finished_deliveries(
    world: World, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers_module, "MAX_KEPT", 3)
    repo = await world.repo()
    endpoint.plan("/", *[OK] * 6, *[reply(500)] * 2)
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        for number in range(1, 7):
            await world.push(repo)
            await endpoint.count(number)
            await world.settled(repo, trigger.id)
        waiting = [await world.push(repo) for _ in range(6)]
        log = await world.settled(repo, trigger.id)
        assert [each.state for each in log] == [DeliveryState.DELIVERED] * 3 + [DeliveryState.PENDING] * 6
        assert [json.loads(each.body)["commit"] for each in log[3:]] == waiting
    world.clock.pass_by(31 * 24 * 3600)
    async with world.opened():

        async def only_new() -> bool:
            return [each.state for each in await world.log(repo, trigger.id)][:1] != [DeliveryState.DELIVERED]

        await until(only_new, LIMIT)


async def test_dropped_deliveries_are_recorded(
    world: World, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers_module, "MAX_WAITING", 3)
    repo = await world.repo()
    async with world.opened(grace=0) as triggers:
        trigger = await triggers.create(repo, endpoint.hold("/"))
        beside = await triggers.create(repo, endpoint.url + "/beside", branches=["b-0"])
        for number in range(5):
            await world.write(repo, branch=f"b-{number}")
        await triggers.refs_changed(repo)
        log = await world.log(repo, trigger.id)
        assert [json.loads(each.body)["branch"] for each in log] == ["b-0", "b-1", "b-2", "b-3"]
        assert [each.state for each in log[1:]] == [
            DeliveryState.PENDING,
            DeliveryState.PENDING,
            DeliveryState.FAILED,
        ]
        assert log[-1].error is not None
        assert "not sent" in log[-1].error
        with pytest.raises(TriggerLimitExceeded):
            await triggers.redeliver(repo, trigger.id, log[-1].id)
        assert len(await world.log(repo, beside.id)) == 1


async def test_deleting_repository_or_trigger_removes_deliveries(world: World, endpoint: Endpoint) -> None:
    repo, kept = await world.repo(), await world.repo()
    async with world.opened() as triggers:
        for path in ("/a", "/b"):
            await triggers.create(repo, endpoint.plan(path, *[reply(500)] * 3))
        staying = await triggers.create(kept, endpoint.url + "/kept")
        await world.push(repo)
        await world.push(kept)
        await endpoint.count(1, "/a")
        await endpoint.count(1, "/b")
        first, second = await triggers.list(repo)
        await world.settled(repo, first.id)
        await world.settled(repo, second.id)
        await triggers.delete(repo, first.id)
        assert (await world.rows(tables.triggers), await world.rows(tables.deliveries)) == (2, 2)
        assert await world.rows(tables.observed_refs) == 2
        await triggers.delete(repo, second.id)
        assert await world.rows(tables.observed_refs) == 1, "nobody is to be told of its branches any more"
        await triggers.create(repo, endpoint.plan("/c", *[reply(500)] * 3))
        await world.push(repo)
        await endpoint.count(1, "/c")
        await world.repos.delete(repo)
        await triggers.refs_changed(repo)
        world.clock.pass_by(24 * 3600)
        assert await triggers.list(repo) == []
        assert [each.id for each in await triggers.list(kept)] == [staying.id]
        await world.push(kept)
        await endpoint.count(2, "/kept")
        assert (await world.rows(tables.triggers), await world.rows(tables.deliveries)) == (1, 2)
        assert await world.rows(tables.observed_refs) == 1
    assert [len(endpoint.told(path)) for path in ("/a", "/b", "/c")] == [1, 1, 1]


# Validation


async def test_triggers_belong_to_their_repository(world: World, endpoint: Endpoint) -> None:
    repo, other = await world.repo(), await world.repo()
    async with world.opened() as triggers:
        one = await triggers.create(repo, endpoint.url, branches=["main"], globs=["*.js", "a/**"])
        world.clock.pass_by(1)
        two = await triggers.create(repo, endpoint.url)
        assert (one.event, one.branches, one.globs, one.endpoint) == (
            "push",
            ("main",),
            ("*.js", "a/**"),
            endpoint.url,
        )
        assert await triggers.list(repo) == [one, two]
        assert await triggers.get(repo, one.id) == one
        for call in (triggers.get, triggers.delete):
            with pytest.raises(TriggerNotFound):
                await call(other, one.id)
            with pytest.raises(TriggerNotFound):
                await call(repo, "nothing")
        await triggers.delete(repo, one.id)
        assert await triggers.list(repo) == [two]
        with pytest.raises(RepoNotFound):
            await triggers.create("nothing", endpoint.url)


@pytest.mark.parametrize(
    "endpoint", ["", "hello", "ftp://example.com/", "http://", "http://a b/", "http://x:99999/", "//x/"]
)
async def test_invalid_endpoint_urls_are_refused(world: World, endpoint: str) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        with pytest.raises(AddressRefused):
            await triggers.create(repo, endpoint)
        assert await triggers.list(repo) == []


async def test_private_endpoints_and_impossible_rules_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = await world.repo()
    async with world.opened(guard=INTERNET) as triggers:
        for near in ("http://127.0.0.1/", "http://[::1]/", "http://localhost:3000/", "http://10.0.0.1/"):
            with pytest.raises(AddressRefused):
                await triggers.create(repo, near)
        public = "http://nobody.invalid/"
        with pytest.raises(InvalidTrigger, match="event"):
            await triggers.create(repo, public, event="pull")
        with pytest.raises(InvalidTrigger, match="branches"):
            await triggers.create(repo, public, branches=["a"] * (MAX_BRANCHES + 1))
        with pytest.raises(InvalidTrigger, match="globs"):
            await triggers.create(repo, public, globs=["a"] * (MAX_GLOBS + 1))
        with pytest.raises(InvalidTrigger, match="patterns"):
            await triggers.create(repo, public, globs=["{a,b}{a,b}{a,b}{a,b}", "{a,b}{a,b}{a,b}{a,b}"] * 2)
        with pytest.raises(InvalidPattern):
            await triggers.create(repo, public, branches=["a b"])
        monkeypatch.setattr(triggers_module, "MAX_TRIGGERS", 2)
        assert MAX_TRIGGERS == 50
        for _ in range(2):
            await triggers.create(repo, public)
        with pytest.raises(TriggerLimitExceeded):
            await triggers.create(repo, public)
