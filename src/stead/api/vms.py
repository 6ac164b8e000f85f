"""Routes of VMs: list, rename, start, stop, suspend, fork, snapshot, resize, delete."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from stead.api.callers import AnyCaller, CurrentCall, OwnedVm, Owner, UsableVm
from stead.api.declared import invalid_code
from stead.api.dependencies import (
    BuilderDep,
    CreationDep,
    DomainsDep,
    IdentitiesDep,
    LogbookDep,
    MachinesDep,
)
from stead.api.errors import ApiError
from stead.api.large_answers import Items, large_answer
from stead.api.repeatable import CurrentCreate, answer_of, snapshot_id
from stead.api.wire import LARGEST, Nothing
from stead.api.wire.builds import BuildRecord
from stead.api.wire.vms import (
    Console,
    Exited,
    Fork,
    Forked,
    Forks,
    Optimized,
    RenameVm,
    Resize,
    Snapshot,
    Snapshotted,
    Start,
    Started,
    VmDeleted,
    VmDetails,
    VmList,
    VmRef,
    VmRow,
    VmState,
    VmStopped,
    VmSuspended,
    wire_state,
)
from stead.builds.errors import NotBuilt
from stead.creation.results import ForkChild, ForkChildren, TakenSnapshot
from stead.errors import MachineNotFound, WrongState
from stead.machines import MachineInfo, State
from stead.machines.persistence import PERSISTENT
from stead.machines.start import READY_TIMEOUT
from stead.machines.unchanged import UNCHANGED
from stead.settings import Size, SizeProblem
from stead.tasks import or_undo

router = APIRouter(prefix="/v1/vms", tags=["vms"])


@router.get("", response_model=VmList)
async def list_vms(
    caller: AnyCaller,
    call: CurrentCall,
    machines: MachinesDep,
    identities: IdentitiesDep,
    limit: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
    vm_state: Annotated[VmState | None, Query(alias="vmState")] = None,
    include_deleted: Annotated[bool, Query(alias="includeDeleted")] = False,
    search: Annotated[str | None, Query(description="Only VMs whose name or id contains this text.")] = None,
) -> Response:
    """List the account's VMs, oldest first; with an identity's token, the VMs granted to it.

    Without `limit` the answer has all of them.
    """
    found = await machines.list(caller.account, deleted=include_deleted)
    if caller.identity is not None:
        granted = await identities.granted(caller.identity)
        found = [info for info in found if info.id in granted and not info.is_deleted]
    states = [wire_state(info.state) for info in found]
    if vm_state is not None:
        found = [info for info in found if wire_state(info.state) == vm_state]
    if search:
        wanted = search.lower()
        found = [info for info in found if wanted in info.id or wanted in (info.name or "").lower()]
    page = found[offset:] if limit is None else found[offset : offset + limit]

    model = VmList(
        vms=[],
        total_count=len(found),
        running_count=states.count("running"),
        starting_count=states.count("starting"),
        suspended_count=states.count("suspended"),
        stopped_count=states.count("stopped"),
        building_count=states.count("building"),
        suspending_count=states.count("suspending"),
        lost_count=states.count("lost"),
        user_id=caller.account,
    )
    return await large_answer(call, model, {"vms": Items(VmRow, len(page), lambda: map(VmRow.of, page))})


@router.get("/{vm_id}")
async def get_vm(info: UsableVm) -> VmDetails:
    """Get one VM. This does not wake it."""
    return VmDetails.of(info)


@router.patch("/{vm_id}")
async def rename_vm(info: OwnedVm, machines: MachinesDep, wanted: RenameVm) -> VmDetails:
    """Change or remove a VM's name. Works in every state and does not wake it; the hostname stays."""
    return VmDetails.of(await machines.rename(info.id, wanted.name))


@router.delete("/{vm_id}")
async def delete_vm(info: OwnedVm, machines: MachinesDep) -> VmDeleted:
    """Delete a VM with its disk and memory. One with `recreate` keeps its id: a start creates it again."""
    await machines.delete(info.id)
    return VmDeleted(id=info.id, recreate=info.recreate)


