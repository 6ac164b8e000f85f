"""POST /v1/vms and POST /v1/vms/snapshots: requests that can take minutes.

SDKs repeat these requests when the connection drops. Without an idempotency key, a VM that its client did not
hear of is deleted: when the client disconnects before the answer, the work is undone; after the answer the VM
is durable. With a key, or with `ifMissing`, the repeated request finds the VM, and nothing is undone.
"""

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header
from starlette.responses import JSONResponse

from stead.api.background import AFTER_HEADER, answer, failed, pending
from stead.api.bodies import MANY_VALUES, MAX_BODY, json_body
from stead.api.callers import CurrentCall, Owner
from stead.api.declared import invalid_code, large_body
from stead.api.dependencies import BackgroundDep, CreationDep
from stead.api.repeatable import CurrentCreate, IfMissing
from stead.api.wire.creation import CreateSnapshot, CreateVm
from stead.api.wire.snapshots import SnapshotCreated
from stead.api.wire.unknown import HEADER
from stead.api.wire.vms import Created
from stead.creation.results import BuiltSnapshot, CreatedVm

router = APIRouter(tags=["vms"])

_After = Annotated[
    float | None,
    Header(
        alias=AFTER_HEADER,
        ge=0,
        le=3600,
        description="Answer 202 with a request id after this many seconds, and continue in the background.",
    ),
]
_UnknownKeys = Annotated[
    Literal["refuse", "warn"] | None,
    Header(
        alias=HEADER,
        description="`refuse`: answer 400 if the body has unknown keys. `warn`, the default: ignore them,"
        " with a warning in the build's log.",
    ),
]
_ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {"description": "The work continues; get the result by the request id."}
}


@router.post("/v1/vms", response_model=Created, responses=_ACCEPTED)
@invalid_code("CREATE_VM_BAD_REQUEST")
@large_body(MAX_BODY, MANY_VALUES)
async def create_vm(
    owner: Owner,
    creation: CreationDep,
    background: BackgroundDep,
    call: CurrentCall,
    create: CurrentCreate,
    body: Annotated[CreateVm | None, json_body(CreateVm | None)],
    after: _After = None,
    unknown: _UnknownKeys = None,
) -> JSONResponse:
    """Create a VM from the base image, a snapshot or a spec. The VM runs when this answers.

    Maps `domains` and grants `gitAccess` before the VM is returned. If either fails, no VM is created.
    """
    wanted = body or CreateVm.model_validate({})
    order = wanted.order(owner.account, create.request, refuse_unknown=unknown == "refuse")
    repeatable = create.outlives_client or bool(wanted.if_missing)
    if repeatable:
        find = partial(creation.named, owner.account)
        missing = IfMissing("VM", order.properties.name, find) if wanted.if_missing else None
        work = create.run(CreatedVm, partial(creation.create, order), missing)
    else:
        work = creation.create(order)

    cancel = partial(background.cancel, owner.account, create.request)

    if after is None:
        made: CreatedVm | None = await work
    else:
        invalid = failed("CREATE_VM_BAD_REQUEST")
        made = await background.run(owner.account, create.request, after, work, invalid)
    if made is None:
        call.outlived_by(partial(background.is_running, create.request), cancel)
        if not repeatable:
            call.on_undelivered(cancel)
        return pending(create.request)
    if not repeatable:
        call.on_undelivered(partial(creation.delete, made.id))
    return answer(made)


@router.post("/v1/vms/snapshots", response_model=SnapshotCreated, responses=_ACCEPTED)
@invalid_code("CREATE_SNAPSHOT_BAD_REQUEST")
@large_body(MAX_BODY, MANY_VALUES)
async def create_snapshot(
    owner: Owner,
    creation: CreationDep,
    background: BackgroundDep,
    call: CurrentCall,
    create: CurrentCreate,
    body: Annotated[CreateSnapshot | None, json_body(CreateSnapshot | None)],
    after: _After = None,
    unknown: _UnknownKeys = None,
) -> JSONResponse:
    """Return the snapshot of a spec, and build it first unless the account has one with the same content."""
    wanted = body or CreateSnapshot()
    order = wanted.order(owner.account, create.request, refuse_unknown=unknown == "refuse")
    # Nothing to undo when the client disconnects: the repeated request finds the snapshot.
    work = create.run(BuiltSnapshot, partial(creation.create_snapshot, order))
    if after is None:
        return answer(await work)
    invalid = failed("CREATE_SNAPSHOT_BAD_REQUEST")
    made = await background.run(owner.account, create.request, after, work, invalid)
    if made is not None:
        return answer(made)
    cancel = partial(background.cancel, owner.account, create.request)
    call.outlived_by(partial(background.is_running, create.request), cancel)
    return pending(create.request)
