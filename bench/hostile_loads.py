"""Loads: what account A, or a stranger without a key, does while the calls of account B are measured.

Each load runs in a process of its own, so that the benchmark's event loop measures the server and not the
load: `hostile_loads.py NAME` reads the `Scene` as JSON, prints `begun` once the server has the load, and
continues until SIGTERM. Then it prints what became of its requests.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import asyncssh

from stead import AsyncStead, VmSpec
from stead.sdk import AsyncVm

SILENT_RESOLVER = "127.0.53.53"
"""The server's name server. It listens only while `silent_dns` runs, and never answers."""
_AGAIN = 0.5
"""Seconds after which a request that was refused is sent again."""
_DNS_FLOOD = """
import itertools, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setblocking(False)
for n in itertools.count():
    label = b"n%d" % (n % 1000)
    name = bytes([len(label)]) + label + b"\\x08internal\\0"
    query = (n & 65535).to_bytes(2, "big") + b"\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + name + b"\\0\\1\\0\\1"
    for target in TARGETS:
        try:
            s.sendto(query, target)
        except OSError:
            pass
"""


@dataclass(frozen=True)
class Scene:
    """The server, and what account A has there."""

    url: str
    https_port: int
    ssh_port: int
    api_name: str
    ca: str
    data: str
    key: str
    vms: tuple[str, ...]
    repos: tuple[str, ...]
    """The first two have one commit each, the last has many files."""
    builds: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def head(self, method: str, path: str, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: a", f"Authorization: Bearer {self.key}", *headers]
        return "\r\n".join([*lines, "", ""]).encode()


class Load:
    """Runs until it is cancelled. `begun` is set when the server has the load."""

    name: ClassVar[str]
    needs_vms: ClassVar[bool] = False
    begins_with: ClassVar[int | None] = None
    """It has begun when so many requests were sent."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.begun = asyncio.Event()
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        raise NotImplementedError

    def sent(self) -> None:
        self.outcomes["sent"] += 1
        if self.begins_with is not None and self.outcomes["sent"] >= self.begins_with:
            self.begun.set()

    async def forever(self, work: Callable[[int], Awaitable[object]], count: int) -> None:
        """As many tasks, each of which repeats the work; failures are counted."""

        async def repeat(number: int) -> None:
            while True:
                try:
                    await work(number)
                except (OSError, EOFError, RuntimeError, ssl.SSLError, asyncio.LimitOverrunError) as error:
                    self.outcomes[type(error).__name__] += 1
                    await asyncio.sleep(_AGAIN)

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(repeat(number))

    async def request(self, sent: bytes, *, slow: bool = False) -> str:
        """Send a request on a connection of its own, and read its answer to the end: slowly, if asked for."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.scene.port, limit=1 << 16)
        try:
            writer.write(sent)
            await writer.drain()
            self.sent()
            status = (await reader.readline()).decode(errors="replace").split()
            outcome = status[1] if len(status) > 1 else "closed"
            self.outcomes[outcome] += 1
            if slow:
                self.begun.set()
            while await reader.read(1 << 16):
                if slow:
                    await asyncio.sleep(1)
        finally:
            writer.close()
        if not outcome.startswith("2"):
            await asyncio.sleep(_AGAIN)
        return outcome


class Awaits(Load):
    """1,000 requests that wait for the end of a VM."""

    name = "awaits"
    needs_vms = True
    begins_with = 1000

    async def run(self) -> None:
        sent = self.scene.head("POST", f"/v1/vms/{self.scene.vms[0]}/await", "Content-Length: 0")
        await self.forever(lambda _: self.request(sent), self.begins_with)


class UnreadStreams(Load):
    """HTTP/2 streams through the edge, without a key, whose answers are never taken: their windows are 0."""

    name = "unread_streams"
    _CONNECTIONS, _STREAMS = 5, 250
    _SETTINGS, _HEADERS, _PING, _GOAWAY, _RST, _DATA = 4, 1, 6, 7, 3, 0

    async def run(self) -> None:
        await self.forever(lambda _: self._connection(), self._CONNECTIONS)

    async def _connection(self) -> None:
        context = ssl.create_default_context(cadata=self.scene.ca)
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.scene.https_port, ssl=context, server_hostname=self.scene.api_name
        )
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            # SETTINGS_INITIAL_WINDOW_SIZE = 0
            writer.write(self._frame(self._SETTINGS, 0, 0, b"\0\4\0\0\0\0"))
            following = 1
            for _ in range(self._STREAMS):
                following = self._open(writer, following)
            await writer.drain()
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind == self._SETTINGS and not flags & 1:
                    writer.write(self._frame(self._SETTINGS, 1, 0))
                elif kind == self._PING and not flags & 1:
                    writer.write(self._frame(self._PING, 1, 0, payload))
                elif kind == self._HEADERS:
                    self.outcomes["answers"] += 1
                    self.begun.set()
                    if flags & 1:
                        following = self._open(writer, following)
                elif kind == self._RST or (kind == self._DATA and flags & 1):
                    self.outcomes["ended"] += 1
                    self.begun.set()
                    await asyncio.sleep(0.02)
                    following = self._open(writer, following)
                elif kind == self._GOAWAY:
                    self.outcomes["goaway"] += 1
                    return
        finally:
            self.begun.set()
            writer.close()

    def _open(self, writer: asyncio.StreamWriter, number: int) -> int:
        fields = {
            ":method": "GET",
            ":scheme": "https",
            ":authority": self.scene.api_name,
            ":path": "/docs/swagger-ui-bundle.js",
        }
        block = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields.items()
        )
        # END_HEADERS, END_STREAM
        writer.write(self._frame(self._HEADERS, 5, number, block))
        self.outcomes["sent"] += 1
        return number + 2

    @staticmethod
    def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class SlowPushes(Load):
    """Twelve pushes that send a byte a minute."""

    name = "slow_pushes"
    begins_with = 12

    async def run(self) -> None:
        await self.forever(self._push, self.begins_with)

    async def _push(self, number: int) -> None:
        repo = self.scene.repos[number % 2]
        login = base64.b64encode(f"x:{self.scene.key}".encode()).decode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.scene.port)
        head = f"POST /{repo}/git-receive-pack HTTP/1.1\r\nHost: a\r\nAuthorization: Basic {login}\r\n"
        head += "Content-Type: application/x-git-receive-pack-request\r\nTransfer-Encoding: chunked\r\n\r\n"
        try:
            writer.write(head.encode())
            self.sent()
            for byte in b"00a0" + b"0" * 100:
                writer.write(b"1\r\n%c\r\n" % byte)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(60):
                        answer = await reader.readline()
                        self.outcomes[answer.decode(errors="replace").split()[1] if answer else "closed"] += 1
                        return
        finally:
            writer.close()


