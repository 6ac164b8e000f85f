"""Wire models of snapshots."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from stead.api.wire import Time, Wire
from stead.api.wire.lifetimes import LifetimeFields
from stead.api.wire.vms import PersistenceModel
from stead.machines import SnapshotInfo, SnapshotState
from stead.machines.lifetimes import Lifetime
from stead.machines.snapshots import SnapshotPurpose
from stead.machines.unchanged import UNCHANGED, Unchanged


class SnapshotModel(Wire):
    snapshot_id: str
    state: Literal["building", "ready", "failed", "cancelled", "lost"]
    created_at: Time
    failed: bool
    cancelled: bool = False
    lost: bool = False
    deleted: bool
    snapshot_persistence: PersistenceModel
    source_vm_id: str | None = None
    account_id: str | None = None
    name: str | None = None
    failure_reason: str | None = None
    build_id: str | None = None
    template_hash: str | None = None
    vcpu_count: int
    mem_size_mib: int
    rootfs_size_mb: int
    has_memory: bool
    size_bytes: int | None = Field(
        default=None, description="Disk space of its memory and disk layers; null while it is built."
    )
    expires_at: Time | None = Field(default=None, description="When it is deleted by itself; null is never.")
    purpose: SnapshotPurpose = Field(
        default="use", description="`agent`: saved so that the session of an agent can be resumed."
    )

    @classmethod
    def of(cls, info: SnapshotInfo) -> "SnapshotModel":
        return cls(
            snapshot_id=info.id,
            state=info.state.value,
            created_at=info.created_at,
            failed=info.state is SnapshotState.FAILED,
            deleted=info.deleted_at is not None,
            snapshot_persistence=PersistenceModel.of(info.persistence),
            source_vm_id=info.source_machine,
            account_id=info.account,
            name=info.name,
            failure_reason=info.failure,
            build_id=info.build,
            template_hash=info.template_hash,
            vcpu_count=info.size.vcpus,
            mem_size_mib=info.size.memory_mib,
            rootfs_size_mb=info.size.disk_gib * 1024,
            has_memory=info.has_memory,
            size_bytes=info.size_bytes,
            expires_at=info.expires_at,
            purpose=info.purpose,
        )


class SnapshotList(Wire):
    snapshots: list[SnapshotModel]
    total_count: int
    building_count: int
    ready_count: int
    failed_count: int
    cancelled_count: int = 0
    lost_count: int = 0
    deleted_count: int
    agent_count: int = Field(description="How many have the purpose `agent`, listed or not.")


class UpdateSnapshot(LifetimeFields):
    """What is left out stays as it is."""

    name: str | None = Field(default=None, description="null removes the name.")
    expires_at: AwareDatetime | None = Field(
        default=None, description="Delete it at this time, instead of `ttlSeconds`; null is never."
    )

    def changed_name(self) -> str | Unchanged | None:
        return self.name if "name" in self.model_fields_set else UNCHANGED

    def changed_lifetime(self) -> Lifetime | Unchanged:
        given = self.ttl_seconds is not None or "expires_at" in self.model_fields_set
        return self.lifetime() if given else UNCHANGED


class Updated(Wire):
    snapshot_id: Annotated[str, Field(serialization_alias="snapshot_id")]
    name: str | None = None
    expires_at: Time | None = None


class SnapshotDeleted(Wire):
    """Two spellings of the id, for two kinds of clients."""

    snapshot_id: str
    snapshot_id_too: Annotated[str, Field(serialization_alias="snapshot_id")]


class SnapshotCreated(Wire):
    snapshot_id: str
