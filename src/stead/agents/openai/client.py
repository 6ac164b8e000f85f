"""The sandbox client: `SandboxRunConfig(client=SteadSandboxClient())` gives an agent a VM."""

import asyncio
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from agents.sandbox import Manifest
from agents.sandbox.errors import WorkspaceStartError
from agents.sandbox.session import (
    BaseSandboxClient,
    Dependencies,
    Instrumentation,
    SandboxSession,
    SandboxSessionState,
)
from agents.sandbox.snapshot import NoopSnapshot, SnapshotBase, SnapshotSpec, resolve_snapshot

from stead.agents.openai import mounts
from stead.agents.openai.backend import Backend
from stead.agents.openai.guest import repeated
from stead.agents.openai.options import SteadSandboxClientOptions, SteadSandboxSessionState
from stead.agents.openai.references import saved_reference
from stead.agents.openai.session import SteadSandboxSession, SteadSession
from stead.sdk import AsyncStead, NotFound


class SteadSandboxClient(BaseSandboxClient[SteadSandboxClientOptions | None]):
    """Runs sandbox agents in VMs of a Stead server.

    Args:
        stead: a client of the SDK to use. It is not closed with this one.
        api_key, base_url: those of a new client; by default `STEAD_API_KEY` and `STEAD_API_URL`.
        instrumentation, dependencies: as for every sandbox client.
    """

    backend_id = "stead"
    supports_default_options = True

    def __init__(
        self,
        stead: AsyncStead | None = None,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        self._given = stead
        self._api_key = api_key
        self._base_url = base_url
        self._instrumentation = Instrumentation() if instrumentation is None else instrumentation
        self._dependencies = dependencies
        self._own: tuple[asyncio.AbstractEventLoop, AsyncStead] | None = None

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: SteadSandboxClientOptions | None = None,
    ) -> SteadSession:
        """A session in a new VM, or in the one that has the `key` of the options."""
        wanted = SteadSandboxClientOptions() if options is None else options
        session_id = uuid.uuid4()
        state = SteadSandboxSessionState(
            session_id=session_id,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            manifest=self._validate_manifest_for_create(Manifest() if manifest is None else manifest),
            exposed_ports=wanted.exposed_ports,
            vm_id="",
            key=wanted.key,
            snapshot_id=wanted.snapshot_id,
            size=wanted.size,
            pause_on_exit=wanted.pause_on_exit,
            workspace_persistence=wanted.workspace_persistence,
            idle_timeout_seconds=wanted.idle_timeout_seconds,
            git_access=wanted.git_access,
            snapshot_ttl_days=wanted.snapshot_ttl_days,
        )
        backend = self._backend()
        found = None if wanted.key is None else await backend.find(wanted.key)
        inner = SteadSandboxSession(state, backend)
        if found is not None:
            state.vm_id = found.id
            inner._set_start_state_preserved(True)
            return self._wrap(inner)
        await self._replace(inner)
        return self._wrap(inner)

    async def find(self, key: str, *, manifest: Manifest | None = None) -> SteadSession | None:
        """The session of the VM with this key, to continue it; None if there is none.

        At the end of a run, or when it is closed, its VM is suspended.
        """
        backend = self._backend()
        found = await backend.find(key)
        if found is None:
            return None
        session_id = uuid.uuid4()
        state = SteadSandboxSessionState(
            session_id=session_id,
            snapshot=NoopSnapshot(id=str(session_id)),
            manifest=self._validate_manifest_for_create(Manifest() if manifest is None else manifest),
            vm_id=found.id,
            key=key,
            pause_on_exit=True,
            workspace_root_ready=True,
        )
        inner = SteadSandboxSession(state, backend)
        inner._set_start_state_preserved(True)
        return self._wrap(inner)

    async def resume(self, state: SandboxSessionState) -> SteadSession:
        """Continue a session: in its VM, awake or asleep; else in a new one from what was saved."""
        if not isinstance(state, SteadSandboxSessionState):
            raise TypeError(f"cannot resume a session of type {state.type!r} (expected 'stead')")
        state.assert_path_grants_rebound()
        inner = SteadSandboxSession(state, self._backend())
        if await inner.backend.exists(state.vm_id):
            inner._set_start_state_preserved(True)
            await inner.backend.extend(state.saved_snapshot_id, state.snapshot_ttl_days)
        else:
            await self._replace(inner)
        return self._wrap(inner)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Delete the VM, unless `pause_on_exit` keeps it."""
        inner = session._inner
        if not isinstance(inner, SteadSandboxSession):
            raise TypeError(f"cannot delete a session of type {type(inner).__name__}")
        await inner._shutdown_backend()
        return session

    async def fork(self, session: SandboxSession, count: int = 1) -> list[SteadSession]:
        """Sessions that continue from the current state of this one, with its memory and running programs."""
        inner = session._inner
        if not isinstance(inner, SteadSandboxSession):
            raise TypeError(f"cannot fork a session of type {type(inner).__name__}")
        forks = []
        vms = await mounts.detached(inner, lambda: repeated(lambda: inner.vm.fork(count=count)))
        for vm in vms:
            session_id = uuid.uuid4()
            changes = {
                "session_id": session_id,
                "vm_id": vm.id,
                "key": None,
                "snapshot": NoopSnapshot(id=str(session_id)),
                "saved_snapshot_id": None,
                "commands": dict(inner.state.commands),
            }
            fork = SteadSandboxSession(inner.state.model_copy(update=changes), inner.backend)
            fork._set_start_state_preserved(True)
            forks.append(fork)
        try:
            for fork in forks:
                await fork.attach_mounts()
        except Exception:
            for vm in vms:
                await inner.backend.release(vm.id, pause=False)
            raise
        return [self._wrap(fork) for fork in forks]

    def _validate_manifest_for_create(self, manifest: Manifest) -> Manifest:
        mounts.refuse_unsupported(manifest)
        return super()._validate_manifest_for_create(manifest)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, SteadSandboxSessionState)

    async def close(self) -> None:
        """Close the connections. VMs and sessions are not touched."""
        own, self._own = self._own, None
        if own is not None:
            await own[1].aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _replace(self, inner: SteadSandboxSession) -> None:
        """A new VM for a session, from what was saved of it if something was."""
        dependencies = self._resolve_dependencies()
        try:
            reference = await saved_reference(inner.state, dependencies)
        finally:
            if dependencies is not None:
                await dependencies.aclose()
        try:
            vm = await inner.backend.create(inner.state, reference)
        except NotFound as error:
            if reference is None:
                raise
            raise WorkspaceStartError(
                path=Path(inner.state.manifest.root),
                cause=error,
                message=f"cannot continue the session from what was saved: {error}",
                retryable=False,
            ) from error
        inner.attach(vm, restored=reference is not None)

    def _wrap(self, inner: SteadSandboxSession) -> SteadSession:
        return SteadSession(
            inner,
            client=self,
            instrumentation=self._instrumentation,
            dependencies=self._resolve_dependencies(),
        )

    def _backend(self) -> Backend:
        if self._given is not None:
            return Backend(self._given)
        # Connections belong to the event loop that opened them; `Runner.run_sync` has a loop for each call.
        loop = asyncio.get_running_loop()
        if self._own is None or self._own[0] is not loop:
            self._own = (loop, AsyncStead(self._api_key, base_url=self._base_url))
        return Backend(self._own[1])
