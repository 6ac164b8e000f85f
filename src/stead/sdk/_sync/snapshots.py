# Made by scripts/unasync from _async/snapshots.py.
"""Snapshots and builds."""

import time
from collections.abc import Mapping
from typing import Any

from stead.sdk._sync.background import BACKGROUND, Progress, call_in_background
from stead.sdk._sync.connection import Connection
from stead.sdk.blocking import sync_sleep
from stead.sdk.creation import SpecLike, snapshot_body
from stead.sdk.errors import WaitTimedOut
from stead.sdk.models import Build, BuildPhase, Snapshot, SnapshotList, SnapshotRef
from stead.sdk.parsing import parse, parse_list
from stead.sdk.parts import PersistenceLike
from stead.sdk.requests import BUILD_TIMEOUT, LIFECYCLE_TIMEOUT, request


class Snapshots:
    """Kept machines, from which others are made. `vm.snapshot()` takes one of a running machine."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ensure(
        self,
        spec: SpecLike | None = None,
        *,
        name: str | None = None,
        template: Mapping[str, Any] | None = None,
        persistence: PersistenceLike | None = None,
        progress: Progress | None = None,
    ) -> SnapshotRef:
        """The snapshot of a spec, built if the server does not have it; `progress` is called with each line
        it logs."""
        body = snapshot_body(name, spec, template, persistence)
        call = request("POST", "/v1/vms/snapshots", json=body, headers=BACKGROUND, timeout=BUILD_TIMEOUT)
        return parse(SnapshotRef, call_in_background(self._connection, call, progress))

    def create(
        self,
        spec: SpecLike | None = None,
        *,
        name: str | None = None,
        template: Mapping[str, Any] | None = None,
        persistence: PersistenceLike | None = None,
        progress: Progress | None = None,
    ) -> SnapshotRef:
        """The same as `ensure`."""
        return self.ensure(spec, name=name, template=template, persistence=persistence, progress=progress)

    def list(
        self,
        *,
        include_deleted: bool | None = None,
        include_failed: bool | None = None,
        include_building: bool | None = None,
        include_cancelled: bool | None = None,
        include_lost: bool | None = None,
    ) -> SnapshotList:
        """Snapshots. Those that failed or are being built are there unless they are excluded."""
        query = {
            "includeDeleted": include_deleted,
            "includeFailed": include_failed,
            "includeBuilding": include_building,
            "includeCancelled": include_cancelled,
            "includeLost": include_lost,
        }
        return parse(SnapshotList, self._connection.call(request("GET", "/v1/vms/snapshots", query=query)))

    def get(self, snapshot_id: str) -> Snapshot:
        return parse(Snapshot, self._connection.call(request("GET", "/v1/vms/snapshots/{}", snapshot_id)))

    def update(self, snapshot_id: str, *, name: str) -> None:
        """Give it another name."""
        call = request("PATCH", "/v1/vms/snapshots/{}", snapshot_id, json={"name": name}, idempotent=True)
        self._connection.call(call)

    def delete(self, snapshot_id: str) -> None:
        """Delete it. Machines that were made from it live on."""
        call = request("DELETE", "/v1/vms/snapshots/{}", snapshot_id, timeout=LIFECYCLE_TIMEOUT)
        self._connection.call(call)


class Builds:
    """How machines and snapshots were made from specs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, build_id: str) -> Build:
        return parse(Build, self._connection.call(request("GET", "/v1/vms/builds/{}", build_id)))

    def phases(self, build_id: str) -> list[BuildPhase]:
        """The steps that were begun, in order."""
        answer = self._connection.call(request("GET", "/v1/vms/builds/{}/phases", build_id))
        return parse_list(BuildPhase, answer, "phases")

    def wait(self, build_id: str, *, timeout: float = 600.0, interval: float = 2.0) -> Build:
        """Wait until a build has succeeded or failed; `WaitTimedOut` if it has not in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            build = self.get(build_id)
            if build.finished:
                return build
            if time.monotonic() + interval > deadline:
                raise WaitTimedOut(f"build {build_id} is {build.state} after {timeout:g} seconds")
            sync_sleep(interval)
