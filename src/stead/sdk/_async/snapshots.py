"""Snapshots and builds."""

import builtins
import time
from datetime import datetime, timedelta
from typing import Unpack

from stead.sdk._async.background import BACKGROUND, Progress, call_in_background
from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.logs import AsyncLogs
from stead.sdk._async.lookups import find_snapshot, resolve_references
from stead.sdk.arguments import checks_arguments, patience, seconds
from stead.sdk.blocking import async_sleep
from stead.sdk.creation import REFUSE_UNKNOWN_KEYS, snapshot_body
from stead.sdk.errors import InvalidArgument, WaitTimedOut
from stead.sdk.lifetimes import Ttl, lifetime_to_wire
from stead.sdk.models import (
    Build,
    BuildList,
    BuildPhase,
    BuildState,
    LogPage,
    Snapshot,
    SnapshotList,
    SnapshotPurpose,
    SnapshotRef,
)
from stead.sdk.parsing import parse, parse_list
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, UNSET, Unset, request
from stead.sdk.vm_options import SnapshotOptions, SpecLike

_BEFORE_START = timedelta(seconds=5)
"""Lines of the request are logged shortly before its build has a record."""


@checks_arguments
class AsyncSnapshots:
    """Snapshots: saved VMs, from which new VMs are created. `vm.snapshot()` saves a running VM.

    A snapshot is given by its id, a unique id prefix, or a unique name.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def ensure(
        self,
        spec: SpecLike | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[SnapshotOptions],
    ) -> SnapshotRef:
        """The snapshot of a spec. The server builds it if it is not cached.

        Args:
            spec: a `VmSpec`, or the same as JSON.
            progress: called with each line that the build logs, for example `print`.
            options: its name and lifetime: see `SnapshotOptions`.
        """
        body = await resolve_references(self._connection, snapshot_body(spec, options))
        headers = {**BACKGROUND, **REFUSE_UNKNOWN_KEYS}
        call = request("POST", "/v1/vms/snapshots", json=body, headers=headers, timeout=BUILD_TIMEOUT)
        return parse(SnapshotRef, await call_in_background(self._connection, call, progress))

    async def create(
        self,
        spec: SpecLike | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[SnapshotOptions],
    ) -> SnapshotRef:
        """Another name of `ensure`."""
        return await self.ensure(spec, progress=progress, **options)

    async def list(
        self,
        *,
        include_deleted: bool | None = None,
        include_failed: bool | None = None,
        include_building: bool | None = None,
        include_cancelled: bool | None = None,
        include_lost: bool | None = None,
        purpose: SnapshotPurpose | None = None,
    ) -> SnapshotList:
        """All snapshots, or those with a purpose. Failed and building ones are included unless you exclude
        them.
        """
        query = {
            "includeDeleted": include_deleted,
            "includeFailed": include_failed,
            "includeBuilding": include_building,
            "includeCancelled": include_cancelled,
            "includeLost": include_lost,
            "purpose": purpose,
        }
        return parse(
            SnapshotList, await self._connection.call(request("GET", "/v1/vms/snapshots", query=query))
        )

    async def get(self, snapshot: str) -> Snapshot:
        """A snapshot by its id, a unique id prefix, or its name; `SnapshotNotFound` if there is none."""
        call = request("GET", "/v1/vms/snapshots/{}", await self._id(snapshot))
        return parse(Snapshot, await self._connection.call(call))

    async def find(self, snapshot: str) -> Snapshot:
        """The snapshot with this id, unique id prefix (4 characters or more), or unique name.

        Raises `SnapshotNotFound` if there is none, `AmbiguousName` if there are several.
        """
        return await self.get(snapshot)

    async def update(self, snapshot: str, *, name: str) -> None:
        """Rename a snapshot."""
        found = await self._id(snapshot)
        call = request("PATCH", "/v1/vms/snapshots/{}", found, json={"name": name}, idempotent=True)
        await self._connection.call(call)

    async def extend(
        self, snapshot: str, *, ttl: Ttl | None = None, expires_at: datetime | Unset | None = UNSET
    ) -> Snapshot:
        """Set when a snapshot expires, later or earlier than before.

        Args:
            snapshot: its id, a unique id prefix, or its name.
            ttl: seconds, or a timedelta, from now on.
            expires_at: a time, instead of `ttl`; None for never.
        """
        lifetime = lifetime_to_wire(ttl, expires_at)
        if not lifetime:
            raise InvalidArgument("nothing to change: give ttl or expires_at")
        found = await self._id(snapshot)
        call = request("PATCH", "/v1/vms/snapshots/{}", found, json=lifetime, idempotent=True)
        await self._connection.call(call)
        return await self.get(found)

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot. VMs that were created from it keep running."""
        found = await self._id(snapshot)
        call = request("DELETE", "/v1/vms/snapshots/{}", found, timeout=LIFECYCLE_TIMEOUT)
        await self._connection.call(call)

    async def _id(self, reference: str) -> str:
        return await find_snapshot(self._connection, reference)


@checks_arguments
class AsyncBuilds:
    """Builds: how the server created VMs and snapshots from specs."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def list(
        self, *, state: BuildState | None = None, limit: int | None = None, offset: int | None = None
    ) -> BuildList:
        """The account's builds, newest first, those that run included."""
        query = {"state": state, "limit": limit, "offset": offset}
        return parse(BuildList, await self._connection.call(request("GET", "/v1/vms/builds", query=query)))

    async def get(self, build_id: str) -> Build:
        """A build by its id; `BuildNotFound` if there is none."""
        return parse(Build, await self._connection.call(request("GET", "/v1/vms/builds/{}", build_id)))

    async def phases(self, build_id: str) -> builtins.list[BuildPhase]:
        """The phases (layers and steps) that the build has started, in order, with their times."""
        answer = await self._connection.call(request("GET", "/v1/vms/builds/{}/phases", build_id))
        return parse_list(BuildPhase, answer, "phases")

    async def logs(
        self,
        build_id: str,
        *,
        search: str | None = None,
        page_size: int | None = None,
        page_token: str | None = None,
    ) -> LogPage:
        """The lines that a build logged, oldest first, from its start."""
        build = await self.get(build_id)
        start = None if build.started_at is None else build.started_at - _BEFORE_START
        return await AsyncLogs(self._connection).list(
            build_id=build_id, search=search, start_time=start, page_size=page_size, page_token=page_token
        )

    async def wait(self, build_id: str, *, timeout: float = 600.0, interval: float = 2.0) -> Build:
        """Wait until a build has succeeded or failed; `WaitTimedOut` if it has not in `timeout` seconds."""
        seconds("interval", interval)
        deadline = time.monotonic() + (patience("timeout", timeout) or 0)
        while True:
            build = await self.get(build_id)
            if build.finished:
                return build
            if time.monotonic() + interval > deadline:
                raise WaitTimedOut(f"build {build_id} is still {build.state} after {timeout:g} seconds")
            await async_sleep(interval)
