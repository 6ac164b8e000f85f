"""A handle on one VM."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address
from typing import Protocol

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
from stead.machines.events import Use, instance_of
from stead.machines.lifecycle import STOP_TIMEOUT, persistence_of, size_of
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.snapshots import SnapshotInfo
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow


class Unchanged(Enum):
    """Sentinel for "do not change" where None has a meaning."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


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


def machine_info(row: MachineRow) -> MachineInfo:
    return MachineInfo(
        id=row.id,
        name=row.name,
        state=State(row.state),
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
        instance=instance_of(row),
        layer=row.layer,
    )


class Keeper(Protocol):
    """What a handle needs of `Machines`."""

    async def info(self, machine_id: str) -> MachineInfo: ...
    async def agent(self, machine_id: str, use: Use = Use.GUEST) -> Agent: ...
    async def start(
        self,
        machine_id: str,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None: ...
    async def suspend(self, machine_id: str) -> None: ...
    async def snapshot(
        self, machine_id: str, *, name: str | None = None, persistence: SnapshotPersistence = ...
    ) -> SnapshotInfo: ...
    async def fork(
        self,
        machine_id: str,
        count: int = 1,
        *,
        persistence: Persistence | None = None,
        name: str | None = None,
    ) -> list["Machine"]: ...
    async def rename(self, machine_id: str, name: str | None) -> MachineInfo: ...
    async def resize(
        self,
        machine_id: str,
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_gib: int | None = None,
    ) -> None: ...
    async def wait_for_exit(self, machine_id: str) -> str: ...
    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None: ...
    async def kill(self, machine_id: str) -> None: ...
    async def delete(self, machine_id: str, *, forget: bool = False) -> None: ...


class Machine:
    """A handle on one VM; cheap, and valid as long as the VM exists."""

    def __init__(self, machines: Keeper, machine_id: str) -> None:
        self._machines = machines
        self.id = machine_id

    async def info(self) -> MachineInfo:
        return await self._machines.info(self.id)

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
        return await collect(await self._machines.agent(self.id, Use.COMMAND), request, output_limit)

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
        agent = await self._machines.agent(self.id, Use.COMMAND)
        async with contextlib.aclosing(follow(agent, request)) as events:
            async for event in events:
                yield event

    def files(self, user: str | None = None) -> GuestFiles:
        """The VM's files with the permissions of a Linux user; root by default."""
        return GuestFiles(lambda: self._machines.agent(self.id, Use.FILES), user)

    @contextlib.asynccontextmanager
    async def watch(self, user: str | None = None) -> AsyncIterator[AsyncGenerator[FileEvent, None]]:
        """File changes that a Linux user may see, until the end of the block.

        An open watch counts as activity: the VM is not suspended for being idle.
        """
        async with watch(await self.agent(Use.WATCH), user) as events:
            yield events

    async def agent(self, use: Use = Use.GUEST) -> Agent:
        """The connection to its guest; wakes or starts a VM that is down. The log names `use` then."""
        return await self._machines.agent(self.id, use)

    async def out_of_memory(self) -> list[OutOfMemory]:
        """The last processes that the guest's OOM killer ended."""
        agent = await self._machines.agent(self.id)
        answer = await agent.call("GET", "/v1/oom")
        with parsing("GET /v1/oom"):
            return [parse_oom(event) for event in answer["events"]]

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

    async def snapshot(
        self, name: str | None = None, persistence: SnapshotPersistence = PERSISTENT
    ) -> SnapshotInfo:
        """Capture its memory and disk while it keeps running."""
        return await self._machines.snapshot(self.id, name=name, persistence=persistence)

    async def fork(
        self, count: int = 1, persistence: Persistence | None = None, name: str | None = None
    ) -> "list[Machine]":
        """New VMs, each with the current memory, processes and files of this one.

        One child gets `name`; several get `name-1`, `name-2` and so on.
        """
        return await self._machines.fork(self.id, count, persistence=persistence, name=name)

    async def rename(self, name: str | None) -> MachineInfo:
        """Change or remove its name; its hostname and id stay."""
        return await self._machines.rename(self.id, name)

    async def resize(
        self, *, vcpus: int | None = None, memory_mib: int | None = None, disk_gib: int | None = None
    ) -> None:
        """Change its size; a running VM is restarted for it."""
        await self._machines.resize(self.id, vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib)

    async def wait_for_exit(self) -> str:
        """Wait until it is no longer running; returns why."""
        return await self._machines.wait_for_exit(self.id)

    async def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        await self._machines.stop(self.id, timeout)

    async def kill(self) -> None:
        await self._machines.kill(self.id)

    async def delete(self, *, forget: bool = False) -> None:
        """Delete it. One with `recreate` keeps its id, unless `forget` is set."""
        await self._machines.delete(self.id, forget=forget)
