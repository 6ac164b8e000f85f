"""One client does its worst to the API, through the real edge, and others are served. VMs are in memory."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead.api import admission, calls
from stead.api.server import serving
from stead.shares import RateLimit
from support.edge_with_namespaces import EdgeWithNamespaces, edge_with_namespaces
from support.fake_api import FakeApi, fake_api
from support.git_client import GitClient
from support.http2 import MAX_STREAMS, UnreadStreams
from support.waiting import until

pytestmark = pytest.mark.root
_NAME = "stead.localhost"
_LARGE_FILE = "/docs/swagger-ui-bundle.js"
"""Public, and larger than all buffers between the server and a client."""


@dataclass(frozen=True)
class Attacked:
    api: FakeApi
    edge: EdgeWithNamespaces

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.edge.public.https_port}"

    def client(self, caller: str) -> httpx2.AsyncClient:
        return self.edge_client(self.api.callers[caller])

    def edge_client(self, headers: dict[str, str]) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, headers=headers, verify=self.edge.context, timeout=60)

    @contextlib.asynccontextmanager
    async def unread(
        self, connections: int, method: str, path: str, caller: str = "nobody"
    ) -> AsyncIterator[list[UnreadStreams]]:
        """As many requests as each connection can have, whose answers are never taken."""
        port = self.edge.public.https_port
        headers = {name.lower(): value for name, value in self.api.callers[caller].items()}
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(UnreadStreams.connected(port, self.edge.context, _NAME))
                for _ in range(connections)
            ]
            for streams in opened:
                for _ in range(MAX_STREAMS - 1):
                    await streams.request(method, _NAME, path, **headers)
            yield opened
        # The server notices within a moment that the clients have left: the next test needs their places.
        async with self.client("owner") as owner, self.client("nobody") as stranger:

            async def places_are_free() -> bool:
                answers = [await owner.get("/v1/vms"), await stranger.get("/docs")]
                return all(answer.status_code == 200 for answer in answers)

            await until(places_are_free, 60)


@pytest_asyncio.fixture(scope="module")
async def attacked(root: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Attacked]:
    async with (
        fake_api(tmp_path_factory.mktemp("api")) as api,
        edge_with_namespaces(api=lambda listening: serving(api.installation, [listening])) as edge,
    ):
        yield Attacked(api, edge)


async def served(client: httpx2.AsyncClient, calls: int = 20) -> None:
    """All calls of a victim succeed, and so do health checks."""
    for _ in range(calls):
        answer = await client.get("/v1/vms")
        assert answer.status_code == 200, answer.text
        assert (await client.get("/healthz")).status_code == 200


async def test_unread_answers_of_strangers_take_no_place_of_an_account(attacked: Attacked) -> None:
    async with attacked.unread(5, "GET", _LARGE_FILE) as opened, attacked.client("owner") as victim:
        await until(lambda: sum(each.statuses for each in opened) > 100, 60)
        await served(victim)


async def test_waiting_calls_of_an_account_take_no_place_of_another(attacked: Attacked) -> None:
    path = f"/v1/vms/{attacked.api.vm}/await"
    async with (
        attacked.unread(5, "POST", path, "owner"),
        attacked.client("owner") as greedy,
        attacked.client("stranger") as victim,
    ):

        async def is_full() -> bool:
            return (await greedy.get("/v1/vms")).status_code in (429, 503)

        await until(is_full, 60)
        await served(victim)


async def test_unread_answers_end_and_give_their_places_back(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls.STALLED_ANSWER == 60.0
    monkeypatch.setattr(calls, "STALLED_ANSWER", 2.0)
    async with attacked.client("nobody") as stranger:

        async def answered() -> bool:
            return (await stranger.get("/docs")).status_code == 200

        await until(answered, 60)
        async with attacked.unread(1, "GET", _LARGE_FILE):

            async def refused() -> bool:
                return (await stranger.get("/docs")).status_code in (429, 503)

            await until(refused, 60)
            # The streams are still open, and are not read.
            await until(answered, 60)


async def _begun(attacked: Attacked, caller: str, path: str, body: bytes = b"") -> bytes:
    """The answer to a request whose body of 30 MB does not arrive."""
    head = [f"POST {path} HTTP/1.1", f"Host: {_NAME}", "Content-Type: application/json"]
    head += [f"{name}: {value}" for name, value in attacked.api.callers[caller].items()]
    request = "\r\n".join([*head, "Content-Length: 30000000", "Connection: close", "", ""]).encode()
    return await attacked.edge.raw(request + body, _NAME, timeout=60)


async def test_a_body_that_does_not_arrive_ends_its_call(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "STALLED_BODY", 2.0)
    path = f"/v1/vms/{attacked.api.vm}/exec-await"
    answer = await _begun(attacked, "owner", path, b'{"command": "')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request body too slow" in answer


async def test_a_large_body_is_not_read_before_the_access_is_checked(attacked: Attacked) -> None:
    repo = "00000000-0000-4000-8000-000000000000"
    for path, status in (
        (f"/git/v1/repo/{repo}/commits", b"404"),
        (f"/v1/vms/{attacked.api.vm}/exec-await", b"404"),
        (f"/v1/vms/{attacked.api.vm}/exec-stream", b"404"),
        (f"/v1/vms/{attacked.api.vm}/processes", b"404"),
        ("/git/v1/repo", b"403"),
        ("/v1/vms", b"403"),
        ("/v1/vms/snapshots", b"403"),
        ("/v1/vpcs", b"413"),
    ):
        answer = await _begun(attacked, "ungranted", path)
        assert answer.startswith(b"HTTP/1.1 " + status), (path, answer)


async def test_a_body_of_millions_of_values_is_refused_while_it_arrives(attacked: Attacked) -> None:
    body = b'{"a":[' + b"[]," * (4 << 20) + b"[]]}"
    headers = {"Content-Type": "application/json"}
    async with attacked.client("owner") as client, attacked.client("stranger") as victim:
        attacks = [
            asyncio.create_task(client.post("/v1/vms", content=body, headers=headers)) for _ in range(4)
        ]
        await served(victim)
        for answer in await asyncio.gather(*attacks, return_exceptions=True):
            if isinstance(answer, httpx2.Response):
                assert answer.status_code in (413, 502), answer.text
            else:
                assert isinstance(answer, httpx2.HTTPError)


async def test_the_log_has_client_and_account_of_calls_over_the_edge(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    """What a client claims about its address has no effect."""
    forged = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "http"}
    with caplog.at_level(logging.INFO, "stead.access"):
        async with attacked.client("granted") as client:
            answer = await client.get(f"/v1/vms/{attacked.api.vm}", headers=forged)
    assert answer.status_code == 200
    trace = answer.headers["x-freestyle-trace-id"]
    (line,) = [record.getMessage() for record in caplog.records if trace in record.getMessage()]
    assert "client=127.0.0.1" in line and f"account={attacked.api.account}" in line
    assert f"identity={attacked.api.keys['identity']}" in line


async def test_addresses_are_not_forged_on_the_plain_port(
    attacked: Attacked, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stead.access"):
        async with attacked.api.http() as http:
            answer = await http.get("", headers={"X-Forwarded-For": "203.0.113.7"})
    trace = answer.headers["x-freestyle-trace-id"]
    (line,) = [record.getMessage() for record in caplog.records if trace in record.getMessage()]
    assert "client=127.0.0.1" in line


async def test_lfs_links_keep_https_and_carry_no_credential(attacked: Attacked) -> None:
    repo = await attacked.api.installation.repos.create(attacked.api.account)
    wanted = {"oid": hashlib.sha256(b"large").hexdigest(), "size": 5}
    async with attacked.client("owner") as client:
        batch = {"operation": "upload", "objects": [wanted]}
        answer = await client.post(f"/{repo.id}/info/lfs/objects/batch", json=batch)
    assert answer.status_code == 200
    actions = answer.json()["objects"][0]["actions"]
    assert all(action["href"].startswith(f"{attacked.url}/") for action in actions.values())
    secret = attacked.api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    assert secret not in json.dumps(answer.json())


async def test_git_lfs_works_over_the_edge(attacked: Attacked, git: GitClient) -> None:
    """The real client authenticates uploads, verification and downloads by its own credentials."""
    repo = await attacked.api.installation.repos.create(attacked.api.account)
    secret = attacked.api.callers["owner"]["Authorization"].removeprefix("Bearer ")
    remote = attacked.url.replace("https://", f"https://x-access-token:{secret}@") + f"/{repo.id}"
    await git("config", "--global", "http.sslCAInfo", str(attacked.edge.root))
    for name, command in (
        ("smudge", "smudge -- %f"),
        ("process", "filter-process"),
        ("clean", "clean -- %f"),
    ):
        await git("config", "--global", f"filter.lfs.{name}", f"git-lfs {command}")
    work = await git.work_tree("work")
    await git("lfs", "install", "--local", cwd=work)
    await git("lfs", "track", "*.bin", cwd=work)
    content = os.urandom(1 << 20)
    await git.commit(work, {"a.bin": content})
    await git("remote", "add", "origin", remote, cwd=work)
    pushed = await git.run("push", "origin", "main", cwd=work)
    assert pushed.status == 0, pushed.err
    await git("clone", "-q", remote, "mine")
    assert Path(git.home / "mine" / "a.bin").read_bytes() == content


# Rates of addresses

_BURST = 20
_PREFLIGHT = ("-X", "OPTIONS", "-H", "Origin: https://a.example", "-H", "Access-Control-Request-Method: GET")


@pytest_asyncio.fixture
async def limited(tmp_path: Path, root: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Attacked]:
    """Its rates allow a burst, and then nothing: their clock stands."""
    monkeypatch.setattr(admission, "RateLimit", partial(RateLimit, clock=lambda: 0.0))
    monkeypatch.setattr(admission, "_HEALTH_BURST", _BURST)
    monkeypatch.setattr(admission, "_HEALTH_INTERVAL", 1.0)
    async with (
        fake_api(tmp_path, anonymous_rate=2) as api,
        edge_with_namespaces(api=lambda listening: serving(api.installation, [listening])) as edge,
    ):
        yield Attacked(api, edge)


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
@pytest.mark.parametrize(
    ("options", "path", "status"),
    [
        ((), "/v1/vms", 401),
        (("-H", "Authorization: Bearer made-up"), "/v1/vms", 401),
        ((), "/00000000-0000-4000-8000-000000000000/info/refs?service=git-upload-pack", 401),
        (_PREFLIGHT, "/v1/vms", 200),
        ((), "/healthz", 200),
    ],
    ids=["no key", "made up key", "git", "preflight", "health"],
)
async def test_an_address_that_asks_too_often_loses_its_connection(
    limited: Attacked, version: str, options: tuple[str, ...], path: str, status: int
) -> None:
    client, other = limited.edge.add_vm("client"), limited.edge.add_vm("other")
    request = (version, *options, f"https://{_NAME}{path}")
    said = await limited.edge.in_turn(*[request] * (_BURST + 4), source=client)
    assert said == [f"{status} 1"] + [f"{status} 0"] * (_BURST - 1) + ["429 0"] + ["429 1"] * 3
    assert await limited.edge.in_turn(request, source=other) == [f"{status} 1"]


async def test_the_operator_is_always_told_the_health(limited: Attacked) -> None:
    said = await limited.edge.in_turn(*[[f"https://{_NAME}/healthz"]] * (2 * _BURST))
    assert {each[:3] for each in said} == {"200"}
    async with limited.api.http("nobody") as http:
        for _ in range(2 * _BURST):
            assert (await http.get(f"{limited.api.url}/healthz")).status_code == 200


# Revocation


async def _new_key(attacked: Attacked) -> tuple[str, dict[str, str]]:
    info, key = await attacked.api.installation.accounts.create_key(attacked.api.account)
    return info.id, {"Authorization": f"Bearer {key}"}


async def test_calls_of_a_revoked_key_end(attacked: Attacked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PERMISSION_CHECK", 0.2)
    key, headers = await _new_key(attacked)
    async with attacked.edge_client(headers) as client:
        waiting = asyncio.create_task(client.post(f"/v1/vms/{attacked.api.vm}/await"))
        await asyncio.sleep(2)
        assert not waiting.done()
        await attacked.api.installation.accounts.revoke_key(key)
        answer = await asyncio.wait_for(waiting, 60)
    assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED_ERROR")


async def test_calls_end_when_a_permission_is_withdrawn(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "PERMISSION_CHECK", 0.2)
    identities, account = attacked.api.installation.identities, attacked.api.account
    identity = await identities.create(account)
    _, token = await identities.create_token(account, identity.id)
    await identities.grant(account, identity.id, attacked.api.vm)
    async with attacked.edge_client({"Authorization": f"Bearer {token}"}) as client:
        waiting = asyncio.create_task(client.post(f"/v1/vms/{attacked.api.vm}/await"))
        await asyncio.sleep(2)
        assert not waiting.done()
        await identities.revoke(account, identity.id, attacked.api.vm)
        answer = await asyncio.wait_for(waiting, 60)
    assert (answer.status_code, answer.json()["code"]) == (404, "VM_NOT_FOUND")


async def test_background_requests_of_a_revoked_key_end(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VM that was being created is removed."""
    monkeypatch.setattr(calls, "PERMISSION_CHECK", 0.2)
    dial, begun = attacked.api.world.dial, asyncio.Event()

    async def dial_never(place: object) -> object:
        begun.set()
        await asyncio.Event().wait()
        return await dial(place)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(attacked.api.world, "dial", dial_never)
    here = attacked.api.installation
    key, headers = await _new_key(attacked)
    before = {info.id for info in await here.machines.list(attacked.api.account)}
    async with attacked.edge_client(headers | {"x-freestyle-background-after-secs": "0"}) as client:
        answer = await client.post("/v1/vms", json={})
    assert answer.status_code == 202, answer.text
    request = answer.json()["requestId"]
    await asyncio.wait_for(begun.wait(), 60)
    await asyncio.sleep(1)
    assert here.background.is_running(request)
    await here.accounts.revoke_key(key)
    await until(lambda: not here.background.is_running(request), 60)
    assert {info.id for info in await here.machines.list(attacked.api.account)} == before
