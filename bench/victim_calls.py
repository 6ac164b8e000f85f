"""Calls of account B, each timed and checked: the answer must be the right one."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import ssl
import string
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from measuring import Served, since
from terminals import PROMPT, SHELL, Terminal, press, until

LIMIT = 10.0
"""Seconds after which a call counts as lost."""
PAGE_PORT = 8000


@dataclass(frozen=True)
class Victim:
    """What account B has on the server."""

    served: Served
    https_port: int
    trusting: ssl.SSLContext
    vm: str
    page: str
    """A host name that is mapped to the VM."""
    repo: str
    head: str
    """The commit of the repository's branch main."""
    number: "itertools.count[int]" = field(default_factory=itertools.count)


async def http(served: Served, method: str, path: str, body: object = None) -> bytes:
    """A request on a connection of its own; its answer must be 200."""
    content = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(served.url.rpartition(":")[2]), limit=1 << 20
    )
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {served.key}\r\n"
        head += (
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        status = await reader.readline()
        rest = await reader.read()
    finally:
        writer.close()
    if b" 200 " not in status:
        raise RuntimeError(f"{method} {path}: {status.decode().strip()} {rest[-200:]!r}")
    return rest.partition(b"\r\n\r\n")[2]


def expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise RuntimeError(f"wrong answer: {found!r} instead of {wanted!r}")


class Calls:
    """The calls by name. Each returns the milliseconds that it took."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._terminal: Terminal | None = None
        self._terminals = contextlib.AsyncExitStack()

    async def close(self) -> None:
        self._terminal = None
        with contextlib.suppress(Exception):
            await self._terminals.aclose()

    async def exec(self) -> float:
        victim, word = self._victim, f"word{next(self._victim.number)}"
        start = time.perf_counter()
        answer = json.loads(
            await http(victim.served, "POST", f"/v1/vms/{victim.vm}/exec-await", {"command": f"echo {word}"})
        )
        took = since(start)
        expect(answer["stdout"], f"{word}\n")
        return took

    async def resolve(self) -> float:
        """A name that the resolver of the VMs knows, asked for by a command, whose time is included."""
        victim, name = self._victim, f"n{next(self._victim.number)}.style.dev"
        start = time.perf_counter()
        command = {"command": f"getent ahostsv4 {name}"}
        answer = json.loads(await http(victim.served, "POST", f"/v1/vms/{victim.vm}/exec-await", command))
        took = since(start)
        expect(answer["statusCode"], 0)
        return took

    async def create(self) -> float:
        victim = self._victim
        start = time.perf_counter()
        made = json.loads(await http(victim.served, "POST", "/v1/vms", {}))
        took = since(start)
        await http(victim.served, "DELETE", f"/v1/vms/{made['id']}")
        return took

    async def clone(self) -> float:
        victim = self._victim
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": "/nonexistent",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "http.extraHeader",
                "GIT_CONFIG_VALUE_0": f"Authorization: Bearer {victim.served.key}",
            }
            start = time.perf_counter()
            git = await asyncio.create_subprocess_exec(
                *("git", "clone", "-q", f"{victim.served.url}/{victim.repo}", f"{folder}/clone"),
                env=environment,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                _, errors = await git.communicate()
            except BaseException:
                os.killpg(git.pid, signal.SIGKILL)
                await git.wait()
                raise
            took = since(start)
            if git.returncode:
                raise RuntimeError(f"git clone: {errors.decode(errors='replace').strip()}")
            expect(Path(folder, "clone/.git/refs/heads/main").read_text().strip(), victim.head)
            return took

    async def search(self) -> float:
        """Results are cached: each search is another one."""
        victim, number = self._victim, next(self._victim.number)
        path = f"/git/v1/repo/{victim.repo}/search?query=needle&maxResults=5&offset={number % 7}"
        start = time.perf_counter()
        answer = json.loads(await http(victim.served, "GET", f"{path}&excludePattern=none{number}"))
        took = since(start)
        expect(bool(answer["files"]), True)
        return took

    async def page(self) -> float:
        victim = self._victim
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", victim.https_port, ssl=victim.trusting, server_hostname=victim.page
        )
        try:
            writer.write(f"GET / HTTP/1.1\r\nHost: {victim.page}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        took = since(start)
        expect((answer.split(b" ", 2)[1:2], answer.endswith(b"\r\n\r\nok")), ([b"200"], True))
        return took

    async def echo(self) -> float:
        """A key and its echo on a terminal that stays open, unless it was lost."""
        number = next(self._victim.number)
        try:
            if self._terminal is None:
                self._terminal = await self._terminals.enter_async_context(self._opened())
            # The line is abandoned before it wraps.
            if number % 50 == 0:
                await self._terminal.write(b"\x03")
                await until(self._terminal, PROMPT)
            return await press(
                self._terminal, string.ascii_letters[number % len(string.ascii_letters)].encode()
            )
        except BaseException:
            await self.close()
            self._terminals = contextlib.AsyncExitStack()
            raise

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Terminal]:
        path = f"/v1/vms/{self._victim.vm}/pty?cols=80&rows=24&exec={SHELL}"
        async with Terminal.opened(self._victim.served, path) as terminal:
            await until(terminal, PROMPT)
            yield terminal


SHARES = {"exec": 1.0, "resolve": 0.5, "create": 0.25, "clone": 0.5, "search": 1.0, "page": 1.0, "echo": 1.0}
"""The calls, and the part of the samples that each gets: the slow ones get fewer."""
WITH_VMS = {"exec", "resolve", "create", "page", "echo"}
