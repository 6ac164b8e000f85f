"""A laptop whose user has an account: Node.js, the npm package `freestyle` and wireguard-tools."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from support.installations import Server
from support.laptop import Laptop
from support.npm import Npm

SUDO = """#!/bin/sh
test "$1" = -n && shift
exec "$@"
"""


@dataclass(frozen=True)
class NpmLaptop:
    """A laptop with Node.js, the npm package and wireguard-tools, whose user has an account."""

    npm: Npm
    server: Server
    computer: Laptop
    folder: Path
    account: str
    environment: dict[str, str]

    @contextlib.asynccontextmanager
    async def program(self, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
        # Unlike bun, Node.js ends when all that is left is a promise that nothing settles.
        stay = "--import=data:text/javascript,setInterval(()=>{},1e6)"
        command = self.computer.command(self.npm.node22, "--no-warnings", stay, name)
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.npm.folder,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def run(self, *command: str, cwd: Path | None = None, **more: str) -> str:
        return await self.computer.run(*command, env=self.environment | more, cwd=cwd or self.folder)

    def place(self, name: str, program: str) -> None:
        """Put a program on the PATH of the laptop."""
        path = self.folder / "bin" / name
        path.write_text(program)
        path.chmod(0o755)

    @contextlib.asynccontextmanager
    async def joined(self, vpc: str) -> AsyncIterator[None]:
        """With a tunnel into a VPC."""
        session = await self.server.installation.tunnels.create(self.account, vpc)
        config = self.folder / f"wg-{session.id}.conf"
        config.touch(mode=0o600)
        config.write_text(session.config)
        async with self.computer.joined(config):
            yield

    async def clean_up(self) -> None:
        machines, networks = self.server.installation.machines, self.server.installation.networks
        for info in await machines.list(self.account):
            await machines.delete(info.id, forget=True)
        for vpc in await networks.list(self.account):
            await networks.delete(self.account, vpc.id)
