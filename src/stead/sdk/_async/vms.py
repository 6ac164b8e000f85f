"""VMs."""

from typing import Any, Unpack

from stead.sdk._async.background import BACKGROUND, Progress, call_in_background
from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_vm, resolve_references
from stead.sdk._async.snapshots import AsyncBuilds, AsyncSnapshots
from stead.sdk._async.vm import AsyncVm
from stead.sdk.arguments import checks_arguments
from stead.sdk.creation import REFUSE_UNKNOWN_KEYS, vm_body
from stead.sdk.models import CreatedVm, VmList, VmState
from stead.sdk.parsing import parse
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, Request, request
from stead.sdk.vm_options import VmOptions


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
        progress: Progress | None = None,
        if_missing: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[VmOptions],
    ) -> AsyncVm:
        """Create a VM, start it, and return a handle on it.

        Args:
            progress: called with each line that the server logs for this call, for example `print`: the
                build of the spec, and of the template when the VM is the first of its size.
            if_missing: return the VM of this name if there is one, as it is; its `created` is False then.
                `NameNotUnique` if there are several.
            idempotency_key: a text of your choice, such as a UUID, new for each VM. A create that is repeated
                with it within 24 h returns the same VM, so it is retried when the connection breaks. The
                server finishes it also without its client.
            options: the VM's name, size, content and lifetime: see `VmOptions`.
        """
        body = await resolve_references(self._connection, vm_body(options))
        # A build runs as a background request: if its only connection broke, its result would be lost.
        long = options.get("spec") is not None or progress is not None
        ready = options.get("ready_signal_timeout_seconds") or 0
        headers = {**(BACKGROUND if long else {}), **REFUSE_UNKNOWN_KEYS}
        call = request(
            "POST",
            "/v1/vms",
            json={**body, "ifMissing": True} if if_missing else body,
            headers=headers,
            timeout=(BUILD_TIMEOUT if long else LIFECYCLE_TIMEOUT) + ready,
            idempotent=if_missing,
            idempotency_key=idempotency_key,
        )
        # Another call may have been answered with the same VM.
        undo = None if if_missing or idempotency_key is not None else _delete_created
        made = parse(CreatedVm, await call_in_background(self._connection, call, progress, undo))
        return AsyncVm(
            self._connection, made.id, name=options.get("name"), domains=made.domains, created=made.created
        )

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
