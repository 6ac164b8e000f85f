"""Saves the workspace of a session: as a snapshot of the whole VM, or as a tar archive."""

import asyncio
import contextlib
import io
import tarfile
import tempfile
from collections.abc import AsyncGenerator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from agents.sandbox.errors import WorkspaceArchiveReadError, WorkspaceArchiveWriteError
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tarfile

from stead.agents.openai import mounts
from stead.agents.openai.guest import repeated, run
from stead.agents.openai.references import WorkspaceReference, is_reference, parse_reference
from stead.sdk import Exited, NotFound, Output, ServerUnreachable, SteadException

if TYPE_CHECKING:
    from stead.agents.openai.session import SteadSandboxSession

_IN_MEMORY = 8 << 20
_CHUNK = 256 << 10


async def persist(session: "SteadSandboxSession") -> io.IOBase:
    """A reference to a snapshot, or to the VM if it will be suspended; an archive if the options say so."""
    root = Path(session.state.manifest.root)
    archive = session.state.workspace_persistence == "tar"
    if session.state.pause_on_exit and not archive:
        session.state.saved_as = "reference"
        return WorkspaceReference(vm_id=session.state.vm_id).stream()

    async def save() -> io.IOBase:
        try:
            if archive:
                skipped = [path.as_posix() for path in session._persist_workspace_skip_relpaths()]
                packed = await _pack(session, skipped=skipped)
                await asyncio.to_thread(_require_archive, packed, root)
                session.state.saved_as = "archive"
                return packed
            reference = await _snapshot(session)
            session.state.saved_as = "reference"
            return reference
        except SteadException as error:
            raise WorkspaceArchiveReadError(
                path=root, context={"reason": str(error)}, cause=error, retryable=error.retryable
            ) from error

    return await mounts.detached(session, save)


async def hydrate(session: "SteadSandboxSession", data: io.IOBase) -> None:
    """Restore what `persist` returned: replace the VM, or extract the archive."""
    root = Path(session.state.manifest.root)
    saved, start = await _spooled(data)
    with saved:
        try:
            reference = parse_reference(start) if session.state.takes_references else None
            if reference is not None:
                await _replace_vm(session, reference)
                return
            validate_archive(saved, root)
            await repeated(
                lambda: session.vm.fs.upload_archive(_chunks(saved), session.state.manifest.root),
                harmless=True,
            )
        except SteadException as error:
            raise WorkspaceArchiveWriteError(
                path=root,
                cause=error,
                message=f"cannot restore the workspace: {error}",
                retryable=error.retryable,
            ) from error
        session.state.workspace_root_ready = True


def _require_archive(packed: io.IOBase, root: Path) -> None:
    """Refuse what the VM sent as an archive if it is something else: the `tar` in it may be any program."""
    packed.seek(0)
    start = packed.read(_CHUNK)
    packed.seek(0)
    try:
        if is_reference(start):
            raise tarfile.ReadError("it starts like a reference to another workspace")
        with tarfile.open(fileobj=packed, mode="r:") as archive:
            while archive.next() is not None:
                # The list of members would grow with the archive.
                archive.members.clear()  # type: ignore[attr-defined]  # missing in typeshed
    except (tarfile.TarError, ValueError) as error:
        packed.close()
        context = {"reason": "the VM sent no tar archive", "detail": str(error)}
        raise WorkspaceArchiveReadError(path=root, context=context, cause=error, retryable=False) from error
    packed.seek(0)


def validate_archive(saved: io.IOBase, root: Path) -> None:
    """Refuse members that leave the workspace.

    A symbolic link may point out of it, as those of a venv do: the VM checks the real path of each access.
    """
    saved.seek(0)
    try:
        with tarfile.open(fileobj=saved, mode="r:*") as archive:
            validate_tarfile(archive, allow_external_symlink_targets=True)
    except (UnsafeTarMemberError, tarfile.TarError) as error:
        context = {"reason": "unsafe_or_invalid_tar", "detail": str(error)}
        raise WorkspaceArchiveWriteError(path=root, context=context, cause=error, retryable=False) from error


