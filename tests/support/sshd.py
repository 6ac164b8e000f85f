"""A real OpenSSH server in the place of the one inside a VM: one process for each connection, as there.

It runs in a mount namespace of its own, with accounts of its own, and with the configuration and the
AuthorizedKeysCommand of the image.
"""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stead.host.image import FILES
from stead.tasks import cancel_and_wait
from support.debian_packages import unpacked

_OVERLAY = FILES / "overlay"
_LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
_CONFIG = f"""\
Include {_OVERLAY}/etc/ssh/sshd_config.d/stead.conf
UsePAM no
Subsystem sftp internal-sftp
AcceptEnv LANG LC_*
PidFile none
LogLevel VERBOSE
"""
_ENTER = """
mount --bind "$1/run" /run
mount --bind "$1/passwd" /etc/passwd
mount -t tmpfs -o mode=755 none /usr/local/bin
install -m 0755 "$2" /usr/local/bin/fetch-ssh-keys
exec "$3" -i -e -f "$1/sshd_config"
"""


def find_sshd(cache: Path) -> Path:
    """The host's sshd, or that of Debian's package, unpacked and not installed: it would start."""
    installed = shutil.which("sshd", path="/usr/sbin")
    if installed:
        return Path(installed)
    return unpacked(cache, "openssh-server", "libwrap0") / "usr/sbin/sshd"


@dataclass(eq=False)
class Sshd:
    """Accounts: root, `dev` with a shell, and `locked` without one."""

    folder: Path
    program: Path
    address: tuple[str, int] = ("", 0)
    admitted: list[dict[str, Any]] = field(default_factory=list)
    """What the agent was asked about SSH."""
    host_keys: dict[str, str] = field(default_factory=dict)
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def prepare(self) -> None:
        (self.folder / "run/sshd").mkdir(parents=True)
        (self.folder / "run/stead").mkdir()
        home = self.folder / "home"
        home.mkdir()
        os.chown(home, 54321, 54321)
        # Not the home of the user who runs the tests: a shell there may start with anything.
        (self.folder / "root").mkdir()
        self.folder.chmod(0o755)
        accounts = Path("/etc/passwd").read_text().splitlines()
        accounts = [line for line in accounts if line.split(":")[0] not in ("root", "sshd", "dev", "locked")]
        accounts += [
            f"root:x:0:0::{self.folder}/root:/bin/bash",
            "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin",
            f"dev:x:54321:54321::{home}:/bin/bash",
            f"locked:x:54322:54322::{home}:/usr/sbin/nologin",
        ]
        (self.folder / "passwd").write_text("\n".join(accounts) + "\n")
        (self.folder / "sshd_config").write_text(f"{_CONFIG}HostKey {self.folder}/ssh_host_ed25519_key\n")

    def agent(self, machine: str, request: dict[str, Any]) -> dict[str, Any]:
        """Answers as the agent does: takes the gateway's key, and host keys if it has none."""
        self.admitted.append({"vm": machine, **request})
        (self.folder / "run/stead/ssh-gateway-key").write_text(request["authorized_key"] + "\n")
        if not self.host_keys and "host_keys" in request:
            self.host_keys = request["host_keys"]
            for name, content in self.host_keys.items():
                path = self.folder / name
                path.touch(mode=0o600)
                path.write_text(content)
        return {"host_keys": {name: text for name, text in self.host_keys.items() if name.endswith(".pub")}}

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        libraries = ":".join(str(self.program.parents[2] / place) for place in _LIBRARIES)
        while True:
            link, _ = await loop.sock_accept(listening)
            with link, (self.folder / "log").open("ab") as log:
                link.setblocking(True)
                script = str(_OVERLAY / "usr/local/bin/fetch-ssh-keys")
                arguments = ["sh", "-ec", _ENTER, "sh", str(self.folder), script, str(self.program)]
                self.processes.append(
                    await asyncio.create_subprocess_exec(
                        "unshare",
                        "--mount",
                        *arguments,
                        stdin=link.fileno(),
                        stdout=link.fileno(),
                        stderr=log,
                        env={**os.environ, "LD_LIBRARY_PATH": libraries},
                    )
                )

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@contextlib.asynccontextmanager
async def running_sshd(folder: Path, program: Path) -> AsyncIterator[Sshd]:
    sshd = Sshd(folder, program)
    sshd.prepare()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        sshd.address = listening.getsockname()
        accepting = asyncio.create_task(sshd._accept(listening))
        try:
            yield sshd
        finally:
            await cancel_and_wait(accepting)
            for process in sshd.processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()
