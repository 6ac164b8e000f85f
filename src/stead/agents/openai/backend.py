"""Creates and finds the VMs of sessions."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from stead.agents.openai.guest import repeated
from stead.agents.openai.options import SteadSandboxSessionState
from stead.agents.openai.references import WorkspaceReference
from stead.sdk import AsyncStead, AsyncVm, NotFound, ServerUnreachable, SteadException
from stead.sdk.vm_options import VmOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """The VMs of a Stead server, as sessions need them."""

    stead: AsyncStead

    def vm(self, vm_id: str) -> AsyncVm:
        return self.stead.vms.ref(vm_id)

    async def exists(self, vm_id: str) -> bool:
        """Whether the VM exists, in a state that its next use brings back: running, suspended or stopped."""
        if not vm_id:
            return False
        try:
            info = await repeated(self.vm(vm_id).info)
        except NotFound:
            return False
        return not info.deleted and info.state != "lost"

    async def find(self, name: str) -> AsyncVm | None:
        """The oldest VM with exactly this name; None if there is none."""
        found = await repeated(lambda: self.stead.vms.list(search=name))
        for info in found:
            if info.name == name and not info.deleted and info.state != "lost":
                return self.vm(info.id)
        return None

    async def create(
        self, state: SteadSandboxSessionState, reference: WorkspaceReference | None = None
    ) -> AsyncVm:
        """A new VM for a session: from what was saved, if there is a reference, else as the options say."""
        name = vm_name(state)
        if reference is not None and reference.vm_id is not None:
            return (await self.vm(reference.vm_id).fork(name=name))[0]
        options: VmOptions = {"name": name}
        if reference is not None:
            options["snapshot_id"] = reference.snapshot_id
        elif state.snapshot_id is not None:
            options["snapshot_id"] = state.snapshot_id
        if state.size is not None and "snapshot_id" not in options:
            options["size"] = state.size
        if state.idle_timeout_seconds != "default":
            options["idle_timeout_seconds"] = state.idle_timeout_seconds
        if state.git_access is not None:
            options["git_access"] = state.git_access

        async def once() -> AsyncVm:
            try:
                return await self.stead.vms.create(**options)
            except ServerUnreachable as error:
                # The answer was lost: the name tells whether the VM was created.
                created = await self.find(name) if error.sent else None
                if created is None:
                    raise
                return created

        vm = await repeated(once)
        if reference is not None:
            await self.extend(reference.snapshot_id, state.snapshot_ttl_days)
        return vm

    async def extend(self, snapshot_id: str | None, days: float | None) -> None:
        """Restart the lifetime of a saved snapshot: the session may have to be resumed from it once more.

        One that is kept for longer stays so.
        """
        if snapshot_id is None:
            return
        snapshots = self.stead.vms.snapshots
        ttl = None if days is None else timedelta(days=days)
        try:
            ends = (await repeated(lambda: snapshots.get(snapshot_id), harmless=True)).expires_at
            if ends is None or (ttl is not None and ends >= datetime.now(UTC) + ttl):
                return
            await repeated(lambda: snapshots.extend(snapshot_id, ttl=ttl, expires_at=None), harmless=True)
        except NotFound:
            return
        except SteadException as error:
            # The session can be used nevertheless.
            logger.warning("cannot extend the lifetime of snapshot %s: %s", snapshot_id, error)

    async def release(self, vm_id: str, *, pause: bool) -> None:
        """Suspend or delete a VM; one that is gone already is no error."""
        vm = self.vm(vm_id)
        try:
            await repeated(vm.suspend if pause else vm.delete, harmless=True)
        except NotFound:
            return
        except SteadException:
            if not await self.exists(vm_id):
                return
            raise


def vm_name(state: SteadSandboxSessionState) -> str:
    return state.key or f"agent-{state.session_id.hex[:16]}"
