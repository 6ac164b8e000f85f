"""Lifecycle events of VMs: what happened and why, for the log that users read and for callers that wait."""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

from stead.machines.records import Record
from stead.processes import ProcessId

REQUESTED = "requested"
_MAX_UNHEARD = 1000


class EventKind(StrEnum):
    CREATED = "created"
    STARTED = "started"
    """Booted from disk."""
    WOKEN = "woken"
    """Resumed from the memory that was saved when it was suspended."""
    PAUSED = "paused"
    """By the host, whose disk is nearly full; its state stays `running`."""
    CONTINUED = "continued"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    KILLED = "killed"
    CRASHED = "crashed"
    """The guest's kernel panicked or its QEMU ended, and no caller asked for it."""
    START_FAILED = "failed to start"
    LOST = "lost"
    """Its disk is incomplete; it can only be deleted."""
    DELETED = "deleted"


FAILURES = frozenset({EventKind.CRASHED, EventKind.START_FAILED, EventKind.LOST})


class Origin(Enum):
    """Who a VM is woken or started for."""

    OWNER = "owner"
    """A caller with a credential for the VM."""
    STRANGER = "stranger"
    """Anyone who can send it a request or a packet: nothing may be deleted for it."""


class Use(StrEnum):
    """What a VM is needed for; the log line of a wake or start names it."""

    COMMAND = "command"
    FILES = "file access"
    WATCH = "file watch"
    TERMINAL = "terminal"
    PROCESS = "process"
    FORWARD = "forwarded port"
    DOMAIN = "request for a mapped domain"
    SSH = "SSH connection"
    NETWORK = "packet in its VPC"
    GUEST = "guest access"
    START = "start request"
    STOP = "stop request"
    FORK = "fork"
    RESIZE = "resize"

    @property
    def origin(self) -> Origin:
        # The gateway of SSH checks a token before it wakes a VM.
        return Origin.STRANGER if self in (Use.DOMAIN, Use.NETWORK) else Origin.OWNER


@dataclass(frozen=True)
class MachineEvent:
    kind: EventKind
    record: Record
    """The VM as it was before the event when it ended its run; else as it is now."""
    reason: str | None = None
    row_removed: bool = False
    """Deleted with its id: it cannot be recreated under it."""
    console: str | None = None
    """The end of the guest's console output, of a run that failed."""

    @property
    def message(self) -> str:
        """`VM abc suspended: idle for 300 s`."""
        return f"VM {self.record.id} {status(self.kind, self.reason)}"

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES

    @property
    def instance(self) -> str | None:
        run = self.record.run
        return None if run is None else instance_id(self.record.id, run.process)


OnEvent = Callable[[MachineEvent], None]


def status(kind: EventKind, reason: str | None) -> str:
    """How a run ended, in words: `stopped`, `crashed: guest kernel panicked`."""
    return kind.value if reason is None else f"{kind.value}: {reason}"


def instance_id(machine_id: str, process: ProcessId) -> str:
    """The id of a VM's run: a new one after every start."""
    return hashlib.sha256(f"{machine_id} {process.pid} {process.started}".encode()).hexdigest()[:20]


class Events:
    """Reports lifecycle events to one listener, and the end of a run to callers that wait for it."""

    def __init__(self) -> None:
        # Recovery comes before the listener: its events wait here.
        self._unheard: deque[MachineEvent] = deque(maxlen=_MAX_UNHEARD)
        self._on_event: OnEvent = self._unheard.append
        self._exits: dict[str, set[asyncio.Future[str]]] = {}

    def listen(self, on_event: OnEvent) -> None:
        """Report every event to this, first those of the recovery at start."""
        self._on_event = on_event
        while self._unheard:
            on_event(self._unheard.popleft())

    def report(
        self,
        kind: EventKind,
        record: Record,
        *reasons: str | None,
        removed: bool = False,
        console: str | None = None,
    ) -> None:
        said = "; ".join(reason for reason in reasons if reason)
        self._on_event(MachineEvent(kind, record, said or None, removed, console))

    @contextlib.contextmanager
    def exiting(self, machine_id: str) -> "Iterator[asyncio.Future[str]]":
        """The end of a VM's run if it comes inside the block: the result is why."""
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiters = self._exits.setdefault(machine_id, set())
        waiters.add(waiting)
        try:
            yield waiting
        finally:
            waiting.cancel()
            waiters.discard(waiting)
            if not waiters:
                self._exits.pop(machine_id, None)

    def tell_exit(self, machine_id: str, how: str) -> None:
        for waiting in list(self._exits.get(machine_id, ())):
            if not waiting.done():
                waiting.set_result(how)
