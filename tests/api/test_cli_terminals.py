"""Terminals, processes and ports on the command line, typed into a terminal. The guest is in memory."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.cli.terminal import DetachKey, Screen
from support.fake_api import FakeApi, fake_api
from support.flaky_proxy import FlakyProxy
from support.pseudo_terminal import PseudoTerminal, typed
from support.run_cli import PROGRAM, Shell
from support.waiting import until


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        yield api


@pytest_asyncio.fixture(autouse=True)
async def no_sessions(api: FakeApi) -> None:
    await api.installation.machines.start(api.vm)
    api.sessions.table.clear()


@pytest.fixture
def shell(api: FakeApi) -> Shell:
    return Shell(api.url, api.callers["owner"]["Authorization"].removeprefix("Bearer "))


async def in_session(window: PseudoTerminal) -> None:
    """Wait until the screen of the session was drawn: keys go to it now."""
    await window.expect(b"screen:")


async def test_shell_passes_keys_size_and_the_exit_code(api: FakeApi, shell: Shell) -> None:
    async with typed(shell, "vm", "shell", api.vm, "--session", "work", cols=100, rows=30) as window:
        before = window.modes
        await in_session(window)
        session = api.session("work")
        assert (session.argv, session.cols, session.rows) == ([], 100, 30)
        assert window.modes != before
        session.print(b"\x1b[1mhello\x1b[0m\r\n")
        await window.expect(b"\x1b[1mhello\x1b[0m\r\n")
        window.type(b"\x03ls\r")
        await until(lambda: session.received == b"\x03ls\r", 60)
        window.resize(132, 43)
        await until(lambda: (session.cols, session.rows) == (132, 43), 60)
        window.type(b"exit 7")
        assert await window.ended() == 7
        assert window.modes == before


async def test_detach_key_leaves_the_session_and_attach_returns_to_it(api: FakeApi, shell: Shell) -> None:
    async with typed(shell, "vm", "shell", api.vm) as window:
        before = window.modes
        await in_session(window)
        (session,) = api.sessions.table.values()
        session.print(b"\x1b[?1049hin the editor")
        await window.expect(b"in the editor")
        window.type(b"~~\r~.")
        assert await window.ended() == 0
        assert window.modes == before
        await window.expect(b"\x1b[?1049l")
        await window.expect(f"stead vm attach {api.vm} {session.id}".encode())
    assert session.received == b"~\r"
    assert not session.ended.is_set()
    async with typed(shell, "vm", "attach", api.vm, session.id) as window:
        await window.expect(b"in the editor")
        window.type(b"exit 0")
        assert await window.ended() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_killed_client_restores_the_terminal(api: FakeApi, shell: Shell, number: int) -> None:
    async with typed(shell, "vm", "shell", api.vm, "--session", "work") as window:
        before = window.modes
        await in_session(window)
        assert window.modes != before
        window.process.send_signal(number)
        assert await window.ended() == 128 + number
        assert window.modes == before
    assert not api.session("work").ended.is_set()


async def test_a_dropped_network_is_survived(api: FakeApi, shell: Shell) -> None:
    async with FlakyProxy(api.url) as proxy:
        through = Shell(proxy.url, shell.key)
        async with typed(through, "vm", "shell", api.vm, "--session", "work") as window:
            await in_session(window)
            session = api.session("work")
            session.print(b"before")
            await window.expect(b"before")
            proxy.cut()
            await window.expect(b"connecting again")
            window.type(b"typed meanwhile")
            await window.expect(b"screen:before")
            await until(lambda: session.received == b"typed meanwhile", 60)
            window.type(b"exit 3")
            assert await window.ended() == 3


async def test_a_suspended_vm_is_woken_by_a_key(api: FakeApi, shell: Shell) -> None:
    machines = api.installation.machines
    async with typed(shell, "vm", "shell", api.vm, "--session", "work") as window:
        await in_session(window)
        session = api.session("work")
        await machines.suspend(api.vm)
        await window.expect(b"press a key to wake it")
        assert (await machines.info(api.vm)).state == "suspended"
        await machines.start(api.vm)
        api.sessions.table["work"] = session  # as the memory of a real VM does
        window.type(b"x")
        await until(lambda: session.received == b"x", 60)
        window.type(b"\r~.")
        assert await window.ended() == 0


async def test_a_stopped_vm_is_not_started_again(api: FakeApi, shell: Shell) -> None:
    machines = api.installation.machines
    async with typed(shell, "vm", "shell", api.vm) as window:
        before = window.modes
        await in_session(window)
        await machines.stop(api.vm)
        await window.expect(b"the VM is stopped")
        assert await window.ended() == 1
        assert window.modes == before
    assert (await machines.info(api.vm)).state == "stopped"


async def test_exec_with_a_terminal_is_the_terminal_of_the_command(api: FakeApi, shell: Shell) -> None:
    async with typed(shell, "vm", "exec", "-it", api.vm, "--", "cat", cols=90, rows=20) as window:
        before = window.modes
        await until(lambda: any(each.clients for each in api.sessions.table.values()), 60)
        (session,) = api.sessions.table.values()
        assert (session.pty, session.argv[-1], session.cols, session.rows) == (True, "cat", 90, 20)
        # Before that, Ctrl-C is for the client.
        await until(lambda: window.modes != before, 60)
        window.type(b"\x03hello")
        await window.expect(b"\x03hello")
        window.resize(100, 40)
        await until(lambda: (session.cols, session.rows) == (100, 40), 60)
        window.type(b"exit 5")
        assert await window.ended() == 5
        assert window.modes == before
    assert api.sessions.table == {}


async def test_exec_passes_standard_input_on_as_it_comes(api: FakeApi, shell: Shell) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "vm", "exec", "-i", api.vm, "cat", stdin=pipe, stdout=pipe, env=shell.environment
    )
    assert process.stdin is not None and process.stdout is not None
    for text in (b"one", b"two"):
        process.stdin.write(text)
        assert await process.stdout.readexactly(3) == text
    (session,) = api.sessions.table.values()
    process.stdin.close()
    await until(lambda: session.stdin_closed, 60)
    session.end(4)
    assert await process.wait() == 4
    assert api.sessions.table == {}


async def test_ctrl_c_without_a_terminal_goes_to_the_command(api: FakeApi, shell: Shell) -> None:
    async with typed(shell, "vm", "exec", "-t", api.vm, "cat") as window:
        await until(lambda: any(each.clients for each in api.sessions.table.values()), 60)
        window.type(b"\x03")
        assert await window.ended() == 130
    assert api.sessions.table == {}


async def test_a_terminal_needs_a_terminal(api: FakeApi, shell: Shell) -> None:
    for command in (["exec", "-it", api.vm, "bash"], ["shell", api.vm], ["attach", api.vm, "work"]):
        assert "terminal" in await shell.refused("vm", *command)
    assert api.sessions.table == {}


async def test_run_ps_logs_and_kill(api: FakeApi, shell: Shell) -> None:
    assert await shell.run("vm", "run", "-d", "--id", "job", api.vm, "--", "cat") == "job\n"
    session = api.session("job")
    session.print(b"line one\n")
    (listed,) = (await shell.ask("vm", "ps", api.vm))["processes"]
    assert (listed["id"], listed["status"], listed["command"]) == ("job", "running", ["/bin/sh", "-c", "cat"])
    assert "cat" in await shell.run("vm", "ps", api.vm)
    assert await shell.run("vm", "ps", "-q", api.vm) == "job\n"
    assert await shell.run("vm", "logs", api.vm, "job") == "line one\n"
    assert (await shell.ask("vm", "logs", api.vm, "job"))["stdout"] == "line one\n"
    following = await shell.start("vm", "logs", "-f", api.vm, "job")
    assert following.stdout is not None
    assert await following.stdout.readline() == b"line one\n"
    session.print(b"line two\n")
    assert await following.stdout.readline() == b"line two\n"
    assert await shell.run("vm", "signal", api.vm, "job", "--signal", "term") == "sent SIGTERM to job\n"
    assert await following.wait() == 0
    assert session.signal == "SIGTERM"
    assert "killed by SIGTERM" in await shell.run("vm", "ps", api.vm)
    assert "SESSION_NOT_FOUND" in await shell.refused("vm", "logs", api.vm, "other")
    await shell.refused("vm", "logs", api.vm, "job", "--service", "web", code=2)
    assert "PROCESS_EXITED" in await shell.refused("vm", "signal", api.vm, "job")
    assert "stead vm signal" in await shell.refused("vm", "kill", api.vm, "job", "--signal", "TERM", code=2)
    assert "stead vm signal VM PROCESS" in await shell.refused("vm", "kill", api.vm, "job")
    assert (await shell.ask("vm", "get", api.vm))["state"] == "running"


async def test_run_in_the_foreground_has_the_exit_code_and_stays_listed(api: FakeApi, shell: Shell) -> None:
    result = await shell.try_("vm", "run", "--id", "job", api.vm, "exit 6")
    assert result.returncode == 6
    assert await shell.run("vm", "ps", "-q", api.vm) == "job\n"


async def test_sessions_are_listed_and_closed(api: FakeApi, shell: Shell) -> None:
    async with typed(shell, "vm", "shell", api.vm, "--session", "work") as window:
        await in_session(window)
        (listed,) = (await shell.ask("vm", "sessions", api.vm))["sessions"]
        assert (listed["id"], listed["running"], listed["attached_count"]) == ("work", True, 1)
        assert "login shell" in await shell.run("vm", "sessions", api.vm)
        assert await shell.run("vm", "sessions", api.vm, "--close", "work") == "closed work\n"
        assert await window.ended() == 137
    assert api.sessions.table == {}


async def test_forward_says_where_it_listens_and_reports_refusals(api: FakeApi, shell: Shell) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        api.sessions.ports[3000] = server.sockets[0].getsockname()[:2]
        command = await shell.start("vm", "forward", api.vm, "3000:0", "3001:0", "--json")
        assert command.stdout is not None and command.stderr is not None
        lines = [json.loads(await command.stdout.readline()) for _ in range(2)]
        assert [each["port"] for each in lines] == [3000, 3001]
        for data in (b"first", b"second"):
            reader, writer = await asyncio.open_connection("127.0.0.1", lines[0]["local_port"])
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == data.upper()
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", lines[1]["local_port"])
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert b"CONNECTION_REFUSED" in await command.stderr.readline()
        command.send_signal(signal.SIGINT)
        assert await command.wait() == 130
    await shell.refused("vm", "forward", api.vm, "0", code=2)
    await shell.refused("vm", "forward", api.vm, "3000:x", code=2)


@pytest.mark.parametrize(
    ("keys", "passed", "detached"),
    [
        ([b"~."], b"", True),
        ([b"ls\r", b"~", b"."], b"ls\r", True),
        ([b"a~.\r"], b"a~.\r", False),
        ([b"~~."], b"~.", False),
        ([b"~", b"a"], b"~a", False),
        ([b"~\r~."], b"~\r", True),
    ],
)
def test_detach_key_is_a_tilde_and_a_dot_at_the_beginning_of_a_line(
    keys: list[bytes], passed: bytes, detached: bool
) -> None:
    key = DetachKey()
    results = [key.feed(each) for each in keys]
    assert b"".join(each for each, _ in results) == passed
    assert any(asked for _, asked in results) == detached


def test_leaving_a_program_resets_what_it_may_have_changed() -> None:
    screen = Screen()
    assert b"\x1b[?1049l" not in screen.undo()
    screen.feed(b"text\x1b[?10")
    screen.feed(b"49hmore")
    assert screen.undo().startswith(b"\x1b[?1049l")
    screen.feed(b"\x1b[?1049l")
    assert b"\x1b[?1049l" not in screen.undo() and b"\x1b[?25h" in screen.undo()
