"""Terminals, processes and ports of a real VM over WebSockets, through suspend and fork."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from stead.deadlines import scaled
from stead.machines import Machine
from stead.machines.records import Properties
from support.documents import commands, matches, run_by
from support.installations import Server
from support.pseudo_terminal import typed
from support.run_cli import Shell

LIMIT = scaled(60.0)


@pytest_asyncio.fixture(scope="module")
async def vm(server: Server) -> AsyncIterator[Machine]:
    machine = await server.installation.machines.create(Properties(account=server.account))
    yield machine
    await machine.delete()


def socket(server: Server, vm: str, path: str) -> connect:
    url = f"{server.url.replace('http', 'ws', 1)}/v1/vms/{vm}{path}"
    return connect(url, additional_headers={"Authorization": f"Bearer {server.key}"})


async def call(server: Server, method: str, vm: str, path: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {server.key}"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=LIMIT) as http:
        return (await http.request(method, f"/v1/vms/{vm}{path}", **options)).json()


async def shows(terminal: ClientConnection, text: bytes) -> bytes:
    """Read until the terminal has printed a text."""
    seen = b""
    async with asyncio.timeout(LIMIT):
        while text not in seen:
            message = await terminal.recv()
            seen += message if isinstance(message, bytes) else b""
    return seen


async def ended(terminal: ClientConnection) -> tuple[list[dict[str, Any]], int | None, str | None]:
    """The text messages until the server closes the WebSocket, and how it closes it."""
    texts = []
    try:
        async with asyncio.timeout(LIMIT):
            while True:
                message = await terminal.recv()
                if isinstance(message, str):
                    texts.append(json.loads(message))
    except ConnectionClosed:
        return texts, terminal.close_code, terminal.close_reason


async def test_terminal_lives_through_suspend_and_fork(server: Server, vm: Machine) -> None:
    async with socket(server, vm.id, "/pty?cols=90&rows=20&exec=%2Fbin%2Fsh&sessionId=mine") as terminal:
        assert json.loads(await terminal.recv()) == {"type": "sessionInfo", "sessionId": "mine"}
        await terminal.send(b"stty size; word=remembered; echo first-$((1+1))\n")
        assert b"20 90" in await shows(terminal, b"first-2")
        await vm.suspend()
        assert await ended(terminal) == ([], 1001, "the VM was suspended")
    (listed,) = (await call(server, "GET", vm.id, "/pty/sessions"))["sessions"]
    assert (listed["sessionId"], listed["running"], listed["suspended"]) == ("mine", False, True)
    assert (await vm.info()).state == "suspended"
    async with socket(server, vm.id, "/pty/sessions/mine?cols=90&rows=20") as terminal:
        await shows(terminal, b"first-2")
        (child,) = await vm.fork(1)
        await terminal.send(b"echo still-$word\n")
        await shows(terminal, b"still-remembered")
    try:
        async with socket(server, child.id, "/pty/sessions/mine") as terminal:
            assert b"still" not in await shows(terminal, b"first-2")
            await terminal.send(b"exit 3\n")
            texts, code, _ = await ended(terminal)
            assert (texts[-1], code) == ({"type": "exited", "exitCode": 3}, 1000)
    finally:
        await child.delete()
    closed = await call(server, "DELETE", vm.id, "/pty/sessions/mine")
    assert closed["sessionId"] == "mine"
    assert (await call(server, "GET", vm.id, "/pty/sessions"))["sessions"] == []


async def test_shell_of_the_page_is_left_and_attached_to(server: Server, vm: Machine) -> None:
    (block,) = run_by(__file__, "docs/terminals.md")
    opened, attached = commands(block.body)
    await server.installation.machines.rename(vm.id, "worker")
    shell = Shell(server.url, server.key)
    async with typed(shell, *shlex.split(opened.line)[1:]) as window:
        prompt = (await window.expect(b"~# ")).decode().splitlines()[-1]
        assert matches(list(opened.output), re.sub(r"\x1b[\[\]][\x20-?]*[@-~]", "", prompt)), repr(prompt)
        window.type(b"kept=here\r~.")
        await window.expect(f"stead vm attach {vm.id} pty-1".encode())
        assert await window.ended() == 0
    async with typed(shell, *shlex.split(attached.line)[1:]) as window:
        await window.expect(b"kept=here")
        window.type(b"echo still $kept; exit\r")
        await window.expect(b"still here")
        assert await window.ended() == 0


async def test_process_and_forwarded_port(server: Server, vm: Machine) -> None:
    command = "import socket; s = socket.create_server(('127.0.0.1', 3000)); print('up', flush=True); "
    command += "c, _ = s.accept(); d = b''.join(iter(lambda: c.recv(65536), b'')); c.sendall(b'%d' % len(d))"
    made = await call(server, "POST", vm.id, "/processes", json={"command": ["python3", "-c", command]})
    async with socket(server, vm.id, f"/processes/{made['id']}/attach") as process:
        assert json.loads(await process.recv())["type"] == "process"
        assert await shows(process, b"up\n") == b"\x01up\n"
        async with socket(server, vm.id, "/forward/3000") as tunnel:
            for _ in range(4):
                await tunnel.send(b"x" * 250_000)
            await tunnel.send('{"type": "eof"}')
            assert await shows(tunnel, b"1000000") == b"1000000"
        texts, code, _ = await ended(process)
        assert (texts[-1]["type"], texts[-1]["exitCode"], code) == ("exited", 0, 1000)
    await call(server, "DELETE", vm.id, f"/processes/{made['id']}")
