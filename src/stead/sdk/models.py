"""Answers of the server as immutable models. Times have a zone; names of sizes contain the unit."""

from datetime import UTC, datetime
from typing import ClassVar, Literal

from msgspec import field

from stead.sdk.errors import CommandFailed
from stead.sdk.parsing import Listing, Model, Open, Time
from stead.sdk.sizes import size_text

VmState = Literal["building", "starting", "running", "suspending", "suspended", "stopped", "lost"]
SnapshotPurpose = Literal["use", "agent"]
SnapshotState = Literal["building", "ready", "failed", "cancelled", "lost"]
BuildState = Literal["pending", "running", "succeeded", "failed"]
PhaseState = Literal["running", "succeeded", "failed"]
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
Permission = Literal["read", "write"]


class Persistence(Model, frozen=True):
    """How long a VM or a snapshot is kept.

    `persistent`: until you delete it. `sticky`: the server may delete it to free disk space, low `priority`
    (0 to 10) first. `ephemeral` (VMs only): the server deletes it when it is suspended or stops, or with
    `delete_event="OnStop"` only when it stops.
    """

    type: Open[Literal["persistent", "sticky", "ephemeral"]]
    priority: int | None = None
    delete_event: Open[Literal["OnStop", "OnSuspend"]] | None = None


class Sizing(Model, frozen=True):
    """The size of a VM in the units of the wire."""

    vcpu_count: int | None = None
    mem_size_mib: int | None = None
    rootfs_size_mb: int | None = None


class VmNic(Model, frozen=True):
    """The VPC that a VM is in, and its address there."""

    vpc: str
    ipv4: str


class VmInfo(Model, frozen=True):
    """The properties of a VM."""

    id: str
    state: Open[VmState]
    name: str | None = None
    created_at: Time | None = None
    last_network_activity: Time | None = None
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
    nics: tuple[VmNic, ...] = ()
    """Its VPC and its address there; empty without one."""
    workdir: str | None = None
    reason: str | None = None
    """Why it is in this state, if the server gives a reason."""

    @property
    def size(self) -> str | None:
        """Its vCPUs, memory and disk, for example `2x4Gx20G`."""
        found = self.sizing or Sizing()
        return size_text(found.vcpu_count, found.mem_size_mib, found.rootfs_size_mb)


class VmList(Listing[VmInfo], frozen=True):
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


class CreatedVm(Model, frozen=True):
    """A VM that was just created, and the host names that route to it."""

    id: str
    domains: tuple[str, ...] = ()
    name: str | None = None
    created: bool = True


class ExecResult(Model, frozen=True):
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


class Output(Model, frozen=True):
    """Output of a running command.

    `text` is decoded across chunks: a character that is split between two chunks comes with the second.
    """

    stream: Literal["stdout", "stderr"]
    data: bytes
    text: str


class Exited(Model, frozen=True):
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


class OutputCut(Model, frozen=True):
    """Output of a process that the VM no longer holds: the bytes from `start` to `end`."""

    start: int = field(name="from")
    end: int = field(name="to")


ProcessEvent = Output | OutputCut | Exited


class PtySessionInfo(Model, frozen=True):
    """A recording of the output of commands that were run with `terminal`."""

    id: str = field(name="sessionId")
    running: bool = True
    cols: int = 80
    rows: int = 24
    attached_count: int = 0
    created_at_ms: float | None = None
    exited_at_ms: float | None = None
    exit_code: int | None = None
    """None while it runs; 128 plus the signal number if a signal ended it."""
    exec: str | None = None
    """The program; None for a login shell."""
    user: str | None = None
    """The Linux user; None for root."""
    suspended: bool = False
    """Its VM is suspended: the session continues when the VM wakes."""
    title: str = ""
    """The title that its program set."""

    @property
    def created_at(self) -> datetime | None:
        """When it was opened, in UTC."""
        return None if self.created_at_ms is None else datetime.fromtimestamp(self.created_at_ms / 1000, UTC)