@router.post("/{vm_id}/start")
async def start_vm(
    info: UsableVm,
    caller: AnyCaller,
    machines: MachinesDep,
    domains: DomainsDep,
    options: Start | None = None,
) -> Started:
    """Wake a suspended VM, boot a stopped one, or create a deleted one again if it has `recreate`.

    `idleTimeoutSeconds` and `activityThresholdBytes` change the VM's settings, and need an API key. So does
    creating it again.
    """
    options = options or Start()
    given = options.model_fields_set
    if caller.identity is not None and given & {"idle_timeout_seconds", "activity_threshold_bytes"}:
        text = "an identity token may start a VM, but not change its idle time-out or activity threshold"
        raise ApiError("FORBIDDEN", f"{text}: use an API key")
    threshold = options.activity_threshold_bytes
    await machines.start(
        info.id,
        idle_timeout=options.idle_timeout_seconds if "idle_timeout_seconds" in given else UNCHANGED,
        activity_threshold=UNCHANGED if threshold is None else threshold,
        ready_timeout=ready_timeout(options.wait_for_ready_signal, options.ready_signal_timeout_seconds),
    )
    return Started(id=info.id, domains=[mapping.domain for mapping in domains.of_machine(info.id)])


def ready_timeout(wait: bool | None, seconds: float | None) -> float | None:
    return (seconds or READY_TIMEOUT) if wait else None


@router.post("/{vm_id}/stop")
async def stop_vm(info: OwnedVm, machines: MachinesDep) -> VmStopped:
    """Shut a VM down cleanly. It keeps its disk and loses its memory."""
    _refuse_if_down(info, "stop", State.STOPPED, State.DELETED)
    await machines.stop(info.id)
    return VmStopped(vm_id=info.id, vm_instance_id=info.instance or info.id)


@router.post("/{vm_id}/suspend")
async def suspend_vm(info: OwnedVm, machines: MachinesDep) -> VmSuspended:
    """Save a VM's memory and disk and end its process. The next command or connection wakes it."""
    _refuse_if_down(info, "suspend", State.STOPPED, State.DELETED)
    await machines.suspend(info.id)
    try:
        layer = (await machines.info(info.id)).layer
    except MachineNotFound:
        layer = None  # an ephemeral VM is deleted when it is suspended
    return VmSuspended(
        id=info.id, vm_instance_id=info.instance or info.id, snapshot_layer_id=layer or info.id
    )


def _refuse_if_down(info: MachineInfo, operation: str, *states: State) -> None:
    if info.state in states:
        raise WrongState(info.id, operation, info.state)


@router.post("/{vm_id}/kill")
async def kill_vm(info: OwnedVm, machines: MachinesDep) -> VmRef:
    """Power a VM off at once, without a shutdown. It keeps its disk."""
    await machines.kill(info.id)
    return VmRef(id=info.id)


@router.post("/{vm_id}/await")
async def await_exit(info: UsableVm, machines: MachinesDep) -> Exited:
    """Wait until the VM is no longer running; the answer says why."""
    return Exited(id=info.id, exit_status=await machines.wait_for_exit(info.id))


@router.get("/{vm_id}/console")
async def vm_console(info: OwnedVm, machines: MachinesDep, logbook: LogbookDep) -> Console:
    """Get the end of the VM's serial console: what its kernel printed since it was created, woken or started.

    For a VM that is not running: the console of its last crash or failed start, kept for 7 days.
    """
    text = await machines.console(info.id)
    if text is not None:
        return Console(id=info.id, console=text, running=True)
    kept = None if info.account is None else await logbook.console(info.account, info.id)
    return Console(id=info.id, console=kept or "", running=False)


@router.post("/{vm_id}/snapshot", response_model=Snapshotted)
@invalid_code("SNAPSHOT_VM_BAD_REQUEST")
async def snapshot_vm(
    info: OwnedVm,
    machines: MachinesDep,
    call: CurrentCall,
    create: CurrentCreate,
    body: Snapshot | None = None,
) -> JSONResponse:
    """Capture a VM's memory and disk as a snapshot. The VM keeps running."""
    wanted = body or Snapshot()
    kept = PERSISTENT if wanted.persistence is None else wanted.persistence.of_snapshot()
    own_id = snapshot_id(create.request)

    async def make() -> TakenSnapshot:
        await or_undo(
            machines.snapshot(
                info.id,
                name=wanted.name,
                persistence=kept,
                lifetime=wanted.lifetime(),
                purpose=wanted.purpose,
                snapshot_id=own_id,
            ),
            lambda taken: machines.snapshots.delete(taken.id),
        )
        return TakenSnapshot(own_id, info.id, info.instance)

    taken = await create.run(TakenSnapshot, make)
    if not create.outlives_client:
        # A client that never got the id cannot delete the snapshot.
        call.on_undelivered(lambda: machines.snapshots.delete(own_id))
    return answer_of(
        Snapshotted(snapshot_id=taken.id, source_vm_id=taken.source, source_vm_instance_id=taken.instance)
    )


