"""Options of the client, and the state of a session from which it is resumed."""

from typing import Annotated, Literal

from agents.sandbox.session import SandboxSessionState
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from pydantic import Field

WorkspacePersistence = Literal["snapshot", "tar"]
SavedAs = Literal["reference", "archive"]
IdleTimeout = int | Literal["default"] | None
SnapshotTtl = Annotated[float, Field(gt=0, le=3650)] | None
SNAPSHOT_TTL_DAYS = 7.0


class SteadSandboxClientOptions(BaseSandboxClientOptions):
    """How the VM of a session is created, and what happens to it at the end. Everything has a default."""

    type: Literal["stead"] = "stead"
    snapshot_id: str | None = None
    """Create the VM from this snapshot (id or name) instead of the default image."""
    size: str | None = None
    """vCPUs x memory x disk, for example "2x4Gx20G"."""
    key: str | None = None
    """A name of your own for the VM. If a VM with it exists, the session continues in that VM."""
    pause_on_exit: bool = False
    """At the end of a run, suspend the VM instead of deleting it. It wakes on its next use."""
    workspace_persistence: WorkspacePersistence = "snapshot"
    """What `persist_workspace` saves: a snapshot of the VM with its memory, or a tar of the workspace."""
    idle_timeout_seconds: IdleTimeout = "default"
    """Suspend the VM after this time without network traffic; None for never."""
    exposed_ports: tuple[int, ...] = ()
    """Not needed: any port can be resolved."""
    git_access: str | None = None
    """The id of a repository of this Stead that git in the VM may fetch from and push to."""
    snapshot_ttl_days: SnapshotTtl = SNAPSHOT_TTL_DAYS
    """Days after which a saved snapshot is deleted, counted from the last time that it was saved or resumed;
    None for never."""


class SteadSandboxSessionState(SandboxSessionState):
    """What another process needs to continue a session. It contains no credentials."""

    type: Literal["stead"] = "stead"
    vm_id: str
    key: str | None = None
    snapshot_id: str | None = None
    size: str | None = None
    pause_on_exit: bool = False
    workspace_persistence: WorkspacePersistence = "snapshot"
    idle_timeout_seconds: IdleTimeout = "default"
    git_access: str | None = None
    snapshot_ttl_days: SnapshotTtl = SNAPSHOT_TTL_DAYS
    commands: dict[int, int] = Field(default_factory=dict)
    """Running commands by number, with the bytes of output that were reported."""
    saved_snapshot_id: str | None = None
    """The snapshot that the last `persist_workspace` saved."""
    saved_as: SavedAs | None = None
    """What the last `persist_workspace` returned; None before it, and in states of earlier releases."""

    @property
    def takes_references(self) -> bool:
        """Whether what was saved may be a reference, which names the VM or snapshot to continue from.

        The bytes of an archive come from the VM, and a program in it must not choose the VM that is forked.
        """
        if self.saved_as is not None:
            return self.saved_as == "reference"
        return self.workspace_persistence == "snapshot"
