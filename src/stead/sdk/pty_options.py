"""Callbacks and addresses of terminal sessions, for the asynchronous and the synchronous client."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from stead.sdk.errors import SteadException
from stead.sdk.requests import Request, request
from stead.sdk.sockets import Closed


class PtyCallbacks(TypedDict, total=False):
    """Functions that are called with the events of a session. For `AsyncStead` they may be coroutine
    functions, which are awaited."""

    on_data: Callable[[bytes], object]
    """Output. With it, a task (a thread in `Stead`) reads the session; without, iterate over the session."""
    on_exit: Callable[[int], object]
    """The program has ended, with this exit code."""
    on_close: Callable[[Closed], object]
    """The connection has ended and is not opened again."""
    on_disconnect: Callable[[Closed], object]
    """The connection broke. The client connects again when this returns."""
    on_reconnect: Callable[[], object]
    """The client is attached again; the next output redraws the screen."""
    on_error: Callable[[SteadException], object]
    """The client could not attach again."""


@dataclass(frozen=True)
class PtyPlace:
    """Where a session is, and the Linux user that uses it."""

    vm_id: str
    session_id: str
    user: str | None

    def request(self, method: str = "GET", **query: object) -> Request:
        """A request about the session."""
        path = "/v1/vms/{}/pty/sessions/{}"
        return request(method, path, self.vm_id, self.session_id, query=query, user=self.user)
