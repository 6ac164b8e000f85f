"""A session of the agent framework in a VM."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from agents.sandbox import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.entries import BaseEntry
from agents.sandbox.errors import (
    ExecNonZeroError,
    ExposedPortUnavailableError,
    PtySessionNotFoundError,
    WorkspaceArchiveWriteError,
    WorkspaceStartError,
    WorkspaceStopError,
)
from agents.sandbox.files import FileEntry
from agents.sandbox.materialization import MaterializationResult, MaterializedFile
from agents.sandbox.session import BaseSandboxSession, Dependencies, Instrumentation, SandboxSession
from agents.sandbox.session.manifest_application import ManifestApplier
from agents.sandbox.session.pty_types import (
    PtyExecUpdate,
    clamp_pty_yield_time_ms,
    resolve_pty_write_yield_time_ms,
)
from agents.sandbox.workspace_paths import posix_path_as_path

from stead.agents.openai import mounts, persistence
from stead.agents.openai.accounts import accounts_script, groups_script
from stead.agents.openai.backend import Backend
from stead.agents.openai.commands import SessionCommands
from stead.agents.openai.errors import timeout_error, transport_error
from stead.agents.openai.guest import is_outage, repeated, run
from stead.agents.openai.options import SteadSandboxSessionState
from stead.agents.openai.references import saved_reference
from stead.agents.openai.workspace_archive import WorkspaceArchive
from stead.agents.openai.workspace_files import AnyPath, AnyUser, WorkspaceFiles
from stead.sdk import AsyncVm, FileNotFound, SteadException

if TYPE_CHECKING:
    from stead.agents.openai.client import SteadSandboxClient

logger = logging.getLogger(__name__)

_NO_INPUT = "stdin is not available for this process"
"""The shell tool looks for exactly this text."""


class SteadSandboxSession(BaseSandboxSession):
    """One VM and its workspace. `session.vm` is the VM as the SDK knows it."""

    state: SteadSandboxSessionState

    def __init__(self, state: SteadSandboxSessionState, backend: Backend) -> None:
        self.state = state
        self.backend = backend
        self.files = WorkspaceFiles(lambda: self.vm, self._workspace_path_policy)
        self._commands = SessionCommands(state.commands)
        self._verified = True
        """The client has just created or found the VM."""
        self._released = False
        self._saved = True

    @property
    def vm(self) -> AsyncVm:
        return self.backend.vm(self.state.vm_id)

    # Commands

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        self.files.forget()
        arguments, user = _split_user([str(part) for part in command])
        env = await self.state.manifest.environment.resolve()
        try:
            try:
                end = await run(self.vm, arguments, cwd=self._cwd(), env=env, user=user, timeout=timeout)
            except FileNotFound:
                # The workspace was deleted: nothing has started, and the agent needs a shell to repair it.
                end = await run(self.vm, arguments, env=env, user=user, timeout=timeout)
        except SteadException as error:
            raise transport_error(command, error) from error
        if end.timed_out:
            raise timeout_error(command, timeout, end)
        return ExecResult(stdout=end.stdout, stderr=end.stderr, exit_code=end.exit_code)

    def _cwd(self) -> str:
        return self.state.manifest.root if self.state.workspace_root_ready else "/"

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        self.files.forget()
        arguments, name = _split_user(self._prepare_exec_command(*command, shell=shell, user=user))
        env = await self.state.manifest.environment.resolve()
        try:
            try:
                number, process = await self._commands.start(
                    self.vm, arguments, tty=tty, cwd=self._cwd(), env=env, user=name, timeout=timeout
                )
            except FileNotFound:
                number, process = await self._commands.start(
                    self.vm, arguments, tty=tty, cwd="/", env=env, user=name, timeout=timeout
                )
            return await self._commands.update(
                number,
                process,
                seconds=clamp_pty_yield_time_ms(_milliseconds(yield_time_s, 10_000)) / 1000,
                max_output_tokens=max_output_tokens,
            )
        except SteadException as error:
            raise transport_error(command, error) from error

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        self.files.forget()
        try:
            process = await self._commands.find(self.vm, session_id)
            if process is None:
                raise PtySessionNotFoundError(session_id=session_id)
            if chars and not process.last_info.pty:
                raise RuntimeError(_NO_INPUT)
            wait = resolve_pty_write_yield_time_ms(
                yield_time_ms=_milliseconds(yield_time_s, 250), input_empty=chars == ""
            )
            return await self._commands.update(
                session_id, process, seconds=wait / 1000, max_output_tokens=max_output_tokens, chars=chars
            )
        except SteadException as error:
            raise transport_error(("write_stdin", str(session_id)), error) from error

    async def pty_terminate_all(self) -> None:
        await self._commands.terminate(self.vm)

    # Files

    def normalize_path(self, path: AnyPath, *, for_write: bool = False) -> Path:
        return posix_path_as_path(
            self._workspace_path_policy().normalize_sandbox_path(path, for_write=for_write)
        )

    async def _validate_path_access(self, path: AnyPath, *, for_write: bool = False) -> Path:
        return await self.files.check(path, for_write=for_write)

    async def read(self, path: AnyPath, *, user: AnyUser = None) -> io.IOBase:
        return io.BytesIO(await self.files.read(path, user))

    async def _read_bounded(self, path: AnyPath, *, max_bytes: int) -> bytes:
        return await self.files.read_range(path, 0, max_bytes)

    async def write(self, path: AnyPath, data: io.IOBase, *, user: AnyUser = None) -> None:
        await self.files.write(path, data, user)

    async def _write_new_file(self, path: AnyPath, data: io.IOBase, *, user: AnyUser = None) -> None:
        await self.files.create(path, data, user)

    async def mkdir(self, path: AnyPath, *, parents: bool = False, user: AnyUser = None) -> None:
        await self.files.mkdir(path, parents=parents, user=user)

    async def ls(self, path: AnyPath, *, user: AnyUser = None) -> list[FileEntry]:
        return await self.files.list(path, user)

    async def rm(self, path: AnyPath, *, recursive: bool = False, user: AnyUser = None) -> None:
        await self.files.remove(path, recursive=recursive, user=user)

    async def mv(self, source: AnyPath, destination: AnyPath, *, user: AnyUser = None) -> None:
        await self.files.move(source, destination, user)

    async def same_file(
        self, left: AnyPath, right: AnyPath, *, follow_symlinks: bool = True, user: AnyUser = None
    ) -> bool:
        return await self.files.same(left, right, follow=follow_symlinks, user=user)

    # Manifest

    async def _apply_manifest(
        self, *, only_ephemeral: bool = False, provision_accounts: bool = True
    ) -> MaterializationResult:
        """Upload files and folders as one archive, then apply the entries that need the VM."""
        if provision_accounts and not only_ephemeral:
            await self.provision_manifest_accounts()
        archive = self._archive()
        try:
            applier = ManifestApplier(
                mkdir=lambda path: archive.mkdir(path, parents=True),
                exec_checked_nonzero=self._exec_checked_nonzero,
                apply_entry=archive.add,
                max_entry_concurrency=self._max_manifest_entry_concurrency,
            )
            result = await applier.apply_manifest(
                self.state.manifest,
                only_ephemeral=only_ephemeral,
                provision_accounts=False,
                base_dir=self._manifest_base_dir(),
            )
            return MaterializationResult(files=[*result.files, *await self._materialise(archive)])
        finally:
            archive.close()

    async def _apply_entry_batch(
        self, entries: Sequence[tuple[Path, BaseEntry]], *, base_dir: Path
    ) -> list[MaterializedFile]:
        archive = self._archive()
        try:
            files = await archive._apply_entry_batch(entries, base_dir=base_dir)
            return [*files, *await self._materialise(archive)]
        finally:
            archive.close()

    def _archive(self) -> WorkspaceArchive:
        return WorkspaceArchive(
            self.state,
            entry_limit=self._max_manifest_entry_concurrency,
            file_limit=self._max_local_dir_file_concurrency,
        )

    async def _materialise(self, archive: WorkspaceArchive) -> list[MaterializedFile]:
        root = self.state.manifest.root
        self.files.forget()
        if not archive.empty or not self.state.workspace_root_ready:
            try:
                await repeated(lambda: self.vm.fs.upload_archive(archive.chunks(), root), harmless=True)
            except SteadException as error:
                raise WorkspaceArchiveWriteError(
                    path=Path(root), cause=error, message=str(error), retryable=error.retryable
                ) from error
        await self._run_script(groups_script(archive.groups))
        if not archive.deferred:
            return []
        # Mounts and repositories run commands in the workspace.
        self.state.workspace_root_ready = True
        return await self._apply_in_vm(archive.deferred)

    async def _apply_in_vm(self, entries: Sequence[tuple[Path, BaseEntry]]) -> list[MaterializedFile]:
        apply = super()._apply_entry_batch
        return await mounts.attach(self, entries, lambda: apply(entries, base_dir=self._manifest_base_dir()))

    async def attach_mounts(self) -> None:
        """Mount what the manifest mounts, for example in a fork of a VM."""
        await self._apply_in_vm(
            [(path, mount) for mount, path in reversed(self.state.manifest.mount_targets())]
        )

    async def _reapply_ephemeral_manifest_on_resume(self) -> None:
        """As in the base class, whose `apply_manifest` would hide why a mount fails."""
        await self._validate_manifest_application(only_ephemeral=True)
        await self._apply_manifest(only_ephemeral=True, provision_accounts=False)

    async def provision_manifest_accounts(self) -> None:
        await self._run_script(accounts_script(self.state.manifest))

    async def _run_script(self, script: str | None) -> None:
        if script is None:
            return
        try:
            end = await run(self.vm, ["sh", "-c", script], harmless=True)
        except SteadException as error:
            raise transport_error(("sh", "-c", script), error) from error
        if end.exit_code:
            result = ExecResult(stdout=end.stdout, stderr=end.stderr, exit_code=end.exit_code)
            raise ExecNonZeroError(result, command=("sh", "-c", script))

    # Ports

    def _assert_exposed_port_configured(self, port: int) -> None:
        """Any port can be exposed; none has to be declared."""

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            url = urlsplit(await repeated(lambda: self.vm.url(port), harmless=True))
        except SteadException as error:
            raise ExposedPortUnavailableError(
                port=port,
                exposed_ports=self.state.exposed_ports,
                reason="backend_unavailable",
                context={"backend": "stead", "detail": str(error)},
                cause=error,
                retryable=error.retryable,
            ) from error
        tls = url.scheme == "https"
        return ExposedPortEndpoint(host=url.hostname or "", port=url.port or (443 if tls else 80), tls=tls)

    # Lifecycle

    async def running(self) -> bool:
        """True for a VM that exists, also if it sleeps: its next use wakes it."""
        if not self.state.workspace_root_ready or self._released:
            return False
        try:
            return await self.backend.exists(self.state.vm_id)
        except SteadException as error:
            # An unreachable server says nothing about the VM; starting again would overwrite its files.
            if is_outage(error):
                return True
            raise

    async def _ensure_backend_started(self) -> None:
        """Replace the VM if it was deleted since the session was created."""
        verified, self._verified = self._verified and not self._released, False
        if verified or (not self._released and await self.backend.exists(self.state.vm_id)):
            return
        reference = await saved_reference(self.state, self.dependencies)
        vm = await self.backend.create(self.state, reference)
        self.attach(vm, restored=reference is not None)

    async def _probe_workspace_root_for_preserved_resume(self) -> bool:
        """Whether a VM that was found has the workspace.

        The base class takes any failure for no, and then applies the manifest over the work of the agent.
        """
        if not self._workspace_state_preserved_on_start() or self._start_workspace_root_ready:
            return self._can_reuse_preserved_workspace_on_resume()
        end = await run(self.vm, ["test", "-d", self.state.manifest.root], harmless=True)
        if end.exit_code == 0:
            self._mark_workspace_root_ready_from_probe()
        return end.exit_code == 0

    def attach(self, vm: AsyncVm, *, restored: bool) -> None:
        """Continue in another VM: a new one, or one that was created from what this session saved."""
        self.state.vm_id = vm.id
        self.state.workspace_root_ready = restored
        if not restored:
            self.state.commands.clear()
        self._released = False
        self._set_start_state_preserved(restored, system=restored)

    async def _can_skip_snapshot_restore_on_resume(self, *, is_running: bool) -> bool:
        """The VM itself is at least as new as anything that was saved of it."""
        return is_running

    def _should_compute_snapshot_fingerprint_on_persist(self) -> bool:
        return False

    async def persist_workspace(self) -> io.IOBase:
        return await persistence.persist(self)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        await persistence.hydrate(self, data)

    async def _before_stop(self) -> None:
        """A snapshot and a suspended VM contain the running commands; an archive of files does not."""
        self._saved = False
        if self.state.workspace_persistence == "tar" and not self.state.pause_on_exit:
            await self.pty_terminate_all()
        await self._commands.settle()

    async def _persist_snapshot(self) -> None:
        await super()._persist_snapshot()
        self._saved = True

    async def _before_shutdown(self) -> None:
        await self._commands.settle()

    async def _terminate_ambiguous_mount_transition(self) -> None:
        """A mount could not be detached or attached again: the VM is suspended, so nothing in it is lost."""
        self._saved = False
        await self.shutdown()

    async def _shutdown_backend(self) -> None:
        """Suspend or delete the VM. A VM whose workspace could not be saved is suspended, not deleted."""
        if self._released:
            return
        pause = self.state.pause_on_exit or not self._saved
        if pause:
            await mounts.try_detach(self)
        try:
            await self.backend.release(self.state.vm_id, pause=pause)
        except SteadException as error:
            logger.warning("cannot release VM %s: %s", self.state.vm_id, error)
            return
        self._released = not self.state.pause_on_exit and self._saved

    def _wrap_start_error(self, error: Exception) -> Exception:
        if isinstance(error, SteadException):
            return WorkspaceStartError(
                path=Path(self.state.manifest.root),
                cause=error,
                message=f"cannot start the session: {error}",
                retryable=error.retryable,
            )
        return error

    def _wrap_stop_error(self, error: Exception) -> Exception:
        if isinstance(error, SteadException):
            path = Path(self.state.manifest.root)
            return WorkspaceStopError(path=path, cause=error, retryable=error.retryable)
        return error


class SteadSession(SandboxSession):
    """What the client returns: the session with audit events, and with what a VM adds to it."""

    def __init__(
        self,
        inner: SteadSandboxSession,
        *,
        client: "SteadSandboxClient",
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        super().__init__(inner, instrumentation=instrumentation, dependencies=dependencies)
        self._client = client

    @property
    def _stead(self) -> SteadSandboxSession:
        return cast(SteadSandboxSession, self._inner)

    @property
    def vm(self) -> AsyncVm:
        """The VM of the session: everything that the SDK can do with a VM."""
        return self._stead.vm

    async def fork(self, count: int = 1) -> "list[SteadSession]":
        """RunningVm sessions in copies of the VM, with the same files, memory and running programs."""
        return await self._client.fork(self, count)

    async def read_range(
        self, path: Path | str, *, offset: int, length: int, user: str | User | None = None
    ) -> bytes:
        """Read at most `length` bytes of a file from `offset` on."""
        return await self._stead.files.read_range(path, offset, length, user)

    async def _apply_manifest(
        self, *, only_ephemeral: bool = False, provision_accounts: bool = True
    ) -> MaterializationResult:
        return await self._stead._apply_manifest(
            only_ephemeral=only_ephemeral, provision_accounts=provision_accounts
        )

    async def _apply_entry_batch(
        self, entries: Sequence[tuple[Path, BaseEntry]], *, base_dir: Path
    ) -> list[MaterializedFile]:
        return await self._stead._apply_entry_batch(entries, base_dir=base_dir)


def _split_user(command: list[str]) -> tuple[list[str], str | None]:
    """The framework runs a command as another user with sudo; the VM does it without."""
    if len(command) > 4 and command[:2] == ["sudo", "-u"] and command[3] == "--":
        return command[4:], command[2]
    return command, None


def _milliseconds(seconds: float | None, standard: int) -> int:
    return standard if seconds is None else int(seconds * 1000)
