"""The options and the output of `stead serve`. `test_serve.py` tests what it serves."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from stead.machines import Machines
from stead.settings import Settings
from support.documents import commands, run_by
from support.installations import other_settings
from support.run_cli import PROGRAM, Shell, environment_of, stead
from support.waiting import until

Process = asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def serving(
    settings: Settings, *options: str, stdout: int = asyncio.subprocess.PIPE, **variables: str
) -> AsyncIterator[Process]:
    pipe, environment = asyncio.subprocess.PIPE, environment_of(settings, **variables)
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "serve", *options, stdout=stdout, stderr=pipe, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said(process: Process, last: str) -> str:
    """The standard output of a server up to the line with a text."""
    text = ""
    async with asyncio.timeout(120):
        while last not in text:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            assert line, text
            text += line
    return text


async def printed_on(terminal: int, last: str) -> str:
    """What a server prints on a terminal up to a text."""
    text = ""
    async with asyncio.timeout(120):
        while last not in text:
            text += (await asyncio.to_thread(os.read, terminal, 65536)).decode()
    return text.replace("\r\n", "\n")


async def stop(process: Process, how: signal.Signals = signal.SIGTERM) -> list[str]:
    """Stop a server with a signal; returns its log lines."""
    process.send_signal(how)
    _, logged = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, logged
    return logged.decode().splitlines()


async def test_the_first_start_prints_the_url_and_a_key(settings: Settings, machines: Machines) -> None:
    """On a terminal. Logs are logfmt or JSON; a public address without TLS is a warning."""
    start, variables = (commands(block.body) for block in run_by(__file__, "README.md"))
    assert [command.line for command in start] == ["stead serve"]
    terminal, output = pty.openpty()
    with other_settings(settings) as other:
        async with serving(other, stdout=output, STEAD_LISTEN="127.0.0.1:0") as process:
            os.close(output)
            text = await printed_on(terminal, "Try it")
            printed = re.findall(r"^  (export .*)$", text, re.M)
            for command, line in zip(variables, printed, strict=True):
                shown = re.escape(command.line).replace("8600", r"\d+").replace(r"\.\.\.", r"[\w-]{43}")
                assert re.fullmatch(shown, line), f"the README shows {command.line}"
            exports = dict(re.findall(r"export (STEAD_API_\w+)=(\S+)", text))
            first = Shell(exports["STEAD_API_URL"], exports["STEAD_API_KEY"])
            assert f"is listening on {first.url}, data in {other.data}\n" in text
            assert (other.data / "first-api-key").read_text() == f"{first.key}\n"
            assert f"It is in {other.data}/first-api-key, which only root reads" in text
            assert httpx2.get(f"{first.url}/healthz").json()["status"] == "ok"
            await first.run("whoami")
            lines = await stop(process)
        for line in lines:
            assert re.match(r"time=\S+Z level=\w+ logger=[\w.]+ event=", line), line
        assert any("event=call method=GET path=/auth/v1/whoami status=200" in line for line in lines)
        assert not any(first.key in line for line in lines)
        os.close(terminal)

        async with serving(other, "--listen", "0.0.0.0:0", "--json", "--log-json") as process:
            again = json.loads(await said(process, "\n"))
            assert again["key"] is None and again["keyFile"] is None
            assert again["url"].startswith("http://127.0.0.1:")
            await Shell(again["url"], first.key).run("whoami")
            entries: list[dict[str, Any]] = [json.loads(line) for line in await stop(process, signal.SIGINT)]
        warnings = [entry["event"] for entry in entries if entry["level"] == "warning"]
        assert any("without TLS" in event for event in warnings)
        (call,) = (entry for entry in entries if entry["event"] == "call")
        assert (call["path"], call["status"]) == ("/auth/v1/whoami", 200)


async def test_the_first_key_is_not_printed_into_a_pipe(settings: Settings, machines: Machines) -> None:
    """The log of a container is read by others, and kept."""
    with other_settings(settings) as other:
        async with serving(other, "--json", STEAD_LISTEN="127.0.0.1:0") as process:
            line = await said(process, "\n")
            first = json.loads(line)
            key = (other.data / "first-api-key").read_text().strip()
            assert first["key"] is None and first["keyFile"] == str(other.data / "first-api-key")
            assert key not in line
            await Shell(first["url"], key).run("whoami")
            assert not any(key in each for each in await stop(process))


async def test_log_level_error_logs_only_errors(settings: Settings, machines: Machines) -> None:
    (block,) = run_by(__file__, "docs/server.md")
    (command,) = commands(block.body)
    with other_settings(settings) as other:
        line = command.line.replace(":8600", ":0").replace("/var/lib/stead", str(other.data))
        options = shlex.split(line.removeprefix("stead serve"))
        assert len(options) == 4
        async with serving(other, *options, "--json", "--log-level", "error") as process:
            await said(process, "\n")
            assert await stop(process) == []


async def test_a_starting_server_can_be_stopped(settings: Settings, machines: Machines) -> None:
    """It listens on its port and waits for the lock on the data directory."""
    with other_settings(settings) as other, (other.data / "stead.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        async with serving(other, "--listen", f"{address[0]}:{address[1]}") as process:

            async def listening() -> bool:
                with socket.socket() as caller:
                    return caller.connect_ex(address) == 0

            assert await until(listening, 60)
            await stop(process)


def test_serve_requires_root(settings: Settings) -> None:
    """In a user namespace the process is user 1000, but can still read root's files."""
    result = subprocess.run(
        ["unshare", "--user", "--map-user=1000", PROGRAM, "serve"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment_of(settings),
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "must run as root" in result.stderr and result.stderr.endswith(" (HOST)\n")


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1", "127.0.0.1:99999"])
def test_an_invalid_address_is_refused(settings: Settings, listen: str) -> None:
    result = stead("serve", "--listen", listen, settings=settings)
    assert result.returncode == 1
    assert "must be HOST:PORT with a port up to 65535, such as 127.0.0.1:8600" in result.stderr
