"""Rows of triggers, of last observed branches, and of webhook deliveries."""

import dataclasses
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from stead.store.repos import repos
from stead.store.rows import Rows, build_rows, table_of


@dataclass(frozen=True)
class TriggerRow:
    """`branches` and `globs` are JSON arrays."""

    id: str
    repo: str
    event: str
    branches: str | None
    globs: str | None
    endpoint: str
    created_at: int


@dataclass(frozen=True)
class DestinationRow:
    """The endpoint of a trigger, its repository and the account of that."""

    endpoint: str
    repo: str
    account: str


@dataclass(frozen=True)
class DeliveryRow:
    """Times are in nanoseconds. Deliveries of a trigger are ordered by `number`."""

    id: str
    trigger: str
    body: str
    state: str
    attempts: int
    created_at: int
    next_at: int
    attempted_at: int | None = None
    finished_at: int | None = None
    status: int | None = None
    error: str | None = None
    response: str | None = None
    redelivery_of: str | None = None
    number: int | None = None


triggers = table_of("triggers", TriggerRow)
deliveries = table_of("deliveries", DeliveryRow)
observed_refs = sa.table("observed_refs", sa.column("repo"), sa.column("name"), sa.column("sha"))
_UNFINISHED = deliveries.c.finished_at.is_(None)


class TriggerStore(Rows[TriggerRow]):
    """Triggers, and the last observed branches of repositories that have any."""

    table = triggers
    row = TriggerRow

    async def in_repo(self, repo: str) -> list[TriggerRow]:
        """The triggers of a repository, oldest first."""
        statement = sa.select(triggers).where(triggers.c.repo == repo)
        return await self._select(statement.order_by(triggers.c.created_at, triggers.c.id))

    async def any_in_repo(self, repo: str) -> bool:
        with self.database.look_up() as connection:
            return connection.execute(_ANY, {"wanted": repo}).first() is not None

    async def repos(self) -> list[str]:
        """All repositories that have triggers."""
        statement = sa.select(triggers.c.repo).distinct()
        return await self.database.read(lambda connection: list(connection.execute(statement).scalars()))

    async def destination(self, trigger: str) -> DestinationRow | None:
        columns = triggers.c.endpoint, triggers.c.repo, repos.c.account
        statement = sa.select(*columns).join(repos, repos.c.id == triggers.c.repo)
        with self.database.look_up() as connection:
            found = connection.execute(statement.where(triggers.c.id == trigger))
            return next(iter(build_rows(DestinationRow, found)), None)

    async def create(self, row: TriggerRow, branches: Mapping[str, str] | None) -> bool:
        """Insert a trigger; the first of a repository with its current branches.

        Returns whether the repository exists.
        """

        def create(connection: sa.Connection) -> None:
            connection.execute(triggers.insert().values(**dataclasses.asdict(row)))
            if branches is not None:
                connection.execute(observed_refs.delete().where(observed_refs.c.repo == row.repo))
                _record_branches(connection, row.repo, branches)

        return await _if_parent_exists(self.database.write(create))

    async def remove(self, repo: str, trigger: str) -> bool:
        """Delete a trigger, and with the last one the observed branches; returns whether it existed."""
        mine = sa.and_(triggers.c.repo == repo, triggers.c.id == trigger)
        none_left = ~sa.exists().where(triggers.c.repo == repo)

        def remove(connection: sa.Connection) -> bool:
            found = connection.execute(triggers.delete().where(mine))
            connection.execute(observed_refs.delete().where(observed_refs.c.repo == repo, none_left))
            return found.rowcount > 0

        return await self.database.write(remove)

    async def last_branches(self, repo: str) -> dict[str, str]:
        """The last observed branches of a repository."""
        statement = sa.select(observed_refs.c.name, observed_refs.c.sha).where(observed_refs.c.repo == repo)
        return await self.database.read(
            lambda connection: {row.name: row.sha for row in connection.execute(statement)}
        )

    async def record(
        self, repo: str, changes: Mapping[str, str | None], rows: Sequence[DeliveryRow], *, kept: int
    ) -> bool:
        """Record changed branches and the deliveries for them in one transaction; None is a deleted branch.

        Each trigger keeps the last `kept` finished deliveries. Returns whether the repository exists.
        """

        def record(connection: sa.Connection) -> None:
            _record_branches(connection, repo, changes)
            if rows:
                connection.execute(deliveries.insert(), [_values(row) for row in rows])
            for trigger in {row.trigger for row in rows}:
                connection.execute(_delete_beyond(trigger, kept))

        return await _if_parent_exists(self.database.write(record))


