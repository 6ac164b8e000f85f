"""Strangers and tenants at the edge: what one of them does takes nothing from the others."""

import asyncio
import contextlib
import itertools
import logging
import selectors
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from cryptography import x509
from starlette.types import Receive, Scope, Send

from stead.addresses import GATEWAY
from stead.edge import edge as edges
from stead.edge import gate
from stead.edge.connections import limit_rules
from stead.errors import StartFailed
from stead.guest.watchdog import watching_the_loop
from stead.host import authority
from support.acme_server import AcmeServer
from support.edge_with_namespaces import (
    EdgeWithNamespaces,
    FakeVm,
    Mapping,
    Mappings,
    echo_app,
    edge_with_namespaces,
)
from support.http2 import MAX_STREAMS, UnreadStreams
from support.links import CERTAIN, Side, link, namespace
from support.waiting import until

pytestmark = pytest.mark.root
_PORT = 4433


@pytest_asyncio.fixture(scope="module")
async def edge_ns(root: None) -> AsyncIterator[EdgeWithNamespaces]:
    async with edge_with_namespaces() as edge_ns:
        yield edge_ns


async def test_public_pages_name_no_vm_and_no_reason(
    edge_ns: EdgeWithNamespaces, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "/var/lib/stead/vms/secret: qemu-system-x86_64: no such file"
    vm = edge_ns.add_vm("vmsecretid")
    edge_ns.map("page.style.dev", vm.id, 8080)
    edge_ns.map("gone.style.dev", "othersecretid", 8080)

    def fail() -> None:
        raise StartFailed(secret)

    for host, code, up in (
        ("page.style.dev", "CONNECTION_REFUSED", True),
        ("gone.style.dev", "VM_NOT_FOUND", True),
        ("page.style.dev", "SERVICE_UNAVAILABLE", False),
    ):
        vm.up, vm.on_wake = up, fail
        for options in ((), ("-H", "Accept: text/html")):
            answer = await edge_ns.curl(f"https://{host}/", *options)
            text = answer.body.decode()
            assert options or answer.json()["code"] == code
            assert "secretid" not in text and "qemu" not in text and "/var" not in text, text
            trace = answer.headers["x-freestyle-trace-id"]
            assert trace in text
            logged = [each for each in caplog.messages if trace in each]
            assert len(logged) == 1 and "secretid" in logged[0], caplog.messages
            assert code != "SERVICE_UNAVAILABLE" or "qemu" in logged[0]
    vm.up = True


async def test_a_name_that_is_not_mapped_asks_the_gate_once(edge_ns: EdgeWithNamespaces) -> None:
    host = "nobody.style.dev"
    first = await edge_ns.curl(f"https://{host}/")
    assert (first.status, first.json()["code"]) == (404, "DOMAIN_NOT_MAPPED")
    asked = edge_ns.asked
    again = await edge_ns.curl(f"https://{host}/")
    assert edge_ns.asked == asked
    assert (again.status, again.json()) == (404, first.json())
    page = await edge_ns.curl(f"https://{host}/", "-H", "Accept: text/html")
    assert edge_ns.asked == asked
    assert page.status == 404 and host.encode() in page.body and page.body.startswith(b"<!doctype html>")
    assert page.headers["cache-control"] == "no-store"
    vm = edge_ns.add_vm("late")
    async with vm.serving(echo_app("late"), 80):
        edge_ns.map(host, vm.id)
        assert (await edge_ns.curl(f"https://{host}/")).json()["name"] == "late"
        edge_ns.unmap(host)
        assert (await edge_ns.curl(f"https://{host}/")).status == 404


async def test_names_made_up_by_one_client_push_out_its_own(edge_ns: EdgeWithNamespaces) -> None:
    unmapped = edge_ns.edge.unmapped
    unmapped.put("victim.style.dev", "192.0.2.1")
    for number in range(6000):
        unmapped.put(f"x{number}.style.dev", "192.0.2.2")
    folder = edge_ns.settings.runtime / "edge" / edge_ns.settings.instance / "unmapped"
    assert len(list(folder.iterdir())) == 5000
    assert (folder / "victim.style.dev").exists()


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
async def test_a_client_that_makes_up_names_loses_its_connection(
    root: None, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_NOT_MAPPED_BURST", 20)
    monkeypatch.setattr(gate, "_NOT_MAPPED_INTERVAL", 60.0)
    async with edge_with_namespaces() as edge_ns:
        url = "https://app.style.dev/"
        requests = [(version, "-H", f"Host: n{number}.style.dev", url) for number in range(24)]
        said = await edge_ns.in_turn(*requests)
        assert said == ["404 1"] + ["404 0"] * 19 + ["429 0"] + ["429 1"] * 3, "connections are opened again"
        # Names that are mapped, and those that are known not to be, are answered as before.
        vm = edge_ns.add_vm("vm")
        edge_ns.map("app.style.dev", vm.id)
        async with vm.serving(echo_app("vm"), 80):
            assert (await edge_ns.curl("https://app.style.dev/")).status == 200
        assert (await edge_ns.curl("https://n7.style.dev/")).status == 404


async def test_host_names_in_upper_case_use_the_route_files(edge_ns: EdgeWithNamespaces) -> None:
    vm = edge_ns.add_vm("upper")
    edge_ns.map("upper.style.dev", vm.id)
    async with vm.serving(echo_app("upper"), 80):
        assert (await edge_ns.curl("https://upper.style.dev/")).json()["name"] == "upper"
        asked = edge_ns.asked
        for host in ("UPPER.style.dev", "Upper.Style.DEV.", "upper.style.dev.", "UPPER.STYLE.DEV:443"):
            answer = await edge_ns.curl("https://upper.style.dev/", "-H", f"Host: {host}")
            assert (answer.status, answer.json()["name"]) == (200, "upper"), host
            assert answer.received()["host"][0].partition(":")[0] == "upper.style.dev"
        assert edge_ns.asked == asked
        own = await edge_ns.curl("https://stead.localhost/", "-H", "Host: STEAD.localhost")
        assert own.json()["name"] == "api"


async def test_local_users_cannot_list_mapped_names(edge_ns: EdgeWithNamespaces) -> None:
    vm = edge_ns.add_vm("listed")
    edge_ns.map("listed.style.dev", vm.id)
    async with vm.serving(echo_app("listed"), 80):
        assert (await edge_ns.curl("https://listed.style.dev/")).status == 200
    folder = edge_ns.settings.runtime / "edge" / edge_ns.settings.instance
    for name in ("routes", "unmapped"):
        assert list((folder / name).iterdir())
        assert await asyncio.to_thread(_listed_by_nobody, folder / name) == ""


def _listed_by_nobody(folder: Path) -> str:
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "find", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.replace(str(folder), "").strip()


async def _presented(edge_ns: EdgeWithNamespaces, roots: Path, name: str) -> x509.Certificate | None:
    """The certificate that a client gets who trusts these roots; None if it refuses it, or gets none."""
    context = ssl.create_default_context(cafile=str(roots))
    try:
        _, writer = await asyncio.open_connection(
            "127.0.0.1", edge_ns.public.https_port, ssl=context, server_hostname=name
        )
    except (ssl.SSLError, ConnectionError):
        return None
    try:
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(found)


async def test_one_account_does_not_use_up_the_certificates_of_the_preview_zone(
    root: None, caplog: pytest.LogCaptureFixture
) -> None:
    zone = "stead.example.com"
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        acme = AcmeServer(folder)
        async with edge_with_namespaces(acme.running, domain=zone) as edge_ns:
            own = (zone, f"api.{zone}", f"git.{zone}")

            async def has_own() -> bool:
                return all([await _presented(edge_ns, acme.roots, each) for each in own])

            await until(has_own, 60)
            issued, orders = acme.issued, acme.orders
            edge_ns.add_vm("vm")
            got = 0
            for number in range(12):
                edge_ns.map(f"x{number}.{zone}", "vm", account="mallory")
                got += await _presented(edge_ns, acme.roots, f"x{number}.{zone}") is not None
            assert (got, acme.issued - issued) == (5, 5)
            assert acme.orders - orders == 5, "the others were not ordered"
            assert "STEAD_ACME_NAMES_PER_DAY" in caplog.text
            edge_ns.map(f"alice.{zone}", "vm", account="alice")
            assert await _presented(edge_ns, acme.roots, f"alice.{zone}") is not None


async def test_a_new_intermediate_is_used_without_a_restart(
    root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "_RENEWAL_CHECK", 0.5)
    async with edge_with_namespaces() as edge_ns:
        edge_ns.add_vm("vm")
        file = edge_ns.settings.data / "edge" / "intermediate.crt"

        async def signer(name: str) -> bytes | None:
            edge_ns.map(name, "vm")
            found = await _presented(edge_ns, edge_ns.root, name)
            assert found is not None
            return found.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier

        def key() -> bytes:
            now = x509.load_pem_x509_certificate(file.read_bytes())
            return now.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.key_identifier

        first, caddy = key(), edge_ns.edge.caddy.pid
        assert await signer("a.b.style.dev") == first
        with monkeypatch.context() as patch:
            patch.setattr(authority, "_INTERMEDIATE_DAYS", 29)
            ending = edge_ns.authority.intermediate(authority.signed_names(edge_ns.settings))
        file.write_bytes(ending.certificate)
        (file.parent / "intermediate.key").write_bytes(ending.key)
        short = key()
        await until(lambda: key() not in (first, short), 60)
        numbers = itertools.count()

        async def used() -> bool:
            return await signer(f"n{next(numbers)}.b.style.dev") == key()

        await until(used, 60)
        assert edge_ns.edge.caddy.pid == caddy


async def test_a_request_that_holds_the_event_loop_in_the_gate_is_named_in_the_log(
    edge_ns: EdgeWithNamespaces, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = Mappings.route

    def hold(mappings: Mappings, hostname: str) -> Mapping | None:
        end = time.monotonic() + (1.5 if hostname == "slow.style.dev" else 0)
        while time.monotonic() < end:
            pass
        return route(mappings, hostname)

    monkeypatch.setattr(Mappings, "route", hold)
    with caplog.at_level(logging.WARNING, "stead.watchdog"):
        async with watching_the_loop():
            assert (await edge_ns.curl("https://slow.style.dev/")).status == 404

            def named() -> bool:
                held = [line for line in caplog.messages if "event loop was held" in line]
                return any('call="request for slow.style.dev"' in line for line in held)

            await until(named, 60)


# Requests that wait in the gate


@contextlib.asynccontextmanager
async def _unread(
    edge_ns: EdgeWithNamespaces, host: str, connections: int, source: FakeVm | None = None
) -> AsyncIterator[list[UnreadStreams]]:
    """Requests whose answers are not taken: 249 on each connection, from loopback or from a VM."""
    port = edge_ns.public.https_port
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for _ in range(connections):
            over = None if source is None else await source.side.connect(str(GATEWAY), 443)
            made = UnreadStreams.connected(port, edge_ns.context, host, over)
            opened.append(await stack.enter_async_context(made))
        for streams in opened:
            for _ in range(MAX_STREAMS - 1):
                await streams.request("GET", host, "/")
        yield opened


def _answered(opened: list[UnreadStreams]) -> int:
    return sum(streams.statuses for streams in opened)


def _never_wakes(edge_ns: EdgeWithNamespaces, name: str, host: str, account: str) -> FakeVm:
    vm = edge_ns.add_vm(name)
    vm.up = False
    vm.waking.clear()
    edge_ns.map(host, vm.id, account=account)
    return vm


async def test_requests_for_a_vm_that_never_wakes_leave_the_gate_to_others(root: None) -> None:
    async with edge_with_namespaces() as edge_ns:
        # So that 5,000 requests do what 28,000 do on a host with all ports.
        await edge_ns.side.sysctl("net/ipv4/ip_local_port_range", "20000 23000")
        dead = _never_wakes(edge_ns, "dead", "dead.style.dev", "mallory")
        vm = edge_ns.add_vm("vm")
        async with vm.serving(echo_app("alice"), 80), _unread(edge_ns, "dead.style.dev", 20) as opened:
            await until(lambda: dead.wakes == 1, 60)
            await until(lambda: _answered(opened) == 20 * (MAX_STREAMS - 1) - 128, 60)
            for number in range(5):
                # A new name, for which the gate is asked.
                edge_ns.map(f"a{number}.style.dev", vm.id, account="alice")
                answer = await edge_ns.curl(f"https://a{number}.style.dev/")
                assert answer.status == 200, answer
                assert (await edge_ns.curl("https://stead.localhost/healthz")).status == 200
            refused = await edge_ns.curl("https://dead.style.dev/")
            assert (refused.status, refused.json()["code"]) == (503, "VM_STARTING")
            assert int(refused.headers["retry-after"]) >= 1
        # The places are free again when the clients are gone.
        dead.waking.set()
        async with dead.serving(echo_app("dead"), 80):

            async def serves() -> bool:
                return (await edge_ns.curl("https://dead.style.dev/")).status == 200

            await until(serves, 60)


async def test_requests_of_one_address_that_wait_leave_the_gate_to_others(root: None) -> None:
    async with edge_with_namespaces() as edge_ns:
        _never_wakes(edge_ns, "dead", "dead.style.dev", "mallory")
        client = edge_ns.add_vm("client")
        async with _unread(edge_ns, "dead.style.dev", 1, client) as opened:
            await until(lambda: _answered(opened) == MAX_STREAMS - 1 - 64, 60)
            waiting = asyncio.create_task(edge_ns.curl("https://dead.style.dev/"))
            await asyncio.sleep(2)
            assert not waiting.done(), "another client may wait"
            waiting.cancel()


async def test_requests_that_a_vm_does_not_answer_use_a_bounded_number_of_connections(
    root: None,
) -> None:
    async with edge_with_namespaces() as edge_ns:
        vm, other = edge_ns.add_vm("slow"), edge_ns.add_vm("other")
        edge_ns.map("slow.style.dev", vm.id)
        edge_ns.map("other.style.dev", other.id)
        begun, go_on = 0, asyncio.Event()

        async def hold(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal begun
            begun += 1
            await go_on.wait()
            await echo_app("slow")(scope, receive, send)

        async with other.serving(echo_app("other"), 80), vm.serving(hold, 80):
            go_on.set()
            assert (await edge_ns.curl("https://slow.style.dev/")).status == 200
            go_on.clear()
            begun = 0
            async with _unread(edge_ns, "slow.style.dev", 3) as opened:
                await until(lambda: begun >= 256, 60)
                await asyncio.sleep(2)
                assert begun == 256, "the others wait"
                assert (await edge_ns.curl("https://other.style.dev/")).status == 200
                go_on.set()
                await until(lambda: _answered(opened) == 3 * (MAX_STREAMS - 1), 60)


async def test_an_address_wakes_a_limited_number_of_vms(root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_WAKE_BURST", 3)
    monkeypatch.setattr(gate, "_WAKE_INTERVAL", 600.0)
    async with edge_with_namespaces() as edge_ns, contextlib.AsyncExitStack() as stack:
        client, other = edge_ns.add_vm("client"), edge_ns.add_vm("other")
        vms = [edge_ns.add_vm(f"vm{number}") for number in range(5)]
        for vm in vms:
            vm.up = False
            edge_ns.map(f"{vm.id}.style.dev", vm.id)
            await stack.enter_async_context(vm.serving(echo_app(vm.id), 80))
        urls = [f"https://{vm.id}.style.dev/" for vm in vms]
        said = await edge_ns.in_turn(*([url] for url in (*urls, urls[0])), source=client)
        assert [each[:3] for each in said] == ["200"] * 3 + ["429"] * 2 + ["200"]
        assert said[4] == "429 1", "the connection was closed"
        assert [vm.wakes for vm in vms] == [1, 1, 1, 0, 0]
        # Requests to VMs that are up or wake already, and other clients, are served.
        vms[0].end_run()
        vms[0].waking.clear()
        joined = asyncio.create_task(edge_ns.in_turn([urls[0]], source=other))
        await until(lambda: vms[0].wakes == 2, 60)
        joining = asyncio.create_task(edge_ns.in_turn([urls[0]], source=client))
        await asyncio.sleep(1)
        assert not joining.done()
        vms[0].waking.set()
        assert [(await joined)[0][:3], (await joining)[0][:3]] == ["200", "200"]
        # All clients of a proxy on this host have one address.
        for url in urls[3:]:
            assert (await edge_ns.curl(url)).status == 200


@pytest.fixture
def host_and_clients(root: None) -> Iterator[tuple[Side, Side]]:
    """Two namespaces: 10.9.9.1 and fd09::1 of the host, and 10.9.9.2 to .9 of clients."""
    with namespace("floodh") as host, namespace("floodc") as clients:
        link(host, "up0", clients, "up0")
        host.ip("addr", "add", "10.9.9.1/24", "dev", "up0")
        host.ip("addr", "add", "fd09::1/32", "dev", "up0", "nodad")
        for number in range(2, 10):
            clients.ip("addr", "add", f"10.9.9.{number}/24", "dev", "up0")
            clients.ip("addr", "add", f"fd09:0:{number}::1/32", "dev", "up0", "nodad")
        yield host, clients


def _listen() -> socket.socket:
    return socket.create_server(("", _PORT), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1000)


def _opened(source: str, target: str, count: int, wanted: int) -> list[socket.socket]:
    """The connections that are made, out of so many; waits longer if they are too few."""
    made = [socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET) for _ in range(count)]
    with selectors.DefaultSelector() as pending:
        for each in made:
            each.setblocking(False)
            each.bind((source, 0))
            each.connect_ex((target, _PORT))
            pending.register(each, selectors.EVENT_WRITE)
        found: list[socket.socket] = []
        while ready := pending.select(CERTAIN if len(found) < wanted else 0.5):
            for key, _ in ready:
                pending.unregister(key.fileobj)
                found += [each for each in made if each is key.fileobj]
    for each in set(made).difference(found):
        each.close()
    return found


@pytest.mark.parametrize("source", ["10.9.9.{}", "fd09:0:{}::1"])
async def test_connections_are_limited_when_there_are_more_clients_than_counts(
    host_and_clients: tuple[Side, Side], source: str
) -> None:
    host, clients = host_and_clients
    target = source.format(1) if "." in source else "fd09::1"
    host.load(limit_rules("stead_test_edge", [_PORT], most=5, clients=2))
    held: list[socket.socket] = []
    try:
        with await host.thread.call(_listen):
            for number in (2, 3, 4, 5):
                made = await clients.thread.call(partial(_opened, source.format(number), target, 20, 5))
                held += made
                # The third and the fourth share lists, which may be the same one.
                assert len(made) == 5 or (number == 5 and not made), number
    finally:
        for each in held:
            each.close()


async def test_the_rate_of_new_connections_of_an_address_is_limited(
    host_and_clients: tuple[Side, Side],
) -> None:
    host, clients = host_and_clients
    host.load(limit_rules("stead_test_edge", [_PORT], clients=2, rate=1, burst=10))
    with await host.thread.call(_listen):
        for number in (2, 3, 4):
            made = await clients.thread.call(partial(_opened, f"10.9.9.{number}", "10.9.9.1", 50, 10))
            for each in made:
                each.close()
            assert 10 <= len(made) < 20, (number, len(made))
