"""Webhook delivery queue: durable, at least once, in order per trigger, with retries."""

import asyncio
import contextlib
import functools
import random
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from stead.logs import get_logger
from stead.repos.errors import RepoError
from stead.repos.ssrf import RemoteResponse, SsrfGuard
from stead.repos.webhooks.retries import DeliveryProgress, DeliveryState
from stead.repos.webhooks.signing import SignedDelivery, WebhookSigner
from stead.shares import KeyedLimit
from stead.store.database import Database
from stead.store.triggers import DeliveryRow, DeliveryStore, DestinationRow, TriggerStore
from stead.tasks import SingleFlight, TaskSet, finished

SIGNATURE_HEADER = "x-freestyle-signature"
ID_HEADER = "x-stead-delivery"
TIMEOUT = 30.0
GRACE = 5.0
"""Seconds to wait at shutdown for requests in flight; slower ones are sent again after the next start."""
MAX_AT_ONCE = 128
MAX_PER_ACCOUNT = 16
MAX_PER_HOST = 4
MAX_KEPT = 1000
"""Retention: finished deliveries kept per trigger."""
KEPT_FOR = 30 * 24 * 3600
_MAX_EXCERPT = 1000
_MAX_CONTENT = 4096
_MAX_ERROR = 500
_RECHECK_AFTER = 60.0
"""Seconds after which a worker that waits for a retry checks whether the delivery still exists."""
_AFTER_FAILURE = 30.0
_SECOND = 10**9

log = get_logger("stead.deliveries")