@router.post("/{vm_id}/fork", response_model=Forks)
async def fork_vm(
    info: OwnedVm,
    caller: Owner,
    machines: MachinesDep,
    creation: CreationDep,
    call: CurrentCall,
    create: CurrentCreate,
    body: Fork | None = None,
) -> JSONResponse:
    """Create VMs with the current memory, processes and files of this one: all of them, or none."""
    wanted = body or Fork()
    kept = None if wanted.persistence is None else wanted.persistence.persistence()

    async def delete_created(ids: list[str]) -> None:
        for child in ids:
            await machines.delete(child, forget=True)

    async def fork() -> list[str]:
        children = await creation.fork(
            caller.account,
            info.id,
            wanted.count,
            persistence=kept,
            name=wanted.name,
            request=create.request,
        )
        return [child.id for child in children]

    async def make() -> ForkChildren:
        infos = [await machines.info(child) for child in await or_undo(fork(), delete_created)]
        return ForkChildren(info.id, tuple(ForkChild(child.id, child.name) for child in infos))

    made = await create.run(ForkChildren, make)
    if not create.outlives_client:
        call.on_undelivered(lambda: delete_created([child.id for child in made.children]))
    forks = [Forked(id=child.id, name=child.name) for child in made.children]
    return answer_of(Forks(vm_id=made.parent, forks=forks))


@router.post("/{vm_id}/resize")
async def resize_vm(info: OwnedVm, machines: MachinesDep, wanted: Resize) -> Nothing:
    """Change a VM's vCPUs, memory or disk. A running VM is shut down for it and booted again."""
    memory = None if wanted.mem_size_gb is None else wanted.mem_size_gb * 1024
    if wanted.vcpu_count is None and memory is None and wanted.rootfs_size_gb is None:
        raise ApiError(
            "RESIZE_VM_EMPTY_REQUEST",
            "empty resize: give at least one of vcpuCount, memSizeGb and rootfsSizeGb",
        )
    for problem in Size.problems(wanted.vcpu_count, memory):
        raise _cannot_resize(problem)
    disk, present = wanted.rootfs_size_gb, info.size.disk_gib
    if disk is not None and disk < present:
        text = f"cannot shrink the disk from {present} to {disk} GB (rootfsSizeGb): it can only grow"
        code = "RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED"
        raise ApiError(code, text, currentMb=present * 1024, requestedMb=disk * 1024)
    for problem in Size.problems(disk_gib=disk):
        raise _cannot_resize(problem)
    mib = None if memory is None else int(memory)
    await machines.resize(info.id, vcpus=wanted.vcpu_count, memory_mib=mib, disk_gib=disk)
    return Nothing()


def _cannot_resize(problem: SizeProblem) -> ApiError:
    """The error of a size that a VM cannot have, with the codes of this call."""
    got, low, high = problem.got, problem.low / 1024, problem.high / 1024
    match problem.part, problem.kind:
        case "vcpus", "out_of_range":
            text = f"vcpuCount {got} out of range: must be {problem.low} to {problem.high}"
            return ApiError("RESIZE_VM_VCPU_OUT_OF_RANGE", text, got=got, max=problem.high)
        case "vcpus", _:
            text = f"vcpuCount {got} must be a power of two"
            return ApiError("RESIZE_VM_VCPU_NOT_POWER_OF_TWO", text, got=got)
        case "memory", "out_of_range":
            text = f"memSizeGb {got / 1024:g} out of range: must be {low:g} to {high:g}"
            return ApiError("RESIZE_VM_MEM_OUT_OF_RANGE", text, got=got / 1024, min=low, max=high)
        case "memory", _:
            text = f"memSizeGb {got / 1024:g} must be a power of two"
            return ApiError("RESIZE_VM_MEM_NOT_POWER_OF_TWO", text, got=got / 1024)
        case _:
            text = f"rootfsSizeGb {got} too large (max {problem.high})"
            return ApiError("ROOTFS_SIZE_TOO_LARGE", text, gotGb=got)


@router.post("/{vm_id}/optimize")
async def optimize_vm(info: OwnedVm) -> Optimized:
    """No operation, kept for compatibility: disk layers are merged in the background without this call."""
    return Optimized(id=info.id, message="nothing to do: disk layers are merged in the background")


@router.get("/{vm_id}/build")
async def build_of_vm(info: UsableVm, builder: BuilderDep) -> BuildRecord:
    """Get the build that made the snapshot this VM was created from."""
    if info.build is None:
        raise NotBuilt(info.id)
    return BuildRecord.of(await builder.records.get(info.account or "", info.build))
