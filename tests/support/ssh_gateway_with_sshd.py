"""The SSH gateway for tests: VMs in memory, a real sshd in the place of that of all VMs, real clients."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stead.api.server import listen_on
from stead.edge.ssh.gateway import GatewayLimits, SshGateway
from stead.edge.ssh.listener import Listener
from stead.edge.ssh.packets import packet_pair
from stead.installation import ssh_gateway
from stead.tasks import in_background
from support.fake_api import TOKEN, FakeApi, fake_api
from support.sshd import Sshd, find_sshd, running_sshd

Process = asyncio.subprocess.Process
WAIT = 120


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class SshGatewayWithSshd:
    api: FakeApi
    sshd: Sshd
    gateway: SshGateway
    port: int
    home: Path

    @property
    def token(self) -> str:
        return self.api.callers["granted"][TOKEN]

    @property
    def login(self) -> str:
        return f"{self.api.vm},{self.token}"

    @property
    def options(self) -> list[str]:
        known = self.home / "known_hosts"
        known.write_text(f"[127.0.0.1]:{self.port},[::1]:{self.port} {self.gateway.host_key}\n")
        return [
            *("-F", "none", "-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes"),
            *("-o", "BatchMode=yes", "-o", "ConnectTimeout=90"),
        ]

    async def start(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> Process:
        pipe = asyncio.subprocess.PIPE
        variables = None if environment is None else {**os.environ, **environment}
        return await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=variables
        )

    async def run(
        self, *command: str | Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> Ended:
        process = await self.start(*command, environment=environment)
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), WAIT)
        finally:
            if process.returncode is None:
                process.kill()
        return Ended(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))

    def ssh_command(self, *arguments: str, login: str | None = None, host: str = "127.0.0.1") -> list[str]:
        where = ["-p", str(self.port), f"{login or self.login}@{host}"]
        return ["ssh", *self.options, *where, *arguments]

    async def ssh(
        self, *arguments: str, login: str | None = None, host: str = "127.0.0.1", stdin: bytes = b""
    ) -> Ended:
        return await self.run(*self.ssh_command(*arguments, login=login, host=host), stdin=stdin)

    async def ssh_with_password(self, password: str, *options: str) -> Ended:
        """Log in by the VM's name, with a password that ssh gets from a program."""
        helper = self.home / "askpass"
        helper.write_text(f"#!/bin/sh\necho {password}\n")
        helper.chmod(0o700)
        command = self.ssh_command(*options, "echo in", login=self.api.vm)
        command[command.index("BatchMode=yes")] = "BatchMode=no"
        environment = {"SSH_ASKPASS": str(helper), "SSH_ASKPASS_REQUIRE": "force"}
        return await self.run(*command, environment=environment)

    @contextlib.asynccontextmanager
    async def connected(self, *options: str) -> AsyncIterator[Process]:
        """A connection that lasts, with `cat` in the VM."""
        process = await self.start(*self.ssh_command(*options, "cat"))
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"begun\n")
        try:
            assert await asyncio.wait_for(process.stdout.readline(), WAIT) == b"begun\n"
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def token_for(self, *users: str, vm: str | None = None) -> tuple[str, str]:
        """A new identity with permission for these Linux users, and its token."""
        identities, account = self.api.installation.identities, self.api.account
        made = await identities.create(account)
        await identities.grant(account, made.id, vm or self.api.vm, users or None)
        return made.id, (await identities.create_token(account, made.id))[1]

    @contextlib.asynccontextmanager
    async def limited(
        self, limits: GatewayLimits, listener: socket.socket | None = None
    ) -> AsyncIterator["SshGatewayWithSshd"]:
        """The same VMs behind another gateway, which has the same host key."""
        gateway = self._gateway(limits)
        with listener or listen_on("127.0.0.1", 0) as listening:
            async with gateway.serving(listening):
                yield replace(self, gateway=gateway, port=listening.getsockname()[1])

    @contextlib.asynccontextmanager
    async def in_this_process(self) -> AsyncIterator[tuple["SshGatewayWithSshd", Listener]]:
        """The same VMs behind a gateway without a process of its own: for tests that change its code."""
        gateway = self._gateway(GatewayLimits(100))
        control, of_gateway = packet_pair()
        with listen_on("127.0.0.1", 0) as listening:
            listener = Listener(listening, of_gateway)
            async with in_background(listener.serve()), gateway.attending(control):
                yield replace(self, gateway=gateway, port=listening.getsockname()[1]), listener

    def _gateway(self, limits: GatewayLimits) -> SshGateway:
        here = self.api.installation
        return SshGateway(here.settings, here.callers, here.identities, here.machines, limits)


@contextlib.asynccontextmanager
async def ssh_gateway_with_sshd(cache: Path) -> AsyncIterator[SshGatewayWithSshd]:
    with tempfile.TemporaryDirectory(prefix="stead-ssh-", dir="/var/tmp") as folder:
        async with (
            running_sshd(Path(folder) / "sshd", find_sshd(cache)) as sshd,
            fake_api(Path(folder)) as api,
        ):
            api.world.ports[22] = sshd.address
            api.world.on_ssh = sshd.agent
            with listen_on("127.0.0.1", 0) as listening:
                async with ssh_gateway(api.installation, listening) as gateway:
                    yield SshGatewayWithSshd(api, sshd, gateway, listening.getsockname()[1], Path(folder))
