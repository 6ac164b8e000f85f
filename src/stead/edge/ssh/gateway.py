"""The SSH gateway: a process of its own without privileges, which the server starts and lets into VMs."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import msgspec

from stead.deadlines import scaled
from stead.edge.ssh.access import Access
from stead.edge.ssh.client_access import ClientAccess, SharedParts
from stead.edge.ssh.keys import load_host_key
from stead.edge.ssh.messages import FromGateway, GivenLink, NewLink, Ping, Pong, Serving, StartServing
from stead.edge.ssh.packets import Packets, ProtocolViolation, packet_pair
from stead.errors import SteadError
from stead.identity.callers import Callers
from stead.identity.identities import Identities
from stead.logs import get_logger
from stead.machines import Machines
from stead.settings import Settings
from stead.shares import KeyedLimit, RateLimit, share_of
from stead.supervision import Backoff, ProcessCommand, SupervisedProcess
from stead.tasks import TaskSet

log = get_logger("stead.ssh")

_RESTART = Backoff(shortest=0.2, longest=10.0, healthy=60.0)
_START_TIMEOUT = scaled(30.0)
_STOP_TIMEOUT = scaled(3.0)
_LOGIN_TIMEOUT = scaled(10.0)
_VM_LOGIN_TIMEOUT = scaled(60.0)
_PING_INTERVAL = 10.0
_PONG_TIMEOUT = scaled(30.0)
_LINKS, _LINKS_PER_SECOND = 2000, 1000
"""Logins at once, and in the long run: more than the gateway has CPU time for."""
_NICE = 5
"""A flood of key exchanges leaves the CPU to the server and the VMs."""
_DECODER = msgspec.msgpack.Decoder(FromGateway)


class TooManyConnections(SteadError):
    def __init__(self, share: int, own: int) -> None:
        text = f"too many open SSH connections: max {share} for an account, {own} for an identity"
        super().__init__(f"{text} (STEAD_MAX_SSH)")


def _limit_connections(most: int) -> KeyedLimit:
    share = share_of(most)
    own = max(1, share // 2)
    busy = partial(TooManyConnections, share, own)
    return KeyedLimit(most, share, per_caller=own, max_wait=0, busy=busy)


@dataclass(frozen=True)
class GatewayLimits:
    """Limits that all clients share."""

    connections: int
    """Open connections; an account has at most a quarter of them, an identity half of that."""
    unauthenticated: int = 200
    """Connections that have not logged in."""
    unauthenticated_per_network: int = 20
    failures: int = 20
    """Failed logins of a network at once. More are answered late."""
    failure_interval: float = 6.0
    """Seconds after which a network has one more."""
    login_timeout: float = _LOGIN_TIMEOUT


class SshGateway:
    """One address for all VMs. Clients log in by tokens; VMs see only the gateway's own keys."""

    def __init__(
        self,
        settings: Settings,
        callers: Callers,
        identities: Identities,
        machines: Machines,
        limits: GatewayLimits,
        on_change: Callable[[bool], None] = lambda serving: None,
    ) -> None:
        """`on_change` is told when the gateway begins to serve and when it has ended."""
        self._settings = settings
        self._key, self.host_key = load_host_key(settings.data)
        self._limits = limits
        self._on_change = on_change
        self._parts = SharedParts(
            Access(callers, identities, machines),
            machines,
            _limit_connections(limits.connections),
            RateLimit(limits.failures, limits.failure_interval),
            WeakKeyDictionary(),
            # The gateway ends slow logins; the server only one that has forgotten to.
            2 * limits.login_timeout,
        )
        self._links = KeyedLimit(limits.connections + 2 * limits.unauthenticated)
        self._process: SupervisedProcess | None = None
        self._root = settings.runtime / "ssh" / settings.instance
        """The empty folder that is the root of the process."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @contextlib.asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve on a bound socket during a block; then all connections are closed.

        Raises HostError when the process does not start. Later ends of it are repaired: it is started again.
        """
        run = _Run(self, listening)
        process = self._process = SupervisedProcess(
            "SSH gateway",
            run.command,
            run.ready,
            _RESTART,
            start_timeout=_START_TIMEOUT,
            stop_timeout=_STOP_TIMEOUT,
            clean_up=run.clean_up,
        )
        try:
            await process.start()
            yield
        finally:
            await process.close()
            with contextlib.suppress(OSError):
                self._root.rmdir()

    @contextlib.asynccontextmanager
    async def attending(self, control: socket.socket) -> AsyncIterator[None]:
        """Answer a gateway on its control socket during a block, which begins when it serves."""
        attendant = _Attendant(self._links, self._parts, control, self._restart)
        try:
            attendant.control.send(self._start())
            await attendant.serving.wait()
            yield
        finally:
            await attendant.close()

    def _restart(self) -> None:
        """The gateway has closed its control socket, or has sent what it must not."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _start(self) -> StartServing:
        limits = self._limits
        return StartServing(
            self._key,
            limits.unauthenticated,
            limits.unauthenticated_per_network,
            limits.login_timeout,
            _VM_LOGIN_TIMEOUT,
        )

    def command(self, listening: socket.socket, control: socket.socket) -> ProcessCommand:
        self._root.mkdir(parents=True, exist_ok=True)
        return ProcessCommand(
            [
                *("nice", "-n", str(_NICE)),
                # It needs no network: the sockets that it inherits stay in the host's.
                *("unshare", "--net"),
                *("setpriv", "--no-new-privs", "--pdeathsig=KILL", "--"),
                *(sys.executable, "-m", "stead.edge.ssh.process"),
                *("--listening", str(listening.fileno()), "--control", str(control.fileno())),
                *(
                    "--user",
                    str(self._settings.ssh_uid),
                    "--root",
                    str(self._root),
                    "--parent",
                    str(os.getpid()),
                ),
            ],
            environment={
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                # asyncssh asks for both, and the user is in no file.
                "HOME": "/",
                "LOGNAME": "stead-ssh",
            },
            descriptors=(listening.fileno(), control.fileno()),
        )


class _Attendant:
    """The server's end of the control socket of one gateway process."""

    def __init__(
        self, links: KeyedLimit, parts: SharedParts, control: socket.socket, on_lost: Callable[[], None]
    ) -> None:
        self._links = links
        self._parts = parts
        self._on_lost = on_lost
        self._tasks = TaskSet()
        self._closed = False
        self._rate = RateLimit(_LINKS, 1 / _LINKS_PER_SECOND)
        self.serving, self._answered = asyncio.Event(), asyncio.Event()
        self.control: Packets[FromGateway] = Packets(control, _DECODER, self._received, self._lost)

    def _received(self, message: FromGateway, _: object) -> None:
        match message:
            case Serving() if not self.serving.is_set():
                self.serving.set()
                self._tasks.start(self._watch(), "watch the SSH gateway")
            case NewLink():
                self._new_link()
            case Pong():
                self._answered.set()
            case _:
                raise ProtocolViolation

    async def _watch(self) -> None:
        """Have a gateway that does not answer started again."""
        while True:
            self._answered.clear()
            self.control.send(Ping())
            try:
                async with asyncio.timeout(_PONG_TIMEOUT):
                    await self._answered.wait()
            except TimeoutError:
                log.error("ssh gateway does not answer, restarting", seconds=_PONG_TIMEOUT)
                self._on_lost()
                return
            await asyncio.sleep(_PING_INTERVAL)

    def _new_link(self) -> None:
        if self._rate.allow(None):
            raise ProtocolViolation
        release = self._links.try_acquire()
        if release is None:
            self.control.send(GivenLink())
            return
        own, gateways = packet_pair()
        with gateways:
            self.control.send(GivenLink(), gateways)
        self._tasks.start(self._serve(own, release), "SSH client")

    async def _serve(self, link: socket.socket, release: Callable[[], None]) -> None:
        try:
            await ClientAccess(link, self._parts).serve()
        finally:
            release()

    def _lost(self) -> None:
        if not self._closed:
            self._on_lost()

    async def close(self) -> None:
        self._closed = True
        self.control.close()
        await self._tasks.close()


class _Run:
    """Starts of the gateway's process, one after the other."""

    def __init__(self, gateway: SshGateway, listening: socket.socket) -> None:
        self._gateway = gateway
        self._listening = listening
        self._control: socket.socket | None = None
        self._of_process: socket.socket | None = None
        self._attending = contextlib.AsyncExitStack()

    def command(self) -> ProcessCommand:
        self._control, self._of_process = packet_pair()
        return self._gateway.command(self._listening, self._of_process)

    async def ready(self) -> None:
        assert self._control is not None and self._of_process is not None  # noqa: S101  # it was started
        self._of_process.close()
        await self._attending.enter_async_context(self._gateway.attending(self._control))
        self._gateway._on_change(True)

    async def clean_up(self) -> None:
        self._gateway._on_change(False)
        await self._attending.aclose()
        for end in (self._control, self._of_process):
            if end is not None:
                end.close()
