"""Tickets: single-use credentials of a minute, for clients that can send a URL and no headers."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from stead.errors import SteadError
from stead.identity.credentials import CredentialKind, digest, new_secret

LIFETIME = 60.0
MAX_UNUSED = 1000
"""Unused tickets of one account."""


class TicketLimitExceeded(SteadError):
    code = "ticket_limit_exceeded"

    def __init__(self) -> None:
        super().__init__(f"too many unused tickets (max {MAX_UNUSED}); they expire after {LIFETIME:g} s")


@dataclass(frozen=True)
class Ticket:
    """What a ticket stands for: a credential, for one target, as one Linux user (None: root)."""

    account: str
    credential: str
    target: str
    user: str | None
    expires_at: float
    """By the clock of `Tickets`."""


class Tickets:
    """The unused tickets, in memory: a restart of the server, like a minute, makes them invalid.

    A ticket keeps the API key or token that it was made with, which is checked again when it is used: a
    revocation takes effect at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unused: OrderedDict[str, Ticket] = OrderedDict()
        self._count: Counter[str] = Counter()

    def create(self, account: str, credential: str, target: str, user: str | None) -> str:
        self._drop_expired()
        if self._count[account] >= MAX_UNUSED:
            raise TicketLimitExceeded
        secret = new_secret(CredentialKind.TICKET)
        self._unused[digest(secret)] = Ticket(account, credential, target, user, self._clock() + LIFETIME)
        self._count[account] += 1
        return secret

    def use(self, secret: str) -> Ticket | None:
        """The ticket of a secret, once; None if it is unknown, used or expired."""
        self._drop_expired()
        return self._remove(digest(secret))

    def _drop_expired(self) -> None:
        now = self._clock()
        # All have the same lifetime, so that the oldest expire first.
        while self._unused and next(iter(self._unused.values())).expires_at <= now:
            self._remove(next(iter(self._unused)))

    def _remove(self, key: str) -> Ticket | None:
        ticket = self._unused.pop(key, None)
        if ticket is not None:
            self._count[ticket.account] -= 1
            if not self._count[ticket.account]:
                del self._count[ticket.account]
        return ticket
