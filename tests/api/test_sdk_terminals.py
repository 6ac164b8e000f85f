"""Terminals, processes and forwarded ports in both clients, against a scripted WebSocket server."""

import asyncio
import contextlib
import inspect
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from websockets.sync.server import ServerConnection

from stead.sdk import Closed, Exited, Output, OutputCut, errors
from stead.sdk._async import reconnecting as async_reconnecting
from stead.sdk._sync import reconnecting as sync_reconnecting
from support.sdk_clients import Client, close, done
from support.socket_server import Answer, Session, control, cut, sockets

VM = "x" * 20
PROCESS = {"id": "proc-1", "command": ["sh", "-c", "make"], "status": "running", "offset": 0, "start": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attempts to connect again, with short delays."""
    for module in (async_reconnecting, sync_reconnecting):
        assert module.DELAYS == (0.5, 1.0, 2.0, 4.0, 8.0)
        monkeypatch.setattr(module, "DELAYS", (0.01, 0.02, 0.03, 0.04, 0.05))


async def got(result: Any) -> Any:
    """The result of a call of either client. Unlike `done`, it does not iterate over a session."""
    return await result if inspect.isawaitable(result) else result


@contextlib.asynccontextmanager
async def played(client: Client, *steps: Session | Answer) -> Any:
    """A VM handle of a client of a server that plays these steps, and that server."""
    with sockets(*steps) as server:
        stead = client(server.url, max_retries=0)
        try:
            yield stead.vms.ref(VM), server
        finally:
            await close(stead)


def screen(*frames: str | bytes, then: Callable[[ServerConnection], object] = bool) -> Session:
    """A terminal `pty-1` that sends these frames."""

    def play(connection: ServerConnection) -> None:
        connection.send(control("sessionInfo", sessionId="pty-1"))
        for frame in frames:
            connection.send(frame)
        then(connection)

    return play


EXITED = control("exited", exitCode=3)


async def test_open_yields_the_output_and_the_exit_code(client: Client) -> None:
    async with played(client, screen(b"\x1b[1mhello", b"\xff\x00", EXITED)) as (vm, server):
        opened = vm.user("alice").pty.open(cols=100, rows=30, exec="/bin/sh -l", session_id="mine")
        session = await got(opened)
        assert (session.id, session.exit_code) == ("pty-1", None)
        assert await done(session) == [b"\x1b[1mhello", b"\xff\x00"]
        assert (session.exit_code, await got(session.wait()), session.closed) == (3, 3, Closed(1000))
        with pytest.raises(errors.SessionClosed):
            await got(session.write("late"))
    (opened,) = server.seen
    assert opened.path == f"/v1/vms/{VM}/pty"
    assert opened.query == {"cols": "100", "rows": "30", "exec": "/bin/sh -l", "sessionId": "mine"}
    assert opened.headers["Authorization"] == "Bearer key"
    assert opened.headers["X-Freestyle-Vm-Linux-User-Id"] == "alice"


async def test_input_resize_and_signals_reach_the_server(client: Client) -> None:
    received: list[Any] = []

    def listen(connection: ServerConnection) -> None:
        received.extend(connection.recv() for _ in range(5))
        connection.send(EXITED)

    async with played(client, screen(then=listen)) as (vm, _):
        session = await got(vm.pty.open())
        await got(session.write("ä"))
        await got(session.write(b"\x04"))
        await got(session.resize(120, 40))
        await got(session.interrupt())
        await got(session.kill())
        assert await got(session.wait()) == 3
    assert received[:2] == ["ä".encode(), b"\x04"]
    assert [json.loads(each) for each in received[2:]] == [
        {"type": "resize", "cols": 120, "rows": 40},
        {"type": "signal", "signal": "SIGINT"},
        {"type": "signal", "signal": "SIGKILL"},
    ]


async def test_a_broken_connection_is_replaced_and_queued_input_follows(client: Client) -> None:
    broken, greeting = threading.Event(), list[Any]()

    def break_off(connection: ServerConnection) -> None:
        cut(connection)
        broken.set()

    def again(connection: ServerConnection) -> None:
        connection.send(b"redrawn")
        greeting.extend(connection.recv() for _ in range(3))
        connection.send(EXITED)

    events: list[Any] = []
    callbacks = {
        name: lambda *args, name=name: events.append((name, *args))
        for name in ("on_exit", "on_close", "on_disconnect", "on_reconnect", "on_error")
    }
    busy = Answer(503, {"code": "SERVICE_UNAVAILABLE", "message": "restarting"})
    async with played(client, screen(b"first", then=break_off), busy, again) as (vm, server):
        session = await got(vm.pty.open(**callbacks))
        assert await got(anext(session) if hasattr(session, "__anext__") else next(session)) == b"first"
        assert broken.wait(10)
        await asyncio.sleep(0.1)
        await got(session.resize(90, 20))
        await got(session.write("one"))
        await got(session.write("two"))
        assert await done(session) == [b"redrawn"]
        assert session.exit_code == 3
    assert [each.path for each in server.seen[1:]] == [f"/v1/vms/{VM}/pty/sessions/pty-1"] * 2
    assert server.seen[2].query == {"cols": "90", "rows": "20"}
    assert [json.loads(greeting[0]), *greeting[1:]] == [
        {"type": "resize", "cols": 90, "rows": 20},
        b"one",
        b"two",
    ]
    assert events == [
        ("on_disconnect", Closed(1006, "connection lost")),
        ("on_reconnect",),
        ("on_exit", 3),
        ("on_close", Closed(1000)),
    ]


async def test_after_five_failed_attempts_the_first_close_is_reported(client: Client) -> None:
    def suspend(connection: ServerConnection) -> None:
        connection.close(1001, "the VM was suspended")

    closed: list[Closed] = []
    busy = Answer(503, {"code": "SERVICE_UNAVAILABLE", "message": "restarting"})
    async with played(client, screen(b"first", then=suspend), *[busy] * 6) as (vm, server):
        session = await got(vm.pty.open(on_close=closed.append))
        with pytest.raises(errors.ServerUnreachable, match="the VM was suspended"):
            await done(session)
    assert len(server.seen) == 1 + 5
    assert closed == [Closed(1001, "the VM was suspended")]


@pytest.mark.parametrize("reconnect", [True, False])
async def test_a_session_that_is_gone_or_must_not_be_reconnected_is_not_tried_again(
    client: Client, reconnect: bool
) -> None:
    failed: list[Any] = []
    async with played(client, screen(b"first", then=cut)) as (vm, server):
        session = await got(vm.pty.open(reconnect=reconnect, on_error=failed.append))
        with pytest.raises(errors.SessionNotFound if reconnect else errors.ServerUnreachable):
            await done(session)
    assert len(server.seen) == 1 + reconnect
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (403, "SESSION_USER_MISMATCH", errors.SessionUserMismatch),
        (404, "SESSION_NOT_FOUND", errors.SessionNotFound),
        (409, "SESSION_ALREADY_EXISTS", errors.AlreadyExists),
        (429, "SESSION_CAP_REACHED", errors.SessionCapReached),
    ],
)
async def test_a_refusal_before_the_upgrade_is_the_error_of_the_server(
    client: Client, status: int, code: str, error: type[errors.SteadApiError]
) -> None:
    async with played(client, Answer(status, {"code": code, "message": "no"})) as (vm, server):
        with pytest.raises(error) as raised:
            await got(vm.pty.attach("mine"))
    assert (raised.value.code, raised.value.status) == (code, status)
    assert len(server.seen) == 1


async def test_callbacks_get_the_output_and_detach_leaves_the_session(client: Client) -> None:
    data, closed = bytearray(), list[Closed]()
    gone = threading.Event()

    def stay(connection: ServerConnection) -> None:
        with contextlib.suppress(Exception):
            connection.recv()
        gone.set()

    came = threading.Event()

    def take(chunk: bytes) -> None:
        data.extend(chunk)
        if data == b"ab":
            came.set()

    async with played(client, screen(b"a", b"b", then=stay)) as (vm, server):
        session = await got(vm.pty.open(on_data=take, on_close=closed.append))
        await asyncio.to_thread(came.wait, 10)
        await got(session.detach())
        assert await got(session.wait()) is None
        assert await asyncio.to_thread(gone.wait, 10)
    assert len(server.seen) == 1
    assert closed == [Closed(1000, "detached")] or closed == [Closed(1000)]


async def test_an_error_in_a_callback_is_raised_by_wait(client: Client) -> None:
    def fail(_: bytes) -> None:
        raise KeyError("mine")

    async with played(client, screen(b"a", b"b", then=lambda connection: connection.recv())) as (vm, _):
        session = await got(vm.pty.open(on_data=fail))
        with pytest.raises(KeyError):
            await got(session.wait(timeout=60))


async def test_wait_has_a_timeout(client: Client) -> None:
    async with played(client, screen(b"a", then=lambda connection: connection.recv())) as (vm, _):
        session = await got(vm.pty.open())
        with pytest.raises(errors.WaitTimedOut):
            await got(session.wait(timeout=0.05))
        await got(session.detach())


# Processes


def attached(*frames: str | bytes, then: Callable[[ServerConnection], object] = bool) -> Session:
    def play(connection: ServerConnection) -> None:
        connection.send(control("process", **PROCESS))
        for frame in frames:
            connection.send(frame)
        then(connection)

    return play


ENDED = control("exited", **(PROCESS | {"status": "exited", "exitCode": 137, "signal": "SIGKILL"}))


async def test_a_stream_continues_at_its_offset_without_losing_or_repeating_a_byte(client: Client) -> None:
    """The second connection is cut in the middle of a character."""
    steps = (
        Answer(200, PROCESS),
        attached(b"\x01" + b"a" * 1000, b"\x02err", then=cut),
        attached(b"\x01\xc3", then=cut),
        attached(control("cut", **{"from": 1004, "to": 5000}), b"\x01\xa4!", ENDED),
    )
    async with played(client, *steps) as (vm, server):
        process = await got(vm.processes.get("proc-1"))
        stream = await got(process.stream())
        events = await done(stream)
        assert stream.offset == 5002
        assert (process.exit_code, process.last_info.running) == (137, False)
    assert [each.query.get("offset") for each in server.seen[1:]] == ["0", "1003", "1004"]
    assert events == [
        Output("stdout", b"a" * 1000, "a" * 1000),
        Output("stderr", b"err", "err"),
        Output("stdout", b"\xc3", ""),
        OutputCut(1004, 5000),
        Output("stdout", b"\xa4!", "ä!"),
        Exited(137, "SIGKILL"),
    ]


async def test_a_stream_sends_input_resize_signal_and_the_end_of_input(client: Client) -> None:
    received: list[Any] = []

    def listen(connection: ServerConnection) -> None:
        received.extend(connection.recv() for _ in range(4))
        connection.send(ENDED)

    async with played(client, Answer(200, PROCESS), attached(then=listen)) as (vm, _):
        stream = await got(vm.processes.attach("proc-1", offset=7))
        await got(stream.write("in"))
        await got(stream.resize(100, 30))
        await got(stream.signal("SIGTERM"))
        await got(stream.close_stdin())
        assert await done(stream) == [Exited(137, "SIGKILL")]
    assert received[0] == b"in"
    assert [json.loads(each) for each in received[1:]] == [
        {"type": "resize", "cols": 100, "rows": 30},
        {"type": "signal", "signal": "SIGTERM"},
        {"type": "closeStdin"},
    ]


# Forwarded ports


def echo(connection: ServerConnection) -> None:
    """A server in the VM: it answers in capitals when its client has finished."""
    data = b""
    while isinstance(message := connection.recv(), bytes):
        data += message
    assert json.loads(message) == {"type": "eof"}
    connection.send(data.upper())
    connection.send(control("eof"))


def exchange(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@contextlib.asynccontextmanager
async def forwarded(forward: Any) -> Any:
    if hasattr(forward, "__aenter__"):
        async with forward:
            yield forward
    else:
        with forward:
            yield forward


async def test_forward_carries_many_connections_with_half_close(client: Client) -> None:
    async with played(client, *[echo] * 20) as (vm, server), forwarded(vm.forward(3000, local=0)) as forward:
        assert forward.port == 3000 and forward.local_port not in (0, 3000)
        sent = [bytes([97 + number]) * 300_000 for number in range(20)]
        answers = await asyncio.gather(
            *(asyncio.to_thread(exchange, forward.local_port, data) for data in sent)
        )
        assert answers == [data.upper() for data in sent]
    assert {each.path for each in server.seen} == {f"/v1/vms/{VM}/forward/3000"}


def abort(connection: ServerConnection) -> None:
    connection.recv()
    connection.send(b"part")
    connection.close(1011, "connection reset")


async def test_forward_resets_the_client_when_the_port_refuses_or_resets(client: Client) -> None:
    refused = Answer(502, {"code": "CONNECTION_REFUSED", "message": "nothing listens on port 3000"})
    failed: list[errors.SteadException] = []
    async with (
        played(client, refused, abort) as (vm, _),
        forwarded(vm.forward(3000, local=0, on_error=failed.append)) as forward,
    ):
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(exchange, forward.local_port, b"x")
    assert [getattr(each, "code", None) for each in failed] == ["CONNECTION_REFUSED"]


async def test_closing_a_forward_ends_its_connections(client: Client) -> None:
    gone = threading.Event()

    def hold(connection: ServerConnection) -> None:
        assert connection.recv() == b"hello"
        connection.send(b"there")
        with contextlib.suppress(Exception):
            connection.recv()
        gone.set()

    async with played(client, hold) as (vm, _):
        async with forwarded(vm.forward(3000, local=0)) as forward:
            open_socket = socket.create_connection(("127.0.0.1", forward.local_port), timeout=10)
            open_socket.sendall(b"hello")
            assert await asyncio.to_thread(open_socket.recv, 5) == b"there"
        with open_socket, pytest.raises(ConnectionResetError):
            open_socket.recv(1)
        assert await asyncio.to_thread(gone.wait, 10)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", forward.local_port), timeout=1)


async def test_a_local_port_that_is_taken_is_an_error(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with played(client) as (vm, _):
            with pytest.raises(OSError, match="in use"):
                async with forwarded(vm.forward(3000, local=taken.getsockname()[1])):
                    pass
