"""What `persist_workspace` returns instead of an archive: a reference to a snapshot or to a suspended VM."""

import io
import json
from dataclasses import dataclass

from agents.sandbox.session import Dependencies

from stead.agents.openai.options import SteadSandboxSessionState

_MAGIC = b"stead-workspace-reference/1\n"
_LONGEST = 4096


@dataclass(frozen=True)
class WorkspaceReference:
    """Exactly one of the two is set."""

    snapshot_id: str | None = None
    vm_id: str | None = None

    def stream(self) -> io.BytesIO:
        return io.BytesIO(_MAGIC + json.dumps({"snapshotId": self.snapshot_id, "vmId": self.vm_id}).encode())


def is_reference(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def parse_reference(data: bytes) -> WorkspaceReference | None:
    """The reference in saved data; None if it is something else, such as an archive."""
    if not is_reference(data):
        return None
    try:
        found = json.loads(data[len(_MAGIC) : _LONGEST])
    except ValueError:
        raise ValueError("invalid workspace reference: not JSON") from None
    snapshot, vm = (found.get("snapshotId"), found.get("vmId")) if isinstance(found, dict) else (None, None)
    if isinstance(snapshot, str) and vm is None:
        return WorkspaceReference(snapshot_id=snapshot)
    if isinstance(vm, str) and snapshot is None:
        return WorkspaceReference(vm_id=vm)
    raise ValueError("invalid workspace reference: needs either snapshotId or vmId")


async def saved_reference(
    state: SteadSandboxSessionState, dependencies: Dependencies | None
) -> WorkspaceReference | None:
    """The reference that a session persisted; None if it persisted nothing, or an archive."""
    if not state.takes_references or not await state.snapshot.restorable(dependencies=dependencies):
        return None
    saved = await state.snapshot.restore(dependencies=dependencies)
    try:
        start = saved.read(_LONGEST)
    finally:
        saved.close()
    return parse_reference(start if isinstance(start, bytes) else b"")
