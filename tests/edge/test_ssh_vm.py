"""The SSH gateway and sshd inside a real VM: OpenSSH's clients, and what editors do with them."""

import asyncio
import contextlib
import io
import os
import re
import socket
import tarfile
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stead.machines import Machine, State
from stead.machines.records import Properties
from support.installations import Server
from support.waiting import until

_HOST_KEY = "cat /etc/ssh/ssh_host_ed25519_key.pub"
_BOOT = "cat /proc/sys/kernel/random/boot_id"
_WAIT = 300
_PIPE = asyncio.subprocess.PIPE


@dataclass(frozen=True)
class Box:
    """A VM with a Linux user `dev`, and a token for it."""

    machine: Machine
    identity: str
    token: str
    port: str
    known_hosts: Path

    @property
    def options(self) -> list[str]:
        return ["-F", "none", "-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "BatchMode=yes"]

    def login(self, user: str = "dev") -> str:
        return f"{self.machine.id}+{user},{self.token}@127.0.0.1"

    def ssh(self, *arguments: str, user: str = "dev") -> list[str]:
        return ["ssh", *self.options, "-p", self.port, self.login(user), *arguments]

    def ssh_to(self, vm: str, command: str) -> list[str]:
        return ["ssh", *self.options, "-p", self.port, f"{vm}:{self.token}@127.0.0.1", command]


@pytest_asyncio.fixture(scope="module")
async def box(server: Server) -> AsyncIterator[Box]:
    here, account = server.installation, server.account
    machine = await here.machines.create(Properties(account=account, name="ssh"))
    await machine.exec("useradd --create-home --shell /bin/bash dev")
    identity = await here.identities.create(account)
    await here.identities.grant(account, identity.id, machine.id)
    _, token = await here.identities.create_token(account, identity.id)
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known_hosts"
        known.write_text(f"[127.0.0.1]:{here.ssh.port} {here.ssh.host_key}\n")
        yield Box(machine, identity.id, token, str(here.ssh.port), known)
    await machine.delete()


async def _run(*command: str | Path, stdin: bytes = b"") -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(*command, stdin=_PIPE, stdout=_PIPE, stderr=_PIPE)
    out, err = await asyncio.wait_for(process.communicate(stdin), _WAIT)
    return process.returncode or 0, (out + err).decode(errors="replace")


# What Remote-SSH of VS Code and Cursor does

_SERVER = '''\
"""In the place of an editor's server: prints where it listens, and answers every line in capitals."""
import os, socket, socketserver, sys, threading

class Answering(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line.upper())

class Ports(socketserver.ThreadingTCPServer):
    daemon_threads = True

class Sockets(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

folder = sys.argv[1]
ports, sockets = Ports(("127.0.0.1", 0), Answering), Sockets(f"{folder}/server.sock", Answering)
threading.Thread(target=sockets.serve_forever, daemon=True).start()
with open(f"{folder}/port.new", "w") as file:
    file.write(str(ports.server_address[1]))
os.rename(f"{folder}/port.new", f"{folder}/port")
ports.serve_forever()
'''
_BOOTSTRAP = """
set -e
unset HISTFILE
umask 077
echo "$1: running"
folder="$HOME/.editor-server/bin/0123abcd"
if [ ! -f "$folder/port" ]; then
    mkdir -p "$folder"
    tar -xzf "$HOME/editor-server.tar.gz" -C "$folder" --strip-components 1
    (cd "$folder" && exec setsid python3 -u server.py "$folder" < /dev/null > "$folder/.log" 2>&1) &
    echo "installed=="
fi
while [ ! -f "$folder/port" ]; do sleep 0.05; done
echo "listeningOn==$(cat "$folder/port")=="
echo "osReleaseId==$(. /etc/os-release; echo $ID)=="
echo "arch==$(uname -m)=="
echo "tmpDir==${XDG_RUNTIME_DIR:-/tmp}=="
"""


def _archive() -> bytes:
    """A folder like an editor's server: a program among many files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        files = {"server.py": _SERVER.encode(), "node": os.urandom(2_000_000)}
        for name, content in (files | {f"extensions/{n}.json": b"{}" for n in range(100)}).items():
            entry = tarfile.TarInfo(f"editor-server-linux-x64/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> bytes:
    writer.write(line)
    async with asyncio.timeout(_WAIT):
        return await reader.readline()


async def _through_socks(proxy: int, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a port of the VM's loopback through `ssh -D`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy)
    writer.write(b"\x05\x01\x00")
    assert await reader.readexactly(2) == b"\x05\x00"
    writer.write(b"\x05\x01\x00\x03\x09localhost" + port.to_bytes(2, "big"))
    assert (await reader.readexactly(10))[:2] == b"\x05\x00"
    return reader, writer


@contextlib.asynccontextmanager
async def _bootstrapped(box: Box, *options: str) -> AsyncIterator[tuple[int, str]]:
    """`ssh ... bash` with the script as its input, open during the block. Yields the port and its output."""
    command = box.ssh("-T", *options, "bash", "-s", "window")
    process = await asyncio.create_subprocess_exec(*command, stdin=_PIPE, stdout=_PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(_BOOTSTRAP.encode())
        said = ""
        async with asyncio.timeout(_WAIT):
            while "tmpDir==" not in said:
                line = await process.stdout.readline()
                assert line, f"ssh has ended: {said}"
                said += line.decode()
        (port,) = re.findall(r"listeningOn==(\d+)==", said)
        yield int(port), said
        # The shell still reads its input.
        process.stdin.write(b"echo alive==\n")
        assert await asyncio.wait_for(process.stdout.readline(), _WAIT) == b"alive==\n"
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), _WAIT) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
async def test_an_editor_installs_its_server_and_uses_it(box: Box, tmp_path: Path) -> None:
    """scp of the server's archive, a script on the input of `bash`, `-D`, and `-L` to a port and a socket.

    The next window finds the running server.
    """
    (tmp_path / "server.tar.gz").write_bytes(_archive())
    scp = ["scp", "-q", *box.options, "-P", box.port]
    place = f"{box.login()}:editor-server.tar.gz"
    assert await _run(*scp, tmp_path / "server.tar.gz", place) == (0, "")
    proxy = _free_port()
    async with _bootstrapped(box, "-D", str(proxy)) as (port, said):
        assert "window: running" in said and "installed==" in said
        assert "osReleaseId==debian==" in said and "arch==x86_64==" in said
        # An editor has a connection for itself, one for extensions, and one for each forwarded port.
        links = [await _through_socks(proxy, port) for _ in range(3)]
        for number in range(3):
            lines = [f"message {number} of {index}\n".encode() for index in range(3)]
            answers = [_answer(*link, line) for link, line in zip(links, lines, strict=True)]
            assert await asyncio.gather(*answers) == [line.upper() for line in lines]
        for _, writer in links:
            writer.close()
    local, near = _free_port(), tmp_path / "near.sock"
    far = "/home/dev/.editor-server/bin/0123abcd/server.sock"
    forwards = ("-L", f"127.0.0.1:{local}:localhost:{port}", "-L", f"{near}:{far}")
    async with _bootstrapped(box, *forwards, "-o", "ExitOnForwardFailure=yes") as (again, said):
        assert again == port and "installed==" not in said, "the server outlived its window"
        for link in (
            await asyncio.open_connection("127.0.0.1", local),
            await asyncio.open_unix_connection(str(near)),
        ):
            assert await _answer(*link, b"hello\n") == b"HELLO\n"
            link[1].close()


@pytest.mark.slow
async def test_sessions_share_one_connection(box: Box, tmp_path: Path) -> None:
    """ControlMaster: commands, a terminal, sftp and a forward that is added later, beside each other."""
    shared = ("-o", f"ControlPath={tmp_path}/control")
    master = await asyncio.create_subprocess_exec(*box.ssh("-M", "-N", *shared))
    try:
        await until(lambda: (tmp_path / "control").exists(), 60)
        assert (await _run(*box.ssh(*shared, "-O", "check")))[0] == 0
        long = await asyncio.create_subprocess_exec(*box.ssh(*shared, "cat"), stdin=_PIPE, stdout=_PIPE)
        assert long.stdin is not None and long.stdout is not None
        runs = [_run(*box.ssh(*shared, f"echo $PPID; exit {number}")) for number in range(8)]
        ended = await asyncio.gather(*runs)
        assert [code for code, _ in ended] == list(range(8)), ended
        assert len({parent for _, parent in ended}) == 1, "one sshd process has them all"
        code, shown = await _run(*box.ssh(*shared, "-tt", "tty; id -un"))
        assert code == 0 and shown.startswith("/dev/pts/") and "dev" in shown
        content = os.urandom(3_000_000)
        (tmp_path / "file").write_bytes(content)
        sftp = ["sftp", "-q", *box.options, *shared, "-P", box.port, "-b", "-", box.login()]
        batch = f"put {tmp_path}/file copy\nget copy {tmp_path}/back\n"
        assert (await _run(*sftp, stdin=batch.encode()))[0] == 0
        assert (tmp_path / "back").read_bytes() == content
        port = _free_port()
        forward = ("-L", f"127.0.0.1:{port}:127.0.0.1:22")
        assert await _run(*box.ssh(*shared, "-O", "forward", *forward)) == (0, "")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await asyncio.wait_for(reader.readline(), _WAIT)).startswith(b"SSH-2.0-OpenSSH")
        writer.close()
        assert (await _run(*box.ssh(*shared, "-O", "cancel", *forward)))[0] == 0
        long.stdin.write(b"still here\n")
        assert await asyncio.wait_for(long.stdout.readline(), _WAIT) == b"still here\n"
        assert (await _run(*box.ssh(*shared, "-O", "exit")))[0] == 0
        assert await asyncio.wait_for(long.wait(), _WAIT) == 255
        await asyncio.wait_for(master.wait(), _WAIT)
    finally:
        if master.returncode is None:
            master.kill()
            await master.wait()


# The life of the VM


async def test_openssh_clients_reach_a_vm_that_sleeps_and_forks(
    server: Server, box: Box, tmp_path: Path
) -> None:
    """Copies of files, a suspend under an open shell, and a fork, which has keys of its own."""
    here, account, machine = server.installation, server.account, box.machine
    assert await _run(*box.ssh("id -un; pwd; cat; exit 3"), stdin=b"in") == (3, "dev\n/home/dev\nin")
    content = os.urandom(300_000)
    (tmp_path / "file").write_bytes(content)
    scp = ["scp", "-q", *box.options, "-P", box.port]
    assert await _run(*scp, tmp_path / "file", f"{box.login()}:copy") == (0, "")
    assert await machine.files().read("/home/dev/copy") == content
    await _sleeps(machine.suspend, box.ssh_to(machine.id, "cat"))
    (copy,) = await machine.fork(1)
    before = (await machine.exec("cat /run/stead/ssh-gateway-key; " + _HOST_KEY)).stdout
    assert before
    assert (await copy.exec("ls /run/stead/ssh-gateway-key")).exit_code == 2
    await here.identities.grant(account, box.identity, copy.id)
    code, shown = await _run(*box.ssh_to(copy.id, "hostname; " + _HOST_KEY))
    assert code == 0 and shown.startswith(f"{copy.id}\n")
    assert shown.splitlines()[1].encode() not in before
    await copy.delete()


async def _sleeps(suspend: object, command: list[str]) -> None:
    """A connection continues after the VM was suspended under it: the next data wakes it."""
    process = await asyncio.create_subprocess_exec(*command, stdin=_PIPE, stdout=_PIPE)
    assert process.stdin is not None and process.stdout is not None and callable(suspend)
    process.stdin.write(b"before\n")
    assert await asyncio.wait_for(process.stdout.readline(), 120) == b"before\n"
    await suspend()
    process.stdin.write(b"after\n")
    assert await asyncio.wait_for(process.stdout.readline(), 120) == b"after\n"
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0


@contextlib.asynccontextmanager
async def _connected(box: Box, control: Path, *options: str) -> AsyncIterator[list[str]]:
    """`ssh -M -N`, open during the block, with keepalives. Yields the options by which others share it."""
    shared = ["-o", f"ControlPath={control}"]
    # Answers have the order of the requests: a keepalive waits for a wake that was asked for before.
    alive = ("-o", "ServerAliveInterval=1", "-o", f"ServerAliveCountMax={_WAIT}")
    lasting = (*alive, "-o", "ExitOnForwardFailure=yes")
    master = await asyncio.create_subprocess_exec(*box.ssh("-M", "-N", *shared, *lasting, *options))
    try:
        await until(control.exists, 60)
        yield shared
        assert master.returncode is None, "the connection has lasted"
    finally:
        if master.returncode is None:
            master.kill()
        await master.wait()


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"from the client\n")
    writer.close()


async def _first_line(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    line = await asyncio.wait_for(reader.readline(), _WAIT)
    writer.close()
    return line.decode()


async def test_new_channels_of_an_open_connection_wake_the_vm(box: Box, tmp_path: Path) -> None:
    """A forwarded port, a session and `-R`, each as the first after a suspend; keepalives wake nothing."""
    machine, port = box.machine, _free_port()
    greeter = await asyncio.start_server(_greet, "127.0.0.1", 0)
    back = f"127.0.0.1:7000:127.0.0.1:{greeter.sockets[0].getsockname()[1]}"
    async with (
        greeter,
        _connected(box, tmp_path / "control", "-L", f"127.0.0.1:{port}:127.0.0.1:22") as shared,
    ):
        _, boot = await _run(*box.ssh(*shared, _BOOT))
        await machine.suspend()
        await asyncio.sleep(2)
        assert (await machine.info()).state is State.SUSPENDED
        assert (await _first_line(port)).startswith("SSH-2.0-OpenSSH")
        await machine.suspend()
        assert await _run(*box.ssh(*shared, _BOOT)) == (0, boot), "as it was"
        await machine.suspend()
        assert await _run(*box.ssh(*shared, "-O", "forward", "-R", back)) == (0, "")
        assert await _run(*box.ssh(*shared, "cat < /dev/tcp/127.0.0.1/7000")) == (0, "from the client\n")


@pytest.mark.slow
async def test_a_login_starts_a_stopped_vm(box: Box) -> None:
    _, before = await _run(*box.ssh(f"sync; {_BOOT}"))
    assert before
    await box.machine.kill()
    assert (await box.machine.info()).state is State.STOPPED
    code, shown = await _run(*box.ssh(f"id -un; {_BOOT}"))
    assert (code, shown.splitlines()[0]) == (0, "dev"), shown
    assert shown.splitlines()[1] != before.strip()
