"""Wire models of VMs."""

import functools
from typing import Annotated, Any, Literal

from pydantic import Field

from stead.api.wire import LARGEST, Time, Wire
from stead.api.wire.lifetimes import LifetimeFields
from stead.api.wire.numbers import Count, Gigabytes, Rounded
from stead.api.wire.unknown import Tracked
from stead.creation.results import CreatedVm
from stead.errors import InvalidRequest
from stead.machines import Ephemeral, MachineInfo, Persistent, State, Sticky
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.snapshots import SnapshotPurpose
from stead.settings import Size

VmState = Literal["building", "starting", "running", "suspending", "suspended", "stopped", "lost"]

_STATES: dict[State, VmState] = {
    State.PREPARING: "starting",
    State.PREPARED: "starting",
    State.CREATING: "starting",
    State.STARTING: "starting",
    State.RUNNING: "running",
    State.SUSPENDING: "suspending",
    State.STOPPING: "suspending",
    State.SUSPENDED: "suspended",
    State.STOPPED: "stopped",
    State.DELETING: "stopped",
    State.DELETED: "stopped",
    State.LOST: "lost",
}
"""The wire format has no state for a VM that is shutting down; `suspending` is the closest."""


def wire_state(state: State) -> VmState:
    return _STATES[state]


class PersistenceModel(Tracked):
    """When a VM or snapshot may be deleted: never, when the disk is full, or when it stops."""

    type: Literal["persistent", "sticky", "ephemeral"]
    priority: Count | None = Field(default=None, ge=0, le=10)
    delete_event: Literal["OnStop", "OnSuspend"] | None = None

    def persistence(self) -> Persistence:
        match self.type:
            case "sticky":
                return Sticky() if self.priority is None else Sticky(self.priority)
            case "ephemeral":
                return Ephemeral() if self.delete_event is None else Ephemeral(self.delete_event)
            case _:
                return PERSISTENT

    def of_snapshot(self) -> SnapshotPersistence:
        kept = self.persistence()
        if isinstance(kept, Ephemeral):
            raise InvalidRequest("invalid persistence ephemeral: a snapshot is persistent or sticky")
        return kept

    @staticmethod
    @functools.lru_cache
    def of(persistence: Persistence) -> "PersistenceModel":
        match persistence:
            case Persistent():
                return PersistenceModel(type="persistent")
            case Sticky():
                return PersistenceModel(type="sticky", priority=persistence.priority)
            case Ephemeral():
                return PersistenceModel(type="ephemeral", delete_event=persistence.delete_event)


class Sizing(Wire):
    vcpu_count: int
    mem_size_mib: int
    rootfs_size_mb: int


class VmNic(Wire):
    """The VPC that a VM is in, and its address there."""

    vpc: str
    mode: str = "routed"
    ipv4: str
    default: bool = True


class VmRow(Wire):
    """A VM in a list."""

    id: str
    state: VmState
    name: str | None = None
    created_at: Time
    last_network_activity: Time | None = None
    cpu_time_seconds: float | None = None
    snapshot_id: str | None = None
    deleted: bool = False
    created_declaratively: bool = False
    build_id: str | None = None
    persistence: PersistenceModel
    metrics: None = None
    sizing: Sizing
    address: str
    nics: list[VmNic] = Field(default_factory=list)

    @classmethod
    def of(cls, info: MachineInfo) -> "VmRow":
        return cls(**row_facts(info))


def row_facts(info: MachineInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "state": wire_state(info.state),
        "name": info.name,
        "created_at": info.created_at,
        "last_network_activity": info.last_traffic,
        "snapshot_id": info.snapshot,
        "deleted": info.state is State.DELETED,
        "created_declaratively": info.build is not None,
        "build_id": info.build,
        "persistence": PersistenceModel.of(info.persistence),
        "sizing": sizing(info.size),
        "address": str(info.address),
        "nics": [] if info.nic is None else [VmNic(vpc=info.nic.vpc, ipv4=str(info.nic.address))],
    }


