"""Log lines of VMs, builds and requests, merged with the journal of a running VM."""

import bisect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from stead.api.callers import USER_HEADER, AnyCaller, CurrentCall, find_owned
from stead.api.calls import Call
from stead.api.declared import invalid_code
from stead.api.dependencies import IdentitiesDep, LogbookDep, MachinesDep
from stead.api.large_answers import Items, large_answer
from stead.api.log_pages import PageToken, Source, merge
from stead.api.wire import Micros, Wire
from stead.errors import GuestUnreachable, InvalidRequest, MachineNotFound
from stead.guest.errors import JournalUnreadable
from stead.guest.systemd_journal import Entry, JournalPage, JournalQuery, read_journal
from stead.identity.callers import Caller
from stead.identity.identities import Identities
from stead.logbook import CONSOLE, Logbook, LogQuery, LogRow
from stead.machines import Machines
from stead.machines.machine import MachineInfo

router = APIRouter(prefix="/observability/v1", tags=["logs"])

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000
MAX_SEARCH = 1000
_DAY = 24 * 3600 * 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_LINES = JournalPage((), complete=True)


class LogEntry(Wire):
    message: str
    timestamp: Micros
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
            timestamp=row.at // 1000,
            source=row.source,
            resource_type="vm" if row.machine else None,
            origin="stead",
            resource_id=row.machine,
            instance_id=row.instance,
            level=row.level,
            vm_service=row.service,
            build_id=row.build,
        )

    @classmethod
    def of_guest(cls, machine_id: str, entry: Entry, instance: str | None) -> "LogEntry":
        return cls(
            message=entry.message,
            timestamp=entry.micros,
            source="journal",
            resource_type="vm",
            origin="guest",
            resource_id=machine_id,
            instance_id=instance,
            level=entry.level,
            vm_service=entry.unit,
        )


class LogPage(Wire):
    logs: list[LogEntry]
    next_page_token: str | None = None


