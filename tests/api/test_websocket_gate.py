"""WebSockets before their upgrade: authentication, tickets, origins, limits, invalid handshakes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import sqlalchemy
from fastapi.routing import APIWebSocketRoute
from websockets.http11 import Request

from stead.api import forward, piped_exec, processes, pty, server, sockets
from stead.api.server import running
from stead.api.websocket_protocol import WebSocketProtocol
from stead.identity import tickets
from stead.identity.callers import Callers
from stead.identity.tickets import TicketLimitExceeded, Tickets
from stead.machines.records import Properties
from support.fake_api import USER, FakeApi, closed, fake_api, stands_still
from support.waiting import until

PATHS = ("/pty", "/pty/sessions/one", "/processes/one/attach", "/exec", "/forward/80")
INVENTED = "abcdefghijklmnopqrst"


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        yield api


@pytest_asyncio.fixture
async def own_site(tmp_path: Path) -> AsyncIterator[FakeApi]:
    """For tests that withdraw permissions."""
    async with fake_api(tmp_path) as api:
        yield api


def test_every_websocket_is_in_the_caller_table() -> None:
    routers = [module.router for module in (pty, processes, piped_exec, forward)]
    routes = [each for router in routers for each in router.routes]
    known = {_shape(each.path) for each in routes if isinstance(each, APIWebSocketRoute)}
    assert known == {path.replace("one", "*").replace("80", "*") for path in PATHS}


def _shape(path: str) -> str:
    parts = path.removeprefix("/v1/vms/{vm_id}").split("/")
    return "/".join("*" if part.startswith("{") else part for part in parts)


@pytest.mark.parametrize("caller", ["nobody", "not a key", "revoked key"])
@pytest.mark.parametrize("path", [*PATHS, "/nowhere"])
async def test_unauthenticated_websockets_are_refused(api: FakeApi, caller: str, path: str) -> None:
    status, body = await api.refusal(path, caller)
    assert (status, body["code"]) == (401, "UNAUTHORIZED_ERROR")


@pytest.mark.parametrize("caller", ["stranger", "ungranted"])
@pytest.mark.parametrize("path", PATHS)
async def test_vms_of_others_look_nonexistent(api: FakeApi, caller: str, path: str) -> None:
    real = await api.refusal(path, caller)
    missing = await api.refusal(path, caller, vm=INVENTED)
    assert (real[0], real[1]["code"]) == (404, "VM_NOT_FOUND")
    assert json.dumps(real).replace(api.vm, "*") == json.dumps(missing).replace(INVENTED, "*")


@pytest.mark.parametrize("caller", ["owner", "granted"])
async def test_granted_vms_can_be_used(api: FakeApi, caller: str) -> None:
    async with api.socket("/pty?exec=cat", caller) as terminal:
        assert json.loads(await terminal.recv())["type"] == "sessionInfo"
        assert terminal.response is not None
        assert len(terminal.response.headers["x-freestyle-trace-id"]) == 32


async def test_identities_act_as_their_allowed_linux_user(own_site: FakeApi) -> None:
    api = own_site
    identity = api.keys["identity"]
    await api.installation.identities.update(api.account, identity, api.vm, ["alice"])
    async with api.socket("/pty?sessionId=hers", "granted") as terminal:
        await terminal.recv()
        assert api.session("hers").user == "alice"
    status, body = await api.refusal("/pty", "granted", headers={USER: "root"})
    assert (status, body["code"]) == (403, "FORBIDDEN")


async def test_unknown_websocket_paths_are_not_found(api: FakeApi) -> None:
    status, body = await api.refusal("/nowhere")
    assert (status, body["code"]) == (404, "NOT_FOUND")


async def test_plain_get_of_a_websocket_says_what_is_missing(api: FakeApi) -> None:
    async with api.http() as http:
        for path in PATHS:
            answer = await http.get(path)
            assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket"), path
    async with api.http("nobody") as http:
        assert (await http.get("/pty")).status_code == 401


# Tickets


async def test_ticket_opens_one_websocket_once(api: FakeApi) -> None:
    async with api.http() as http:
        made = (await http.post("/tickets", json={"kind": "pty"})).json()
    assert made["path"] == f"/v1/vms/{api.vm}/pty"
    async with api.socket(f"/pty?exec=cat&ticket={made['ticket']}", "nobody") as terminal:
        assert json.loads(await terminal.recv())["type"] == "sessionInfo"
    status, body = await api.refusal(f"/pty?ticket={made['ticket']}", "nobody")
    assert (status, body["code"]) == (401, "UNAUTHORIZED_ERROR")


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ({}, "/pty"),
        ({"kind": "pty", "sessionId": "a.b-C_9"}, "/pty/sessions/a.b-C_9"),
        ({"kind": "process", "sessionId": "one"}, "/processes/one/attach"),
        ({"kind": "forward", "port": 3000}, "/forward/3000"),
    ],
)
async def test_ticket_is_bound_to_its_path(api: FakeApi, wanted: dict[str, object], path: str) -> None:
    async with api.http() as http:
        made, other = [(await http.post("/tickets", json=wanted)).json() for _ in range(2)]
    assert made["path"] == f"/v1/vms/{api.vm}{path}"
    status, body = await api.refusal(f"/pty/sessions/other?ticket={made['ticket']}", "nobody")
    assert (status, body["code"]) == (403, "FORBIDDEN")
    # It is used up.
    status, _ = await api.refusal(f"{path}?ticket={made['ticket']}", "nobody")
    assert status == 401
    status, body = await api.refusal(f"{path}?ticket={other['ticket']}", "nobody", vm=INVENTED)
    assert (status, body["code"]) == (403, "FORBIDDEN")


async def test_ticket_is_bound_to_its_linux_user(api: FakeApi) -> None:
    async with api.http(**{USER: "alice"}) as http:
        made = (await http.post("/tickets", json={})).json()
    path = f"/pty?sessionId=alices&ticket={made['ticket']}"
    async with api.socket(path, "nobody", headers={USER: "root"}) as terminal:
        await terminal.recv()
        assert api.session("alices").user == "alice"


async def test_ticket_of_a_revoked_key_is_invalid(own_site: FakeApi) -> None:
    api = own_site
    async with api.http() as http:
        made = (await http.post("/tickets", json={})).json()
    await api.installation.accounts.revoke_key(api.keys["owner"])
    assert (await api.refusal(f"/pty?ticket={made['ticket']}", "nobody"))[0] == 401


async def test_ticket_does_not_authenticate_http_calls(api: FakeApi) -> None:
    async with api.http() as http:
        made = (await http.post("/tickets", json={"kind": "pty"})).json()
    async with api.http("nobody") as http:
        assert (await http.get(f"/pty?ticket={made['ticket']}")).status_code == 401
        bearer = {"Authorization": f"Bearer {made['ticket']}"}
        assert (await http.get("/pty/sessions", headers=bearer)).status_code == 401


@pytest.mark.parametrize(
    "wanted",
    [{"kind": "process"}, {"kind": "forward"}, {"kind": "forward", "port": 0}, {"sessionId": "a/b"}],
)
async def test_incomplete_tickets_are_refused(api: FakeApi, wanted: dict[str, object]) -> None:
    async with api.http() as http:
        assert (await http.post("/tickets", json=wanted)).status_code == 400


async def test_tickets_are_not_in_the_log(api: FakeApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with api.http() as http:
        made = (await http.post("/tickets", json={})).json()
    async with api.socket(f"/pty?exec=cat&ticket={made['ticket']}", "nobody") as terminal:
        await terminal.recv()
    path = f"/v1/vms/{api.vm}/pty"

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name != "websockets.client"]

    async def logged() -> bool:
        return any(path in line and "WEBSOCKET" in line for line in lines())

    await until(logged, 60)
    assert not any(made["ticket"] in line for line in lines())


def test_tickets_expire_and_are_limited_by_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "MAX_UNUSED", 2)
    now = 100.0
    held = Tickets(lambda: now)
    first = held.create("a", "key", "/x", None)
    held.create("a", "key", "/x", None)
    with pytest.raises(TicketLimitExceeded):
        held.create("a", "key", "/x", None)
    other = held.create("b", "key", "/x", "alice")
    assert held.use(other) == tickets.Ticket("b", "key", "/x", "alice", 160.0)
    now += tickets.LIFETIME
    assert held.use(first) is None
    assert held.create("a", "key", "/x", None)


# Origins


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (("*",), "https://any.example", True),
        (("https://app.example",), "https://app.example", True),
        (("https://app.example",), "https://evil.example", False),
        (("https://app.example",), "null", False),
        (("https://app.example",), None, True),
        ((), "own", True),
    ],
)
async def test_origin_of_a_page_must_be_allowed(
    tmp_path: Path, origins: tuple[str, ...], origin: str | None, allowed: bool
) -> None:
    async with fake_api(tmp_path, origins=origins) as api:
        named = api.url if origin == "own" else origin
        headers = {} if named is None else {"Origin": named}
        if allowed:
            async with api.socket("/pty?exec=cat", headers=headers) as terminal:
                await terminal.recv()
        else:
            status, body = await api.refusal("/pty?exec=cat", headers=headers)
            assert (status, body["code"]) == (403, "FORBIDDEN")


# Limits


async def test_account_cannot_take_all_websockets(tmp_path: Path) -> None:
    async with fake_api(tmp_path, max_sockets=8, max_calls=2) as api:
        here = api.installation
        stranger = await here.callers.authenticate(api.callers["stranger"]["Authorization"].split()[1])
        assert stranger is not None
        theirs = await here.machines.create(Properties(account=stranger.account))
        async with api.socket("/pty?exec=cat") as first, api.socket("/pty?exec=cat"):
            await first.recv()
            status, body = await api.refusal("/pty?exec=cat")
            assert (status, body["code"], body["limit"]) == (429, "LIMIT_EXCEEDED", 2)
            # Neither another account nor calls are held up.
            async with api.socket("/pty?exec=cat", "stranger", vm=theirs.id) as other, api.http() as http:
                assert json.loads(await other.recv())["type"] == "sessionInfo"
                assert (await http.get("/pty/sessions")).status_code == 200
        async with api.socket("/pty?exec=cat") as again:
            assert json.loads(await again.recv())["type"] == "sessionInfo"
        # An identity has half of its account's.
        async with api.socket("/pty?exec=cat", "granted") as one:
            await one.recv()
            assert (await api.refusal("/pty?exec=cat", "granted"))[0] == 429
            async with api.socket("/pty?exec=cat") as owners:
                assert json.loads(await owners.recv())["type"] == "sessionInfo"


async def test_revoked_key_closes_its_websockets(own_site: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    api = own_site
    monkeypatch.setattr(sockets, "_PERMISSION_CHECK", 0.05)
    async with api.socket("/pty?exec=cat") as terminal, api.socket("/pty?exec=cat", "granted") as other:
        await terminal.recv()
        await terminal.send(b"still")
        await api.installation.accounts.revoke_key(api.keys["owner"])
        assert await closed(terminal) == (1008, "the API key or token was revoked")
        await other.send(b"here")
        await api.installation.identities.revoke(api.account, api.keys["identity"], api.vm)
        assert (await closed(other))[0] == 1008


async def test_a_failed_check_leaves_a_websocket_open_and_is_made_again(
    own_site: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_PERMISSION_CHECK", 0.05)
    failed = 0

    async def fail(callers: Callers, secret: str) -> None:
        nonlocal failed
        failed += 1
        raise sqlalchemy.exc.OperationalError("SELECT", {}, OSError("made up"))

    async with own_site.socket("/pty?exec=cat") as terminal:
        await terminal.recv()
        with monkeypatch.context() as patch:
            patch.setattr(Callers, "authenticate", fail)
            await until(lambda: failed >= 3, 60)
        await own_site.installation.accounts.revoke_key(own_site.keys["owner"])
        assert await closed(terminal) == (1008, "the API key or token was revoked")


# Handshakes and frames


async def _answer(api: FakeApi, request: bytes) -> tuple[int, dict[str, str]]:
    url = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(request)
    async with asyncio.timeout(60):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "request_head",
    [
        b"POST /v1/vms HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /v1/vms HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 12\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Authorization: Bearer " + b"x" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_invalid_handshakes_get_a_json_error(api: FakeApi, request_head: bytes) -> None:
    status, body = await _answer(api, request_head)
    assert (status, body["code"]) == (400, "BAD_REQUEST")


async def test_too_long_messages_close_the_websocket(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat") as terminal:
        await terminal.send(b"x" * (1 << 20))
        await terminal.send(b"x" * ((1 << 20) + 1))
        assert (await closed(terminal))[0] == 1009


@pytest.mark.parametrize("text", ["not JSON", "[1]", '{"type": "resize"}', '{"a": "' + "x" * 5000 + '"}'])
async def test_invalid_control_messages_close_the_websocket(api: FakeApi, text: str) -> None:
    async with api.socket("/pty?exec=cat") as terminal:
        await terminal.send(text)
        assert (await closed(terminal))[0] == 1008


async def test_unknown_control_messages_are_ignored(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat") as terminal:
        await terminal.recv(), await terminal.recv()
        await terminal.send('{"type": "dance"}')
        await terminal.send(b"on")
        assert await terminal.recv() == b"on"


async def test_pings_of_a_client_that_does_not_read_are_dropped(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers would fill the server's memory."""
    protocols = []

    class Seen(WebSocketProtocol):
        def handle_connect(self, event: Request) -> None:
            protocols.append(self)
            super().handle_connect(event)

        def handle_ping(self) -> None:
            pings.append(self.writable.is_set())
            super().handle_ping()

    pings: list[bool] = []
    monkeypatch.setattr(server, "WebSocketProtocol", Seen)
    settings = api.installation.settings
    async with running(settings, api.installation) as url:
        other = replace(api, url=url)
        async with other.socket("/pty?exec=flood&sessionId=flood") as terminal:
            await terminal.recv()
            terminal.transport.pause_reading()
            await stands_still(api.session("flood"))
            (protocol,) = protocols
            held = protocol.transport.get_write_buffer_size()
            assert held > 0
            for _ in range(2000):
                terminal.transport.write(bytes([0x89, 0x80 | 125, 0, 0, 0, 0]) + b"x" * 125)

            async def all_seen() -> bool:
                return len(pings) == 2000

            await until(all_seen, 60)
            assert not any(pings)
            assert protocol.transport.get_write_buffer_size() == held
            terminal.transport.abort()
