"""Push triggers: detect changed branches and queue webhook deliveries."""

import asyncio
import contextlib
import functools
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Self

from stead.identity.identities import Page
from stead.logs import get_logger
from stead.repos.errors import RepoError, RepoNotFound
from stead.repos.globs import MAX_ALTERNATIVES
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.repos.ssrf import RequestFailed, SsrfGuard
from stead.repos.webhooks.deliveries import GRACE, MAX_KEPT, TIMEOUT, Clock, DeliveryQueue, new_delivery
from stead.repos.webhooks.pushes import BranchUpdate, PushEvent, TriggerFilter, branches_of, changed_files
from stead.repos.webhooks.retries import DeliveryState
from stead.repos.webhooks.signing import WebhookSigner
from stead.shares import KeyedLock
from stead.store.database import Database
from stead.store.triggers import DeliveryRow, DeliveryStore, TriggerRow, TriggerStore
from stead.supervision import repeat
from stead.tasks import SingleFlight, Threads, in_background

EVENT = "push"
MAX_TRIGGERS = 50
"""Triggers per repository."""
MAX_BRANCHES = 20
MAX_GLOBS = 20
MAX_WAITING = 1000
"""Pending deliveries per trigger; further ones are dropped and recorded as failed."""
MAX_UPDATES = 10_000
"""Changed branches per detection; further ones are dropped."""
_MAX_COMPARED = 100
"""Branches per detection whose changed files are compared; the others match all globs."""
_MAX_GLOB_MATCHES = 5_000_000
"""File-pattern matches per detection: a few seconds of CPU."""
_CATCH_UP_EVERY = 60.0
_AT_ONCE = 4
_PRUNE_EVERY = 60
"""Retention runs once per this many catch-up runs."""

log = get_logger("stead.triggers")


class InvalidTrigger(RepoError):
    """The trigger can never match."""


class TriggerLimitExceeded(RepoError):
    """Too many triggers of a repository, or pending deliveries of a trigger."""


class TriggerNotFound(RepoError):
    def __init__(self, trigger: str) -> None:
        super().__init__(f"no trigger {trigger}")
        self.trigger_id = trigger


class DeliveryNotFound(RepoError):
    def __init__(self, delivery: str) -> None:
        super().__init__(f"no delivery {delivery}")
        self.delivery_id = delivery


@dataclass(frozen=True)
class Trigger:
    """Calls the endpoint after pushes to matching branches that change matching files.

    Both are patterns; an empty list matches everything.
    """

    id: str
    repo: str
    event: str
    branches: tuple[str, ...]
    globs: tuple[str, ...]
    endpoint: str
    created_at: float


@dataclass(frozen=True)
class Delivery:
    """`response` is the start of the last response; `next_at` is None if the delivery is finished."""

    id: str
    trigger: str
    state: DeliveryState
    body: str
    attempts: int
    created_at: float
    next_at: float | None
    attempted_at: float | None
    finished_at: float | None
    status: int | None
    error: str | None
    response: str | None
    redelivery_of: str | None