class DeliveryStore(Rows[DeliveryRow]):
    table = deliveries
    row = DeliveryRow

    async def queue(self, row: DeliveryRow, *, kept: int) -> bool:
        """Insert a delivery; returns whether its trigger exists."""
        new = deliveries.insert().values(**_values(row))
        return await _if_parent_exists(self.database.execute(new, _delete_beyond(row.trigger, kept)))

    async def next(self, trigger: str) -> DeliveryRow | None:
        """The oldest unfinished delivery of a trigger: deliveries are sent in order."""
        return self._select_one(_NEXT, wanted=trigger)

    async def find(self, trigger: str, delivery: str) -> DeliveryRow | None:
        found = await self.get(delivery)
        return found if found is not None and found.trigger == trigger else None

    async def page(self, trigger: str, limit: int, offset: int) -> tuple[list[DeliveryRow], int]:
        """One page of a trigger's deliveries, newest first, and the total count."""
        statement = sa.select(deliveries).where(deliveries.c.trigger == trigger)
        return await self._page(statement.order_by(deliveries.c.number.desc()), limit, offset)

    async def unfinished(self) -> list[str]:
        """All triggers with unfinished deliveries."""
        statement = sa.select(deliveries.c.trigger).where(_UNFINISHED).distinct()
        return await self.database.read(lambda connection: list(connection.execute(statement).scalars()))

    async def waiting(self, of: Collection[str]) -> dict[str, int]:
        """The number of unfinished deliveries of each of these triggers."""
        statement = sa.select(deliveries.c.trigger, sa.func.count().label("number"))
        statement = statement.where(_UNFINISHED, deliveries.c.trigger.in_(of)).group_by(deliveries.c.trigger)
        return await self.database.read(
            lambda connection: {row.trigger: row.number for row in connection.execute(statement)}
        )

    async def prune(self, before: int) -> None:
        """Delete deliveries that finished before a time."""
        await self.database.execute(deliveries.delete().where(deliveries.c.finished_at < before))


_ANY = sa.select(triggers.c.id).where(triggers.c.repo == sa.bindparam("wanted")).limit(1)
_NEXT = (
    sa.select(deliveries)
    .where(_UNFINISHED, deliveries.c.trigger == sa.bindparam("wanted"))
    .order_by(deliveries.c.number)
    .limit(1)
)


async def _if_parent_exists(work: Awaitable[object]) -> bool:
    """False when the parent row does not exist (foreign key)."""
    try:
        await work
    except sa.exc.IntegrityError:
        return False
    return True


def _record_branches(connection: sa.Connection, repo: str, changes: Mapping[str, str | None]) -> None:
    if not changes:
        return
    here = sa.and_(observed_refs.c.repo == repo, observed_refs.c.name == sa.bindparam("gone"))
    connection.execute(observed_refs.delete().where(here), [{"gone": name} for name in changes])
    rows = [{"repo": repo, "name": name, "sha": sha} for name, sha in changes.items() if sha is not None]
    if rows:
        connection.execute(observed_refs.insert(), rows)


def _delete_beyond(trigger: str, kept: int) -> sa.Delete:
    """Delete all but the last `kept` finished deliveries of a trigger."""
    over = sa.and_(deliveries.c.trigger == trigger, ~_UNFINISHED)
    oldest = sa.select(deliveries.c.number).where(over).order_by(deliveries.c.number.desc())
    limit = oldest.offset(kept).limit(1).scalar_subquery()
    return deliveries.delete().where(over, deliveries.c.number <= limit)


def _values(row: DeliveryRow) -> dict[str, Any]:
    values = dataclasses.asdict(row)
    del values["number"]
    return values
