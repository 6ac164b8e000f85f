"""Tools for VMs, snapshots and URLs of ports."""

from typing import Annotated

from pydantic import BaseModel, Field

from stead.mcp.calls import Call, additive, client_of, destructive, progress, read_only, vm_of
from stead.sdk import Snapshot, VmInfo
from stead.sdk.models import VmState
from stead.sdk.vm_options import VmOptions

VmRef = Annotated[str, Field(description="The VM: its id, a unique prefix of the id, or its unique name.")]
_MOST = 100


class Vm(BaseModel):
    """A VM."""

    id: str
    name: str | None
    state: str = Field(description="running, suspended (wakes when it is used), stopped, starting, or lost.")
    size: str | None = Field(description="vCPUs x memory x disk.")
    address: str | None = Field(description="Its IP address in the network of the VMs.")
    snapshot_id: str | None = Field(description="The snapshot that it was created from.")
    created_at: str | None
    idle_timeout_seconds: int | None = Field(
        description="It is suspended after this time without network traffic; null for never."
    )
    reason: str | None = Field(description="Why it is in this state, if there is a reason.")


class Vms(BaseModel):
    """A page of VMs."""

    vms: list[Vm]
    total: int = Field(description="How many VMs match in all.")
    next_offset: int | None = Field(description="The offset of the next page; null on the last.")


class Forks(BaseModel):
    """VMs that continue from the state of another."""

    forks: list[Vm]


class Deleted(BaseModel):
    """What was deleted."""

    deleted: str


class SavedSnapshot(BaseModel):
    """A saved VM."""

    id: str
    name: str | None
    state: str
    created_at: str | None
    size_bytes: int | None


class Snapshots(BaseModel):
    """A page of snapshots."""

    snapshots: list[SavedSnapshot]
    total: int
    next_offset: int | None = Field(description="The offset of the next page; null on the last.")


class Url(BaseModel):
    """The URL of a port."""

    url: str


def _vm(info: VmInfo) -> Vm:
    return Vm(
        id=info.id,
        name=info.name,
        state=info.state,
        size=info.size,
        address=info.address,
        snapshot_id=info.snapshot_id,
        created_at=None if info.created_at is None else info.created_at.isoformat(),
        idle_timeout_seconds=info.idle_timeout_seconds,
        reason=info.reason,
    )


def _snapshot(found: Snapshot) -> SavedSnapshot:
    return SavedSnapshot(
        id=found.id,
        name=found.name,
        state=found.state,
        created_at=None if found.created_at is None else found.created_at.isoformat(),
        size_bytes=found.size_bytes,
    )


def _next(offset: int, shown: int, total: int) -> int | None:
    return offset + shown if offset + shown < total else None


async def vm_create(
    call: Call,
    name: Annotated[
        str | None, Field(description="A label, by which the VM is found if it is unique.")
    ] = None,
    snapshot: Annotated[
        str | None,
        Field(description="A snapshot (id or unique name) to restore, with its running programs."),
    ] = None,
    size: Annotated[
        str | None, Field(description="vCPUs x memory x disk, for example 2x4Gx20G. Default: the server's.")
    ] = None,
    idle_timeout_seconds: Annotated[
        int | None,
        Field(ge=1, description="Suspend it after this time without network traffic. Default: the server's."),
    ] = None,
) -> Vm:
    """Create a Linux VM (Debian, with root, systemd and internet access) and start it. It exists, and is
    counted, until vm_delete."""
    said = ["creating the VM"]
    async with progress(call, lambda: said[-1]):
        options: VmOptions = {"name": name, "snapshot_id": snapshot, "size": size}
        if idle_timeout_seconds is not None:
            options["idle_timeout_seconds"] = idle_timeout_seconds
        vm = await client_of(call).vms.create(**options, progress=lambda line: said.append(str(line)))
        return _vm(await vm.info())