class Triggers:
    """The triggers of all repositories.

    Changes are detected by comparing branches with their last recorded state, not by events, so a crash
    between a push and its delivery loses nothing. Fast successive pushes to a branch may become one delivery.
    Deleted branches are not delivered, because the payload names an existing commit.
    """

    def __init__(
        self,
        database: Database,
        repos: Repos,
        guard: SsrfGuard,
        deliveries: DeliveryQueue,
        clock: Clock,
    ) -> None:
        self._store = TriggerStore(database)
        self._log = DeliveryStore(database)
        self._repos = repos
        self._guard = guard
        self._deliveries = deliveries
        self._clock = clock
        self._locks = KeyedLock()
        self._detections = SingleFlight[None]()
        self._missed: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        database: Database,
        repos: Repos,
        signing: WebhookSigner,
        guard: SsrfGuard,
        *,
        clock: Clock | None = None,
        timeout: float = TIMEOUT,
        grace: float = GRACE,
    ) -> AsyncIterator[Self]:
        """Resume pending deliveries and detect changes made meanwhile."""
        clock = clock or Clock()
        deliveries = DeliveryQueue(database, guard, signing, clock, timeout)
        triggers = cls(database, repos, guard, deliveries, clock)
        triggers._missed.update(await triggers._store.repos())
        await deliveries.start()
        try:
            async with in_background(triggers._catch_up()):
                yield triggers
        finally:
            await triggers._detections.join()
            await deliveries.close(grace)

    # Create, find, delete

    async def create(
        self,
        repo: str,
        endpoint: str,
        *,
        branches: Sequence[str] = (),
        globs: Sequence[str] = (),
        event: str = EVENT,
    ) -> Trigger:
        """Create a trigger for future pushes."""
        if event != EVENT:
            raise InvalidTrigger(f"invalid trigger event {event[:100]!r}: use {EVENT!r}")
        _check_number("branches", branches, MAX_BRANCHES)
        _check_number("globs", globs, MAX_GLOBS)
        if (globs_in_all := TriggerFilter(branches, globs).globs) > MAX_ALTERNATIVES:
            raise InvalidTrigger(f"globs expand to {globs_in_all} patterns (max {MAX_ALTERNATIVES})")
        with contextlib.suppress(RequestFailed):
            # The name may become resolvable later: it is resolved for each delivery.
            account = (await self._repos.get(repo)).account
            await self._guard.for_account(account).check(endpoint, own=True)
        async with self._locks.hold(repo):
            repository = await self._repository(repo)
            others = await self._store.in_repo(repo)
            if len(others) >= MAX_TRIGGERS:
                raise TriggerLimitExceeded(f"too many triggers (max {MAX_TRIGGERS} per repository)")
            if others:
                # Earlier changes are for the existing triggers only.
                await self._detect(repo)
            seen = None if others else await branches_of(repository)
            row = TriggerRow(
                id=str(uuid.uuid4()),
                repo=repo,
                event=event,
                branches=json.dumps(list(branches)) if branches else None,
                globs=json.dumps(list(globs)) if globs else None,
                endpoint=endpoint,
                created_at=self._clock.now(),
            )
            if not await self._store.create(row, seen):
                raise RepoNotFound(repo)
        return _trigger(row)

    async def list(self, repo: str) -> list[Trigger]:
        """The triggers of a repository, oldest first."""
        return [_trigger(row) for row in await self._store.in_repo(repo)]

    async def get(self, repo: str, trigger: str) -> Trigger:
        row = await self._store.get(trigger)
        if row is None or row.repo != repo:
            raise TriggerNotFound(trigger)
        return _trigger(row)

    async def delete(self, repo: str, trigger: str) -> None:
        """Delete a trigger with its deliveries."""
        async with self._locks.hold(repo):
            if not await self._store.remove(repo, trigger):
                raise TriggerNotFound(trigger)

    # Deliveries

    async def deliveries(self, repo: str, trigger: str, *, limit: int, offset: int = 0) -> Page[Delivery]:
        """The deliveries of a trigger, newest first."""
        await self.get(repo, trigger)
        rows, total = await self._log.page(trigger, limit, offset)
        return Page([_delivery(row) for row in rows], offset, total)

    async def redeliver(self, repo: str, trigger: str, delivery: str) -> Delivery:
        """Queue the same body again, after all pending deliveries of the trigger."""
        await self.get(repo, trigger)
        old = await self._log.find(trigger, delivery)
        if old is None:
            raise DeliveryNotFound(delivery)
        if (await self._log.waiting([trigger])).get(trigger, 0) >= MAX_WAITING:
            raise TriggerLimitExceeded(f"too many pending deliveries for this trigger (max {MAX_WAITING})")
        row = new_delivery(trigger, old.body, self._clock.now(), redelivery_of=old.redelivery_of or old.id)
        if not await self._log.queue(row, kept=MAX_KEPT):
            raise TriggerNotFound(trigger)
        self._deliveries.wake([trigger])
        return _delivery(row)

    # Change detection

    async def refs_changed(self, repo_id: str) -> None:
        """Detect changed branches and record deliveries, before this returns.

        Cheap for repositories without triggers. Never fails: detection that fails is retried later.
        """
        if not await self._store.any_in_repo(repo_id):
            return
        await self._detections.run(repo_id, functools.partial(self._detect_in_turn, repo_id))

    async def _detect_in_turn(self, repo: str) -> None:
        async with self._locks.hold(repo):
            # Changes from here on may be missed by this detection.
            self._detections.forget(repo)
            try:
                await self._detect(repo)
            except RepoNotFound:
                return
            except Exception as error:
                log.warning("push detection failed", repo=repo, error=str(error))
                self._missed.add(repo)

    async def _detect(self, repo: str) -> None:
        """Compare the branches, and record changes and deliveries in one transaction."""
        repository = await self._repository(repo)
        triggers = await self._store.in_repo(repo)
        if not triggers:
            return
        before, now = await self._store.last_branches(repo), await branches_of(repository)
        updates = [
            BranchUpdate(name, before.get(name), sha) for name, sha in now.items() if before.get(name) != sha
        ]
        changes: dict[str, str | None] = {update.branch: update.new for update in updates}
        changes |= dict.fromkeys(before.keys() - now.keys())
        if not changes:
            return
        rows = await self._rows(repository, triggers, updates)
        if await self._store.record(repo, changes, rows, kept=MAX_KEPT):
            self._deliveries.wake({row.trigger for row in rows})
        else:
            self._missed.add(repo)

    async def _rows(
        self, repository: Repository, triggers: Sequence[TriggerRow], updates: Sequence[BranchUpdate]
    ) -> Sequence[DeliveryRow]:
        """The deliveries of these updates to the matching triggers."""
        rules = {row.id: TriggerFilter(_texts(row.branches), _texts(row.globs)) for row in triggers}
        room = dict.fromkeys(rules, MAX_WAITING)
        for trigger, waiting in (await self._log.waiting(list(rules))).items():
            room[trigger] -= waiting
        # Too many to compare: every trigger matches.
        dropped = dict.fromkeys(rules, updates[MAX_UPDATES]) if len(updates) > MAX_UPDATES else {}
        full = set[str]()
        rows: list[DeliveryRow] = []
        compared = glob_matches = 0
        for update, candidates in await Threads.PARSING.run(_matching_branches, rules, updates[:MAX_UPDATES]):
            matching = [trigger for trigger in candidates if trigger not in full]
            globs = sum(rules[trigger].globs for trigger in matching)
            if globs and compared < _MAX_COMPARED and glob_matches < _MAX_GLOB_MATCHES:
                paths = await changed_files(repository, update)
                compared += 1
                glob_matches += globs * len(paths or ())
                matching = await Threads.PARSING.run(_matching_files, rules, matching, paths)
            for trigger in matching:
                if room[trigger] > 0:
                    room[trigger] -= 1
                    rows.append(self._row(repository.id, trigger, update))
                else:
                    full.add(trigger)
                    dropped[trigger] = update
        return [*rows, *(self._dropped(repository.id, *each) for each in dropped.items())]

    def _row(self, repo: str, trigger: str, update: BranchUpdate) -> DeliveryRow:
        now = self._clock.now()
        delivery = str(uuid.uuid4())
        event = PushEvent(repo, delivery, update, datetime.fromtimestamp(now / 1e9, UTC))
        return new_delivery(trigger, event.body(), now, delivery_id=delivery)

    def _dropped(self, repo: str, trigger: str, update: BranchUpdate) -> DeliveryRow:
        """A failed delivery that records the drop."""
        log.warning("webhook deliveries dropped", trigger=trigger, repo=repo)
        row = self._row(repo, trigger, update)
        error = f"not sent: too many pending deliveries (max {MAX_WAITING})"
        return replace(row, state=DeliveryState.FAILED, finished_at=row.created_at, error=error)

    async def _catch_up(self) -> None:
        """Background loop: detect changes made while the server was down, and retry failed detections."""
        rounds = itertools.count()

        async def catch_up() -> None:
            missed, self._missed = sorted(self._missed), set()
            for start in range(0, len(missed), _AT_ONCE):
                await asyncio.gather(*(self.refs_changed(repo) for repo in missed[start : start + _AT_ONCE]))
            if next(rounds) % _PRUNE_EVERY == 0:
                await self._deliveries.prune()

        name = "search for missed pushes"
        await repeat(name, catch_up, _CATCH_UP_EVERY, at_once=True, sleep=self._clock.sleep)

    async def _repository(self, repo: str) -> Repository:
        await self._repos.get(repo)
        return self._repos.repository(repo)


