"""The terminals of suspended VMs, so that a list of them does not wake the VM."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable
from stead.guest.agent import Agent
from stead.guest.sessions import Session, find

_MAX_VMS = 1000
_MAX_TEXT = 64 << 10
"""Characters in the terminals of one VM: the guest chooses titles and commands."""
_TIMEOUT = scaled(5.0)


class SuspendedTerminals:
    """What the guests listed last, in memory: after a restart of the server, a list wakes the VM."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Sequence[Session]] = OrderedDict()

    async def remember(self, machine_id: str, agent: Agent) -> None:
        """Ask a guest for its terminals, before it is suspended."""
        self._known.pop(machine_id, None)
        try:
            async with asyncio.timeout(_TIMEOUT):
                found = [each for each in await find(agent, "terminal") if not each.exited]
        except (GuestError, GuestUnreachable, TimeoutError):
            return
        if sum(len(each.title) + sum(map(len, each.argv)) for each in found) <= _MAX_TEXT:
            self._known[machine_id] = found
            if len(self._known) > _MAX_VMS:
                self._known.popitem(last=False)

    def get(self, machine_id: str) -> Sequence[Session] | None:
        """The terminals of a VM that is suspended now; None when they are not known."""
        return self._known.get(machine_id)
