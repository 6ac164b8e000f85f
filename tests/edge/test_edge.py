"""The edge with a real Caddy: namespaces stand for VMs; clients are curl, a WebSocket client and raw TLS."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Hashable
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from stead import addresses
from stead.addresses import GATEWAY
from stead.edge import configuration, gate
from stead.edge import edge as edges
from stead.edge.caddy import caddy_program
from stead.edge.edge import edge_folder
from stead.host import resolvers
from stead.processes import ProcessId
from stead.settings import Settings
from stead.shares import KeyedLimit, Release
from support.edge_with_namespaces import EdgeWithNamespaces, FakeVm, echo_app, edge_with_namespaces
from support.links import CERTAIN
from support.name_server import NameServer, dns_socket, name_server
from support.waiting import until

pytestmark = pytest.mark.root
_HOST = "app.style.dev"
_URL = f"https://{_HOST}/"


async def test_a_mapped_name_reaches_its_vm_with_host_and_forwarding_headers(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    for options in ((), ("--http1.1",), ("-H", "X-Forwarded-For: 6.6.6.6", "-H", "X-Forwarded-Proto: http")):
        answer = await edge_ns.curl(f"{_URL}a%2Fb/..%2Fc?x=%41", *options)
        assert (answer.status, answer.json()["name"]) == (200, vm.id), answer
        assert answer.json()["path"] == "/a%2Fb/..%2Fc"
        headers = answer.received()
        assert headers["host"] == [_HOST]
        assert headers["x-forwarded-for"] == ["127.0.0.1"]
        assert (headers["x-forwarded-proto"], headers["x-forwarded-host"]) == (["https"], [_HOST])
        assert not [name for name in headers if name.startswith("x-stead")]


async def test_requests_after_the_first_do_not_ask_the_gate(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    assert (await edge_ns.curl(_URL)).status == 200
    known = edge_ns.vms.found.pop(vm.id)
    try:
        assert (await edge_ns.curl(_URL)).status == 200
    finally:
        edge_ns.vms.found[vm.id] = known


@pytest.mark.parametrize(
    "host", ["stead.localhost", "api.freestyle.sh", "git.freestyle.sh", "git.stead.localhost", "localhost"]
)
async def test_own_names_lead_to_the_api(edge_ns: EdgeWithNamespaces, host: str) -> None:
    answer = await edge_ns.curl(f"https://{host}/v1/vms")
    assert (answer.status, answer.json()["name"]) == (200, "api")


async def test_the_api_has_a_certificate_for_its_address(edge_ns: EdgeWithNamespaces) -> None:
    answer = await edge_ns.curl(f"https://127.0.0.1:{edge_ns.public.https_port}/v1/vms")
    assert (answer.status, answer.json()["name"]) == (200, "api")


async def test_a_name_that_is_not_mapped_gets_404_as_json_or_as_a_page(edge_ns: EdgeWithNamespaces) -> None:
    answer = await edge_ns.curl("https://nothing.style.dev/")
    assert (answer.status, answer.json()["code"]) == (404, "DOMAIN_NOT_MAPPED")
    page = await edge_ns.curl("https://nothing.style.dev/", "-H", "Accept: text/html,*/*;q=0.8")
    assert (page.status, page.headers["content-type"]) == (404, "text/html; charset=utf-8")


async def test_a_vm_that_is_gone_gives_404(edge_ns: EdgeWithNamespaces) -> None:
    edge_ns.map("gone.style.dev", "no-such-vm")
    answer = await edge_ns.curl("https://gone.style.dev/")
    assert (answer.status, answer.json()["code"]) == (404, "VM_NOT_FOUND")


async def test_a_sleeping_vm_is_woken_once_and_serves_the_requests_that_waited(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    vm.end_run()
    vm.waking.clear()
    requests = [asyncio.create_task(edge_ns.curl(_URL, "--data-binary", "x" * 10_000)) for _ in range(20)]
    await until(lambda: vm.wakes == 1, 60)
    await asyncio.sleep(0.2)
    assert not any(request.done() for request in requests)
    vm.waking.set()
    answers = await asyncio.gather(*requests)
    assert {(answer.status, answer.json()["length"]) for answer in answers} == {(200, 10_000)}
    assert vm.wakes == 1


async def test_a_port_that_does_not_listen_gets_502_or_a_page_that_reloads(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RUNNING_HOLD", 1.0)
    edge_ns.map("late.style.dev", vm.id, 8080)
    url = "https://late.style.dev/"
    before = time.monotonic()
    answer = await edge_ns.curl(url)
    assert (answer.status, answer.json()["code"]) == (502, "CONNECTION_REFUSED")
    assert "nothing listens on port 8080 of the VM" in answer.json()["message"]
    assert time.monotonic() - before >= 1.0, "it waited for the port"
    page = await edge_ns.curl(url, "-H", "Accept: text/html")
    assert page.status == 502
    assert b'http-equiv="refresh"' in page.body
    async with vm.serving(echo_app("late"), 8080):
        assert (await edge_ns.curl(url)).json()["name"] == "late"
    # It has a route file now, so that Caddy's own connection fails.
    assert (await edge_ns.curl(url)).json()["code"] == "CONNECTION_REFUSED"
    assert (await edge_ns.curl(url, "-d", "x")).json()["code"] == "CONNECTION_REFUSED"


@pytest.mark.parametrize("routed", [False, True], ids=["first request", "after a restart of the server"])
async def test_requests_wait_for_a_server_that_is_about_to_listen(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, routed: bool
) -> None:
    """With their bodies, which arrive once: also when Caddy knew the address, and its connection failed."""
    monkeypatch.setattr(gate, "_RUNNING_HOLD", 60.0)
    edge_ns.map("soon.style.dev", vm.id, 8081)
    url = "https://soon.style.dev/"
    if routed:
        async with vm.serving(echo_app("before"), 8081):
            assert (await edge_ns.curl(url)).json()["name"] == "before"
        assert (edge_ns.edge.files._folder / "soon.style.dev").exists()
    seen: list[tuple[str, int]] = []

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        seen.append((request.method, len(await request.body())))
        await Response("counted")(scope, receive, send)

    (tmp_path / "body").write_bytes(b"x" * 300_000)
    sent = (
        (),
        ("-d", "x" * 1000),
        ("--http1.1", "--data-binary", f"@{tmp_path / 'body'}"),
        ("-X", "PUT", "-H", "Transfer-Encoding: chunked", "--http1.1", "-d", "x" * 5000),
    )
    requests = [asyncio.create_task(edge_ns.curl(url, *options, timeout=60)) for options in sent]
    await asyncio.sleep(1.5)
    assert not any(request.done() for request in requests)
    async with vm.serving(count, 8081):
        answers = await asyncio.gather(*requests)
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"counted")] * 4, answers
    assert sorted(seen) == [("GET", 0), ("POST", 1000), ("POST", 300_000), ("PUT", 5000)]


async def test_a_client_that_leaves_does_not_wait_for_a_port_any_more(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_RUNNING_HOLD", 600.0)
    limits: list[KeyedLimit] = []
    acquire = KeyedLimit.try_acquire

    def acquired(self: KeyedLimit, *keys: Hashable, **options: int) -> Release | None:
        if vm.id in keys:
            limits.append(self)
        return acquire(self, *keys, **options)

    monkeypatch.setattr(KeyedLimit, "try_acquire", acquired)
    edge_ns.map("never.style.dev", vm.id, 8082)
    async with edge_ns.connected("never.style.dev") as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: never.style.dev\r\n\r\n")
        await until(lambda: limits, 60)
        assert limits[0].used == 1
    await until(lambda: not limits[0].used, 60)


async def test_an_answer_that_is_not_http_is_a_502_and_is_not_asked_for_twice(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    edge_ns.map("broken.style.dev", vm.id, 81)
    requests = 0

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        if await reader.read(1000):
            requests += 1
            writer.write(b"\x00not HTTP at all\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(break_off, sock=await vm.side.listener("0.0.0.0", 81)):
        answer = await edge_ns.curl("https://broken.style.dev/")
    assert (answer.status, answer.json()["code"], requests) == (502, "BAD_GATEWAY", 1)


@pytest.mark.parametrize("sent", [20_000, 10_000])
async def test_a_request_whose_vm_ends_before_its_answer_gets_502(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, sent: int
) -> None:
    """Its whole body is sent before that, or half of it."""
    edge_ns.map("ending.style.dev", vm.id, 84)
    received = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if b"x" in data:
                    received.set()
        writer.close()

    reader, writer = await asyncio.open_connection(
        "127.0.0.1", edge_ns.public.https_port, ssl=edge_ns.context, server_hostname="ending.style.dev"
    )
    async with (
        await asyncio.start_server(wait, sock=await vm.side.listener("0.0.0.0", 84)),
        asyncio.timeout(60),
    ):
        writer.write(b"POST / HTTP/1.1\r\nHost: ending.style.dev\r\nContent-Length: 20000\r\n\r\n")
        writer.write(b"x" * sent)
        await received.wait()
        vm.end_run()
        writer.write(b"x" * (20_000 - sent))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 502 ")
        assert b'"code": "BAD_GATEWAY"' in await reader.read(65536)
    writer.close()


@contextlib.asynccontextmanager
async def _websocket(edge_ns: EdgeWithNamespaces, host: str = _HOST) -> AsyncIterator[Any]:
    async with connect(
        f"wss://{host}/chat",
        host="127.0.0.1",
        port=edge_ns.public.https_port,
        ssl=edge_ns.context,
        proxy=None,
    ) as socket:
        yield socket


async def _said(socket: Any, text: str) -> str:
    await socket.send(text)
    return str(await asyncio.wait_for(socket.recv(), 60))


async def test_websockets_pass_and_end_with_the_run_of_their_vm(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    async with _websocket(edge_ns) as socket:
        assert await _said(socket, "hello") == f"{vm.id}: hello"
        vm.end_run()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(socket.recv(), 60)
    async with _websocket(edge_ns) as socket:
        assert await _said(socket, "back") == f"{vm.id}: back"
    assert vm.wakes == 1


async def test_changes_of_mappings_leave_other_connections_open(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    async with _websocket(edge_ns) as socket:
        assert await _said(socket, "one") == f"{vm.id}: one"
        for number in range(500):
            edge_ns.map(f"name{number}.style.dev", vm.id)
        answers = await asyncio.gather(
            *(edge_ns.curl(f"https://name{n}.style.dev/") for n in range(0, 500, 25))
        )
        assert {answer.status for answer in answers} == {200}
        for number in range(500):
            edge_ns.unmap(f"name{number}.style.dev")
        assert (await edge_ns.curl("https://name25.style.dev/")).status == 404
        assert await _said(socket, "two") == f"{vm.id}: two"


async def test_moving_a_mapping_drops_no_request(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    other = edge_ns.add_vm("other")
    seen: list[tuple[int, str]] = []
    stopped = False

    async def ask() -> None:
        while not stopped:
            answer = await edge_ns.curl(_URL, "-d", "body")
            seen.append((answer.status, answer.json()["name"] if answer.status == 200 else answer.error))

    async with other.serving(echo_app("other"), 8000), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(ask())
        for number in range(20):
            await asyncio.sleep(0.1)
            edge_ns.map(_HOST, *(("other", 8000) if number % 2 == 0 else (vm.id, 80)))
        stopped = True
    assert {status for status, _ in seen} == {200}
    assert {name for _, name in seen} == {vm.id, "other"}


async def test_a_wildcard_reaches_its_vm_by_any_name(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    edge_ns.map("*.wild.style.dev", vm.id)
    for name in ("a", "b", "a"):
        answer = await edge_ns.curl(f"https://{name}.wild.style.dev/")
        assert (answer.status, answer.received()["host"]) == (200, [f"{name}.wild.style.dev"]), answer
    edge_ns.map("*.a.b.c.d.style.dev", vm.id)
    assert (await edge_ns.curl("https://e.a.b.c.d.style.dev/")).status == 200
    edge_ns.unmap("*.wild.style.dev")
    assert (await edge_ns.curl("https://a.wild.style.dev/")).status == 404


async def test_server_sent_events_arrive_at_once(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    """The rest of the stream never comes."""
    async with edge_ns.connected(_HOST) as (reader, writer), asyncio.timeout(CERTAIN):
        writer.write(f"GET /events HTTP/1.1\r\nHost: {_HOST}\r\n\r\n".encode())
        answer = await reader.readuntil(b"data: first\n\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_big_uploads_pass(edge_ns: EdgeWithNamespaces, vm: FakeVm, tmp_path: Any) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(100 << 20)
    answer = await edge_ns.curl(f"{_URL}upload", "-T", str(tmp_path / "big"))
    assert (answer.status, answer.json()["length"]) == (200, 100 << 20)


async def test_upper_case_and_a_dot_at_the_end_reach_the_same_vm(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    for host in ("APP.Style.Dev", "app.style.dev."):
        answer = await edge_ns.curl(_URL, "-H", f"Host: {host}")
        assert (answer.status, answer.json()["name"]) == (200, vm.id), (host, answer)


async def test_endless_headers_are_refused(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    answer = await edge_ns.curl(_URL, "--http1.1", "-H", f"X-Big: {'x' * 50_000}")
    assert answer.status == 200
    answer = await edge_ns.curl(_URL, "--http1.1", "-H", f"X-Big: {'x' * 100_000}")
    assert answer.status == 431


async def test_http_redirects_to_https(edge_ns: EdgeWithNamespaces) -> None:
    assert edge_ns.public.http is not None
    answer = await edge_ns.curl(f"http://{_HOST}/a?b=c", port=edge_ns.public.http.getsockname()[1])
    assert answer.status == 308
    assert answer.headers["location"] == f"https://{_HOST}:{edge_ns.public.https_port}/a?b=c"


async def test_http_3_is_announced_and_answers(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    answer = await edge_ns.curl(_URL)
    assert answer.headers["alt-svc"].startswith(f'h3=":{edge_ns.public.https_port}"')
    # A packet of an unknown version is answered by the list of known ones (RFC 9000, section 6).
    packet = b"\xc0\x1a\x2a\x3a\x4a\x08" + bytes(8) + b"\x08" + bytes(range(8)) + bytes(1200)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setblocking(False)
        client.connect(("127.0.0.1", edge_ns.public.https_port))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, packet)
        reply = await asyncio.wait_for(loop.sock_recv(client, 2000), 60)
    assert reply[1:5] == bytes(4)
    assert b"\x00\x00\x00\x01" in reply


async def test_a_name_without_mapping_gets_no_certificate(edge_ns: EdgeWithNamespaces) -> None:
    with pytest.raises(ssl.SSLError):
        await edge_ns.raw(b"GET / HTTP/1.1\r\nHost: a.example.com\r\n\r\n", "a.example.com")


async def test_caddy_is_restarted_and_waiting_connections_are_served(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    assert (await edge_ns.curl(_URL)).status == 200
    before = edge_ns.edge.caddy.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    await until(lambda: ProcessId.of(before) is None, 60)
    assert (await edge_ns.curl(_URL)).status == 200
    assert edge_ns.edge.caddy.pid not in (None, before)


async def test_interim_answers_pass_however_many(edge_ns: EdgeWithNamespaces, vm: FakeVm) -> None:
    """`102 Processing` of a long call: Node's fetch gives up when it hears nothing for 300 s."""
    count = 12

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * count)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, sock=await vm.side.listener("0.0.0.0", 86)):
        edge_ns.map("slow.stead.localhost", vm.id, 86)
        request = b"GET / HTTP/1.1\r\nHost: slow.stead.localhost\r\nConnection: close\r\n\r\n"
        answered = await edge_ns.raw(request, "slow.stead.localhost")
    assert answered.count(b"HTTP/1.1 102 Processing\r\n") == count
    assert answered.endswith(b"done")


