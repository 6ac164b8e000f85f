"""Exceptions of the client itself, and the base class of those that stand for an error answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stead.sdk.models import ExecResult


class SteadException(Exception):
    """Base class of all exceptions that this library raises."""

    retryable: bool = False
    """The same call may succeed later, and the failed one had no effect: you can repeat it.

    False once a command may have started or something may have been created.
    """


class InvalidArgument(SteadException, ValueError):
    """An argument has a value that no request can carry: an empty id, a timeout of 0, text with NUL in an id.

    An argument of a wrong type is a `TypeError` instead, which names the argument.
    """


class ClientClosed(SteadException):
    """The client was closed before this call, by `close` or by the end of its `with` block."""


class MissingCredentials(SteadException):
    """There is no API key and no access token, neither as an argument nor in the environment."""


class ServerUnreachable(SteadException):
    """The client could not connect to the server, or the connection broke before the answer was complete.

    `sent` is True if the server may have received the request, and so may have executed it. `retryable` is
    True if the request was not sent, or if repeating it has no further effect (reads, writes of a whole file,
    deletes). `reason` says why the client could not connect: DNS, TLS, a refused connection.
    """

    def __init__(
        self, message: str, *, sent: bool = True, retryable: bool | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.sent = sent
        self.reason = reason
        self.retryable = not sent if retryable is None else retryable


class NoAnswerInTime(ServerUnreachable):
    """The server did not answer within the timeout."""


class UnexpectedAnswer(SteadException):
    """The server answered with success, but not in the expected format.

    Check that the base URL points to a Stead server.
    """


class AmbiguousName(SteadException):
    """A name or an id prefix matches more than one thing; `candidates` has the id and name of each."""

    def __init__(self, kind: str, reference: str, candidates: Sequence[tuple[str, str | None]]) -> None:
        listed = ", ".join(f"{found} ({name})" if name else found for found, name in candidates)
        kinds = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        super().__init__(f"{reference!r} matches {len(candidates)} {kinds}: {listed}; use a full id")
        self.kind = kind
        self.reference = reference
        self.candidates = tuple(candidates)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.reference, self.candidates)


class WaitTimedOut(SteadException):
    """A wait reached its timeout."""


class SessionClosed(SteadException):
    """The terminal or process has ended, or this client has detached: it takes no input."""


class CommandFailed(SteadException):
    """A command failed and `check` was set; `result` has its output."""

    def __init__(self, result: "ExecResult", command: str) -> None:
        ending = f"was killed by {result.signal}" if result.signal else f"exited with {result.status_code}"
        last = (result.stderr.strip() or result.stdout.strip()).rpartition("\n")[2]
        shown = command if len(command) <= 80 else command[:79] + "…"
        super().__init__(f"`{shown}` {ending}" + (f": {last}" if last else ""))
        self.result = result
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result, self.command)


class Text:
    """A text in the body of an error answer; None if it has none."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __get__(self, error: "SteadApiError", _: object = None) -> str | None:
        return error._text(self._key)


class SteadApiError(SteadException):
    """The server answered with an error.

    `code` is the server's stable error code; None if a proxy answered instead. `status` is the HTTP status,
    `message` the explanation, `trace_id` the id of the request in the server's log, and `body` the whole
    answer with further fields in camelCase. `retryable` is True if the same call may succeed later and the
    failed one had no effect.
    """

    nothing_done: bool = False
    """The server sends this error only before it starts to execute a request."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int = 0,
        body: Mapping[str, Any] | None = None,
        trace_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.body: Mapping[str, Any] = body or {}
        self.trace_id = trace_id

    @property
    def refused(self) -> bool:
        """The server says that it refused this request before it began to execute it."""
        return self.body.get("retryable") is True

    def __init_subclass__(cls, *, codes: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        for code in codes.split():
            ERRORS_BY_CODE[code] = cls

    def __str__(self) -> str:
        named = f"{self.code}: {self.message}" if self.code else self.message
        return f"{named} (trace {self.trace_id})" if self.trace_id else named

    def _text(self, key: str) -> str | None:
        value = self.body.get(key)
        return value if isinstance(value, str) else None

    def _number(self, key: str) -> float | None:
        value = self.body.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


ERRORS_BY_CODE: dict[str, type[SteadApiError]] = {}
"""The class of each error code that has its own."""
