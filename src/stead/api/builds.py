"""Builds: one record for each request that built something, while it runs and afterwards."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from stead.api.callers import Owner
from stead.api.dependencies import BuilderDep
from stead.api.wire import LARGEST
from stead.api.wire.builds import BuildList, BuildRecord, PhaseList, PhaseRecord
from stead.builds.records import BuildState

router = APIRouter(prefix="/v1/vms/builds", tags=["builds"])

MAX_PAGE = 1000

BuildId = Annotated[str, Path(description="Build id.")]


@router.get("")
async def list_builds(
    owner: Owner,
    builder: BuilderDep,
    state: Annotated[BuildState | None, Query(description="Only builds in this state.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
) -> BuildList:
    """List the account's builds, newest first.

    Builds are kept for 90 days after they finish. The log lines of a build are at
    `/observability/v1/logs?buildId=`.
    """
    builds, total = await builder.records.list(owner.account, state, limit, offset)
    return BuildList(builds=[BuildRecord.of(build) for build in builds], total_count=total)


@router.get("/{build_id}")
async def get_build(build_id: BuildId, owner: Owner, builder: BuilderDep) -> BuildRecord:
    """Get a build, running or finished."""
    return BuildRecord.of(await builder.records.get(owner.account, build_id))


@router.get("/{build_id}/phases")
async def get_phases(build_id: BuildId, owner: Owner, builder: BuilderDep) -> PhaseList:
    """List the phases that a build has started, in order."""
    phases = await builder.records.phases(owner.account, build_id)
    return PhaseList(phases=[PhaseRecord.of(phase) for phase in phases])
