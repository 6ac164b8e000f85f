"""Routes of snapshots: list, get, update, delete."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from stead.api.callers import CurrentCall, OwnedSnapshot, Owner
from stead.api.dependencies import MachinesDep
from stead.api.large_answers import Items, large_answer
from stead.api.wire.snapshots import SnapshotDeleted, SnapshotList, SnapshotModel, Updated, UpdateSnapshot
from stead.errors import SnapshotAlreadyDeleted, SnapshotNotFound
from stead.machines import SnapshotInfo, SnapshotState
from stead.machines.snapshots import SnapshotPurpose

router = APIRouter(prefix="/v1/vms/snapshots", tags=["snapshots"])


@router.get("", response_model=SnapshotList)
async def list_snapshots(
    caller: Owner,
    call: CurrentCall,
    machines: MachinesDep,
    include_deleted: Annotated[bool, Query(alias="includeDeleted")] = False,
    include_failed: Annotated[bool, Query(alias="includeFailed")] = True,
    include_building: Annotated[bool, Query(alias="includeBuilding")] = True,
    purpose: Annotated[SnapshotPurpose | None, Query(description="Only those with this purpose.")] = None,
    _cancelled: Annotated[bool, Query(alias="includeCancelled")] = False,
    _lost: Annotated[bool, Query(alias="includeLost")] = False,
) -> Response:
    """List the account's snapshots, oldest first."""
    known = await machines.snapshots.list(caller.account, deleted=True)
    hidden = {
        state
        for state, wanted in (
            (SnapshotState.FAILED, include_failed),
            (SnapshotState.BUILDING, include_building),
        )
        if not wanted
    }
    there = [info for info in known if info.deleted_at is None]
    shown = [
        info
        for info in known
        if info.state not in hidden
        and (include_deleted or info.deleted_at is None)
        and purpose in (None, info.purpose)
    ]
    states = [info.state for info in there]
    model = SnapshotList(
        snapshots=[],
        total_count=len(shown),
        building_count=states.count(SnapshotState.BUILDING),
        ready_count=states.count(SnapshotState.READY),
        failed_count=states.count(SnapshotState.FAILED),
        deleted_count=len(known) - len(there),
        agent_count=sum(info.purpose == "agent" for info in there),
    )
    snapshots = Items(SnapshotModel, len(shown), lambda: map(SnapshotModel.of, shown))
    return await large_answer(call, model, {"snapshots": snapshots})


@router.get("/{snapshot_id}")
async def get_snapshot(info: OwnedSnapshot) -> SnapshotModel:
    """Get one snapshot."""
    return SnapshotModel.of(_refuse_deleted(info))


@router.patch("/{snapshot_id}")
async def update_snapshot(info: OwnedSnapshot, machines: MachinesDep, wanted: UpdateSnapshot) -> Updated:
    """Change or remove a snapshot's name, or set its lifetime: longer, shorter or without an end."""
    updated = await machines.snapshots.update(
        _refuse_deleted(info).id, name=wanted.changed_name(), lifetime=wanted.changed_lifetime()
    )
    return Updated(snapshot_id=updated.id, name=updated.name, expires_at=updated.expires_at)


@router.delete("/{snapshot_id}")
async def delete_snapshot(info: OwnedSnapshot, machines: MachinesDep) -> SnapshotDeleted:
    """Delete a snapshot. VMs that were created from it are not affected."""
    if info.deleted_at is not None:
        raise SnapshotAlreadyDeleted(info.id)
    await machines.snapshots.delete(info.id)
    return SnapshotDeleted(snapshot_id=info.id, snapshot_id_too=info.id)


def _refuse_deleted(info: SnapshotInfo) -> SnapshotInfo:
    if info.deleted_at is not None:
        raise SnapshotNotFound(info.id)
    return info
