"""Machines."""

from collections.abc import Mapping, Sequence
from typing import Any

from stead.sdk._async.background import BACKGROUND, Progress, call_in_background
from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.snapshots import AsyncBuilds, AsyncSnapshots
from stead.sdk._async.vm import AsyncVm
from stead.sdk.creation import SpecLike, vm_body
from stead.sdk.models import CreatedVm, VmList, VmState
from stead.sdk.parsing import parse
from stead.sdk.parts import FileLike, Git, Group, PersistenceLike, Service, User
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, UNSET, Unset, request


class AsyncVms:
    """Machines: made, found, deleted."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.snapshots = AsyncSnapshots(connection)
        """Kept machines."""
        self.builds = AsyncBuilds(connection)
        """How they were made."""
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
        vcpu_count: int | None = None,
        mem_size_gb: float | None = None,
        rootfs_size_gb: int | None = None,
        recreate: bool | None = None,
        wait_for_ready_signal: bool | None = None,
        ready_signal_timeout_seconds: float | None = None,
        domains: Mapping[str, int] | Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> AsyncVm:
        """Make a machine and return a handle on it, running.

        Args:
            name: a label.
            snapshot_id: begin with this snapshot, memory and all, instead of the default image.
            spec: what it should be like, with layers that the server builds once and keeps: see `VmSpec`.
            template: one layer in the server's own words, instead of a spec.
            idle_timeout_seconds: let it sleep after this time without network traffic; None for never. If
                not given, the server decides.
            activity_threshold_bytes: traffic below this does not count.
            persistence: how long it is kept: "persistent", "sticky", "ephemeral", or a `Persistence`.
            users, groups, additional_files, git, systemd, apt_deps, workdir: what to set up in this one
                machine.
            vcpu_count, mem_size_gb, rootfs_size_gb: its size; vCPUs and memory are powers of two.
            recreate: it may be made again under its id after it was deleted.
            wait_for_ready_signal, ready_signal_timeout_seconds: return only when its services are ready.
            domains: names to publish it under, with the port of each: `{"app.example.com": 3000}`.
            progress: called with each line that is logged while it is being built; `print` will do.
        """
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
            vcpu_count=vcpu_count,
            mem_size_gb=mem_size_gb,
            rootfs_size_gb=rootfs_size_gb,
            recreate=recreate,
            wait_for_ready_signal=wait_for_ready_signal,
            ready_signal_timeout_seconds=ready_signal_timeout_seconds,
            domains=domains,
        )
        # A build is not left to one silent connection: if that broke, its result would be lost.
        long = spec is not None or progress is not None
        wait = (BUILD_TIMEOUT if long else LIFECYCLE_TIMEOUT) + (ready_signal_timeout_seconds or 0)
        headers = BACKGROUND if long else None
        call = request("POST", "/v1/vms", json=body, headers=headers, timeout=wait)
        created = parse(CreatedVm, await call_in_background(self._connection, call, progress))
        return AsyncVm(self._connection, created.id, domains=created.domains)

    async def list(
        self,
        *,
        state: VmState | None = None,
        search: str | None = None,
        include_deleted: bool | None = None,
        limit: int | None = None,
        offset: int | None = None,
    ) -> VmList:
        """All machines, or those that fit."""
        query = {
            "vmState": state,
            "search": search,
            "includeDeleted": include_deleted,
            "limit": limit,
            "offset": offset,
        }
        return parse(VmList, await self._connection.call(request("GET", "/v1/vms", query=query)))

    async def get(self, vm_id: str) -> AsyncVm:
        """A handle on a machine that is there, with `last_info`; else `VmNotFound`."""
        vm = self.ref(vm_id)
        await vm.info()
        return vm

    def ref(self, vm_id: str) -> AsyncVm:
        """A handle on a machine, without asking whether it is there."""
        return AsyncVm(self._connection, vm_id)

    async def delete(self, vm_id: str) -> None:
        """Delete a machine for good."""
        await self.ref(vm_id).delete()
