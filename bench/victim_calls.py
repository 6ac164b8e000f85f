"""Calls of account B, each timed and checked: the answer must be the right one.

B's calls go through the HTTPS edge, as those of real clients: the API's on a connection that is kept, a page
and a clone each on a new one, the terminal on one that stays open.
"""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from measuring import Served, since
from terminals import PROMPT, SHELL, Terminal, press, until

LIMIT = 10.0
"""Seconds after which a call counts as lost."""
PAGE_PORT = 8000
_KEPT = 60.0
"""Seconds that an unused connection to the edge is kept: less than the edge keeps it."""


@dataclass(frozen=True)
class Victim:
    """What account B has on the server."""

    served: Served
    https_port: int
    api_name: str
    ca: Path
    """File with the certificate of the installation's CA."""
    trusting: ssl.SSLContext
    vm: str
    page: str
    """A host name that is mapped to the VM."""
    repo: str
    head: str
    """The commit of the repository's branch main."""
    number: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def url(self) -> str:
        """The API behind the edge."""
        return f"https://{self.api_name}:{self.https_port}"

    def client(self) -> httpx2.AsyncClient:
        """A client of the API behind the edge, which keeps its connection."""
        host = f"{self.api_name}:{self.https_port}"
        return httpx2.AsyncClient(
            base_url=f"https://127.0.0.1:{self.https_port}",
            headers={"Authorization": f"Bearer {self.served.key}", "Host": host},
            verify=self.trusting,
            timeout=None,
            trust_env=False,
            limits=httpx2.Limits(keepalive_expiry=_KEPT),
        )

    async def ask(self, client: httpx2.AsyncClient, method: str, path: str, body: object = None) -> Any:
        """A call of the API through the edge; its answer must be 200 with JSON."""
        # Not every resolver knows the names below `localhost`.
        named = {"sni_hostname": self.api_name}
        answer = await client.request(method, path, json=body, extensions=named)
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[-200:]!r}")
        return answer.json()


async def http(served: Served, method: str, path: str, body: object = None) -> bytes:
    """A request to the plain port, on a connection of its own; its answer must be 200."""
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
        self._client = victim.client()
        self._terminal: Terminal | None = None
        self._terminals = contextlib.AsyncExitStack()
        self._keys = itertools.count()

    async def close(self) -> None:
        await self._close_terminal()
        with contextlib.suppress(Exception):
            await self._client.aclose()

    async def _close_terminal(self) -> None:
        self._terminal = None
        with contextlib.suppress(Exception):
            await self._terminals.aclose()

    async def _run(self, command: str) -> Any:
        path = f"/v1/vms/{self._victim.vm}/exec-await"
        return await self._victim.ask(self._client, "POST", path, {"command": command})

    async def exec(self) -> float:
        word = f"word{next(self._victim.number)}"
        start = time.perf_counter()
        answer = await self._run(f"echo {word}")
        took = since(start)
        expect(answer["stdout"], f"{word}\n")
        return took

    async def resolve(self) -> float:
        """A name that the resolver of the VMs knows, asked for by a command, whose time is included."""
        start = time.perf_counter()
        answer = await self._run(f"getent ahostsv4 n{next(self._victim.number)}.style.dev")
        took = since(start)
        expect(answer["statusCode"], 0)
        return took

    async def create(self) -> float:
        start = time.perf_counter()
        made = await self._victim.ask(self._client, "POST", "/v1/vms", {})
        took = since(start)
        await self._victim.ask(self._client, "DELETE", f"/v1/vms/{made['id']}")
        return took

    async def clone(self) -> float:
        victim = self._victim
        configuration = {
            "http.extraHeader": f"Authorization: Bearer {victim.served.key}",
            "http.sslCAInfo": str(victim.ca),
            "http.curloptResolve": f"{victim.api_name}:{victim.https_port}:127.0.0.1",
        }
        with tempfile.TemporaryDirectory() as folder:
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": "/nonexistent",
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_CONFIG_COUNT": str(len(configuration)),
            }
            for number, (name, value) in enumerate(configuration.items()):
                environment |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
            start = time.perf_counter()
            git = await asyncio.create_subprocess_exec(
                *("git", "clone", "-q", f"{victim.url}/{victim.repo}", f"{folder}/clone"),
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
        answer = await victim.ask(self._client, "GET", f"{path}&excludePattern=none{number}")
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
        number = next(self._keys)
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
            await self._close_terminal()
            self._terminals = contextlib.AsyncExitStack()
            raise

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[Terminal]:
        victim = self._victim
        path = f"/v1/vms/{victim.vm}/pty?cols=80&rows=24&exec={SHELL}"
        behind_edge = replace(victim.served, url=victim.url)
        async with Terminal.opened(behind_edge, path, victim.trusting) as terminal:
            await until(terminal, PROMPT)
            yield terminal


WEIGHTS = {
    "exec": 2.0,
    "resolve": 1.0,
    "create": 0.5,
    "clone": 1.0,
    "search": 2.0,
    "page": 3.0,
    "echo": 3.0,
}
"""The calls, and how often each is made in a round of them: the slow ones less often."""
WITH_VMS = {"exec", "resolve", "create", "page", "echo"}