class ProcessInfo(Model, frozen=True):
    """A background process."""

    id: str
    command: tuple[str, ...] = ()
    status: Open[Literal["running", "exited"]] = "running"
    exit_code: int | None = None
    """None while it runs; 128 plus the signal number if a signal ended it."""
    signal: str | None = None
    """The signal that ended it, if one did."""
    timed_out: bool = False
    """It reached its timeout and was killed."""
    user: str | None = None
    pid: int | None = None
    pty: bool = False
    cols: int | None = None
    rows: int | None = None
    created_at: Time | None = None
    exited_at: Time | None = None
    offset: int = 0
    """Bytes of output so far, both streams together."""
    start: int = 0
    """The offset of the oldest byte that the VM still holds."""

    @property
    def running(self) -> bool:
        """It has not ended."""
        return self.status != "exited"


class OutputChunk(Model, frozen=True):
    """Consecutive output of a process on one stream, from `offset` on."""

    stream: Literal["stdout", "stderr"]
    offset: int
    data: bytes


class ProcessOutput(Model, frozen=True):
    """Output of a process that the VM holds."""

    chunks: tuple[OutputChunk, ...] = ()
    next_offset: int = 0
    """The offset of the next call that continues this one."""
    cut: OutputCut | None = None
    """Requested output that the VM no longer holds."""
    process: ProcessInfo | None = None

    @property
    def stdout(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become replacement characters."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self._text("stderr")

    def _text(self, stream: str) -> str:
        return b"".join(each.data for each in self.chunks if each.stream == stream).decode(errors="replace")


class DirEntry(Model, frozen=True):
    """An entry of a folder."""

    name: str
    kind: str
    """`file` or `directory`."""


class FileStat(Model, frozen=True):
    """Type, size, permissions and owner of a file."""

    name: str
    kind: Open[FileKind]
    size: int
    mode: int | None = None
    """Its permissions, for example 0o644."""
    uid: int | None = None
    gid: int | None = None
    owner: str | None = field(default=None, name="user")
    group: str | None = None
    mtime_ms: float | None = None
    target: str | None = None
    """The target of a symbolic link."""

    @property
    def is_file(self) -> bool:
        """It is a regular file."""
        return self.kind == "file"

    @property
    def is_directory(self) -> bool:
        """It is a directory."""
        return self.kind == "directory"

    @property
    def is_symlink(self) -> bool:
        """It is a symbolic link."""
        return self.kind == "symlink"

    @property
    def modified(self) -> datetime | None:
        """When its content was last changed, in UTC."""
        return None if self.mtime_ms is None else datetime.fromtimestamp(self.mtime_ms / 1000, UTC)


class FileEvent(Model, frozen=True):
    """A change of a file."""

    event_type: str
    """`change` for its content; `rename` if it was created, deleted or renamed."""
    filename: str
    overflow: bool = False
    """Events were lost: anything below `filename` may have changed."""


class SnapshotRef(Model, frozen=True):
    """A snapshot that was just created; pass its `id` to `vms.create(snapshot_id=...)`."""

    id: str = field(name="snapshotId")
    source_vm_id: str | None = None
    source_vm_instance_id: str | None = None


class Snapshot(Model, frozen=True):
    """A saved VM, disk and memory, from which new VMs can be created."""

    id: str = field(name="snapshotId")
    state: Open[SnapshotState] = "ready"
    created_at: Time | None = None
    name: str | None = None
    failed: bool = False
    cancelled: bool = False
    lost: bool = False
    deleted: bool = False
    persistence: Persistence | None = field(default=None, name="snapshotPersistence")
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
    expires_at: Time | None = None
    """When the server deletes it by itself; None for never."""
    purpose: Open[SnapshotPurpose] = "use"
    """`agent`: a client of an agent framework saved it, to resume a session from it."""

    @property
    def size(self) -> str | None:
        """The vCPUs, memory and disk of a VM created from it, for example `2x4Gx20G`."""
        return size_text(self.vcpu_count, self.mem_size_mib, self.rootfs_size_mb)


class SnapshotList(Listing[Snapshot], frozen=True):
    """Snapshots, and their number in each state. Iterates over the snapshots."""

    snapshots: tuple[Snapshot, ...] = ()
    total_count: int = 0
    building_count: int = 0
    ready_count: int = 0
    failed_count: int = 0
    cancelled_count: int = 0
    lost_count: int = 0
    deleted_count: int = 0
    agent_count: int = 0
    """How many have the purpose `agent`, listed or not."""


class Build(Model, frozen=True):
    """The build of a VM or snapshot from a spec."""

    id: str = field(name="buildId")
    state: Open[BuildState]
    account_id: str | None = None
    request_id: str | None = None
    template_hash: str | None = None
    failure_reason: str | None = None
    planned_phases: tuple[str, ...] = ()
    current_phase: str | None = None
    """The phase that runs now."""
    started_at: Time | None = None
    finished_at: Time | None = None
    updated_at: Time | None = None

    @property
    def finished(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.state in ("succeeded", "failed")


class BuildPhase(Model, frozen=True):
    """A layer or step of a build. `snapshot_id` is a snapshot for debugging, if the server saved one."""

    id: str = field(name="phaseId")
    name: str
    build_id: str | None = None
    snapshot_id: str | None = None
    state: Open[PhaseState] | None = None
    started_at: Time | None = None
    finished_at: Time | None = None
    """None while it runs."""


class BuildList(Listing[Build], frozen=True):
    """Builds, newest first, and how many match in all. Iterates over the builds."""

    builds: tuple[Build, ...] = ()
    total_count: int = 0


class ServiceStates(Model, frozen=True):
    """The services in one state."""

    active_state: str
    sub_state: str = ""
    services: tuple[str, ...] = ()


class FailedServiceLog(Model, frozen=True):
    """The last log lines of a failed service."""

    unit_name: str
    log: str = ""


class SetupDiagnostics(Model, frozen=True):
    """The state of the services of a VM whose setup failed."""

    service_states: tuple[ServiceStates, ...] = ()
    failed_service_logs: tuple[FailedServiceLog, ...] = ()
    additional_failed_service_logs: tuple[FailedServiceLog, ...] = ()


class ServiceStatus(Model, frozen=True):
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


class ServiceName(Model, frozen=True):
    """A systemd service in a list."""

    name: str


class ServiceLogLine(Model, frozen=True):
    """A line that a service logged."""

    message: str
    timestamp: str | None = None
    priority: str | int | None = None
    unit: str | None = None


class ServiceResult(Model, frozen=True):
    """The result of starting, stopping or restarting one service."""

    service_id: str
    success: bool
    message: str = ""


class Terminal(Model, frozen=True):
    """A recording of the output of commands that were run with `terminal`."""

    name: str
    status: str = ""
    created: str | None = None


class TerminalLine(Model, frozen=True):
    """A line of a recording."""

    line: str
    timestamp: str | None = None


class Whoami(Model, frozen=True):
    """The account, and the identity, of the credentials."""

    account_id: str
    identity_id: str | None = None
    """Set if the credentials are an identity's access token."""


class SshGateway(Model, frozen=True):
    """Where `ssh` reaches the VMs."""

    port: int
    host_key: str
    """Its public host key, as in known_hosts."""
    host: str | None = None
    """None: the host of the API."""


class IdentityInfo(Model, frozen=True):
    """An identity and how many VMs and repositories it has permissions for."""

    id: str
    managed: bool = False
    name: str | None = None
    created_at: Time | None = None
    vm_grants: int | None = None
    repo_grants: int | None = None


class IdentityList(Listing[IdentityInfo], frozen=True):
    """Identities from `offset` on, out of `total`. Iterates over the identities."""

    identities: tuple[IdentityInfo, ...] = ()
    offset: int = 0
    total: int = 0


class Token(Model, frozen=True):
    """A new access token. The server does not store or show the secret again."""

    id: str
    token: str

    _hidden: ClassVar[str] = "token"


class VmPermission(Model, frozen=True):
    """A permission of an identity for a VM: as any Linux user, or only as the allowed ones."""

    vm_id: str
    identity_id: str | None = None
    id: str | None = None
    allowed_users: tuple[str, ...] | None = None
    granted_at: Time | None = None
    granted_by: str | None = None


class GitPermission(Model, frozen=True):
    """A permission of an identity for a repository."""

    repo: str
    identity: str | None = None
    access_level: Open[Permission] | None = None


class GrantedRepo(Model, frozen=True):
    """A repository that an identity may use."""

    id: str
    name: str | None = None
    account_id: str | None = None
    permissions: Open[Permission] | None = None
    visibility: Open[Literal["public", "private"]] | None = None


class DomainName(Model, frozen=True):
    """The name of a domain."""

    domain: str


class Domain(Model, frozen=True):
    """A domain of the account."""

    id: str
    domain: str
    created_at: Time | None = None
    verified_dns: bool = False
    implicitly_owned: bool = False
    """It is a name of a preview zone, which belongs to the account while it is mapped."""


class DomainVerification(Model, frozen=True):
    """A verification that is not completed: the TXT record `record_name` needs `verification_code`."""

    id: str
    domain: str
    verification_code: str
    record_name: str = ""
    created_at: Time | None = None


class DomainMapping(Model, frozen=True):
    """A host name that leads to a port of a VM."""

    id: str
    domain: str
    vm_id: str | None = None
    vm_port: int | None = None
    ownership_id: str | None = None
    """The id of the domain that the name belongs to."""
    created_at: Time | None = None


class VpcMember(Model, frozen=True):
    """A VM in a VPC. `names` are those of its address inside the VPC."""

    vm_id: str
    ipv4: str
    names: tuple[str, ...] = ()


class Vpc(Model, frozen=True):
    """A private network. `vms` are those in it; a list of VPCs leaves them out."""

    id: str = field(name="vpcId")
    cidr: str
    name: str | None = None
    created_at: Time | None = None
    vms: tuple[VpcMember, ...] = ()


class CreatedVpc(Vpc, frozen=True):
    """The VPC of a create. `created` is False if it existed, and `if_missing` was given."""

    created: bool = True


class WireGuardSession(Model, frozen=True):
    """A way into a VPC for one computer.

    `client_config` is a complete file for `wg-quick`, with the private key.
    """

    id: str = field(name="sessionId")
    vpc_id: str
    client_config: str
    client_tunnel_ip: str
    vpc_cidr: str
    endpoint_port: int
    endpoint_host: str | None = None
    server_public_key: str | None = None
    client_public_key: str | None = None
    expires_at: Time | None = None


class WireGuardClient(Model, frozen=True):
    """A computer that may join a VPC.

    It has a session (`session_id`), or a key of its own (`gateway_vm_id`).
    """

    vpc_id: str
    client_public_key: str
    client_tunnel_ip: str
    session_id: str | None = None
    gateway_vm_id: str | None = None
    created_at: Time | None = None
    expires_at: Time | None = None
    """When a session ends; None for a computer with a key of its own."""


class WireGuardPeer(Model, frozen=True):
    """A way into a VPC for a computer with a key of its own.

    `client_config` is a file for `wg-quick`, but for the private key.
    """

    vpc_id: str
    gateway_vm_id: str
    client_config: str
    client_tunnel_ip: str
    vpc_cidr: str
    endpoint_port: int
    server_public_key: str
    endpoint_host: str | None = None


class PortUrl(Model, frozen=True):
    """The URL of a port of a VM."""

    url: str
    domain: str


class LogEntry(Model, frozen=True):
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
        try:
            return datetime.fromisoformat(self.timestamp)
        except ValueError:
            return None

    def __str__(self) -> str:
        return self.message


class LogPage(Listing[LogEntry], frozen=True):
    """Log lines, and the token of the next page if there is one. Iterates over the lines."""

    logs: tuple[LogEntry, ...] = ()
    next_page_token: str | None = None
