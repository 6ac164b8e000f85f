"""Terminals, processes and forwarded ports in one real VM, through both clients and the command line."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead import AsyncStead, AsyncVm, Exited, Output, Stead
from stead.sdk import errors
from support.flaky_proxy import FlakyProxy
from support.installations import Server
from support.pseudo_terminal import typed
from support.run_cli import Shell


@pytest_asyncio.fixture(scope="module")
async def stead(server: Server) -> AsyncIterator[AsyncStead]:
    async with AsyncStead(server.key, base_url=server.url) as stead:
        yield stead


@pytest_asyncio.fixture(scope="module")
async def vm(stead: AsyncStead) -> AsyncIterator[AsyncVm]:
    """One VM for all tests."""
    async with await stead.vms.create(name="sessions", users=["alice"], idle_timeout_seconds=None) as vm:
        yield vm


@pytest.fixture
def shell(server: Server) -> Shell:
    return Shell(server.url, server.key)


async def test_a_terminal_is_left_and_returned_to_by_its_user_only(vm: AsyncVm) -> None:
    alice = vm.user("alice")
    async with await alice.pty.open(cols=100, rows=30, session_id="hers", term="vt100") as session:
        await session.write('echo "$USER $TERM $(stty size) $PWD"; cd /tmp\n')
        printed = b""
        async for chunk in session:
            printed += chunk
            if b"alice vt100 30 100 /home/alice\r\n" in printed:
                break
    (listed,) = await alice.pty.list()
    assert (listed.id, listed.running, listed.user) == ("hers", True, "alice")
    assert "hers" in [each.id for each in await vm.pty.list()]
    with pytest.raises(errors.AlreadyExists):
        await alice.pty.open(session_id="hers")
    other = await vm.pty.open(session_id="roots")
    await other.detach()
    with pytest.raises(errors.SessionUserMismatch):
        await alice.pty.attach("roots")
    assert "roots" not in [each.id for each in await alice.pty.list()]
    data = bytearray()
    again = await alice.pty.attach("hers", on_data=data.extend)
    await again.write("pwd; exit 4\n")
    assert await again.wait(timeout=60) == 4
    assert b"alice vt100 30 100 /home/alice" in data and b"/tmp\r\n" in data
    await vm.pty.close("roots")


async def test_a_process_keeps_every_byte_over_a_broken_connection(server: Server, vm: AsyncVm) -> None:
    async with (
        FlakyProxy(server.url) as proxy,
        AsyncStead(server.key, base_url=proxy.url) as through,
    ):
        wanted = "".join(f"{number}\n" for number in range(2000))
        line = "read go; i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i+1)); done; echo err >&2; exit 3"
        process = await through.vms.ref(vm.id).processes.start(line, stdin=True)
        stream = await process.stream()
        await process.write("go\n", close=True)
        printed, cuts, errors_printed = "", 0, ""
        async for event in stream:
            if isinstance(event, Output) and event.stream == "stdout":
                printed += event.text
                if cuts < 2:
                    cuts += 1
                    proxy.cut()
            elif isinstance(event, Output):
                errors_printed += event.text
            else:
                assert event == Exited(3)
        assert (printed, errors_printed) == (wanted, "err\n")
        assert proxy.connections > 2
    found = await (await vm.processes.get(process.id)).output()
    assert (found.stdout, found.stderr) == (wanted, "err\n")
    await (await vm.processes.get(process.id)).remove()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


async def test_the_synchronous_client_uses_the_same_sessions(server: Server, vm: AsyncVm) -> None:
    def script() -> None:
        with Stead(server.key, base_url=server.url) as stead:
            box = stead.vms.ref(vm.id)
            process = box.exec(["sleep", "1000"], detach=True)
            with pytest.raises(errors.WaitTimedOut):
                process.wait(timeout=0.1)
            process.signal("SIGTERM")
            assert process.wait() == 143
            assert process.last_info.signal == "SIGTERM"
            process.remove()
            with pytest.raises(errors.SessionNotFound):
                process.info()
            with box.pty.open(exec="echo from the shell; exit 9") as session:
                assert b"from the shell\r\n" in b"".join(session)
                assert session.exit_code == 9
            web = box.exec("python3 -m http.server 8000 --bind 127.0.0.1 --directory /etc", detach=True)
            box.exec("until curl -s 127.0.0.1:8000 >/dev/null; do sleep 0.1; done", check=True)
            with box.forward(8000, local=0) as forward:
                assert fetch(f"{forward.url}/hostname") == box.exec("cat /etc/hostname").stdout
            web.remove()

    await asyncio.to_thread(script)


async def test_suspend_and_fork_carry_terminals_and_processes(vm: AsyncVm) -> None:
    process = await vm.processes.start("echo before; read line; echo after $line", stdin=True)
    session = await vm.pty.open(session_id="carried")
    await session.write("echo mark$((40+2))\n")
    async for data in session:
        if b"mark42" in data:
            break
    await session.detach()
    (child,) = await vm.fork()
    async with child:
        forked = await child.processes.get(process.id)
        await forked.write("child\n")
        assert await forked.wait() == 0
        assert (await forked.output()).stdout == "before\nafter child\n"
    await vm.suspend()
    await process.write("parent\n")
    assert await process.wait() == 0
    assert (await process.output()).stdout == "before\nafter parent\n"
    again = await vm.pty.attach("carried")
    replay = b""
    async for data in again:
        replay += data
        if b"mark42" in replay:
            break
    await again.write("exit 0\n")
    assert await again.wait() == 0


async def test_typed_shell_and_exec_with_a_terminal(vm: AsyncVm, shell: Shell) -> None:
    async with typed(shell, "vm", "shell", vm.id, "--user", "alice", cols=90, rows=25) as window:
        await window.expect(b"$ ")
        window.type(b"stty size; echo $TERM; id -un\r")
        await window.expect(b"25 90\r\nxterm-256color\r\nalice\r\n")
        window.resize(120, 40)
        window.type(b"stty size\r")
        await window.expect(b"40 120\r\n")
        # A loop: Python notices a signal that comes just before a blocking call only after that call.
        loop = "[time.sleep(0.1) for _ in iter(int, 1)]"
        window.type(f"python3 -c \"import time; print('beg' + 'un'); {loop}\"\r".encode())
        await window.expect(b"begun")
        window.type(b"\x03")
        await window.expect(b"KeyboardInterrupt")
        await window.expect(b"$ ")
        window.type(b"exit 3\r")
        assert await window.ended() == 3
    async with typed(shell, "vm", "exec", "-it", vm.id, "--", "less", "/etc/services") as window:
        before = window.modes
        await window.expect(b"tcpmux")
        window.type(b"/^https\r")
        await window.expect(b"443/tcp")
        window.type(b"q")
        assert await window.ended() == 0
        assert window.modes == before


async def test_typed_detach_attach_and_background_processes(vm: AsyncVm, shell: Shell) -> None:
    async with typed(shell, "vm", "shell", vm.id, "--session", "mine") as window:
        await window.expect(b"# ")
        window.type(b"echo begun$((1+1)); read answer; exit $answer\r")
        await window.expect(b"begun2")
        window.type(b"\r~.")
        assert await window.ended() == 0
    async with typed(shell, "vm", "attach", vm.id, "mine") as window:
        await window.expect(b"begun2")
    assert (
        await shell.run(
            "vm", "run", "-d", "--id", "job", vm.id, "--", "sh", "-c", "echo one; exec sleep 1000"
        )
        == "job\n"
    )
    following = await shell.start("vm", "logs", "-f", vm.id, "job")
    assert following.stdout is not None and await following.stdout.readline() == b"one\n"
    await shell.run("vm", "signal", vm.id, "job", "--signal", "KILL")
    assert await following.wait() == 0
    assert "killed by SIGKILL" in await shell.run("vm", "ps", vm.id)
    assert await shell.run("vm", "exec", "-i", vm.id, "wc", "-c", stdin=b"x" * 3_000_000) == "3000000\n"
