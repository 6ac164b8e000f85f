"""Making machines and snapshots: what can take minutes, and must never be done twice.

The client's habit is to ask again when its connection drops. So a machine that nobody heard of is removed:
when the client leaves before the answer, the work is undone; after the answer the machine is durable.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header

from stead.api.background import AFTER_HEADER, Work, new_request_id
from stead.api.callers import CurrentCall, Owner
from stead.api.errors import ApiError
from stead.api.services import Services, ServicesDep
from stead.api.wire.creation import CreateSnapshot, CreateVm
from stead.api.wire.snapshots import SnapshotCreated
from stead.api.wire.vms import Created
from stead.builds.builder import MachineOrder, SnapshotOrder
from stead.errors import InvalidRequest
from stead.machines.persistence import PERSISTENT
from stead.tasks import or_undo

router = APIRouter(tags=["vms"])

_After = Annotated[
    float | None,
    Header(
        alias=AFTER_HEADER,
        ge=0,
        le=3600,
        description="Answer 202 after this many seconds, and let the result be asked for.",
    ),
]
_ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"description": "It goes on; ask for it by its request id."}
}


@router.post("/v1/vms", response_model=Created, responses=_ACCEPTED)
async def create_vm(
    owner: Owner,
    services: ServicesDep,
    call: CurrentCall,
    wanted: CreateVm | None = None,
    after: _After = None,
) -> Any:
    """Make a machine, from the base image, a snapshot, or a spec that is built; it runs when this answers."""
    wanted = wanted or CreateVm.model_validate({})
    wanted.refuse_what_is_missing()
    request = new_request_id()
    order = MachineOrder(
        account=owner.account,
        spec=None if wanted.spec is None else wanted.spec.layer(),
        template=None if wanted.template is None else wanted.template.layer(),
        top=wanted.top(),
        name=wanted.label(),
        persistence=PERSISTENT if wanted.persistence is None else wanted.persistence.persistence(),
        activity_threshold=wanted.activity_threshold_bytes or 0,
        recreate=bool(wanted.recreate),
        request=request,
    )

    async def take_back(created: dict[str, Any]) -> None:
        await services.machines.delete(created["id"], forget=True)

    async def make() -> dict[str, Any]:
        machine = await services.builder.create_machine(order)
        info = await machine.info()
        return Created(id=info.id, snapshot_id=info.snapshot).model_dump(by_alias=True)

    work = _counted(services, lambda: or_undo(make(), take_back))
    if after is not None:
        return await services.background.run(owner.account, request, after, work, "CREATE_VM_BAD_REQUEST")
    created = await work
    call.undo = lambda: take_back(created)
    return created


@router.post("/v1/vms/snapshots", response_model=SnapshotCreated, responses=_ACCEPTED)
async def create_snapshot(
    owner: Owner, services: ServicesDep, wanted: CreateSnapshot | None = None, after: _After = None
) -> Any:
    """Have a snapshot of a spec: the one that is there, or a new one that is built now."""
    if wanted is None:
        raise InvalidRequest("say what the snapshot is made of: give a spec or a template")
    request = new_request_id()
    order = SnapshotOrder(
        account=owner.account,
        layer=wanted.layer(),
        name=wanted.name,
        persistence=PERSISTENT if wanted.persistence is None else wanted.persistence.of_snapshot(),
        request=request,
    )

    async def make() -> dict[str, Any]:
        # What was built is found by the next who asks, so there is nothing to take back.
        snapshot = await services.builder.ensure_snapshot(order)
        return SnapshotCreated(snapshot_id=snapshot.id).model_dump(by_alias=True)

    work = _counted(services, make)
    if after is None:
        return await work
    return await services.background.run(owner.account, request, after, work, "CREATE_SNAPSHOT_BAD_REQUEST")


async def _counted(services: Services, work: Callable[[], Work]) -> dict[str, Any]:
    """As many at a time as the host can bear to have waiting; one more is refused."""
    if services.creations.locked():
        text = f"{services.settings.max_creations} machines are being made, and that is as many as wait here"
        raise ApiError("SERVICE_UNAVAILABLE", text, headers={"Retry-After": "5"})
    async with services.creations:
        return await work()
