"""Answers of the server as frozen dataclasses. Times have a zone; names of sizes contain the unit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from stead.sdk.errors import CommandFailed
from stead.sdk.parsing import parse_time
from stead.sdk.sizes import size_text

VmState = Literal["building", "starting", "running", "suspending", "suspended", "stopped", "lost"]
SnapshotState = Literal["building", "ready", "failed", "cancelled", "lost"]
BuildState = Literal["pending", "running", "succeeded", "failed"]
PhaseState = Literal["running", "succeeded", "failed"]
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
Permission = Literal["read", "write"]


@dataclass(frozen=True)
class Persistence:
    """How long a VM or a snapshot is kept.

    `persistent`: until you delete it. `sticky`: the server may delete it to free disk space, low `priority`
    (0 to 10) first. `ephemeral` (VMs only): the server deletes it when it is suspended or stops, or with
    `delete_event="OnStop"` only when it stops.
    """

    type: Literal["persistent", "sticky", "ephemeral"]
    priority: int | None = None
    delete_event: Literal["OnStop", "OnSuspend"] | None = None


@dataclass(frozen=True)
class Sizing:
    """The size of a VM in the units of the wire."""

    vcpu_count: int | None = None
    mem_size_mib: int | None = None
    rootfs_size_mb: int | None = None


@dataclass(frozen=True)
class VmInfo:
    """The properties of a VM."""

    id: str
    state: VmState
    name: str | None = None
    created_at: datetime | None = None
    last_network_activity: datetime | None = None
    cpu_time_seconds: float | None = None
    snapshot_id: str | None = None
    build_id: str | None = None
    deleted: bool = False
    recreate: bool = False
    created_declaratively: bool = False
    persistence: Persistence | None = None
    sizing: Sizing | None = None
    vm_instance_id: str | None = None
    idle_timeout_seconds: int | None = None
    activity_threshold_bytes: int | None = None
    address: str | None = None
    """Its IP address in the VM network of the host."""
    workdir: str | None = None
    reason: str | None = None
    """Why it is in this state, if the server gives a reason."""

    @property
    def size(self) -> str | None:
        """Its vCPUs, memory and disk, for example `2x4Gx20G`."""
        found = self.sizing or Sizing()
        return size_text(found.vcpu_count, found.mem_size_mib, found.rootfs_size_mb)


@dataclass(frozen=True)
class VmList:
    """VMs, and their number in each state. Iterates over the VMs."""

    vms: tuple[VmInfo, ...] = ()
    total_count: int = 0
    running_count: int = 0
    starting_count: int = 0
    suspended_count: int = 0
    stopped_count: int = 0
    building_count: int = 0
    suspending_count: int = 0
    lost_count: int = 0

    def __iter__(self) -> Iterator[VmInfo]:
        return iter(self.vms)

    def __len__(self) -> int:
        return len(self.vms)


@dataclass(frozen=True)
class CreatedVm:
    """A VM that was just created, and the host names that route to it."""

    id: str
    domains: tuple[str, ...] = ()
    name: str | None = None


@dataclass(frozen=True)
class ExecResult:
    """The result of a command. Output is text; bytes that are not UTF-8 become replacement characters."""

    status_code: int
    stdout: str = ""
    stderr: str = ""
    signal: str | None = None
    """The signal that killed it, if one did."""
    duration: float | None = None
    """Seconds that it ran in the VM."""
    stdout_truncated: bool = False
    """The server dropped output because there was too much."""
    stderr_truncated: bool = False
    command: str = ""

    @property
    def ok(self) -> bool:
        """The exit code is 0 and no signal killed it."""
        return self.status_code == 0 and self.signal is None

    def check(self) -> "ExecResult":
        """Return this result, or raise `CommandFailed` if the command failed."""
        if not self.ok:
            raise CommandFailed(self, self.command)
        return self


@dataclass(frozen=True)
class Output:
    """Output of a running command.

    `text` is decoded across chunks: a character that is split between two chunks comes with the second.
    """

    stream: Literal["stdout", "stderr"]
    data: bytes
    text: str


@dataclass(frozen=True)
class Exited:
    """The end of a command; always the last event."""

    status_code: int
    signal: str | None = None
    timed_out: bool = False
    duration: float | None = None

    @property
    def ok(self) -> bool:
        """The exit code is 0, no signal killed it, and it did not time out."""
        return self.status_code == 0 and not self.timed_out and self.signal is None


ExecEvent = Output | Exited


@dataclass(frozen=True)
class DirEntry:
    """An entry of a folder."""

    name: str
    kind: str
    """`file` or `directory`."""


@dataclass(frozen=True)
class FileStat:
    """Type, size, permissions and owner of a file."""

    name: str
    kind: FileKind
    size: int
    mode: int | None = None
    """Its permissions, for example 0o644."""
    uid: int | None = None
    gid: int | None = None
    owner: str | None = field(default=None, metadata={"wire": "user"})
    group: str | None = None
    mtime_ms: float | None = None
    target: str | None = None
    """The target of a symbolic link."""

    @property
    def is_file(self) -> bool:
        return self.kind == "file"

    @property
    def is_directory(self) -> bool:
        return self.kind == "directory"

    @property
    def is_symlink(self) -> bool:
        return self.kind == "symlink"

    @property
    def modified(self) -> datetime | None:
        return None if self.mtime_ms is None else datetime.fromtimestamp(self.mtime_ms / 1000, UTC)


@dataclass(frozen=True)
class FileEvent:
    """A change of a file."""

    event_type: str
    """`change` for its content; `rename` if it was created, deleted or renamed."""
    filename: str
    overflow: bool = False
    """Events were lost: anything below `filename` may have changed."""


@dataclass(frozen=True)
class SnapshotRef:
    """A snapshot that was just created; pass its `id` to `vms.create(snapshot_id=...)`."""

    id: str = field(metadata={"wire": "snapshotId"})
    source_vm_id: str | None = None
    source_vm_instance_id: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A saved VM, disk and memory, from which new VMs can be created."""

    id: str = field(metadata={"wire": "snapshotId"})
    state: SnapshotState = "ready"
    created_at: datetime | None = None
    name: str | None = None
    failed: bool = False
    cancelled: bool = False
    lost: bool = False
    deleted: bool = False
    persistence: Persistence | None = field(default=None, metadata={"wire": "snapshotPersistence"})
    source_vm_id: str | None = None
    account_id: str | None = None
    failure_reason: str | None = None
    build_id: str | None = None
    template_hash: str | None = None
    vcpu_count: int | None = None
    mem_size_mib: int | None = None
    rootfs_size_mb: int | None = None
    has_memory: bool | None = None
    """VMs created from it continue its running programs; without memory they boot."""
    size_bytes: int | None = None
    """Bytes on disk of its own memory and disk layers; None while it is being built."""

    @property
    def size(self) -> str | None:
        """The vCPUs, memory and disk of a VM created from it, for example `2x4Gx20G`."""
        return size_text(self.vcpu_count, self.mem_size_mib, self.rootfs_size_mb)


