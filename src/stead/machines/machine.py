"""A handle on one VM, and what is recorded of it."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from stead import addresses
from stead.guest.agent import Agent, parsing
from stead.guest.execution import (
    DEFAULT_OUTPUT_LIMIT,
    Ended,
    ExecRequest,
    ExecResult,
    OutOfMemory,
    Output,
    collect,
    follow,
    parse_oom,
)
from stead.guest.files import GuestFiles
from stead.guest.watching import FileEvent, watch
from stead.host.interface import Nic
from stead.machines.events import Use, instance_id
from stead.machines.lifetimes import FOREVER, Lifetime
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.records import nic_of, persistence_of, size_of
from stead.machines.snapshots import SnapshotInfo
from stead.machines.start import Attached
from stead.machines.states import State
from stead.machines.stop import STOP_TIMEOUT
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.processes import ProcessId
from stead.settings import Size
from stead.shares import Reserve, unlimited
from stead.store.machines import MachineRow

if TYPE_CHECKING:
    from stead.machines.machines import Machines


@dataclass(frozen=True)
class MachineInfo:
    """A VM as recorded.

    `reason` says why it is stopped, suspended or lost, or is a note on how a running VM came up.
    """

    id: str
    name: str | None
    state: State
    size: Size
    address: IPv4Address
    """Where the host reaches it. Its guest has this address too, unless it is in a VPC."""
    hostname: str
    reason: str | None
    created_at: float
    snapshot: str | None
    persistence: Persistence
    idle_timeout: int | None
    activity_threshold: int
    recreate: bool
    last_traffic: float | None
    """When its data NIC last had IPv4 traffic, to within the interval of the idle check; None when never."""
    account: str | None
    purpose: str
    workdir: str | None
    build: str | None
    instance: str | None
    """Id of its current run: a new one after every start; None when it has no process."""
    layer: str | None
    """The read-only disk layer below its own."""
    nic: Nic | None
    """Its VPC, and its address there."""

    def belongs_to(self, account: str) -> bool:
        """Whether an account sees and uses it: VMs of builds are not theirs yet."""
        return self.account == account and self.purpose == "use"

    @property
    def is_deleted(self) -> bool:
        """Deleted, or about to be: what is left of a VM with `recreate` is for its account alone."""
        return self.state in {State.DELETING, State.DELETED}


_STATES = {state.value: state for state in State}


def machine_info(row: MachineRow) -> MachineInfo:
    instance = None
    if row.pid is not None and row.pid_started is not None:
        instance = instance_id(row.id, ProcessId(row.pid, row.pid_started))
    return MachineInfo(
        id=row.id,
        name=row.name,
        state=_STATES.get(row.state, State.LOST),
        size=size_of(row),
        address=addresses.machine_address(row.slot),
        hostname=row.hostname,
        reason="being recreated" if row.recreated else row.reason,
        created_at=row.created_at / 1e9,
        snapshot=row.snapshot,
        persistence=persistence_of(row),
        idle_timeout=row.idle_timeout,
        activity_threshold=row.activity_threshold,
        recreate=row.recreate,
        last_traffic=None if row.traffic_at is None else row.traffic_at / 1e9,
        account=row.account,
        purpose=row.purpose,
        workdir=row.workdir,
        build=row.build,
        instance=instance,
        layer=row.layer,
        nic=nic_of(row),
    )


class Machine:
    """A handle on one VM, with the operations of `Machines` on it; cheap, valid as long as the VM exists."""

    def __init__(self, machines: "Machines", machine_id: str) -> None:
        self.id = machine_id
        self._machines = machines

    async def info(self) -> MachineInfo:
        return await self._machines.info(self.id)

    async def rename(self, name: str | None) -> MachineInfo:
        """Change or remove its name, in any state. Its hostname and id stay."""
        return await self._machines.rename(self.id, name)

    async def wait_for_exit(self) -> str:
        """Wait until it is no longer running; returns why."""
        return await self._machines.wait_for_exit(self.id)

    # Lifecycle

    async def start(
        self,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None:
        """Wake or boot it. With `ready_timeout`, wait up to that many seconds for its services."""
        await self._machines.start(
            self.id,
            idle_timeout=idle_timeout,
            activity_threshold=activity_threshold,
            ready_timeout=ready_timeout,
        )

    async def suspend(self) -> None:
        """Save its memory and end its process; the next use wakes it."""
        await self._machines.suspend(self.id)

    async def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Shut it down; after `timeout` seconds it is killed, and its reason says so."""
        await self._machines.stop(self.id, timeout)

    async def kill(self) -> None:
        """End it at once, like a power cut; its disk stays."""
        await self._machines.kill(self.id)

    async def delete(self, *, forget: bool = False) -> None:
        """Delete it with its disk and memory.

        One with `recreate` keeps its row, until it is deleted a second time or with `forget`.
        """
        await self._machines.delete(self.id, forget=forget)

    async def snapshot(
        self,
        name: str | None = None,
        *,
        persistence: SnapshotPersistence = PERSISTENT,
        lifetime: Lifetime = FOREVER,
    ) -> SnapshotInfo:
        """Capture its memory and disk while it keeps running; of a stopped VM, the disk."""
        return await self._machines.snapshot(self.id, name, persistence=persistence, lifetime=lifetime)

    async def fork(
        self,
        count: int = 1,
        *,
        persistence: Persistence | None = None,
        name: str | None = None,
        request: str | None = None,
    ) -> "list[Machine]":
        """New VMs with its current memory, processes and files: all of them, or none.

        One child gets `name`; several get `name-1`, `name-2` and so on.
        """
        return await self._machines.fork(self.id, count, persistence=persistence, name=name, request=request)

    async def resize(
        self, *, vcpus: int | None = None, memory_mib: int | None = None, disk_gib: int | None = None
    ) -> None:
        """Change its size; a running VM is restarted for it. Disks cannot shrink."""
        await self._machines.resize(self.id, vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib)

    # Use of its guest

    def using(self, use: Use = Use.GUEST) -> AbstractAsyncContextManager[Agent]:
        """A lease on its guest: it is not suspended for being idle inside the block.

        If it is suspended it is woken, if it is stopped it is started; the log line names `use`.
        """
        return self._machines.using(self.id, use)

    async def attached(self, use: Use) -> Attached:
        """Wake or start it like `using`, without a lease: an attached client does not hold it awake."""
        return await self._machines.attached(self.id, use)

    async def ensure_up(self, use: Use) -> None:
        """Wait for the operation under way, then wake or start it."""
        await self._machines.ensure_up(self.id, use)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterator[bytes] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        reserve: Reserve = unlimited,
    ) -> ExecResult:
        """Run a command to its end. A string runs in a non-login `sh`, a list without a shell.

        `reserve` is asked for the memory of its output, see `collect`.
        """
        request = ExecRequest(command, cwd, env or {}, stdin, user, timeout)
        async with self.using(Use.COMMAND) as agent:
            return await collect(agent, request, output_limit, reserve)

    async def stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterator[bytes] | None = None,
        user: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Output | Ended, None]:
        """Run a command; yields its output as it arrives, then how it ended."""
        request = ExecRequest(command, cwd, env or {}, stdin, user, timeout)
        async with (
            self.using(Use.COMMAND) as agent,
            contextlib.aclosing(follow(agent, request)) as events,
        ):
            async for event in events:
                yield event

    def files(self, user: str | None = None) -> GuestFiles:
        """The VM's files with the permissions of a Linux user; root by default."""
        return GuestFiles(lambda: self.using(Use.FILES), user)

    @contextlib.asynccontextmanager
    async def watch(self, user: str | None = None) -> AsyncIterator[AsyncGenerator[FileEvent, None]]:
        """File changes that a Linux user may see, until the end of the block.

        An open watch counts as activity: the VM is not suspended for being idle.
        """
        async with self.using(Use.WATCH) as agent, watch(agent, user) as events:
            yield events

    async def out_of_memory(self) -> list[OutOfMemory]:
        """The last processes that the guest's OOM killer ended."""
        async with self.using() as agent:
            answer = await agent.call("GET", "/v1/oom")
        with parsing("GET /v1/oom"):
            return [parse_oom(event) for event in answer["events"]]