@functools.lru_cache
def sizing(size: Size) -> Sizing:
    return Sizing(vcpu_count=size.vcpus, mem_size_mib=size.memory_mib, rootfs_size_mb=size.disk_gib * 1024)


class VmList(Wire):
    vms: list[VmRow]
    total_count: int
    running_count: int
    starting_count: int
    suspended_count: int
    stopped_count: int
    building_count: int
    suspending_count: int
    lost_count: int
    user_id: str


class VmDetails(VmRow):
    """One VM, with details that a list does not have."""

    recreate: bool
    vm_instance_id: str | None = None
    idle_timeout_seconds: int | None = None
    activity_threshold_bytes: int
    workdir: str | None = None
    reason: str | None = None

    @classmethod
    def of(cls, info: MachineInfo) -> "VmDetails":
        return cls(
            **row_facts(info),
            recreate=info.recreate,
            vm_instance_id=info.instance,
            idle_timeout_seconds=info.idle_timeout,
            activity_threshold_bytes=info.activity_threshold,
            workdir=info.workdir,
            reason=info.reason,
        )


class Created(Wire):
    id: str
    domains: list[str] = Field(default_factory=list)
    console_url: str | None = None
    snapshot_id: str | None = None
    created: bool = Field(default=True, description="False: it existed, and `ifMissing` was given.")

    @classmethod
    def of(cls, vm: CreatedVm) -> "Created":
        return cls(id=vm.id, domains=list(vm.domains), snapshot_id=vm.snapshot, created=vm.created)


class VmDeleted(Wire):
    id: str
    recreate: bool


class RenameVm(Wire):
    name: str | None = Field(description="The new name; null removes it.")


class Start(Wire):
    idle_timeout_seconds: Rounded | None = Field(
        default=None,
        le=LARGEST,
        description="Suspend after this many seconds without traffic; null: never; missing: unchanged.",
    )
    ready_signal_timeout_seconds: float | None = Field(default=None, gt=0, le=86_400)
    wait_for_ready_signal: bool | None = Field(
        default=None, description="Answer only when the VM's services have started."
    )
    activity_threshold_bytes: Rounded | None = Field(
        default=None, ge=0, le=LARGEST, description="Less traffic than this between two checks is ignored."
    )


class Started(Wire):
    id: str
    domains: list[str] = Field(default_factory=list)
    console_url: Annotated[str | None, Field(serialization_alias="console_url")] = None


class VmStopped(Wire):
    vm_id: str
    vm_instance_id: str


class VmSuspended(Wire):
    id: str
    vm_instance_id: str
    snapshot_layer_id: str


class VmRef(Wire):
    id: str


class Console(Wire):
    id: str
    console: str = Field(description="The last 64 KiB; the last 16 KiB of a run that failed.")
    running: bool


class Exited(Wire):
    id: str
    exit_status: str


class Optimized(Wire):
    id: str
    message: str


class Snapshot(LifetimeFields):
    name: str | None = None
    persistence: PersistenceModel | None = None
    purpose: SnapshotPurpose = Field(
        default="use", description="`agent`: saved so that the session of an agent can be resumed."
    )


class Snapshotted(Wire):
    snapshot_id: str
    source_vm_id: str
    source_vm_instance_id: str | None = None


class Fork(Wire):
    count: Count = Field(default=1, ge=1, le=100)
    name: str | None = Field(
        default=None, description="Name of the new VM; several get NAME-1, NAME-2 and so on."
    )
    persistence: PersistenceModel | None = None


class Forked(Wire):
    id: str
    name: str | None = None
    domains: list[str] = Field(default_factory=list)
    console_url: str | None = None


class Forks(Wire):
    vm_id: str
    forks: list[Forked]


class Resize(Wire):
    vcpu_count: Count | None = Field(default=None, description="A power of two.")
    mem_size_gb: Gigabytes | None = Field(
        default=None, allow_inf_nan=False, description="Memory in GiB; a power of two."
    )
    rootfs_size_gb: Count | None = Field(default=None, description="Disk in GiB; it can only grow.")
