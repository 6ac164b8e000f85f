"""The log of refused requests for mapped names: reasons, by the trace id that the answer shows."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from stead.edge.pages import Refusal
from stead.edge.routes import MappedPort
from stead.logs import get_logger
from stead.shares import RateLimit

log = get_logger("stead.edge")

_SAME = 60.0
"""Seconds in which equal refusals of a mapped name have one trace id and one line."""
_MAX_TRACES, _MAX_REASON = 10_000, 500
_BURST, _INTERVAL = 50, 2.0
"""Lines of an account: at once, and seconds for each one more. Strangers cause them."""


@dataclass(frozen=True)
class _Trace:
    id: str
    since: float


class RefusalLog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._traces: dict[tuple[str, str, str], _Trace] = {}
        """By mapped name, code and reason; oldest first."""
        self._lines = RateLimit(_BURST, _INTERVAL, clock=clock)

    def traced(self, refusal: Refusal, host: str, route: MappedPort, reason: str) -> Refusal:
        """The refusal with a trace id, under which the VM and the reason are logged."""
        now = self._clock()
        reason = reason[:_MAX_REASON]
        key = (route.domain, refusal.code, reason)
        found = self._traces.get(key)
        if found is None or found.since <= now - _SAME:
            self._traces.pop(key, None)
            found = self._traces[key] = _Trace(secrets.token_hex(16), now)
            if len(self._traces) > _MAX_TRACES:
                del self._traces[next(iter(self._traces))]
            if not self._lines.allow(route.account):
                log.warning(
                    "request refused",
                    trace=found.id,
                    host=host,
                    vm=route.machine,
                    port=route.port,
                    account=route.account,
                    code=refusal.code,
                    reason=reason,
                )
        return refusal.traced(found.id)