@dataclass(frozen=True)
class SnapshotList:
    """Snapshots, and their number in each state. Iterates over the snapshots."""

    snapshots: tuple[Snapshot, ...] = ()
    total_count: int = 0
    building_count: int = 0
    ready_count: int = 0
    failed_count: int = 0
    cancelled_count: int = 0
    lost_count: int = 0
    deleted_count: int = 0

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.snapshots)

    def __len__(self) -> int:
        return len(self.snapshots)


@dataclass(frozen=True)
class Build:
    """The build of a VM or snapshot from a spec."""

    id: str = field(metadata={"wire": "buildId"})
    state: BuildState
    account_id: str | None = None
    request_id: str | None = None
    template_hash: str | None = None
    failure_reason: str | None = None
    planned_phases: tuple[str, ...] = ()
    current_phase: str | None = None
    """The phase that runs now."""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def finished(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.state in ("succeeded", "failed")


@dataclass(frozen=True)
class BuildPhase:
    """A layer or step of a build. `snapshot_id` is a snapshot for debugging, if the server saved one."""

    id: str = field(metadata={"wire": "phaseId"})
    name: str
    build_id: str | None = None
    snapshot_id: str | None = None
    state: PhaseState | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    """None while it runs."""


@dataclass(frozen=True)
class BuildList:
    """Builds, newest first, and how many match in all. Iterates over the builds."""

    builds: tuple[Build, ...] = ()
    total_count: int = 0

    def __iter__(self) -> Iterator[Build]:
        return iter(self.builds)

    def __len__(self) -> int:
        return len(self.builds)


@dataclass(frozen=True)
class ServiceStates:
    """The services in one state."""

    active_state: str
    sub_state: str = ""
    services: tuple[str, ...] = ()


@dataclass(frozen=True)
class FailedServiceLog:
    """The last log lines of a failed service."""

    unit_name: str
    log: str = ""


@dataclass(frozen=True)
class SetupDiagnostics:
    """The state of the services of a VM whose setup failed."""

    service_states: tuple[ServiceStates, ...] = ()
    failed_service_logs: tuple[FailedServiceLog, ...] = ()
    additional_failed_service_logs: tuple[FailedServiceLog, ...] = ()


@dataclass(frozen=True)
class ServiceStatus:
    """The state of a systemd service, as systemd names it."""

    name: str
    active_state: str
    sub_state: str = ""
    load_state: str = ""
    description: str = ""

    @property
    def active(self) -> bool:
        """Whether systemd calls it active."""
        return self.active_state == "active"


@dataclass(frozen=True)
class ServiceLogLine:
    """A line that a service logged."""

    message: str
    timestamp: str | None = None
    priority: str | int | None = None
    unit: str | None = None


@dataclass(frozen=True)
class ServiceResult:
    """The result of starting, stopping or restarting one service."""

    service_id: str
    success: bool
    message: str = ""


@dataclass(frozen=True)
class Terminal:
    """A terminal session."""

    name: str
    status: str = ""
    created: str | None = None


@dataclass(frozen=True)
class TerminalLine:
    """A line of a terminal's output."""

    line: str
    timestamp: str | None = None


@dataclass(frozen=True)
class Whoami:
    """The account, and the identity, of the credentials."""

    account_id: str
    identity_id: str | None = None
    """Set if the credentials are an identity's access token."""


@dataclass(frozen=True)
class IdentityInfo:
    """An identity and how many VMs and repositories it has permissions for."""

    id: str
    managed: bool = False
    name: str | None = None
    created_at: datetime | None = None
    vm_grants: int | None = None
    repo_grants: int | None = None


@dataclass(frozen=True)
class IdentityList:
    """Identities from `offset` on, out of `total`. Iterates over the identities."""

    identities: tuple[IdentityInfo, ...] = ()
    offset: int = 0
    total: int = 0

    def __iter__(self) -> Iterator[IdentityInfo]:
        return iter(self.identities)

    def __len__(self) -> int:
        return len(self.identities)


@dataclass(frozen=True)
class Token:
    """A new access token. The server does not store or show the secret again."""

    id: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class VmPermission:
    """A permission of an identity for a VM: as any Linux user, or only as the allowed ones."""

    vm_id: str
    identity_id: str | None = None
    id: str | None = None
    allowed_users: tuple[str, ...] | None = None
    granted_at: datetime | None = None
    granted_by: str | None = None


@dataclass(frozen=True)
class GitPermission:
    """A permission of an identity for a repository."""

    repo: str
    identity: str | None = None
    access_level: Permission | None = None


@dataclass(frozen=True)
class GrantedRepo:
    """A repository that an identity may use."""

    id: str
    name: str | None = None
    account_id: str | None = None
    permissions: Permission | None = None
    visibility: Literal["public", "private"] | None = None


@dataclass(frozen=True)
class LogEntry:
    """A log line. `str()` of it is its message."""

    message: str
    timestamp: str = ""
    """RFC 3339 text from the server; it can be more precise than a datetime."""
    source: str | None = None
    level: str | None = None
    origin: str | None = None
    resource_type: str | None = None
    resource_id: str | None = None
    instance_id: str | None = None
    vm_service: str | None = None
    build_id: str | None = None

    @property
    def time(self) -> datetime | None:
        """The timestamp as a datetime."""
        return parse_time(self.timestamp)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class LogPage:
    """Log lines, and the token of the next page if there is one. Iterates over the lines."""

    logs: tuple[LogEntry, ...] = ()
    next_page_token: str | None = None

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self.logs)

    def __len__(self) -> int:
        return len(self.logs)
