"""A handle on one machine."""

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address
from typing import Protocol

from stead.host import addresses
from stead.host.agent import Agent
from stead.host.execution import (
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
from stead.host.guest_files import GuestFiles
from stead.host.watching import FileEvent, watch
from stead.machines.lifecycle import STOP_TIMEOUT, persistence_of, size_of
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.snapshots import SnapshotInfo
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow


class Unchanged(Enum):
    """Stands for what is not to be changed, where None has a meaning."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


@dataclass(frozen=True)
class MachineInfo:
    """What is recorded of a machine.

    `reason` says why it is stopped, suspended or lost, or what its owner should know of a running one.
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
    """This run of it: another one after every start; None when it is not up."""
    layer: str | None
    """The frozen disk layer that it stands on."""


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


def instance_of(row: MachineRow) -> str | None:
    """The id of the current run: its QEMU process. None when it has none."""
    if row.pid is None:
        return None
    return hashlib.sha256(f"{row.id} {row.pid} {row.pid_started}".encode()).hexdigest()[:20]


class Keeper(Protocol):
    """Who has the machines: what a handle needs of it."""

    async def info(self, machine_id: str) -> MachineInfo: ...
    async def agent(self, machine_id: str) -> Agent: ...
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
    """A handle on one machine; cheap, and valid as long as the machine exists."""

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
        """Run a command to its end. A string is run by a non-login `sh`; a list is run as it is."""
        request = ExecRequest(command, cwd, env or {}, stdin, user, timeout)
        return await collect(await self._machines.agent(self.id), request, output_limit)

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
        """Run a command and yield its output as it comes, then how it ended."""
        request = ExecRequest(command, cwd, env or {}, stdin, user, timeout)
        agent = await self._machines.agent(self.id)
        async with contextlib.aclosing(follow(agent, request)) as events:
            async for event in events:
                yield event

    def files(self, user: str | None = None) -> GuestFiles:
        """The machine's files as a Linux user sees them; root by default."""
        return GuestFiles(lambda: self._machines.agent(self.id), user)

    @contextlib.asynccontextmanager
    async def watch(self, user: str | None = None) -> AsyncIterator[AsyncGenerator[FileEvent, None]]:
        """The changes on its disk that a Linux user may see, from here to the end of the block.

        While somebody watches, the machine is not put to sleep for being idle.
        """
        async with watch(await self.agent(), user) as events:
            yield events

    async def agent(self) -> Agent:
        """The link to its guest; a machine that is down is brought up for it."""
        return await self._machines.agent(self.id)

    async def out_of_memory(self) -> list[OutOfMemory]:
        """The last processes that the guest's kernel ended for want of memory."""
        agent = await self._machines.agent(self.id)
        answer = await agent.call("GET", "/v1/oom")
        return [parse_oom(event) for event in answer["events"]]

    async def start(
        self,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None:
        """Wake or boot it. With `ready_timeout`, wait that many seconds for its services to be ready."""
        await self._machines.start(
            self.id,
            idle_timeout=idle_timeout,
            activity_threshold=activity_threshold,
            ready_timeout=ready_timeout,
        )

    async def suspend(self) -> None:
        """Keep memory and disk and end the process; the next use wakes it."""
        await self._machines.suspend(self.id)

    async def snapshot(
        self, name: str | None = None, persistence: SnapshotPersistence = PERSISTENT
    ) -> SnapshotInfo:
        """Keep memory and disk as they are now; the machine goes on."""
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
        """Change what it has; a running machine is stopped for it and started again."""
        await self._machines.resize(self.id, vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib)

    async def wait_for_exit(self) -> str:
        """Wait until it is no longer running; says why."""
        return await self._machines.wait_for_exit(self.id)

    async def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        await self._machines.stop(self.id, timeout)

    async def kill(self) -> None:
        await self._machines.kill(self.id)

    async def delete(self, *, forget: bool = False) -> None:
        """Remove it. One that may be made anew keeps its name, unless it is to be forgotten."""
        await self._machines.delete(self.id, forget=forget)
