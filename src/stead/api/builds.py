"""Builds: what was or is being made from a spec, and how far it is."""

from typing import Annotated

from fastapi import APIRouter, Path

from stead.api.callers import Owner
from stead.api.services import ServicesDep
from stead.api.wire.builds import BuildRecord, PhaseList, PhaseRecord

router = APIRouter(prefix="/v1/vms/builds", tags=["builds"])

BuildId = Annotated[str, Path(description="The id of a build.")]


@router.get("/{build_id}")
async def get_build(build_id: BuildId, owner: Owner, services: ServicesDep) -> BuildRecord:
    """A build of the account, under way or ended."""
    return BuildRecord.of(await services.builder.build(owner.account, build_id))


@router.get("/{build_id}/phases")
async def get_phases(build_id: BuildId, owner: Owner, services: ServicesDep) -> PhaseList:
    """The phases that a build has begun, in order; the last one is where it is, or where it ended."""
    phases = await services.builder.phases(owner.account, build_id)
    return PhaseList(phases=[PhaseRecord.of(phase) for phase in phases])