def _matching_branches(
    rules: Mapping[str, TriggerFilter], updates: Sequence[BranchUpdate]
) -> list[tuple[BranchUpdate, list[str]]]:
    found = (
        (update, [each for each in rules if rules[each].matches_branch(update.branch)]) for update in updates
    )
    return [(update, candidates) for update, candidates in found if candidates]


def _matching_files(
    rules: Mapping[str, TriggerFilter], triggers: Sequence[str], paths: Sequence[str] | None
) -> list[str]:
    return [trigger for trigger in triggers if rules[trigger].matches_files(paths)]


def _check_number(what: str, texts: Sequence[str], most: int) -> None:
    if len(texts) > most:
        raise InvalidTrigger(f"too many {what}: {len(texts)} (max {most} per trigger)")


def _texts(encoded: str | None) -> tuple[str, ...]:
    return tuple(json.loads(encoded)) if encoded else ()


def _trigger(row: TriggerRow) -> Trigger:
    return Trigger(
        id=row.id,
        repo=row.repo,
        event=row.event,
        branches=_texts(row.branches),
        globs=_texts(row.globs),
        endpoint=row.endpoint,
        created_at=row.created_at / 1e9,
    )


def _delivery(row: DeliveryRow) -> Delivery:
    state = DeliveryState(row.state)
    return Delivery(
        id=row.id,
        trigger=row.trigger,
        state=state,
        body=row.body,
        attempts=row.attempts,
        created_at=row.created_at / 1e9,
        next_at=None if state.final else row.next_at / 1e9,
        attempted_at=_seconds(row.attempted_at),
        finished_at=_seconds(row.finished_at),
        status=row.status,
        error=row.error,
        response=row.response,
        redelivery_of=row.redelivery_of,
    )


def _seconds(at: int | None) -> float | None:
    return None if at is None else at / 1e9
