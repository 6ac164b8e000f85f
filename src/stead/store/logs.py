"""Log lines of accounts: queries, paging, retention."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.database import Database
from stead.store.rows import build_rows, table_of


@dataclass(frozen=True)
class LogRow:
    """One line. `at` is in nanoseconds."""

    account: str
    at: int
    message: str
    level: str = "info"
    source: str | None = None
    machine: str | None = None
    service: str | None = None
    request: str | None = None
    build: str | None = None
    instance: str | None = None
    """The run of the VM that the line is about."""
    id: int | None = None


log_entries = table_of("log_entries", LogRow)


@dataclass(frozen=True)
class LogQuery:
    """A filter for log lines; times in nanoseconds, both ends included."""

    account: str
    since: int
    until: int
    machine: str | None = None
    machines: tuple[str, ...] | None = None
    """Only lines about these VMs: those that an identity has been granted."""
    service: str | None = None
    request: str | None = None
    build: str | None = None
    instance: str | None = None
    search: str | None = None
    without_source: str | None = None
    """Leave out lines of this source."""
    after: tuple[int, int] | None = None
    """Only lines after this position: time and id."""
    limit: int = 1000


class LogStore:
    def __init__(self, database: Database) -> None:
        self.database = database

    async def add(self, rows: Sequence[LogRow]) -> None:
        values = [dataclasses.asdict(row) for row in rows]
        for value in values:
            del value["id"]
        await self.database.write(lambda connection: connection.execute(log_entries.insert(), values))

    async def find(self, query: LogQuery) -> list[LogRow]:
        """The oldest matching lines, ordered by time and id."""
        columns = log_entries.c
        wanted = [columns.account == query.account, columns.at >= query.since, columns.at <= query.until]
        for column, value in (
            (columns.machine, query.machine),
            (columns.service, query.service),
            (columns.request, query.request),
            (columns.build, query.build),
            (columns.instance, query.instance),
        ):
            if value is not None:
                wanted.append(column == value)
        if query.without_source is not None:
            wanted.append(columns.source.is_distinct_from(query.without_source))
        if query.machines is not None:
            wanted.append(columns.machine.in_(query.machines))
        if query.search:
            wanted.append(columns.message.icontains(query.search, autoescape=True))
        if query.after is not None:
            wanted.append(sa.tuple_(columns.at, columns.id) > sa.tuple_(*map(sa.literal, query.after)))
        statement = sa.select(log_entries).where(*wanted).order_by(columns.at, columns.id)
        page = statement.limit(query.limit)
        return await self.database.read(lambda connection: build_rows(LogRow, connection.execute(page)))

    async def runs(self, account: str, machine: str) -> list[tuple[str, int]]:
        """The recorded runs of a VM, each with the time of its last line, oldest first."""
        columns = log_entries.c
        last = sa.func.max(columns.at)
        statement = (
            sa.select(columns.instance, last)
            .where(columns.account == account, columns.machine == machine, columns.instance.is_not(None))
            .group_by(columns.instance)
            .order_by(last)
        )
        return await self.database.read(
            lambda connection: [(row[0], row[1]) for row in connection.execute(statement)]
        )

    async def newest(self, account: str, machine: str, source: str) -> LogRow | None:
        """The newest line of a source about a VM."""
        statement = sa.select(log_entries).where(*_about(account, machine, source))
        newest = statement.order_by(log_entries.c.at.desc()).limit(1)
        found = await self.database.read(lambda connection: build_rows(LogRow, connection.execute(newest)))
        return found[0] if found else None

    async def delete(self, account: str, machine: str, source: str) -> None:
        """Delete the lines of a source about a VM."""
        await self.database.execute(log_entries.delete().where(*_about(account, machine, source)))

    async def keep_newest(self, account: str, count: int) -> None:
        """Delete the lines of an account but for the newest ones."""
        columns = log_entries.c
        own = sa.select(columns.at).where(columns.account == account).order_by(columns.at.desc())
        oldest = own.offset(count - 1).limit(1).scalar_subquery()
        await self.database.execute(
            log_entries.delete().where(columns.account == account, columns.at < oldest)
        )

    async def prune(self, before: int) -> None:
        await self.database.execute(log_entries.delete().where(log_entries.c.at < before))


def _about(account: str, machine: str, source: str) -> "tuple[sa.ColumnElement[bool], ...]":
    columns = log_entries.c
    return columns.account == account, columns.machine == machine, columns.source == source