class Searches(Load):
    """A hundred searches at once over a large repository, again and again."""

    name = "searches"

    async def run(self) -> None:
        async def search(_: int) -> None:
            # Results are cached: each search is another one.
            query = f"query=n%5Baeiou%5D%2Bdle.%2A{self.outcomes['sent']}z&isRegex=true"
            path = f"/git/v1/repo/{self.scene.repos[2]}/search?{query}"
            await self.request(self.scene.head("GET", path, "Connection: close"))
            self.begun.set()

        await self.forever(search, 100)


class SilentDns(Load):
    """Triggers for 30 names whose name server never answers."""

    name = "silent_dns"

    async def run(self) -> None:
        loop, begun = asyncio.get_running_loop(), self.begun

        class Silent(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, address: object) -> None:
                begun.set()

        transport, _ = await loop.create_datagram_endpoint(Silent, local_addr=(SILENT_RESOLVER, 53))
        try:
            await self.forever(self._trigger, 30)
        finally:
            transport.close()

    async def _trigger(self, number: int) -> None:
        name = f"n{number}-{self.outcomes['sent']}.silent.test"
        body = json.dumps(
            {"trigger": {"event": "push"}, "action": {"action": "webhook", "endpoint": f"https://{name}/"}}
        ).encode()
        headers = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
        path = f"/git/v1/repo/{self.scene.repos[0]}/trigger"
        await self.request(self.scene.head("POST", path, *headers) + body)


