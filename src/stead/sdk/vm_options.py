"""Options of VMs and snapshots: the keyword arguments of create and start."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict

from stead.sdk.lifetimes import Ttl
from stead.sdk.sizes import Size, SizeParts
from stead.sdk.spec import VmSpec
from stead.sdk.spec_parts import FileLike, Git, Group, Nic, PersistenceLike, Service, User

JsonSpec = Mapping[str, Any]
"""A spec, or one layer of it, as JSON in the server's format."""

SpecLike = VmSpec | JsonSpec


class StartOptions(TypedDict, total=False):
    """Options of `vm.start`, which create takes too."""

    idle_timeout_seconds: int | None
    """Suspend the VM after this time without network traffic; None for never. Not given, it stays as it is:
    the server's default for a new VM."""
    activity_threshold_bytes: int | None
    """Less traffic than this does not count as activity."""
    wait_for_ready_signal: bool | None
    """Return only when its services are ready."""
    ready_signal_timeout_seconds: float | None
    """How long to wait for its services."""


class VmOptions(StartOptions, SizeParts, total=False):
    """Options of `stead.vms.create`. None is the same as not given, except for `idle_timeout_seconds`."""

    name: str | None
    """A label; it need not be unique, but only a unique one can be used to find the VM."""
    snapshot_id: str | None
    """Restore this snapshot, memory included, instead of the default image. An id, a unique id prefix, or a
    unique name."""
    spec: SpecLike | None
    """The VM's description, with layers that the server builds once and caches: see `VmSpec`."""
    template: JsonSpec | None
    """One layer as JSON in the server's format, instead of a spec."""
    persistence: PersistenceLike | None
    """How long the VM is kept: "persistent", "sticky", "ephemeral", or a `Persistence`."""
    users: Sequence[User | str] | None
    """Linux users to create in this VM."""
    groups: Sequence[Group | str] | None
    """Linux groups to create in this VM."""
    additional_files: Mapping[str, FileLike] | None
    """Files to write in this VM, by path."""
    git: Git | Mapping[str, Any] | None
    """Repositories to clone in this VM, and its Git user."""
    systemd: Sequence[Service] | Mapping[str, Any] | None
    """systemd services to create in this VM."""
    apt_deps: Sequence[str] | None
    """Debian packages to install in this VM."""
    workdir: str | None
    """The default working directory of commands."""
    size: str | Size | None
    """vCPUs x memory x disk, for example "2x4Gx20G"; or its parts as `cpu`, `memory` and `disk`."""
    recreate: bool | None
    """After it was deleted, the VM can be created again under the same id."""
    domains: Mapping[str, int] | Sequence[str] | None
    """Host names that are routed to a port of the VM: `{"app.example.com": 3000}`, of verified domains or
    preview zones. Names without a port are routed to 3000."""
    git_access: str | None
    """Id of a repository that git in the VM may fetch from and push to. Its token is revoked when the VM is
    deleted."""
    nics: Sequence[Nic | Mapping[str, Any]] | None
    """The VPC that the VM is in: one `Nic`."""


class SnapshotOptions(TypedDict, total=False):
    """Options of `stead.vms.snapshots.ensure`."""

    name: str | None
    """A label."""
    template: JsonSpec | None
    """One layer as JSON in the server's format, instead of a spec."""
    persistence: PersistenceLike | None
    """"persistent", "sticky" (deleted when the disk is full), or a `Persistence`."""
    ttl: Ttl | None
    """Seconds, or a timedelta, after which the server deletes the snapshot; by default never. If it is cached
    with a longer lifetime, it keeps that."""
    expires_at: datetime | None
    """When the server deletes it, instead of `ttl`."""
