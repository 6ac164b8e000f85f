"""VMs."""

from collections.abc import Mapping, Sequence
from typing import Any

from stead.sdk._async.background import BACKGROUND, Progress, call_in_background
from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_vm, find_vpc
from stead.sdk._async.snapshots import AsyncBuilds, AsyncSnapshots
from stead.sdk._async.vm import AsyncVm
from stead.sdk.arguments import checks_arguments
from stead.sdk.creation import REFUSE_UNKNOWN_KEYS, SpecLike, vm_body
from stead.sdk.models import CreatedVm, VmList, VmState
from stead.sdk.parsing import parse
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, UNSET, Request, Unset, request
from stead.sdk.sizes import Amount, Size, wanted_size
from stead.sdk.spec_parts import FileLike, Git, Group, Nic, PersistenceLike, Service, User


@checks_arguments
class AsyncVms:
    """Create, find, list and delete VMs."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.snapshots = AsyncSnapshots(connection)
        """Snapshots: saved VMs."""
        self.builds = AsyncBuilds(connection)
        """Builds of VMs and snapshots from specs."""
        self._connection = connection

    async def create(
        self,
        *,
        name: str | None = None,
        snapshot_id: str | None = None,
        spec: SpecLike | None = None,
        template: Mapping[str, Any] | None = None,
        idle_timeout_seconds: int | Unset | None = UNSET,
        activity_threshold_bytes: int | None = None,
        persistence: PersistenceLike | None = None,
        users: Sequence[User | str] | None = None,
        groups: Sequence[Group | str] | None = None,
        additional_files: Mapping[str, FileLike] | None = None,
        git: Git | Mapping[str, Any] | None = None,
        systemd: Sequence[Service] | Mapping[str, Any] | None = None,
        apt_deps: Sequence[str] | None = None,
        workdir: str | None = None,
        size: str | Size | None = None,
        cpu: int | None = None,
        memory: Amount | None = None,
        disk: Amount | None = None,
        vcpu_count: int | None = None,
        mem_size_gb: float | None = None,
        rootfs_size_gb: float | None = None,
        recreate: bool | None = None,
        wait_for_ready_signal: bool | None = None,
        ready_signal_timeout_seconds: float | None = None,
        domains: Mapping[str, int] | Sequence[str] | None = None,
        git_access: str | None = None,
        nics: Sequence[Nic | Mapping[str, Any]] | None = None,
        progress: Progress | None = None,
        if_missing: bool = False,
        idempotency_key: str | None = None,
    ) -> AsyncVm:
        """Create a VM, start it, and return a handle on it.

        Args:
            name: a label; it need not be unique, but only a unique one can be used to find the VM.
            snapshot_id: restore this snapshot, memory included, instead of the default image. An id, a
                unique id prefix, or a unique name.
            spec: the VM's description, with layers that the server builds once and caches: see `VmSpec`.
            template: one layer as JSON in the server's format, instead of a spec.
            idle_timeout_seconds: suspend the VM after this time without network traffic; None for never.
                The server's default applies if it is not given.
            activity_threshold_bytes: less traffic than this does not count as activity.
            persistence: how long the VM is kept: "persistent", "sticky", "ephemeral", or a `Persistence`.
            users, groups, additional_files, git, systemd, apt_deps, workdir: set up in this VM only.
            size: vCPUs x memory x disk, for example "2x4Gx20G".
            cpu, memory, disk: the same in parts: vCPUs, and GiB as a number or text such as "512M". vCPUs
                and memory are powers of two.
            vcpu_count, mem_size_gb, rootfs_size_gb: other names of cpu, memory and disk.
            recreate: after it was deleted, the VM can be created again under the same id.
            wait_for_ready_signal, ready_signal_timeout_seconds: return only when its services are ready.
            domains: host names that lead to a port of the VM: `{"app.example.com": 3000}`, of verified
                domains or preview zones. Names without a port lead to 3000.
            git_access: id of a repository that git in the VM may fetch from and push to. Its token is
                revoked when the VM is deleted.
            nics: the VPC that the VM is in: one `Nic`.
            progress: called with each line that the server logs for this call, for example `print`: the
                build of the spec, and of the template when the VM is the first of its size.
            if_missing: return the VM of this name if there is one, as it is; its `created` is False then.
                `NameNotUnique` if there are several.
            idempotency_key: a text of your choice, such as a UUID, new for each VM. A create that is repeated
                with it within 24 h returns the same VM, so it is retried when the connection breaks. The
                server finishes it then, although nobody waits.
        """
        wanted = wanted_size(
            size=size,
            cpu=cpu,
            memory=memory,
            disk=disk,
            vcpu_count=vcpu_count,
            mem_size_gb=mem_size_gb,
            rootfs_size_gb=rootfs_size_gb,
        )
        body = vm_body(
            name=name,
            snapshot_id=snapshot_id,
            spec=spec,
            template=template,
            idle_timeout_seconds=idle_timeout_seconds,
            activity_threshold_bytes=activity_threshold_bytes,
            persistence=persistence,
            users=users,
            groups=groups,
            additional_files=additional_files,
            git=git,
            systemd=systemd,
            apt_deps=apt_deps,
            workdir=workdir,
            size=wanted,
            recreate=recreate,
            wait_for_ready_signal=wait_for_ready_signal,
            ready_signal_timeout_seconds=ready_signal_timeout_seconds,
            domains=domains,
            git_access=git_access,
            nics=nics,
        )
        if if_missing:
            body["ifMissing"] = True
        for nic in body.get("nics", ()):
            nic["vpc"] = await find_vpc(self._connection, nic["vpc"])
        await self.snapshots.resolve_names(body)
        # A build runs as a background request: if its only connection broke, its result would be lost.
        long = spec is not None or progress is not None
        wait = (BUILD_TIMEOUT if long else LIFECYCLE_TIMEOUT) + (ready_signal_timeout_seconds or 0)
        headers = {**(BACKGROUND if long else {}), **REFUSE_UNKNOWN_KEYS}
        call = request(
            "POST",
            "/v1/vms",
            json=body,
            headers=headers,
            timeout=wait,
            idempotent=if_missing,
            idempotency_key=idempotency_key,
        )
        # Another call may have been answered with the same VM.
        undo = None if if_missing or idempotency_key is not None else _delete_created
        made = parse(CreatedVm, await call_in_background(self._connection, call, progress, undo))
        return AsyncVm(self._connection, made.id, name=name, domains=made.domains, created=made.created)

    async def list(
        self,
        *,
        state: VmState | None = None,
        search: str | None = None,
        include_deleted: bool | None = None,
        limit: int | None = None,
        offset: int | None = None,
    ) -> VmList:
        """All VMs, oldest first, or those that match: `search` is a part of a name or an id."""
        query = {
            "vmState": state,
            "search": search,
            "includeDeleted": include_deleted,
            "limit": limit,
            "offset": offset,
        }
        return parse(VmList, await self._connection.call(request("GET", "/v1/vms", query=query)))

    async def get(self, vm: str) -> AsyncVm:
        """A handle on an existing VM, with its `last_info`, by id, unique id prefix or unique name.

        Raises `VmNotFound` if there is none, `AmbiguousName` if there are several.
        """
        found = await self.find(vm)
        await found.info()
        return found

    async def find(self, vm: str) -> AsyncVm:
        """A handle on the VM with this id, unique id prefix (4 characters or more), or unique name.

        A full id is used as it is, without a request; else the VMs are listed. Raises `VmNotFound` if there
        is none, `AmbiguousName` if there are several.
        """
        found, info = await find_vm(self._connection, vm)
        return AsyncVm(self._connection, found, last_info=info)

    def ref(self, vm_id: str) -> AsyncVm:
        """A handle on the VM with this id, without a request: it need not exist."""
        return AsyncVm(self._connection, vm_id)

    async def delete(self, vm: str) -> None:
        """Delete a VM, by id, unique id prefix or unique name. This cannot be undone."""
        await (await self.find(vm)).delete()


def _delete_created(answer: Any) -> Request:
    return request("DELETE", "/v1/vms/{}", parse(CreatedVm, answer).id)
