"""Commands whose standard input comes while they run: client, server and guest agent without a VM."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from stead import AsyncStead, Stead
from stead.guest.execution import Ended, ExecRequest, Output, follow
from stead.machines.machine import Machine
from stead.sdk.errors import InvalidRequest, SessionClosed
from stead.sdk.models import Exited
from support.fake_api import FakeApi, fake_api
from support.native_agent import native_agent
from support.process_tree import own_command_lines
from support.run_cli import PROGRAM, Shell
from support.waiting import until


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    """The API, with commands of its VM run by a guest agent on this host."""
    async with native_agent() as (agent, _), fake_api(tmp_path_factory.mktemp("site")) as api:

        async def stream(_: Machine, command: Any, **options: Any) -> AsyncIterator[Output | Ended]:
            request = ExecRequest(command, **{**options, "env": options["env"] or {}})
            async with contextlib.aclosing(follow(agent, request)) as events:
                async for event in events:
                    yield event

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Machine, "stream", stream)
            yield api


def _key(api: FakeApi) -> str:
    return api.callers["owner"]["Authorization"].removeprefix("Bearer ")


@contextlib.contextmanager
def exec_(api: FakeApi, *arguments: str, **options: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """`stead vm exec` with pipes, which is killed at the end of the block."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | options
    environment = Shell(api.url, _key(api)).environment
    line = [str(PROGRAM), "vm", "exec", *arguments]
    with subprocess.Popen(line, env=environment, bufsize=0, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


async def _in_thread(function: Any, *arguments: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(function, *arguments), 60)


async def test_input_that_comes_late_is_passed_on(api: FakeApi) -> None:
    """The command runs before its input is there, so a client that had stopped waiting would lose it."""
    with exec_(api, api.vm, "echo ready; cat; echo end") as process:
        assert process.stdin is not None and process.stdout is not None
        assert await _in_thread(process.stdout.readline) == b"ready\n"
        out, errors = await _in_thread(process.communicate, b"late\n")
    assert (out, errors, process.returncode) == (b"late\nend\n", b"", 0)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
async def test_a_pipe_that_is_never_written_does_not_hold_the_command(api: FakeApi, kind: str) -> None:
    """CI runners and Node's child_process leave such a standard input."""
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        exec_(
            api, api.vm, "echo ran; exit 7", stdin=subprocess.PIPE if kind == "pipe" else theirs
        ) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        assert await _in_thread(process.wait) == 7
        assert (process.stdout.read(), process.stderr.read()) == (b"ran\n", b"")


async def test_large_input_and_output_arrive_whole(api: FakeApi) -> None:
    """More than the windows, buffers and pipes on the way hold, in both directions at once."""
    data = os.urandom(5 << 20)
    with exec_(api, api.vm, "cat; cat >&2") as process:
        assert process.stdin is not None
        out, errors = await _in_thread(process.communicate, data)
    assert (hashlib.sha256(out).digest(), errors) == (hashlib.sha256(data).digest(), b"")
    assert process.returncode == 0


async def test_a_large_file_is_passed_on(api: FakeApi, tmp_path: Any) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "data").write_bytes(data)
    with (tmp_path / "data").open("rb") as file, exec_(api, api.vm, "sha256sum", stdin=file) as process:
        out, _ = await _in_thread(process.communicate)
    assert out.split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_a_reader_that_is_slow_loses_nothing(api: FakeApi) -> None:
    with exec_(api, api.vm, "seq 1 400000; cat") as process:
        assert process.stdin is not None and process.stdout is not None
        assert await _in_thread(process.stdout.readline) == b"1\n"
        await asyncio.sleep(1)
        out, _ = await _in_thread(process.communicate, b"end\n")
    assert out.split()[-2:] == [b"400000", b"end"] and len(out.split()) == 400_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_the_command_ends_with_its_client_also_while_it_takes_no_input(
    api: FakeApi, number: signal.Signals
) -> None:
    mark = f"sleep 86{int(number)}97"
    with exec_(api, api.vm, f"echo ready; {mark}") as process:
        assert process.stdin is not None and process.stdout is not None
        assert await _in_thread(process.stdout.readline) == b"ready\n"
        feeding = asyncio.create_task(asyncio.to_thread(_write_until_broken, process.stdin, 2 << 20))
        assert mark.encode() in b"\n".join(own_command_lines().values())
        await asyncio.sleep(0.5)
        process.send_signal(number)
        code = await _in_thread(process.wait)
        await feeding
    assert code == (-9 if number == signal.SIGKILL else 128 + number)

    async def ended() -> bool:
        return mark.encode() not in own_command_lines().values()

    assert await until(ended, 60)