async def _snapshot(session: "SteadSandboxSession") -> io.IOBase:
    """A snapshot without the ephemeral entries: they are taken out of the VM and put back."""
    state = session.state
    ephemeral = [path.as_posix() for path in session._persist_workspace_skip_relpaths()]
    mounted = {path.as_posix() for path in session._mount_relpaths_within_workspace()}
    ephemeral = [path for path in ephemeral if path not in mounted]
    kept = await _pack(session, only=ephemeral) if ephemeral else None
    try:
        if ephemeral:
            script = 'cd -- "$1" || exit 0; shift; rm -rf -- "$@"; sync'
            await run(session.vm, ["sh", "-c", script, "sh", state.manifest.root, *ephemeral], harmless=True)
        name = f"agent-{state.session_id.hex[:16]}"
        days = state.snapshot_ttl_days
        ttl = None if days is None else timedelta(days=days)
        saved = await repeated(lambda: session.vm.snapshot(name=name, ttl=ttl, purpose="agent"))
    finally:
        if kept is not None:
            await session.vm.fs.upload_archive(_chunks(kept), state.manifest.root)
            kept.close()
    previous, state.saved_snapshot_id = state.saved_snapshot_id, saved.id
    if previous is not None:
        await _forget(session, previous)
    return WorkspaceReference(snapshot_id=saved.id).stream()


async def _forget(session: "SteadSandboxSession", snapshot_id: str) -> None:
    """Delete the snapshot that a newer one of the same session replaces."""
    try:
        await session.backend.stead.vms.snapshots.delete(snapshot_id)
    except SteadException:
        return


async def _replace_vm(session: "SteadSandboxSession", reference: WorkspaceReference) -> None:
    old = session.state.vm_id
    if reference.vm_id == old:
        session.state.workspace_root_ready = True
        return
    try:
        vm = await session.backend.create(session.state, reference)
    except NotFound as error:
        raise WorkspaceArchiveWriteError(
            path=Path(session.state.manifest.root),
            context={"reason": "the saved snapshot or VM no longer exists"},
            cause=error,
            message=f"cannot restore the workspace: {error}",
            retryable=False,
        ) from error
    session.attach(vm, restored=True)
    await session.backend.release(old, pause=False)


async def _pack(
    session: "SteadSandboxSession", *, skipped: list[str] | None = None, only: list[str] | None = None
) -> io.IOBase:
    """A tar archive of the workspace, or of some of its paths. Hard links become files."""
    root = session.state.manifest.root
    options = ["--hard-dereference", "--ignore-failed-read", "--no-wildcards", "--anchored"]
    options += [f"--exclude=./{path}" for path in skipped or ()]
    script = 'cd -- "$1" || exit 3; shift; exec tar "$@"'
    if only is not None:
        # Entries that were deleted since are left out.
        script = (
            'cd -- "$1" || exit 3; shift; for each; do shift; [ -e "$each" ] && set -- "$@" "./$each"; done; '
            '[ "$#" -gt 0 ] || { exec tar -cf - -T /dev/null; }; exec tar --hard-dereference -cf - -- "$@"'
        )
    arguments = only if only is not None else [*options, "-cf", "-", "."]
    command = ["sh", "-c", script, "sh", root, *arguments]

    async def once() -> io.IOBase:
        with contextlib.ExitStack() as closing:
            archive = closing.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
            await receive(archive)
            closing.pop_all()
        archive.seek(0)
        return archive

    async def receive(archive: io.IOBase) -> None:
        errors, end = b"", None
        events = session.vm.exec_stream(command, cwd="/")
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Exited):
                    end = event
                elif isinstance(event, Output) and event.stream == "stdout":
                    archive.write(event.data)
                else:
                    errors = (errors + event.data)[-4096:]
        if end is None:
            raise ServerUnreachable("the stream was cut before the archive was complete", sent=True)
        # 1: a file changed while it was read.
        if end.status_code > 1:
            context = {
                "reason": "tar failed",
                "exit_code": end.status_code,
                "stderr": errors.decode("utf-8", "replace"),
            }
            raise WorkspaceArchiveReadError(path=Path(root), context=context, retryable=False)

    return await repeated(once, harmless=True)


async def _spooled(data: io.IOBase) -> tuple[io.IOBase, bytes]:
    saved = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
    start = b""
    while chunk := data.read(_CHUNK):
        content = chunk.encode() if isinstance(chunk, str) else bytes(chunk)
        start = start or content
        saved.write(content)
    return saved, start


async def _chunks(saved: io.IOBase) -> AsyncGenerator[bytes]:
    saved.seek(0)
    while chunk := saved.read(_CHUNK):
        yield chunk