class LargeBodies(Load):
    """Four JSON bodies of 64 MiB at once, with as many values as fit."""

    name = "large_bodies"
    _SIZE = 64 << 20

    async def run(self) -> None:
        body = b'{"a":[' + b"[]," * ((self._SIZE - 20) // 3) + b"[]]}"
        path = f"/git/v1/repo/{self.scene.repos[0]}/commits"
        headers = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
        head = self.scene.head("POST", path, *headers)
        await self.forever(lambda _: self._send(head, body), 4)

    async def _send(self, head: bytes, body: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.scene.port)
        try:
            writer.write(head)
            answer = asyncio.create_task(reader.readline())
            with contextlib.suppress(ConnectionError):
                for at in range(0, len(body), 1 << 20):
                    writer.write(body[at : at + (1 << 20)])
                    await writer.drain()
                    if answer.done():
                        break
            self.outcomes["sent"] += 1
            self.begun.set()
            status = (await answer).decode(errors="replace").split()
            self.outcomes[status[1] if len(status) > 1 else "closed"] += 1
        finally:
            writer.close()
        await asyncio.sleep(0.1)


class ExecOutputs(Load):
    """Forty commands that print 16 MiB each, which are read at 64 KiB a second."""

    name = "exec_outputs"
    needs_vms = True

    async def run(self) -> None:
        body = json.dumps({"command": f"head -c {16 << 20} /dev/zero"}).encode()
        headers = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
        sent = self.scene.head("POST", f"/v1/vms/{self.scene.vms[0]}/exec-await", *headers) + body
        await self.forever(lambda _: self.request(sent, slow=True), 40)


class SleepingBuilds(Load):
    """Builds whose command sleeps for half an hour."""

    name = "sleeping_builds"
    needs_vms = True

    async def run(self) -> None:
        async with AsyncStead(self.scene.key, base_url=self.scene.url) as stead, asyncio.TaskGroup() as group:
            for number in range(self.scene.builds):
                group.create_task(self._build(stead, number))
            while not await stead.vms.builds.list():  # noqa: ASYNC110  # the server tells nobody
                await asyncio.sleep(0.2)
            self.begun.set()

    async def _build(self, stead: AsyncStead, number: int) -> None:
        while True:
            self.outcomes["sent"] += 1
            try:
                await stead.vms.snapshots.ensure(VmSpec().run(f"sleep 1800 # {number}").skip_cache())
            except Exception as error:
                self.outcomes[type(error).__name__] += 1
            await asyncio.sleep(_AGAIN * 4)


class SshRekeys(Load):
    """Connections to the SSH gateway that ask for new keys again and again, and never log in."""

    name = "ssh_rekeys"
    _EXPENSIVE = "diffie-hellman-group18-sha512"

    async def run(self) -> None:
        await self.forever(lambda _: self._connection(), 5)

    async def _connection(self) -> None:
        opened: Any = None

        class Client(asyncssh.SSHClient):
            def connection_made(self, conn: Any) -> None:
                nonlocal opened
                opened = conn

            async def password_auth_requested(self) -> None:
                await asyncio.sleep(600)

        connecting: asyncio.Future[Any] = asyncio.ensure_future(
            asyncssh.connect(
                "127.0.0.1",
                self.scene.ssh_port,
                username="abcdefghij0123456789",
                known_hosts=None,
                client_keys=None,
                config=None,
                agent_path=None,
                client_factory=Client,
                kex_algs=[self._EXPENSIVE, "curve25519-sha256"],
            )
        )
        try:
            while not connecting.done():
                if opened is not None and opened._kex_complete and opened._kex is None:
                    opened._send_kexinit()
                    opened._kexinit_sent = True
                    self.outcomes["rekeys"] += 1
                    self.begun.set()
                await asyncio.sleep(0.001)
            error = connecting.exception()
            self.outcomes[type(error).__name__ if error else "logged in"] += 1
        finally:
            self.begun.set()
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        await asyncio.sleep(_AGAIN)


class Wildcards(Load):
    """A wildcard that is mapped and unmapped in a loop."""

    name = "wildcards"
    needs_vms = True

    async def run(self) -> None:
        async with AsyncStead(self.scene.key, base_url=self.scene.url) as stead:
            while True:
                for change in (
                    stead.domains.mappings.create("*.loop.style.dev", vm=self.scene.vms[0], port=8000),
                    stead.domains.mappings.delete("*.loop.style.dev"),
                ):
                    try:
                        await change
                        self.outcomes["changes"] += 1
                        self.begun.set()
                    except Exception as error:
                        self.outcomes[type(error).__name__] += 1
                        self.begun.set()
                        await asyncio.sleep(_AGAIN)


class WakeFloods(Load):
    """VMs that flood the resolver, and a sleeping member of their private network with packets."""

    name = "wake_floods"
    needs_vms = True

    async def run(self) -> None:
        async with AsyncStead(self.scene.key, base_url=self.scene.url) as stead:
            vpc = await stead.vpcs.create("10.77.0.0/16")
            flooding: list[AsyncVm] = []
            try:
                sleeping = await stead.vms.create(nics=[{"vpc": vpc.id}])
                flooding.append(sleeping)
                address = await self._address(sleeping)
                for _ in self.scene.vms:
                    flooding.append(await stead.vms.create(nics=[{"vpc": vpc.id}]))
                await sleeping.suspend()
                for vm in flooding[1:]:
                    found = await vm.exec("awk '/nameserver/ {print $2; exit}' /etc/resolv.conf", check=True)
                    resolver = found.stdout.strip()
                    script = _DNS_FLOOD.replace("TARGETS", repr([(resolver, 53), (address, 9)]))
                    await vm.fs.write_text("/root/flood.py", script)
                    await vm.exec("systemd-run --quiet --unit=flood python3 /root/flood.py", check=True)
                    await vm.exec("sleep 1; systemctl is-active flood", check=True)
                    self.outcomes["flooding"] += 1
                self.begun.set()
                while True:
                    await asyncio.sleep(2)
                    with contextlib.suppress(Exception):
                        await sleeping.suspend()
                        self.outcomes["suspended again"] += 1
            finally:
                for vm in flooding:
                    with contextlib.suppress(Exception):
                        await vm.delete()
                with contextlib.suppress(Exception):
                    await stead.vpcs.delete(vpc.id)

    async def _address(self, vm: AsyncVm) -> str:
        found = await vm.exec("hostname -I", check=True)
        return next(word for word in found.stdout.split() if word.startswith("10.77."))


class FullDisk(Load):
    """A VM that writes until the file system of the installation's data is full."""

    name = "full_disk"
    needs_vms = True

    async def run(self) -> None:
        async with AsyncStead(self.scene.key, base_url=self.scene.url) as stead:
            vm = await stead.vms.create()
            try:
                # Not zeros: disks would not keep them.
                fill = "n=0; while :; do n=$((n+1)); yes $n | head -c 256M > /root/fill.$n; sync; done"
                await vm.fs.write_text("/root/fill.sh", fill)
                await vm.exec("systemd-run --quiet --unit=fill sh /root/fill.sh", check=True)
                while shutil.disk_usage(self.scene.data).free > 1 << 30:  # noqa: ASYNC110  # nothing to await
                    await asyncio.sleep(0.5)
                self.begun.set()
                while True:
                    await asyncio.sleep(1)
                    self.outcomes["least free MiB"] = shutil.disk_usage(self.scene.data).free >> 20
            finally:
                await vm.delete()


LOADS: dict[str, type[Load]] = {
    load.name: load
    for load in (
        *(Awaits, UnreadStreams, SlowPushes, Searches, SilentDns, LargeBodies),
        *(ExecOutputs, SleepingBuilds, SshRekeys, Wildcards, WakeFloods, FullDisk),
    )
}


async def _until_signal(load: Load) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stopped.set)

    async def announce() -> None:
        await load.begun.wait()
        print("begun", flush=True)

    works: list[Coroutine[Any, Any, object]] = [load.run(), announce(), stopped.wait()]
    tasks = [asyncio.create_task(work) for work in works]
    done, _ = await asyncio.wait([tasks[0], tasks[2]], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if tasks[0] in done and not stopped.is_set():
        tasks[0].result()
    print(json.dumps(load.outcomes), flush=True)


def main() -> None:
    # Not the price of the attack is measured but its effect: the attacker's own CPU time comes last.
    os.nice(10)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    told = json.loads(sys.stdin.readline())
    scene = Scene(**told | {"vms": tuple(told["vms"]), "repos": tuple(told["repos"])})
    assert {each.name for each in dataclasses.fields(Scene)} == set(told)
    asyncio.run(_until_signal(LOADS[sys.argv[1]](scene)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