class Clock:
    """Clock and sleep, replaceable in tests."""

    def now(self) -> int:
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt."""

    status: int | None = None
    error: str | None = None
    response: str | None = None

    @classmethod
    def of(cls, answer: RemoteResponse, content: bytes) -> "AttemptResult":
        text = content.decode(errors="replace").replace("\0", "\ufffd")[:_MAX_EXCERPT]
        if 200 <= answer.status < 300:
            return cls(answer.status, None, text)
        error = f"the endpoint answered {answer.status}"
        if 300 <= answer.status < 400:
            where = f" to {answer.headers['location']}" if "location" in answer.headers else ""
            error = (
                f"the endpoint answered {answer.status}, a redirect{where}: webhooks do not follow redirects"
            )
        return cls(answer.status, error[:_MAX_ERROR], text)

    @property
    def delivered(self) -> bool:
        return self.error is None


class DeliveryQueue:
    """Sends recorded deliveries at least once.

    The deliveries of a trigger are sent one at a time: the next one starts when the previous one has
    succeeded or failed for good. Triggers are independent, with concurrency limits in total, per account, and
    per account and host.
    """

    def __init__(
        self,
        database: Database,
        guard: SsrfGuard,
        signing: WebhookSigner,
        clock: Clock,
        timeout: float = TIMEOUT,
    ) -> None:
        self._store = DeliveryStore(database)
        self._triggers = TriggerStore(database)
        self._guard = guard
        self._signing = signing
        self._clock = clock
        self._timeout = timeout
        self._queues = SingleFlight[None]()
        self._woken: set[str] = set()
        self._attempts = TaskSet()
        self._closing = False
        self._accounts = KeyedLimit(MAX_AT_ONCE, MAX_PER_ACCOUNT)
        self._hosts = KeyedLimit(per_key=MAX_PER_HOST)

    async def start(self) -> None:
        """Resume unfinished deliveries of the previous run."""
        self.wake(await self._store.unfinished())

    async def close(self, grace: float = GRACE) -> None:
        """Start no more requests, and wait for those in flight."""
        self._closing = True
        await self._queues.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._attempts.join()
        await self._attempts.close()

    def wake(self, triggers: Iterable[str]) -> None:
        """Start the workers of triggers with pending deliveries."""
        for trigger in triggers:
            self._woken.add(trigger)
            if not self._closing:
                self._queues.start(trigger, functools.partial(self._work, trigger))

    async def _work(self, trigger: str) -> None:
        """Worker of one trigger: deliver until its queue is empty."""
        try:
            while trigger in self._woken and not self._closing:
                self._woken.discard(trigger)
                try:
                    await self._drain(trigger)
                except Exception as error:
                    log.warning("webhook deliveries delayed", trigger=trigger, error=str(error))
                    self._woken.add(trigger)
                    await self._clock.sleep(_AFTER_FAILURE)
        finally:
            # In the same step as the last look at the queue, so that no delivery is missed.
            self._queues.forget(trigger)

    async def _drain(self, trigger: str) -> None:
        while not self._closing:
            row = await self._store.next(trigger)
            to = await self._triggers.destination(trigger)
            if row is None or to is None:
                return
            if wait := _progress(row).wait(self._clock.now()):
                await self._clock.sleep(min(wait / _SECOND, _RECHECK_AFTER))
                continue
            host = urllib.parse.urlsplit(to.endpoint).hostname or ""
            # Take the host's slot first: waiting for a busy host must not use slots of the account or of
            # others.
            async with self._hosts.hold((to.account, host)), self._accounts.hold(to.account):
                await self._attempts.run(self._attempt(row, to))

    async def _attempt(self, row: DeliveryRow, to: DestinationRow) -> None:
        progress = _progress(row).begin()
        begun = self._store.update(row.id, **_changes(progress), attempted_at=self._clock.now())
        if await finished(begun) is None:
            return
        outcome = await self._send(row, to)
        progress = progress.end(outcome.delivered, self._clock.now(), random.random())  # noqa: S311
        ended = self._store.update(
            row.id,
            **_changes(progress),
            status=outcome.status,
            error=outcome.error,
            response=outcome.response,
        )
        await finished(ended)
        if progress.state is DeliveryState.FAILED:
            log.warning("webhook delivery failed", delivery=row.id, trigger=row.trigger, error=outcome.error)

    async def _send(self, row: DeliveryRow, to: DestinationRow) -> AttemptResult:
        body = row.body.encode()
        signed = SignedDelivery(row.id, to.endpoint, to.repo)
        headers = {
            "Content-Type": "application/json",
            ID_HEADER: row.id,
            SIGNATURE_HEADER: self._signing.sign(body, signed, self._clock.now() / _SECOND),
        }
        answered: RemoteResponse | None = None
        content = b""
        try:
            guard = self._guard.for_account(to.account)
            target = await guard.check(to.endpoint, own=True)
            async with guard.request(
                "POST", target, most_bytes=sys.maxsize, timeout=self._timeout, headers=headers, content=body
            ) as answered:
                async for piece in answered.pieces:
                    content += piece
                    if len(content) > _MAX_CONTENT:
                        break
        except Exception as error:
            # The status is the result: an incomplete body does not matter.
            if answered is None:
                if not isinstance(error, RepoError):
                    log.exception("webhook delivery error", delivery=row.id, trigger=row.trigger)
                return AttemptResult(error=(str(error) or type(error).__name__)[:_MAX_ERROR])
        return AttemptResult.of(answered, content)

    async def prune(self) -> None:
        await self._store.prune(self._clock.now() - KEPT_FOR * _SECOND)


def new_delivery(
    trigger: str, body: str, now: int, *, delivery_id: str | None = None, redelivery_of: str | None = None
) -> DeliveryRow:
    progress = DeliveryProgress.new(now)
    return DeliveryRow(
        id=delivery_id or str(uuid.uuid4()),
        trigger=trigger,
        body=body,
        state=progress.state,
        attempts=progress.attempts,
        created_at=progress.created_at,
        next_at=progress.next_at,
        redelivery_of=redelivery_of,
    )


def _progress(row: DeliveryRow) -> DeliveryProgress:
    return DeliveryProgress(
        row.created_at, row.next_at, DeliveryState(row.state), row.attempts, row.finished_at
    )


def _changes(progress: DeliveryProgress) -> dict[str, object]:
    return {
        "state": progress.state,
        "attempts": progress.attempts,
        "next_at": progress.next_at,
        "finished_at": progress.finished_at,
    }
