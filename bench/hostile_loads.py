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
import socket
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import asyncssh

from git import git
from stead import AsyncStead, VmSpec
from stead.sdk import AsyncVm

SILENT_RESOLVER = "127.0.53.53"
"""The server's name server. It listens only while `silent_dns` runs, and never answers."""
DISK_FLOOR = 1 << 30
"""Free bytes below which the server creates no VM."""
_STRANGER = ("127.0.0.2", 0)
"""Where clients without a key come from: the server counts them by address."""
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
    floods: int
    """VMs of `wake_floods`."""

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

    async def request(self, sent: bytes, *, rate: int | None = None) -> str:
        """Send a request on a connection of its own, and read its answer to the end.

        With a `rate` it is read at so many bytes a second, and the load has begun with the first answer.
        """
        connected = socket.socket()
        connected.setblocking(False)
        if rate is not None:
            # What is not read stays at the server.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader, writer = await self._opened(connected, 1 << 16 if rate is None else min(rate, 1 << 16))
        try:
            writer.write(sent)
            await writer.drain()
            self.sent()
            status = (await reader.readline()).decode(errors="replace").split()
            outcome = status[1] if len(status) > 1 else "closed"
            self.outcomes[outcome] += 1
            if rate is not None:
                self.begun.set()
            while await reader.read(1 << 16 if rate is None else rate):
                if rate is not None:
                    await asyncio.sleep(1)
        finally:
            writer.close()
        if not outcome.startswith("2"):
            await asyncio.sleep(_AGAIN)
        return outcome

    async def _opened(
        self, connected: socket.socket, limit: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", self.scene.port))
            return await asyncio.open_connection(sock=connected, limit=limit)
        except BaseException:
            connected.close()
            raise

    @contextlib.asynccontextmanager
    async def account(self) -> AsyncIterator[AsyncStead]:
        """A client with the key of account A."""
        async with AsyncStead(self.scene.key, base_url=self.scene.url) as stead:
            yield stead

    @contextlib.asynccontextmanager
    async def forks(self, vm: AsyncVm, count: int) -> AsyncIterator[list[AsyncVm]]:
        """A VM and forks of it, `count` in all: made much sooner than VMs one by one. Deletes them all."""
        all_of_them = [vm]
        try:
            if count > 1:
                all_of_them += await vm.fork(count=count - 1)
            yield all_of_them
        finally:
            await asyncio.gather(*(each.delete() for each in all_of_them), return_exceptions=True)


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
    _CANCEL = 8

    async def run(self) -> None:
        await self.forever(lambda _: self._connection(), self._CONNECTIONS)

    def target(self, number: int) -> tuple[str, str]:
        """Host and path of a request."""
        return self.scene.api_name, "/docs/swagger-ui-bundle.js"

    def received(self) -> None:
        """The server has the first requests of a connection."""

    def answered(self) -> bool:
        """The head of an answer came. Whether its stream is given up, for another one."""
        self.begun.set()
        return False

    async def _connection(self) -> None:
        context = ssl.create_default_context(cadata=self.scene.ca)
        context.set_alpn_protocols(["h2"])
        name, _ = self.target(0)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.scene.https_port, ssl=context, server_hostname=name, local_addr=_STRANGER
        )
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            # SETTINGS_INITIAL_WINDOW_SIZE = 0
            writer.write(self._frame(self._SETTINGS, 0, 0, b"\0\4\0\0\0\0"))
            following = 1
            for _ in range(self._STREAMS):
                following = self._open(writer, following)
            # Frames are read in order: the answer to this one says that the server has the requests.
            writer.write(self._frame(self._PING, 0, 0, bytes(8)))
            await writer.drain()
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind == self._SETTINGS and not flags & 1:
                    writer.write(self._frame(self._SETTINGS, 1, 0))
                elif kind == self._PING and not flags & 1:
                    writer.write(self._frame(self._PING, 1, 0, payload))
                elif kind == self._PING:
                    self.received()
                elif kind == self._HEADERS:
                    self.outcomes["answers"] += 1
                    given_up = self.answered()
                    if given_up and not flags & 1:
                        stream = int.from_bytes(head[5:9], "big")
                        writer.write(self._frame(self._RST, 0, stream, self._CANCEL.to_bytes(4, "big")))
                    if given_up or flags & 1:
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
        host, path = self.target(number // 2)
        fields = {":method": "GET", ":scheme": "https", ":authority": host, ":path": path}
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


class HeldAtGate(UnreadStreams):
    """Unread requests of a stranger to names of A, where no port listens, or none answers."""

    name = "held_at_gate"
    needs_vms = True
    _VMS = 8
    """The gate holds requests by VM."""
    _CLOSED_PORT, _SILENT_PORT = 7001, 7002
    _SILENT = (
        "import socket, time\n"
        f"listening = socket.create_server(('0.0.0.0', {_SILENT_PORT}), backlog=4096)\n"
        "time.sleep(1e9)\n"
    )

    async def run(self) -> None:
        async with self.account() as stead:
            vm = await stead.vms.create()
            await vm.fs.write_text("/root/silent.py", self._SILENT)
            await vm.exec("systemd-run --quiet --unit=silent python3 /root/silent.py", check=True)
            async with self.forks(vm, self._VMS) as vms:
                # With the VMs, their mappings go.
                for number, each in enumerate(vms):
                    await stead.domains.mappings.create(
                        self.target(2 * number)[0], vm=each.id, port=self._CLOSED_PORT
                    )
                    await stead.domains.mappings.create(
                        self.target(2 * number + 1)[0], vm=each.id, port=self._SILENT_PORT
                    )
                await super().run()

    def target(self, number: int) -> tuple[str, str]:
        return f"held-{number % (2 * self._VMS)}.style.dev", "/"

    def received(self) -> None:
        self.outcomes["connections held"] += 1
        if self.outcomes["connections held"] >= self._CONNECTIONS:
            self.begun.set()

    def answered(self) -> bool:
        return True


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
        await self.forever(lambda _: self.request(sent, rate=64 << 10), 40)


class UnreadFiles(Load):
    """Forty requests for a file of 64 MiB, as JSON and as plain bytes, which are read at 2 KiB a second."""

    name = "unread_files"
    needs_vms = True
    _SIZE = 64 << 20

    async def run(self) -> None:
        vm = self.scene.vms[0]
        async with self.account() as stead:
            made = f"head -c {self._SIZE} /dev/zero | tr '\\0' a > /root/large"
            await stead.vms.ref(vm).exec(made, check=True, timeout=120)
        plain = "Accept: application/octet-stream"
        heads = [
            self.scene.head("GET", f"/v1/vms/{vm}/files/root/large", "Connection: close", *accept)
            for accept in ((), (plain,))
        ]
        await self.forever(lambda number: self.request(heads[number % 2], rate=2048), 40)


class ManyRefs(Load):
    """A repository with 100,000 refs, the most that one may have, which 20 clients list again and again."""

    name = "many_refs"
    _REFS = 100_000

    async def run(self) -> None:
        async with self.account() as stead:
            repo = await stead.git.repos.create()
            try:
                await asyncio.to_thread(self._fill, repo.id)
                await self._list(repo.id)
            finally:
                with contextlib.suppress(Exception):
                    await repo.delete()

    def _fill(self, repo: str) -> None:
        """Push a commit, and write the other refs as git packs them: to push them all takes many minutes."""
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            place = Path(folder)
            git("init", "-q", "--bare", cwd=place)
            tree = git("mktree", cwd=place).decode().strip()
            commit = git("commit-tree", "-m", "x", tree, cwd=place).decode().strip()
            git("update-ref", "refs/heads/main", commit, cwd=place)
            git("push", "-q", f"{self.scene.url}/{repo}", "main", cwd=place, key=self.scene.key)
        hosted = Path(self.scene.data, "repos", repo[:2], f"{repo}.git")
        refs = "".join(f"{commit} refs/heads/n{number:06}\n" for number in range(self._REFS - 1))
        packed = hosted / "packed-refs.new"
        packed.write_text(f"# pack-refs with: peeled fully-peeled sorted \n{refs}")
        owner = hosted.stat()
        os.chown(packed, owner.st_uid, owner.st_gid)
        packed.rename(hosted / "packed-refs")

    async def _list(self, repo: str) -> None:
        login = base64.b64encode(f"x:{self.scene.key}".encode()).decode()
        advertised = f"GET /{repo}/info/refs?service=git-upload-pack HTTP/1.1\r\nHost: a\r\n"
        heads = [
            self.scene.head("GET", f"/git/v1/repo/{repo}/git/refs/heads/", "Connection: close"),
            f"{advertised}Authorization: Basic {login}\r\nConnection: close\r\n\r\n".encode(),
        ]

        async def listed(number: int) -> None:
            await self.request(heads[number % 2])
            self.begun.set()

        await self.forever(listed, 20)


class Captures(Load):
    """VMs with 64 MiB of their own in memory, all of which are suspended, woken and saved in a loop."""

    name = "captures"
    needs_vms = True
    _VMS = 4

    async def run(self) -> None:
        async with self.account() as stead:
            vm = await stead.vms.create()
            await vm.exec("head -c 64M /dev/urandom > /dev/shm/written", check=True, timeout=120)
            async with self.forks(vm, self._VMS) as vms:
                await self.forever(lambda number: self._capture(stead, vms[number]), self._VMS)

    async def _capture(self, stead: AsyncStead, vm: AsyncVm) -> None:
        try:
            await vm.suspend()
            self.outcomes["suspends"] += 1
            self.begun.set()
            await vm.start()
            saved = await vm.snapshot()
            self.outcomes["snapshots"] += 1
            await stead.vms.snapshots.delete(saved.id)
        except Exception as error:
            self.outcomes[type(error).__name__] += 1
            self.begun.set()
            await asyncio.sleep(_AGAIN)


class SleepingBuilds(Load):
    """Builds whose command sleeps for half an hour."""

    name = "sleeping_builds"
    needs_vms = True

    async def run(self) -> None:
        async with self.account() as stead, asyncio.TaskGroup() as group:
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
                local_addr=_STRANGER,
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
        async with self.account() as stead:
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
        async with self.account() as stead:
            vpc = await stead.vpcs.create("10.77.0.0/16")
            try:
                sleeping = await stead.vms.create(nics=[{"vpc": vpc.id}])
                try:
                    source = await stead.vms.create(nics=[{"vpc": vpc.id}])
                    address = await self._address(sleeping)
                    await sleeping.suspend()
                    await self._write_flood(source, address)
                    async with self.forks(source, self.scene.floods) as vms:
                        await asyncio.gather(*map(self._flood, vms))
                        self.begun.set()
                        await self._suspend_again(sleeping)
                finally:
                    await sleeping.delete()
            finally:
                with contextlib.suppress(Exception):
                    await stead.vpcs.delete(vpc.id)

    async def _write_flood(self, vm: AsyncVm, address: str) -> None:
        found = await vm.exec("awk '/nameserver/ {print $2; exit}' /etc/resolv.conf", check=True)
        script = _DNS_FLOOD.replace("TARGETS", repr([(found.stdout.strip(), 53), (address, 9)]))
        await vm.fs.write_text("/root/flood.py", script)

    async def _flood(self, vm: AsyncVm) -> None:
        start = "systemd-run --quiet --unit=flood python3 /root/flood.py"
        await vm.exec(f"{start} && sleep 1 && systemctl is-active flood", check=True, timeout=120)
        self.outcomes["flooding"] += 1

    async def _suspend_again(self, sleeping: AsyncVm) -> None:
        while True:
            await asyncio.sleep(2)
            with contextlib.suppress(Exception):
                await sleeping.suspend()
                self.outcomes["suspended again"] += 1

    async def _address(self, vm: AsyncVm) -> str:
        found = await vm.exec("hostname -I", check=True)
        return next(word for word in found.stdout.split() if word.startswith("10.77."))


class FullDisk(Load):
    """VMs that write until the file system of the installation's data is full, or the server stops them.

    Its disk is filled before, up to little more than the room that the server keeps: emulated VMs are slow.
    """

    name = "full_disk"
    needs_vms = True
    _ROOM = 512 << 20
    _WRITTEN = 64 << 20
    _STANDSTILL = 15.0
    # Not zeros: disks would not keep them. Not from /dev/urandom each time: that is slow in emulation.
    _SCRIPT = (
        "head -c 64M /dev/urandom > /dev/shm/block\n"
        "n=0; while :; do n=$((n+1))\n"
        "dd if=/dev/shm/block of=/root/fill.$n bs=1M conv=fsync status=none; done\n"
    )

    async def run(self) -> None:
        async with self.account() as stead:
            vm = await stead.vms.create()
            await vm.fs.write_text("/root/fill.sh", self._SCRIPT)
            async with self.forks(vm, 2) as vms:
                filler = Path(self.scene.data) / "filler"
                try:
                    await asyncio.to_thread(self._fill, filler)
                    start = "systemd-run --quiet --unit=fill sh /root/fill.sh"
                    await asyncio.gather(*(each.exec(start, check=True, timeout=120) for each in vms))
                    await self._watch()
                finally:
                    filler.unlink(missing_ok=True)

    def _fill(self, filler: Path) -> None:
        size = self._free() - DISK_FLOOR - self._ROOM
        with filler.open("wb") as file:
            if size > 0:
                os.posix_fallocate(file.fileno(), 0, size)

    def _free(self) -> int:
        return shutil.disk_usage(self.scene.data).free

    async def _watch(self) -> None:
        """It has begun below the floor, or when VMs that have written something are held."""
        first = least = self._free()
        since = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(0.5)
            now, free = asyncio.get_running_loop().time(), self._free()
            if free < least:
                least, since = free, now
            held = first - least >= self._WRITTEN and now - since > self._STANDSTILL
            if not self.begun.is_set() and (free < DISK_FLOOR or held):
                self.outcomes["free MiB at its begin"] = free >> 20
                self.begun.set()
            self.outcomes["written MiB"] = (first - least) >> 20
            self.outcomes["least free MiB"] = least >> 20


LOADS: dict[str, type[Load]] = {
    load.name: load
    for load in (
        *(Awaits, UnreadStreams, HeldAtGate, SlowPushes, Searches, ManyRefs, SilentDns, LargeBodies),
        *(ExecOutputs, UnreadFiles, SleepingBuilds, SshRekeys, Wildcards, WakeFloods, Captures, FullDisk),
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