async def test_caddy_asks_later_name_servers_of_the_host(root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process asks them for the address of the ACME server, for the next certificate.

    At first the host has none.
    """
    loopback, first, second = (IPv4Address(f"127.0.0.{number}") for number in (1, 2, 3))
    monkeypatch.setattr(resolvers, "_POLL", 0.1)
    monkeypatch.setattr(addresses, "resolvers", list)
    async with contextlib.AsyncExitStack() as stack:
        edge_ns = await stack.enter_async_context(
            edge_with_namespaces(acme_directory="https://acme.test/directory")
        )
        before, after = [
            await stack.enter_async_context(
                name_server(await edge_ns.side.thread.call(partial(dns_socket, address)), loopback)
            )
            for address in (first, second)
        ]
        edge_ns.add_vm("vm")
        numbers = itertools.count()

        async def asked(server: NameServer) -> bool:
            name = f"name{next(numbers)}.example.com"
            edge_ns.map(name, "vm")
            # The handshake waits for a certificate, which does not come.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await edge_ns.raw(b"", name)
            return any(b"\x04acme\x04test" in question for question in server.asked)

        pid = edge_ns.edge.caddy.pid
        assert not await asked(before)
        monkeypatch.setattr(addresses, "resolvers", lambda: [first])
        await until(lambda: asked(before), 60)
        assert not after.asked
        monkeypatch.setattr(addresses, "resolvers", lambda: [second])
        await until(lambda: asked(after), 60)
        assert edge_ns.edge.caddy.pid == pid


async def test_caddy_runs_as_its_own_user_without_privileges(edge_ns: EdgeWithNamespaces) -> None:
    status = Path(f"/proc/{edge_ns.edge.caddy.pid}/status").read_text()
    lines = {line.partition(":")[0]: line.partition(":")[2].split() for line in status.splitlines()}
    assert set(lines["Uid"]) == {str(edge_ns.settings.edge_uid)}
    assert (set(lines["CapEff"]), lines["NoNewPrivs"], lines["Groups"]) == ({"0" * 16}, ["1"], [])
    key = edge_ns.settings.data / "ca" / "root.key"
    assert key.stat().st_uid == 0
    assert key.stat().st_mode & 0o077 == 0


async def test_the_admin_socket_and_the_gate_are_out_of_reach_of_vms(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    assert await edge_ns.side.reaches(str(GATEWAY), 443, wait=CERTAIN)
    on_demand = edge_ns.edge.caddy.configuration["apps"]["tls"]["automation"]["on_demand"]
    port = urlsplit(on_demand["permission"]["endpoint"]).port
    assert port is not None
    assert not await vm.side.reaches(str(GATEWAY), port)
    assert (edge_folder(edge_ns.settings) / "caddy").stat().st_mode & 0o077 == 0


async def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch, root: None) -> None:
    monkeypatch.setattr(configuration, "HEADER_TIMEOUT", 1)
    async with edge_with_namespaces() as edge_ns:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: a.sty"):
            async with asyncio.timeout(60):
                answer = await edge_ns.raw(sent, "a.style.dev", timeout=90)
            assert b" 200 " not in answer


async def test_vms_reach_the_api_and_mapped_names_at_the_gateway(
    edge_ns: EdgeWithNamespaces, vm: FakeVm
) -> None:
    for host, name in (("api.freestyle.sh", "api"), (_HOST, vm.id)):
        command = ["curl", "-sS", "--cacert", str(edge_ns.root), "--connect-to", f"::{GATEWAY}:443"]
        done = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", vm.side.name, *command, f"https://{host}/"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await done.communicate()
        assert f'"name":"{name}"'.encode() in output


async def test_grpc_reaches_the_vm_over_http_2(
    edge_ns: EdgeWithNamespaces, vm: FakeVm, tmp_path: Path
) -> None:
    """Another Caddy stands for a gRPC server: it answers what protocol a request came by."""
    answer = {"handler": "static_response", "body": "by {http.request.proto}"}
    server = {"listen": [":83"], "protocols": ["h2c"], "routes": [{"handle": [answer]}]}
    apps = {"http": {"servers": {"grpc": server}}}
    (tmp_path / "caddy.json").write_text(json.dumps({"admin": {"disabled": True}, "apps": apps}))
    edge_ns.map("grpc.style.dev", vm.id, 83)
    url = "https://grpc.style.dev/service/Method"
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", vm.side.name, str(caddy_program()), "run"),
        *("--config", str(tmp_path / "caddy.json")),
        env={"HOME": str(tmp_path), "PATH": os.defpath},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:

        async def answered() -> bool:
            return (
                await edge_ns.curl(url, "-H", "Content-Type: application/grpc+proto", "-d", "x")
            ).status == 200

        await until(answered, 60)
        found = await edge_ns.curl(url, "-H", "Content-Type: application/grpc+proto", "-d", "x")
        assert found.body == b"by HTTP/2.0"
    finally:
        process.kill()
        await process.wait()


async def test_a_key_that_does_not_fit_its_certificate_is_replaced(root: None, tmp_path: Path) -> None:
    """As after a crash between the two writes: Caddy would not start any more."""
    settings = Settings(data=tmp_path)
    assert edges._sign_certificates(settings, tmp_path / "edge")
    assert not edges._sign_certificates(settings, tmp_path / "edge")
    for name in ("intermediate", "local", "style.dev"):
        file, other = tmp_path / "edge" / f"{name}.key", tmp_path / "ca" / "root.key"
        file.write_bytes(other.read_bytes())
        assert edges._sign_certificates(settings, tmp_path / "edge"), name
        assert file.read_bytes() != other.read_bytes()
