"""Routes of a VM's systemd services."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from stead.api.callers import CurrentCall, Guest, GuestAccess
from stead.api.large_answers import Items, large_answer
from stead.api.wire.systemd import (
    NewService,
    ServiceCreated,
    ServiceDeleted,
    ServiceIds,
    ServiceList,
    ServiceLogEntry,
    ServiceLogs,
    ServiceResult,
    ServiceResults,
    ServiceRow,
    ServiceState,
)
from stead.builds.services import MAX_LINES, GuestServices, Outcome

router = APIRouter(prefix="/v1/vms/{vm_id}/systemd", tags=["services"])


def _services(guest: GuestAccess) -> GuestServices:
    return GuestServices(guest.machine, guest.user)


@router.get("/services")
async def list_services(guest: Guest) -> ServiceList:
    """List the services that are loaded or installed."""
    return ServiceList(services=[ServiceRow(name=name) for name in await _services(guest).list()])


@router.post("/services")
async def create_service(guest: Guest, wanted: NewService) -> ServiceCreated:
    """Create a service. Unless `enable` is false, it starts now and at every boot.

    Answers when it is active or has failed, or after 30 s: see `activeState`. It exists although it fails.
    """
    created = await _services(guest).create(wanted.service())
    return ServiceCreated(
        message=created.message,
        service_name=wanted.name,
        active_state=created.active_state,
        sub_state=created.sub_state,
    )


@router.delete("/services/{service}")
async def delete_service(guest: Guest, service: str) -> ServiceDeleted:
    """Stop and remove a service that was created by the user; services of the image are refused."""
    await _services(guest).delete(service)
    return ServiceDeleted(message=f"service {service} removed")


@router.get("/services/{service}/status")
async def service_status(guest: Guest, service: str) -> ServiceState:
    """Get the state of a service."""
    return ServiceState.model_validate(await _services(guest).status(service))


@router.get("/services/{service}/logs", response_model=ServiceLogs)
async def service_logs(
    guest: Guest,
    call: CurrentCall,
    service: str,
    lines: Annotated[
        int | None, Query(ge=1, description=f"The last lines to return (max {MAX_LINES}).")
    ] = None,
    since: Annotated[str | None, Query(description="ISO 8601 time.")] = None,
) -> Response:
    """Get the last journal lines of a service: its output, and systemd's messages about it."""
    entries = await _services(guest).logs(service, lines, since, call.reserve)
    size = sum(len(entry.message) for entry in entries)
    logs = Items(ServiceLogEntry, len(entries), lambda: map(ServiceLogEntry.of, entries), size)
    return await large_answer(call, ServiceLogs(logs=[]), {"logs": logs})


@router.post("/start")
async def start_services(guest: Guest, wanted: ServiceIds) -> ServiceResults:
    """Start services, one after another."""
    return _results(await _services(guest).change("start", _names(wanted)))


@router.post("/stop")
async def stop_services(guest: Guest, wanted: ServiceIds) -> ServiceResults:
    """Stop services, one after another."""
    return _results(await _services(guest).change("stop", _names(wanted)))


@router.post("/restart")
async def restart_services(guest: Guest, wanted: ServiceIds) -> ServiceResults:
    """Restart services, one after another; stopped ones are started."""
    return _results(await _services(guest).change("restart", _names(wanted)))


def _names(wanted: ServiceIds) -> list[str]:
    return [each.id for each in wanted.services]


def _results(outcomes: Sequence[Outcome]) -> ServiceResults:
    return ServiceResults(results=[ServiceResult.of(each) for each in outcomes])
