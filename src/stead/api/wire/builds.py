"""Builds as clients see them."""

from typing import Literal

from stead.api.wire import Time, Wire
from stead.builds.records import BuildInfo, PhaseInfo


class BuildRecord(Wire):
    """One build. Which phases are still to come is what is planned and not among its phases."""

    build_id: str
    account_id: str
    request_id: str | None = None
    state: Literal["pending", "running", "succeeded", "failed"]
    template_hash: str | None = None
    failure_reason: str | None = None
    planned_phases: list[str]
    started_at: Time
    finished_at: Time | None = None
    updated_at: Time

    @classmethod
    def of(cls, info: BuildInfo) -> "BuildRecord":
        return cls(
            build_id=info.id,
            account_id=info.account,
            request_id=info.request,
            state=info.state,
            template_hash=info.template_hash,
            failure_reason=info.failure,
            planned_phases=list(info.planned_phases),
            started_at=info.started_at,
            finished_at=info.finished_at,
            updated_at=info.updated_at,
        )


class PhaseRecord(Wire):
    """A phase that was begun; `snapshotId` is a machine to look at, as it was when this phase failed."""

    phase_id: str
    build_id: str
    name: str
    snapshot_id: str | None = None
    started_at: Time

    @classmethod
    def of(cls, info: PhaseInfo) -> "PhaseRecord":
        return cls(
            phase_id=info.id,
            build_id=info.build,
            name=info.name,
            snapshot_id=info.snapshot,
            started_at=info.started_at,
        )


class PhaseList(Wire):
    phases: list[PhaseRecord]
