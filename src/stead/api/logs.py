"""What happened: to machines, in builds, for a request, and in the services inside a machine."""

import base64
import time
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.callers import AnyCaller, find_owned
from stead.api.errors import ApiError
from stead.api.services import Services, ServicesDep
from stead.api.wire import Time, Wire
from stead.errors import MachineNotFound, SteadError
from stead.identity.callers import Caller
from stead.machines import Machine, State
from stead.machines.journal import Entry, read_journal
from stead.store.logs import LogQuery, LogRow

router = APIRouter(prefix="/observability/v1", tags=["logs"])

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
_DAY = 24 * 3600.0


class LogEntry(Wire):
    message: str
    timestamp: Time
    source: str | None = None
    resource_type: str | None = None
    origin: str | None = None
    resource_id: str | None = None
    instance_id: str | None = None
    level: str | None = None
    vm_service: str | None = None
    build_id: str | None = None

    @classmethod
    def of(cls, row: LogRow) -> "LogEntry":
        return cls(
            message=row.message,
            timestamp=row.at / 1e9,
            source=row.source,
            resource_type="vm" if row.machine else None,
            origin="stead",
            resource_id=row.machine,
            level=row.level,
            vm_service=row.service,
            build_id=row.build,
        )

    @classmethod
    def of_guest(cls, machine_id: str, entry: Entry) -> "LogEntry":
        return cls(
            message=entry.message,
            timestamp=entry.at,
            source="journal",
            resource_type="vm",
            origin="guest",
            resource_id=machine_id,
            level=entry.level,
            vm_service=entry.unit,
        )


class LogPage(Wire):
    logs: list[LogEntry]
    next_page_token: str | None = None


@router.get("/logs")
async def read_logs(
    caller: AnyCaller,
    services: ServicesDep,
    vm_id: Annotated[str | None, Query(alias="vmId")] = None,
    request_id: Annotated[str | None, Query(alias="requestId")] = None,
    build_id: Annotated[str | None, Query(alias="buildId")] = None,
    vm_service: Annotated[str | None, Query(alias="vmService", description="A systemd service.")] = None,
    search: Annotated[str | None, Query(description="Only lines with this text, in whatever case.")] = None,
    start_time: Annotated[str | None, Query(alias="startTime", description="RFC 3339; a day ago.")] = None,
    end_time: Annotated[str | None, Query(alias="endTime", description="RFC 3339; now.")] = None,
    page_size: Annotated[int, Query(alias="pageSize", ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
    page_token: Annotated[str | None, Query(alias="pageToken")] = None,
    resource_type: Annotated[str | None, Query(alias="resourceType")] = None,
    deployment_id: Annotated[str | None, Query(alias="deploymentId")] = None,
    run_id: Annotated[str | None, Query(alias="runId")] = None,
    domain: str | None = None,
) -> LogPage:
    """Lines in the order of their times.

    With a machine, what its services wrote into its own journal comes too, as long as it is running: reading
    does not wake it.
    """
    if vm_service is not None and vm_id is None:
        raise ApiError("INVALID_QUERY", "vmService is the service of a machine: give vmId with it")
    if deployment_id or run_id or domain or resource_type not in (None, "vm"):
        return LogPage(logs=[])
    now = time.time()
    since, until = _seconds(start_time, now - _DAY), _seconds(end_time, now + _DAY)
    query = LogQuery(
        account=caller.account,
        since=int(since * 1e6) * 1000,
        until=int(until * 1e6) * 1000 + 999,
        machine=vm_id,
        machines=await _visible(services, caller, vm_id),
        service=vm_service,
        request=request_id,
        build=build_id,
        search=search,
        after=_cursor(page_token),
        limit=page_size,
    )
    rows = await services.logbook.find(query)
    logs = [LogEntry.of(row) for row in rows]
    if vm_id is not None and request_id is None and build_id is None and page_token is None:
        logs += await _journal(services, caller, vm_id, vm_service, since, until, search, page_size)
        logs = sorted(logs, key=lambda entry: entry.timestamp)[-page_size:]
    more = len(rows) == page_size
    return LogPage(logs=logs, next_page_token=_token(rows[-1]) if more else None)


async def _visible(services: Services, caller: Caller, vm_id: str | None) -> tuple[str, ...] | None:
    """What an identity may read of; for an owner, everything. An old machine's lines outlive it."""
    if caller.identity is None:
        return None
    granted = await services.identities.granted(caller.identity)
    if vm_id is not None and vm_id not in granted:
        raise MachineNotFound(vm_id)
    return tuple(granted)


async def _journal(
    services: Services,
    caller: Caller,
    vm_id: str,
    service: str | None,
    since: float,
    until: float,
    search: str | None,
    limit: int,
) -> list[LogEntry]:
    try:
        info = await find_owned(services, caller, vm_id)
        if info.state is not State.RUNNING:
            return []
        machine = Machine(services.machines, vm_id)
        # What is older was written by what it was made from.
        since = max(since, info.created_at)
        entries = await read_journal(machine, service, since=since, until=until, search=search, limit=limit)
    except SteadError:
        return []
    return [LogEntry.of_guest(vm_id, entry) for entry in entries]


def _seconds(text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        moment = datetime.fromisoformat(text)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise ApiError("INVALID_QUERY", f"a time looks like 2026-01-31T12:00:00Z, not {text!r}") from None


def _token(row: LogRow) -> str:
    return base64.urlsafe_b64encode(f"{row.at}.{row.id}".encode()).decode().rstrip("=")


def _cursor(token: str | None) -> tuple[int, int] | None:
    if token is None:
        return None
    try:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
        at, _, row = text.partition(".")
        return int(at), int(row)
    except (ValueError, UnicodeError):
        raise ApiError("INVALID_QUERY", "this page token was not given by Stead") from None