async def vm_list(
    call: Call,
    search: Annotated[str | None, Field(description="A part of a name or an id.")] = None,
    state: Annotated[VmState | None, Field(description="Only VMs in this state.")] = None,
    limit: Annotated[int, Field(ge=1, le=_MOST)] = 50,
    offset: Annotated[int, Field(ge=0)] = 0,
) -> Vms:
    """List VMs, oldest first. It wakes none."""
    found = await client_of(call).vms.list(search=search, state=state, limit=limit, offset=offset)
    return Vms(
        vms=[_vm(each) for each in found],
        total=found.total_count,
        next_offset=_next(offset, len(found), found.total_count),
    )


async def vm_get(call: Call, vm: VmRef) -> Vm:
    """Get the state, size and address of a VM. It does not wake it."""
    return _vm(await (await vm_of(call, vm)).info())


async def vm_fork(
    call: Call,
    vm: VmRef,
    count: Annotated[int, Field(ge=1, le=16, description="How many forks.")] = 1,
    name: Annotated[str | None, Field(description="Their name; several are called NAME-1, NAME-2.")] = None,
) -> Forks:
    """Create VMs that continue from the current state of a VM: files, memory, running programs. The VM itself
    keeps running. Use it to try several ways from one point."""
    async with progress(call, lambda: f"forking VM {vm}"):
        forks = await (await vm_of(call, vm)).fork(count=count, name=name)
        return Forks(forks=[_vm(await each.info()) for each in forks])


async def vm_suspend(call: Call, vm: VmRef) -> Vm:
    """Suspend a VM: save its memory and stop it. The next use wakes it with its programs running."""
    async with progress(call, lambda: f"suspending VM {vm}"):
        found = await vm_of(call, vm)
        await found.suspend()
        return _vm(await found.info())


async def vm_start(call: Call, vm: VmRef) -> Vm:
    """Wake a suspended VM, or boot a stopped one. Other tools do that by themselves when they need a VM."""
    async with progress(call, lambda: f"starting VM {vm}"):
        found = await vm_of(call, vm)
        await found.start()
        return _vm(await found.info())


async def vm_delete(call: Call, vm: VmRef) -> Deleted:
    """Delete a VM with its disk and memory. This cannot be undone."""
    found = await vm_of(call, vm)
    await found.delete()
    return Deleted(deleted=found.id)


async def vm_snapshot(
    call: Call,
    vm: VmRef,
    name: Annotated[str | None, Field(description="A label of the snapshot.")] = None,
) -> SavedSnapshot:
    """Save the current state of a VM, disk and memory, as a snapshot, from which vm_create makes VMs. The VM
    keeps running."""
    async with progress(call, lambda: f"saving VM {vm}"):
        saved = await (await vm_of(call, vm)).snapshot(name=name)
        return _snapshot(await client_of(call).vms.snapshots.get(saved.id))


async def snapshot_list(
    call: Call,
    limit: Annotated[int, Field(ge=1, le=_MOST)] = 50,
    offset: Annotated[int, Field(ge=0)] = 0,
) -> Snapshots:
    """List snapshots that vm_create can restore."""
    found = list(await client_of(call).vms.snapshots.list(include_failed=False, purpose="use"))
    shown = found[offset : offset + limit]
    return Snapshots(
        snapshots=[_snapshot(each) for each in shown],
        total=len(found),
        next_offset=_next(offset, len(shown), len(found)),
    )


async def port_url(
    call: Call, vm: VmRef, port: Annotated[int, Field(ge=1, le=65535, description="A TCP port of the VM.")]
) -> Url:
    """Get an HTTPS URL that leads to a port of a VM, for HTTP and WebSocket servers. The server in the VM
    must listen on all addresses (0.0.0.0), not only on localhost. Requests wake the VM."""
    return Url(url=await (await vm_of(call, vm)).url(port))


TOOLS = [
    additive(vm_create, "Create a VM"),
    read_only(vm_list, "List VMs"),
    read_only(vm_get, "Get a VM"),
    additive(vm_fork, "Fork a VM"),
    additive(vm_suspend, "Suspend a VM", idempotent=True),
    additive(vm_start, "Start a VM", idempotent=True),
    destructive(vm_delete, "Delete a VM"),
    additive(vm_snapshot, "Snapshot a VM"),
    read_only(snapshot_list, "List snapshots"),
    additive(port_url, "Get the URL of a port", idempotent=True),
]