@router.get("/logs", response_model=LogPage)
@invalid_code("INVALID_QUERY")
async def read_logs(
    caller: AnyCaller,
    call: CurrentCall,
    machines: MachinesDep,
    identities: IdentitiesDep,
    logbook: LogbookDep,
    vm_id: Annotated[str | None, Query(alias="vmId")] = None,
    request_id: Annotated[str | None, Query(alias="requestId")] = None,
    build_id: Annotated[str | None, Query(alias="buildId")] = None,
    instance_id: Annotated[
        str | None, Query(alias="instanceId", description="One run of a VM: its `vmInstanceId`.")
    ] = None,
    vm_service: Annotated[
        str | None, Query(alias="vmService", description="A systemd unit of the VM; needs vmId.")
    ] = None,
    search: Annotated[
        str | None, Query(max_length=MAX_SEARCH, description="Only lines that contain this text; any case.")
    ] = None,
    start_time: Annotated[
        str | None, Query(alias="startTime", description="RFC 3339; default: 24 hours ago.")
    ] = None,
    end_time: Annotated[str | None, Query(alias="endTime", description="RFC 3339; default: now.")] = None,
    page_size: Annotated[int, Query(alias="pageSize", ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
    page_token: Annotated[
        str | None,
        Query(alias="pageToken", description="`nextPageToken` of the previous page, with the same filters."),
    ] = None,
    resource_type: Annotated[str | None, Query(alias="resourceType")] = None,
    deployment_id: Annotated[str | None, Query(alias="deploymentId")] = None,
    run_id: Annotated[str | None, Query(alias="runId")] = None,
    domain: str | None = None,
    user: Annotated[
        str | None, Header(alias=USER_HEADER, description="Read the journal as this user.")
    ] = None,
) -> Response:
    """Log lines, oldest first, in pages.

    With `vmId`, the lines include the journal of that VM while it is running, as a Linux user of it
    sees it: root, or the user that the token is restricted to. Reading logs neither wakes a VM nor keeps it
    awake.
    """
    if vm_service is not None and vm_id is None:
        raise InvalidRequest("vmService needs vmId: it names a systemd unit of that VM")
    if search is not None and "\0" in search:
        raise InvalidRequest("search must not contain NUL characters")
    if deployment_id or run_id or domain or resource_type not in (None, "vm"):
        return await large_answer(call, LogPage(logs=[]), {})
    position = _position(start_time, end_time, page_token)
    query = LogQuery(
        account=caller.account,
        since=position.since * 1000,
        until=position.until * 1000 + 999,
        machine=vm_id,
        machines=await _visible(identities, caller, vm_id),
        service=vm_service,
        request=request_id,
        build=build_id,
        instance=instance_id,
        search=search,
        # Root alone may read the console of a guest; tokens may be limited to other users.
        without_source=None if caller.identity is None else CONSOLE,
        after=position.logbook,
        # One more than a page holds shows whether there is another page.
        limit=page_size + 1,
    )
    journal, runs = _NO_LINES, _Runs((), None)
    if vm_id is not None and request_id is None and build_id is None:
        reader = _Reader(machines, identities, call, caller, vm_id, user, vm_service, instance_id, search)
        journal, runs = await reader.read(logbook, position, page_size + 1)
    rows = await logbook.find(query)
    page = merge(
        Source(rows, lambda row: row.at // 1000, complete=len(rows) <= page_size),
        Source(journal.entries, lambda entry: entry.micros, complete=journal.complete),
        page_size,
    )

    def entries() -> Iterator[LogEntry]:
        for each in page.order:
            if isinstance(each, LogRow):
                yield LogEntry.of(each)
            else:
                yield LogEntry.of_guest(vm_id or "", each, runs.at(each.micros))

    logs = Items(LogEntry, len(page.order), entries)
    if not page.more:
        return await large_answer(call, LogPage(logs=[]), {"logs": logs})
    last_row = rows[page.first - 1] if page.first else None
    token = PageToken(
        position.since,
        position.until,
        position.logbook if last_row is None else (last_row.at, last_row.id or 0),
        journal.entries[page.second - 1].cursor if page.second else position.journal,
    )
    return await large_answer(call, LogPage(logs=[], next_page_token=token.encode()), {"logs": logs})


async def _visible(identities: Identities, caller: Caller, vm_id: str | None) -> tuple[str, ...] | None:
    """The VMs that an identity has been granted; None for an owner, who may also read of deleted VMs."""
    if caller.identity is None:
        return None
    granted = await identities.granted(caller.identity)
    if vm_id is not None and vm_id not in granted:
        raise MachineNotFound(vm_id)
    return tuple(granted)


@dataclass(frozen=True)
class _Runs:
    """The runs of a VM: the ended ones, each with the time of its last line (µs), and the current one."""

    ended: Sequence[tuple[str, int]]
    current: str | None

    def at(self, micros: int) -> str | None:
        """The run that a journal line of this time belongs to."""
        index = bisect.bisect_left(self.ended, micros, key=lambda run: run[1])
        return self.ended[index][0] if index < len(self.ended) else self.current

    def window(self, instance: str) -> tuple[int, int | None] | None:
        """From when to when a run lasted; an end of None is now."""
        start = 0
        for name, end in self.ended:
            if name == instance:
                return start, end
            start = end + 1
        return (start, None) if instance == self.current else None


@dataclass(frozen=True)
class _Reader:
    """Reads the journal of one VM for one caller."""

    machines: Machines
    identities: Identities
    call: Call
    caller: Caller
    vm_id: str
    user: str | None
    service: str | None
    instance: str | None
    search: str | None

    async def read(self, logbook: Logbook, position: PageToken, limit: int) -> tuple[JournalPage, _Runs]:
        """The next lines of the journal; none when the VM is not running."""
        try:
            info = await find_owned(self.machines, self.caller, self.vm_id)
        except MachineNotFound:
            return _NO_LINES, _Runs((), None)
        user = await self._linux_user()
        runs = await self._runs(logbook, info)
        # Older lines were written by the VM that this one was created from.
        since = max(position.since, int(info.created_at * 1e6))
        until = position.until
        if self.instance is not None:
            window = runs.window(self.instance)
            if window is None:
                return _NO_LINES, runs
            since = max(since, window[0])
            until = until if window[1] is None else min(until, window[1])
        agent = self.machines.observer(self.vm_id)
        if agent is None or since > until:
            return _NO_LINES, runs
        query = JournalQuery(since, until, limit, position.journal, self.service, self.search)
        try:
            return await read_journal(agent, query, user, self.call.reserve), runs
        except GuestUnreachable as error:
            if self.machines.observer(self.vm_id) is not None:
                raise JournalUnreadable(self.vm_id, str(error)) from None
            # The VM was suspended or stopped during the call.
            return _NO_LINES, runs

    async def _linux_user(self) -> str | None:
        """As for commands: a token that is restricted to several Linux users has to name one."""
        if self.caller.identity is None:
            return self.user or None
        permission = await self.identities.permission(self.caller.identity, self.vm_id)
        if permission is None:
            raise MachineNotFound(self.vm_id)
        return permission.user(self.user)

    async def _runs(self, logbook: Logbook, info: MachineInfo) -> _Runs:
        recorded = await logbook.runs(self.caller.account, info.id)
        ended = [(name, last // 1000) for name, last in recorded if name != info.instance]
        return _Runs(ended, info.instance)


def _position(start: str | None, end: str | None, token: str | None) -> PageToken:
    """Where to read from. A token has the window of its first page, so that all pages are of one window."""
    if token is not None:
        try:
            return PageToken.decode(token)
        except ValueError:
            raise InvalidRequest("invalid pageToken: pass nextPageToken unchanged") from None
    now = time.time_ns() // 1000
    since, until = _micros("startTime", start), _micros("endTime", end)
    return PageToken(now - _DAY if since is None else since, now + _DAY if until is None else until)


def _micros(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError):
        text = f"invalid {name} {text!r}: use RFC 3339, such as 2026-01-31T12:00:00Z"
        raise InvalidRequest(text) from None
