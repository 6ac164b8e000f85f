"""The gate: decides about requests for mapped names that have no route file yet, and about failed ones.

Caddy asks it before it passes the first request on: the gate wakes the VM, waits until the port accepts
connections, writes the route file and answers with the address. Caddy then sends the unchanged request there.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Protocol

from stead.addresses import is_loopback, network_of
from stead.deadlines import scaled
from stead.edge import pages
from stead.edge.pages import Refusal
from stead.edge.refusals import RefusalLog
from stead.edge.routes import AwakeVm, MappedPort, RouteFiles, RouteSource, host_of
from stead.edge.unmapped import UnmappedFiles
from stead.errors import MachineNotFound, SteadError
from stead.shares import KeyedLimit, RateLimit, share_of
from stead.tasks import SingleFlight

_HOLD = scaled(30.0)
"""Seconds that a request waits for the port of a VM that was started for it."""
_BROWSER_HOLD = scaled(8.0)
"""The same for a browser, which then gets a page that reloads."""
_RUNNING_HOLD = scaled(5.0)
"""Seconds that a request waits for the port of a VM that was up: its server may be about to start."""
MAX_HELD = 1024
"""Requests that wait for a VM or its port, of which an account has a quarter. More are refused at once."""
_MAX_HELD_OF_VM = 128
_MAX_HELD_OF_CLIENT = 64
_WAKE_BURST, _WAKE_INTERVAL = 10, 2.0
"""Wakes that one client causes: at once, and seconds for one more. They use slots of the VMs' owners."""
_NOT_MAPPED_BURST, _NOT_MAPPED_INTERVAL = 100, 0.1
"""Requests of one client for names that are not mapped, and that Caddy does not know as such: at once, and
seconds for one more. Caddy closes the connection of a client that sends more."""
_POLL = 0.1
_DIAL_ERROR = "dial "
"""How Caddy's message of a failed connection starts. The VM has not seen the request then, and Caddy (from
2.11.4) has not read its body, so it can be sent again."""


class Vms(Protocol):
    def is_up(self, machine: str) -> bool: ...

    async def wake(self, machine: str) -> AwakeVm:
        """Wake or start a VM; MachineNotFound when it is gone."""

    async def ended(self, machine: str) -> None:
        """Wait until a VM has no process."""


Dial = Callable[[IPv4Address, int], Awaitable[None]]
"""Connects to a port of a VM; OSError when that fails."""


ConnectionsClosed = Callable[[str], Awaitable[object]]
"""Waits until the connections to a VM's last run are closed: a new one has the same address."""


@dataclass(frozen=True)
class GateRequest:
    """What Caddy says about a request."""

    host: str
    browser: bool = False
    error: str | None = None
    """Why the attempt to pass it on failed; None when there was none."""
    client: str = ""
    """The client's address."""


class Gate:
    def __init__(
        self,
        vms: Vms,
        source: RouteSource,
        files: RouteFiles,
        unmapped: UnmappedFiles,
        dial: Dial,
        connections_closed: ConnectionsClosed,
    ) -> None:
        self._vms = vms
        self._source = source
        self._files = files
        self._unmapped = unmapped
        self._refusals = RefusalLog()
        self._not_mapped = RateLimit(_NOT_MAPPED_BURST, _NOT_MAPPED_INTERVAL)
        self._wakes = RateLimit(_WAKE_BURST, _WAKE_INTERVAL)
        self._dial = dial
        self._connections_closed = connections_closed
        self._openings: SingleFlight[AwakeVm | None] = SingleFlight()
        self._held = KeyedLimit(MAX_HELD, share_of(MAX_HELD), per_caller=_MAX_HELD_OF_VM)
        self._held_by_client = KeyedLimit(per_key=_MAX_HELD_OF_CLIENT)

    async def close(self) -> None:
        await self._openings.close()

    async def admit(self, request: GateRequest) -> str | Refusal:
        """`ADDRESS:PORT` for a request, or why it is refused."""
        host = host_of(request.host)
        client = network_of(request.client)
        route = None if host is None else self._source.route(host)
        while host is not None and route is not None:
            if request.error is not None and not request.error.startswith(_DIAL_ERROR):
                # The VM may have seen the request, so it is not sent again: nothing to wake the VM for.
                return self._refusals.traced(pages.no_answer(host), host, route, request.error)
            with contextlib.ExitStack() as places:
                if not self._take_places(places, route, request.client):
                    return pages.starting(host)
                if not self._may_wake(route, request.client):
                    return pages.too_many()
                opened = await self._opened(host, route, browser=request.browser)
            before, route = route, self._source.route(host)
            if before == route:
                if isinstance(opened, Refusal):
                    return opened
                self._files.put(host, route, opened)
                return f"{opened.address}:{route.port}"
            # The mapping was changed meanwhile.
        if self._not_mapped.allow(client):
            return pages.too_many()
        if host is not None:
            self._unmapped.put(host, client)
        return pages.not_mapped(request.host[:255])

    def _take_places(self, places: contextlib.ExitStack, route: MappedPort, client: str) -> bool:
        """Take the places of a request that may wait; False without one.

        Each request that waits is a connection from Caddy to the gate. All clients on loopback may be those
        of one proxy: they have no limit by address.
        """
        taken = [self._held.try_acquire(route.account, route.machine)]
        if not is_loopback(client):
            taken.append(self._held_by_client.try_acquire(network_of(client)))
        for release in taken:
            if release is not None:
                places.callback(release)
        return None not in taken

    def _may_wake(self, route: MappedPort, client: str) -> bool:
        """Count the wake that a request starts; False if its client starts too many. Joining one is free."""
        if self._vms.is_up(route.machine) or self._openings.running((route.machine, route.port)):
            return True
        return is_loopback(client) or not self._wakes.allow(network_of(client))

    async def _opened(self, host: str, route: MappedPort, *, browser: bool) -> AwakeVm | Refusal:
        try:
            async with asyncio.timeout(_BROWSER_HOLD if browser else None):
                awake = await self._listening(host, route)
        except TimeoutError:
            return pages.starting(host)
        except MachineNotFound as error:
            return self._refusals.traced(pages.gone(host), host, route, str(error))
        except SteadError as error:
            return self._refusals.traced(pages.not_started(host), host, route, str(error))
        if awake is not None:
            return awake
        refused = pages.not_listening(host, route.port)
        return self._refusals.traced(refused, host, route, "nothing listens on the port")

    async def _listening(self, host: str, route: MappedPort) -> AwakeVm | None:
        """The VM once its port accepts connections; None when it does not in time, or the mapping changes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RUNNING_HOLD
        while True:
            was_up = self._vms.is_up(route.machine)
            awake = await self._openings.run(
                (route.machine, route.port), lambda: self._open(route), name=f"request for {host}"
            )
            if awake is not None or not was_up or loop.time() >= deadline:
                return awake
            if self._source.route(host) != route:
                return None

    async def _open(self, route: MappedPort) -> AwakeVm | None:
        """Wake the VM and wait for its port; None when the port does not accept connections.

        A VM that was up gets one attempt. The pause after a failed one is for all requests that wait.
        """
        await self._connections_closed(route.machine)
        was_up = self._vms.is_up(route.machine)
        awake = await self._vms.wake(route.machine)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (0 if was_up else _HOLD)
        while True:
            try:
                await self._dial(awake.address, route.port)
            except OSError:
                await asyncio.sleep(_POLL)
                if loop.time() >= deadline:
                    return None
            else:
                return awake