def _write_until_broken(pipe: Any, size: int) -> None:
    with contextlib.suppress(OSError):
        pipe.write(bytes(size))
        pipe.flush()


async def test_json_timeouts_and_refusals(api: FakeApi) -> None:
    with exec_(api, "--json", api.vm, "echo out; echo err >&2; exit 3") as process:
        out, _ = await _in_thread(process.communicate)
    result = json.loads(out)
    assert (process.returncode, result["stdout"], result["stderr"]) == (3, "out\n", "err\n")
    with exec_(api, "--timeout", "0.5", api.vm, "sleep 60") as process:
        assert await _in_thread(process.wait) == 124
    with exec_(api, "--cwd", "/no/such/folder", api.vm, "true") as process:
        assert process.stderr is not None
        assert await _in_thread(process.wait) == 1
        refusal = process.stderr.read().decode()
    assert refusal.startswith("error: ") and refusal.count("\n") == 1 and "/no/such/folder" in refusal


def output_of(event: Any) -> bytes:
    return b"" if isinstance(event, Exited) else bytes(event.data)


async def test_both_clients_of_the_sdk_write_while_the_command_runs(api: FakeApi) -> None:
    def with_threads() -> tuple[bytes, Any]:
        with Stead(_key(api), base_url=api.url) as stead:
            with stead.vms.ref(api.vm).exec_piped("read line; echo got $line; cat") as command:
                command.write("one\n")
                seen = b""
                while b"got one\n" not in seen:
                    seen += output_of(next(command))
                command.write(b"two")
                command.close_stdin()
                *rest, last = command
            with pytest.raises(SessionClosed):
                command.write("three")
            return seen + b"".join(map(output_of, rest)), last

    output, last = await _in_thread(with_threads)
    assert output == b"got one\ntwo" and isinstance(last, Exited) and last.status_code == 0
    async with AsyncStead(_key(api), base_url=api.url) as stead:
        async with await stead.vms.ref(api.vm).exec_piped(["tr", "a-z", "A-Z"]) as command:
            await command.write("loud")
            await command.close_stdin()
            events = [each async for each in command]
        assert b"".join(map(output_of, events)) == b"LOUD"
        with pytest.raises(ValueError, match="stdin"):
            await stead.vms.ref(api.vm).exec_piped("cat", stdin="x")
        with pytest.raises(InvalidRequest, match="NUL"):
            async with await stead.vms.ref(api.vm).exec_piped("echo \0") as command:
                [each async for each in command]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"not JSON", "invalid command"),
        (b"{}", "command"),
        (b'{"command": "cat", "stdin": "AAAA"}', "neither stdin nor terminal"),
        ('{"command": "cat"}', "binary message"),
    ],
)
async def test_an_invalid_first_message_is_an_error(api: FakeApi, first: str | bytes, reason: str) -> None:
    async with api.socket("/exec") as socket:
        await socket.send(first)
        told = json.loads(await socket.recv())
    assert told["type"] == "error" and reason in told["message"], told


async def test_more_input_than_the_window_closes_the_connection(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def takes_nothing(_: Machine, command: Any, **options: Any) -> AsyncIterator[Output]:
        await asyncio.sleep(60)
        yield Output("stdout", b"")

    monkeypatch.setattr(Machine, "stream", takes_nothing)
    async with api.socket("/exec") as socket:
        await socket.send(b'{"command": "sleep 60"}')
        for _ in range(3):
            await socket.send(bytes(100_000))
        await socket.wait_closed()
        assert socket.close_code == 1008 and "taken" in (socket.close_reason or "")
