"""The server's end of a link: what the client of one link may do with one VM, and no more than that.

The gateway is not trusted: it proves a login by a token, and gets a connection to that VM's SSH server.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from stead.deadlines import scaled
from stead.edge.ssh.access import Access, Login, LoginRefused
from stead.edge.ssh.keys import VmKey
from stead.edge.ssh.login_places import client_network
from stead.edge.ssh.messages import (
    Accepted,
    Asleep,
    Authenticate,
    Awake,
    EndClient,
    Failed,
    Hold,
    Leave,
    LoggedIn,
    Look,
    Message,
    NotWoken,
    OfClient,
    Open,
    Opened,
    Refused,
    Sign,
    Signed,
    Touch,
    Wake,
)
from stead.edge.ssh.packets import Packets, ProtocolViolation
from stead.errors import (
    GuestError,
    GuestRestarted,
    MachineNotFound,
    StartFailed,
    SteadError,
    WrongState,
)
from stead.guest.agent import Agent
from stead.guest.ssh import admit_gateway
from stead.guest.watchdog import works_on
from stead.logs import get_logger
from stead.machines import Machines
from stead.machines.events import Use
from stead.machines.processes import Eviction
from stead.machines.start import Attached
from stead.shares import KeyedLimit, RateLimit, Release
from stead.supervision import repeat
from stead.tasks import TaskSet, in_background

log = get_logger("stead.ssh")

_DECODER = msgspec.msgpack.Decoder(OfClient)
_PORT = 22
_POLL = 0.1
_LISTEN_TIMEOUT = scaled(30.0)
"""Seconds to wait for the SSH server: after a boot it listens later than the agent answers."""
_ATTEMPTS = 3
"""Passwords of one client, and logins to its VM that may be interrupted by a suspend."""
_WAKE_TIMEOUT = scaled(180.0)
_RECHECK = scaled(5.0)
"""Seconds between two checks that the login would still be accepted."""
_REFUSAL_DELAY = 2.0
"""Seconds before a failed login is answered to a network with too many of them."""
_MESSAGES, _MESSAGES_PER_SECOND = 1000, 100
"""Messages of one link at once, and in the long run. A client causes a few in a second."""
_LEAVE_TIMEOUT = 1.0
"""Seconds for the gateway to disconnect a client and tell it why."""


class VmLoginFailed(SteadError):
    """The VM cannot be logged in to; the message is for the client, who may use this VM."""


@dataclass(frozen=True)
class SharedParts:
    """What all clients use."""

    access: Access
    machines: Machines
    connections: KeyedLimit
    """Authenticated connections, by account and identity."""
    failures: RateLimit
    """Failed logins, by network of the client. A valid token is accepted however many there were."""
    keys: "WeakKeyDictionary[Agent, VmKey]"
    """For each run of a VM. A copy of a VM does not accept the key of the original: its agent forgets it
    with the old identity."""
    login_timeout: float


class ClientAccess:
    """Serves one link. All that it holds for a client ends with the link."""

    def __init__(self, link: socket.socket, parts: SharedParts) -> None:
        self._parts = parts
        self._tasks = TaskSet()
        self._closed = asyncio.Event()
        self._log = log
        self._began = time.monotonic()
        self._reason = ""
        self._attempts = self._opens = 0
        self._busy = False
        """A request is being answered: the next one must wait for its answer."""
        self._waking = False
        self._login: Login | None = None
        self.trace = ""
        self._address = ""
        self._attached: Attached | None = None
        self._key: VmKey | None = None
        self._may_sign = False
        self._logged_in = False
        self._vm_socket: socket.socket | None = None
        """A copy of the gateway's connection to the VM: by it the server ends that connection."""
        self._holding = False
        self._held = contextlib.ExitStack()
        self._messages = RateLimit(_MESSAGES, 1 / _MESSAGES_PER_SECOND)
        self._login_lease = contextlib.ExitStack()
        self._release: Release | None = None
        """Releases the place of the account's share."""
        self._packets: Packets[OfClient] = Packets(link, _DECODER, self._received, self._closed.set)

    def __str__(self) -> str:
        """As the log names a client that holds the event loop."""
        return f"SSH connection from {self._address}" if self._address else "SSH connection"

    async def serve(self) -> None:
        """Serve until the link is closed, or the client may not go on."""
        works_on(self)
        try:
            async with asyncio.timeout(self._parts.login_timeout) as limit:
                self._login_limit = limit
                await self._closed.wait()
        except TimeoutError:
            pass
        finally:
            await self._close()

    async def _close(self) -> None:
        self._packets.close()
        self._disconnect()
        try:
            await self._tasks.close()
        finally:
            self._detach()
            self._held.close()
            self._login_lease.close()
            if self._release is not None:
                self._release()
            if self._vm_socket is not None:
                self._vm_socket.close()
            if self._login is not None:
                self._log.info(
                    "ssh connection ended",
                    **self._facts(self._login),
                    seconds=round(time.monotonic() - self._began, 1),
                    reason=self._reason or "the gateway has ended",
                )

    def end(self, reason: str) -> None:
        """Have the client disconnected. Its connection to the VM ends whatever the gateway does."""
        if not self._reason:
            self._reason = reason
            self._packets.send(EndClient(reason))
            asyncio.get_running_loop().call_later(_LEAVE_TIMEOUT, self._packets.close)

    def _disconnect(self) -> None:
        if self._vm_socket is not None:
            with contextlib.suppress(OSError):
                self._vm_socket.shutdown(socket.SHUT_RDWR)

    def _facts(self, login: Login) -> dict[str, str | None]:
        return {
            "address": self._address,
            "vm": login.vm,
            "user": login.user,
            "identity": login.caller.identity,
        }

    # What the gateway says

    def _received(self, message: OfClient, _: object) -> None:
        if self._messages.allow(None):
            raise ProtocolViolation
        match message:
            case Authenticate() if self._login is None and self._attempts < _ATTEMPTS:
                self._attempts += 1
                self._answer(self._authenticate(message))
            case Leave():
                self._reason = self._reason or message.reason
                self._closed.set()
            case Open() if self._login is not None and self._opens < _ATTEMPTS and not self._logged_in:
                self._opens += 1
                self._answer(self._open(self._login))
            case Sign() if self._may_sign:
                self._may_sign = False
                self._packets.send(self._sign(message.data))
            case LoggedIn() if self._attached is not None and not self._logged_in:
                self._logged_in = True
                self._login_lease.close()
                self._attached.boot.ended.add_done_callback(self._on_boot_end)
            case Wake() if self._logged_in:
                if not self._waking:
                    self._waking = True
                    self._tasks.start(self._wake(), "wake a VM for SSH")
            case Look() if self._attached is not None and self._logged_in:
                self._look()
                if self._attached.eviction.done():
                    self._packets.send(Asleep(self._attached.eviction.result().reason))
            case Touch() if self._attached is not None:
                if not self._attached.eviction.done():
                    self._attached.touch()
            case Hold() if self._attached is not None:
                self._holding = message.held
                self._hold(self._attached)
            case _:
                raise ProtocolViolation

    def _answer(self, work: Coroutine[Any, Any, Message | None]) -> None:
        if self._busy:
            work.close()
            raise ProtocolViolation
        self._busy = True
        self._tasks.start(self._answered(work), "answer the SSH gateway")

    async def _answered(self, work: Coroutine[Any, Any, Message | None]) -> None:
        works_on(self)
        try:
            answer = await work
        except SteadError as error:
            answer = Failed(str(error))
        except Exception as error:
            self._log.error("ssh connection failed", error=repr(error), exc_info=error)
            answer = Failed("internal error")
        self._busy = False
        if answer is not None:
            self._packets.send(answer)

    # Login

    async def _authenticate(self, request: Authenticate) -> Message:
        parts = self._parts
        self.trace, self._address = request.trace, request.address
        self._log = log.bind(trace=request.trace)
        try:
            login = await parts.access.check(request.vm, request.user, request.token)
        except LoginRefused as error:
            if parts.failures.allow(client_network(request.address, request.port)):
                return Refused(str(error), _REFUSAL_DELAY)
            self._log.warning(
                "ssh login refused",
                address=request.address,
                vm=request.vm,
                user=request.user,
                reason=str(error),
            )
            return Refused(str(error), 0.0)
        self._login = login
        self._login_limit.reschedule(None)
        check = repeat("check of an SSH login", partial(self._recheck, login), _RECHECK)
        self._tasks.start(check, "check an SSH login again")
        return Accepted(login.user)

    async def _recheck(self, login: Login) -> None:
        """End the connection once its login is not accepted any more."""
        if self._attached is not None and self._attached.eviction.done():
            self._look()
        try:
            await self._parts.access.recheck(login)
        except LoginRefused as error:
            self.end(str(error))

    # The connection into the VM

    async def _open(self, login: Login) -> Message | None:
        """Wake or start the VM and connect to its SSH server."""
        if self._release is None:
            caller = login.caller
            self._release = await self._parts.connections.acquire(caller.account, caller.identity)
            self._log.info("ssh login", **self._facts(login))
        for _ in range(_ATTEMPTS):
            self._login_lease.close()
            attached = await self._parts.machines.attached(login.vm, Use.SSH)
            self._login_lease.enter_context(attached.lease())
            async with in_background(self._connect(login.vm, attached)) as connecting:
                either: set[asyncio.Future[Any]] = {connecting, attached.eviction}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if connecting.done() and not (attached.eviction.done() and connecting.exception()):
                    opened, connection = connecting.result()
                    self._pass(attached, opened, connection)
                    return None
        raise VmLoginFailed(f"{attached.eviction.result().reason} during the login")

    def _pass(self, attached: Attached, opened: Opened, connection: socket.socket) -> None:
        self._disconnect()
        if self._vm_socket is not None:
            self._vm_socket.close()
        self._vm_socket = connection
        self._busy, self._may_sign = False, True
        self._packets.send(opened, connection)
        self._attach(attached)

    async def _connect(self, vm: str, attached: Attached) -> tuple[Opened, socket.socket]:
        key = self._key = self._parts.keys.setdefault(attached.agent, VmKey())
        try:
            host_keys = await admit_gateway(attached.agent, vm, key.public_line)
        except GuestError as error:
            raise VmLoginFailed(f"VM {vm} does not prepare SSH: {error}") from error
        try:
            async with asyncio.timeout(_LISTEN_TIMEOUT):
                connection = await self._dial(vm)
        except TimeoutError as error:
            raise VmLoginFailed(
                f"nothing listens on port {_PORT} of VM {vm}: run `systemctl start ssh.socket` in it"
            ) from error
        return Opened(list(host_keys), key.public_data), connection

    async def _dial(self, vm: str) -> socket.socket:
        while True:
            try:
                return await self._parts.machines.dial(vm, _PORT)
            except OSError:
                await asyncio.sleep(_POLL)

    def _sign(self, data: bytes) -> Message:
        login, key = self._login, self._key
        signature = None if login is None or key is None else key.sign_login(data, login.user)
        return Failed("the login to the VM was not signed") if signature is None else Signed(signature)

    # Suspends

    def _attach(self, attached: Attached) -> None:
        self._detach()
        self._attached = attached
        self._hold(attached)
        attached.eviction.add_done_callback(self._on_eviction)
        if self._logged_in:
            attached.boot.ended.add_done_callback(self._on_boot_end)

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.eviction.remove_done_callback(self._on_eviction)
            self._attached.boot.ended.remove_done_callback(self._on_boot_end)

    def _hold(self, attached: Attached) -> None:
        """Hold a lease on the VM as long as the gateway wants it."""
        self._held.close()
        if self._holding:
            self._held.enter_context(attached.lease())

    def _on_eviction(self, eviction: "asyncio.Future[Eviction]") -> None:
        if not eviction.cancelled():
            self._packets.send(Asleep(eviction.result().reason))

    def _on_boot_end(self, ended: "asyncio.Future[Eviction]") -> None:
        if not ended.cancelled():
            self.end(ended.result().reason)

    def _look(self) -> None:
        """Tell the gateway if another use has woken the VM."""
        if self._login is None or self._attached is None or not self._logged_in:
            return
        if not self._attached.eviction.done():
            self._packets.send(Awake())
            return
        try:
            attached = self._parts.machines.reattached(self._login.vm, self._attached)
        except GuestRestarted as error:
            self.end(str(error))
            return
        if attached is not None:
            self._attach(attached)
            self._packets.send(Awake())

    async def _wake(self) -> None:
        try:
            self._packets.send(await self._woken())
        except (WrongState, MachineNotFound, GuestRestarted) as error:
            # This connection cannot continue.
            self._packets.send(NotWoken(str(error)))
            self.end(str(error))
        except SteadError as error:
            self._packets.send(NotWoken(str(error)))
        finally:
            self._waking = False

    async def _woken(self) -> Message:
        login, before = self._login, self._attached
        assert login is not None and before is not None  # noqa: S101  # it has logged in
        if before.eviction.done():
            try:
                async with asyncio.timeout(_WAKE_TIMEOUT):
                    attached = await self._parts.machines.attached_again(login.vm, before, Use.SSH)
            except TimeoutError:
                raise StartFailed(f"VM {login.vm} did not wake within {_WAKE_TIMEOUT:g} s") from None
            if self._attached is before:
                self._attach(attached)
        return Awake()
