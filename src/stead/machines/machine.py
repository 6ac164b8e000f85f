"""A handle on one VM, and what is recorded of it."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from typing import TYPE_CHECKING

from stead import addresses
from stead.guest.agent import parsing
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
from stead.machines.persistence import Persistence
from stead.machines.records import nic_of, persistence_of, size_of
from stead.machines.states import State
from stead.processes import ProcessId
from stead.settings import Size
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
        reason=row.reason,
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
        self.info = partial(machines.info, machine_id)
        self.using = partial(machines.using, machine_id)
        self.attached = partial(machines.attached, machine_id)
        self.ensure_up = partial(machines.ensure_up, machine_id)
        self.start = partial(machines.start, machine_id)
        self.suspend = partial(machines.suspend, machine_id)
        self.snapshot = partial(machines.snapshot, machine_id)
        self.fork = partial(machines.fork, machine_id)
        self.rename = partial(machines.rename, machine_id)
        self.resize = partial(machines.resize, machine_id)
        self.wait_for_exit = partial(machines.wait_for_exit, machine_id)
        self.stop = partial(machines.stop, machine_id)
        self.kill = partial(machines.kill, machine_id)
        self.delete = partial(machines.delete, machine_id)

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
    ) -> ExecResult:
        """Run a command to its end. A string runs in a non-login `sh`, a list without a shell."""
        request = ExecRequest(command, cwd, env or {}, stdin, user, timeout)
        async with self.using(Use.COMMAND) as agent:
            return await collect(agent, request, output_limit)

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
        return GuestFiles(partial(self.using, Use.FILES), user)

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
