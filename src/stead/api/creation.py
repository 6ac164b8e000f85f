"""POST /v1/vms and POST /v1/vms/snapshots: requests that can take minutes.

SDKs repeat these requests when the connection drops. Without an idempotency key, a VM that its client did not
hear of is deleted: when the client disconnects before the answer, the work is undone; after the answer the VM
is durable. With a key, or with `ifMissing`, the repeated request finds the VM, and nothing is undone.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header

from stead.api.background import AFTER_HEADER, failure, pending, run
from stead.api.callers import CurrentCall, Owner
from stead.api.dependencies import (
    BackgroundDep,
    BuilderDep,
    CreationsDep,
    DomainsDep,
    GitAccessDep,
    MachinesDep,
    NetworksDep,
)
from stead.api.repeatable import CurrentCreation, IfMissing, answer_of
from stead.api.wire.creation import CreateSnapshot, CreateVm
from stead.api.wire.snapshots import SnapshotCreated
from stead.api.wire.unknown import HEADER, Tracked, unknown_keys
from stead.api.wire.vms import Created
from stead.builds.background import Answer, Work
from stead.builds.builder import MachineOrder, SnapshotOrder
from stead.builds.plan import plan_machine
from stead.domains.domains import Mapping
from stead.errors import InvalidRequest
from stead.machines.machine import MachineInfo
from stead.machines.persistence import PERSISTENT
from stead.tasks import KeyedLimit, finished, or_undo

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
async def create_vm(
    owner: Owner,
    machines: MachinesDep,
    builder: BuilderDep,
    background: BackgroundDep,
    creations: CreationsDep,
    domains: DomainsDep,
    networks: NetworksDep,
    git_access: GitAccessDep,
    call: CurrentCall,
    creation: CurrentCreation,
    wanted: CreateVm | None = None,
    after: _After = None,
    unknown: _UnknownKeys = None,
) -> Any:
    """Create a VM from the base image, a snapshot or a spec. The VM runs when this answers.

    Maps `domains` and grants `gitAccess` before the VM is returned. If either fails, no VM is created.
    """
    wanted = wanted or CreateVm.model_validate({})
    warnings = _check_keys(wanted, unknown)
    wanted.refuse_unsupported()
    request = creation.request
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
        warnings=warnings,
        nic=wanted.nic(),
    )
    plan = plan_machine(order.spec, order.template, order.top)
    targets = wanted.targets(plan.domain_port)

    async def check() -> None:
        if order.nic is not None:
            await networks.check_nic(owner.account, order.nic.vpc, order.nic.address)
        await domains.check(owner.account, targets)
        if wanted.git_access is not None:
            await git_access.check(owner.account, wanted.git_access)

    async def delete_created(created: Answer) -> None:
        await machines.delete(created["id"], forget=True)

    async def cancel() -> None:
        await background.cancel(owner.account, request)

    async def make() -> Answer:
        machine = await builder.create_machine(order)
        info = await machine.info()
        mapped: Sequence[Mapping] = ()
        try:
            if wanted.git_access is not None:
                await git_access.give(owner.account, machine, wanted.git_access)
            if targets:
                mapped = await domains.map_all(owner.account, info.id, targets)
        except BaseException:
            await finished(machines.delete(info.id, forget=True))
            raise
        return created_answer(info, mapped)

    async def checked() -> Answer:
        await check()
        return await _limited(creations, lambda: or_undo(make(), delete_created))

    async def existing(name: str) -> list[Answer]:
        found = await machines.named(owner.account, name)
        return [created_answer(info, domains.of_machine(info.id), created=False) for info in found]

    if_missing = IfMissing("VM", order.name, existing) if wanted.if_missing else None
    undone = not creation.outlives_client and if_missing is None
    work = creation.run(checked, if_missing)
    if after is None:
        created = await work
    else:
        answer = await background.run(
            owner.account, request, after, work, lambda error: failure(error, "CREATE_VM_BAD_REQUEST")
        )
        if answer is None:
            if undone:
                call.undo = cancel
            return pending(request)
        created = answer
    if undone:
        call.undo = lambda: delete_created(created)
    return created


@router.post("/v1/vms/snapshots", response_model=SnapshotCreated, responses=_ACCEPTED)
async def create_snapshot(
    owner: Owner,
    builder: BuilderDep,
    background: BackgroundDep,
    creations: CreationsDep,
    creation: CurrentCreation,
    wanted: CreateSnapshot | None = None,
    after: _After = None,
    unknown: _UnknownKeys = None,
) -> Any:
    """Return the snapshot of a spec, and build it first unless the account has one with the same content."""
    wanted = wanted or CreateSnapshot()
    warnings = _check_keys(wanted, unknown)
    request = creation.request
    order = SnapshotOrder(
        account=owner.account,
        layer=wanted.layer(),
        name=wanted.name,
        persistence=None if wanted.persistence is None else wanted.persistence.of_snapshot(),
        lifetime=wanted.lifetime(),
        request=request,
        warnings=warnings,
    )

    async def make() -> Answer:
        # Nothing to undo when the client disconnects: the repeated request finds the snapshot.
        snapshot = await builder.ensure_snapshot(order)
        return SnapshotCreated(snapshot_id=snapshot.id).model_dump(by_alias=True)

    work = creation.run(lambda: _limited(creations, make))
    if after is None:
        return await work
    return await run(background, owner.account, request, after, work, "CREATE_SNAPSHOT_BAD_REQUEST")


def created_answer(info: MachineInfo, mapped: Sequence[Mapping], *, created: bool = True) -> Answer:
    names = [mapping.domain for mapping in mapped]
    return answer_of(Created(id=info.id, domains=names, snapshot_id=info.snapshot, created=created))


def _check_keys(body: Tracked, unknown: str | None) -> tuple[str, ...]:
    """Refuse unknown keys if the client wants that; otherwise return warnings for the log."""
    found = unknown_keys(body)
    if found and unknown == "refuse":
        raise InvalidRequest("; ".join(found))
    return tuple(f"{each} (ignored)" for each in found)


async def _limited(creations: KeyedLimit, work: Callable[[], Work]) -> Answer:
    async with creations.hold():
        return await work()
