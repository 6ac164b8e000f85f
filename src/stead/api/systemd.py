"""The systemd services of a machine."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.callers import Guest, GuestAccess
from stead.api.errors import ApiError
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
from stead.builds.services import MAX_LINES, GuestServices, Outcome, ServiceExists, ServiceNotFound
from stead.errors import GuestError

router = APIRouter(prefix="/v1/vms/{vm_id}/systemd", tags=["services"])


@contextlib.contextmanager
def _services(guest: GuestAccess) -> Iterator[GuestServices]:
    """The machine's services; what is wrong with them is said in a client's words."""
    try:
        yield GuestServices(guest.machine, guest.user)
    except ServiceNotFound as error:
        raise ApiError("SERVICE_NOT_FOUND", str(error), serviceName=error.name) from None
    except ServiceExists as error:
        raise ApiError("SERVICE_ALREADY_EXISTS", str(error), serviceName=error.name) from None
    except GuestError as error:
        if error.code == "busy":
            raise ApiError("SERVICE_UNAVAILABLE", str(error)) from None
        raise


@router.get("/services")
async def list_services(guest: Guest) -> ServiceList:
    """The services that are loaded or could be."""
    with _services(guest) as services:
        return ServiceList(services=[ServiceRow(name=name) for name in await services.list()])


@router.post("/services")
async def create_service(guest: Guest, wanted: NewService) -> ServiceCreated:
    """Make a service; unless `enable` is false, it is started now and at every boot."""
    with _services(guest) as services:
        message = await services.create(wanted.service())
    return ServiceCreated(message=message, service_name=wanted.name)


@router.delete("/services/{service}")
async def delete_service(guest: Guest, service: str) -> ServiceDeleted:
    """Stop a service that is not part of the system and remove it."""
    with _services(guest) as services:
        await services.delete(service)
    return ServiceDeleted(message=f"{service} was removed")


@router.get("/services/{service}/status")
async def service_status(guest: Guest, service: str) -> ServiceState:
    """How a service is."""
    with _services(guest) as services:
        return ServiceState.of(await services.status(service))


@router.get("/services/{service}/logs")
async def service_logs(
    guest: Guest,
    service: str,
    lines: Annotated[int | None, Query(ge=1, description=f"At most {MAX_LINES} are given.")] = None,
    since: Annotated[str | None, Query(description="A time in ISO 8601.")] = None,
) -> ServiceLogs:
    """The last lines of what a service printed, and of what systemd says of it."""
    with _services(guest) as services:
        entries = await services.logs(service, lines, since)
    return ServiceLogs(logs=[ServiceLogEntry.of(entry) for entry in entries])


@router.post("/start")
async def start_services(guest: Guest, wanted: ServiceIds) -> ServiceResults:
    """Start services, one after the other."""
    with _services(guest) as services:
        return _results(await services.start(_names(wanted)))


@router.post("/stop")
async def stop_services(guest: Guest, wanted: ServiceIds) -> ServiceResults:
    """Stop services, one after the other."""
    with _services(guest) as services:
        return _results(await services.stop(_names(wanted)))


@router.post("/restart")
async def restart_services(guest: Guest, wanted: ServiceIds) -> ServiceResults:
    """Stop services if they run, and start them, one after the other."""
    with _services(guest) as services:
        return _results(await services.restart(_names(wanted)))


def _names(wanted: ServiceIds) -> list[str]:
    return [each.id for each in wanted.services]


def _results(outcomes: Sequence[Outcome]) -> ServiceResults:
    return ServiceResults(results=[ServiceResult.of(each) for each in outcomes])
