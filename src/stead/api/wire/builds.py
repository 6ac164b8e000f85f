"""Builds on the wire."""

from typing import Literal

from pydantic import Field

from stead.api.wire import Time, Wire
from stead.builds.records import BuildInfo, BuildState, PhaseInfo


class BuildRecord(Wire):
    """The build of one request for a VM or a snapshot."""

    build_id: str
    account_id: str
    request_id: str | None = Field(
        default=None, description="The request, as in the background-request header."
    )
    state: BuildState
    template_hash: str | None = Field(default=None, description="Cache key of the outermost built layer.")
    failure_reason: str | None = None
    planned_phases: list[str] = Field(description="Names of the phases started so far and of those to come.")
    current_phase: str | None = Field(default=None, description="The phase that runs now.")
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
            current_phase=info.current_phase,
            started_at=info.started_at,
            finished_at=info.finished_at,
            updated_at=info.updated_at,
        )


class BuildList(Wire):
    builds: list[BuildRecord]
    total_count: int


class PhaseRecord(Wire):
    """A phase that a build has started."""

    phase_id: str
    build_id: str
    name: str = Field(
        description="`layer N: STEP` for a layer of the spec, innermost first; `STEP` for the VM itself, or"
        " for the only layer of a snapshot. `cached`: the layer exists already. `waiting`: another request"
        " builds the same layer."
    )
    state: Literal["running", "succeeded", "failed"]
    snapshot_id: str | None = Field(
        default=None, description="Of a failed phase: a snapshot of the VM as it was then."
    )
    started_at: Time
    finished_at: Time | None = None

    @classmethod
    def of(cls, info: PhaseInfo) -> "PhaseRecord":
        return cls(
            phase_id=info.id,
            build_id=info.build,
            name=info.name,
            state=info.state,
            snapshot_id=info.snapshot,
            started_at=info.started_at,
            finished_at=info.finished_at,
        )


class PhaseList(Wire):
    phases: list[PhaseRecord]
