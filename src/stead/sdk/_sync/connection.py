# Made by scripts/unasync from _async/connection.py.
"""Sends requests, repeats them where that is safe, and reads the answers."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

import httpx2

from stead.sdk.answers import error_of, json_of
from stead.sdk.blocking import sync_sleep
from stead.sdk.errors import Gone, NotFound, SnapshotAlreadyDeleted
from stead.sdk.requests import Request, Settings, Unset
from stead.sdk.retries import RetryPolicy, leaves_doubt
from stead.sdk.transport import is_hopeless, is_timeout, sync_client, timeouts, unreachable, was_sent

Body = Callable[[], Iterable[bytes]]
"""Returns the body of a request; called once for each attempt."""


class Connection:
    """A pool of connections to one server."""

    def __init__(
        self, settings: Settings, policy: RetryPolicy, http_client: httpx2.Client | None = None
    ) -> None:
        self.settings = settings
        self.policy = policy
        self._http = sync_client(settings) if http_client is None else http_client
        self._owned = http_client is None

    def close(self) -> None:
        """Close the pool, unless the caller supplied the HTTP client."""
        if self._owned:
            self._http.close()

    def call(self, request: Request, body: Body | None = None) -> Any:
        """Send a request and return the JSON of its answer."""
        response, doubtful = self._exchange(request, body, stream=False)
        if not response.is_success:
            error = error_of(response, idempotent=request.idempotent)
            # The retry of a delete whose first answer was lost finds nothing: the delete has succeeded.
            if (
                doubtful
                and request.method == "DELETE"
                and isinstance(error, NotFound | Gone | SnapshotAlreadyDeleted)
            ):
                return {}
            raise error
        return json_of(response)

    def send(self, request: Request, body: Body | None = None) -> httpx2.Response:
        """Send a request and return its complete answer, also if it is an error."""
        response, _ = self._exchange(request, body, stream=False)
        return response

    def stream(self, request: Request, body: Body | None = None) -> Generator[bytes]:
        """Send a request and yield the bytes of its answer as they arrive."""
        response, _ = self._exchange(request, body, stream=True)
        try:
            if not response.is_success:
                raise error_of(response, idempotent=request.idempotent)
            yield from response.iter_bytes()
        except httpx2.TransportError as error:
            raise unreachable(error, request, self.settings) from error
        finally:
            response.close()

    def _exchange(self, request: Request, body: Body | None, *, stream: bool) -> tuple[httpx2.Response, bool]:
        """The final answer, and whether the server may have executed an earlier attempt."""
        attempt, doubtful = 1, False
        while True:
            try:
                response = self._http.send(self._build(request, body), stream=True)
                if not stream or not response.is_success:
                    try:
                        response.read()
                    finally:
                        response.close()
            except httpx2.TransportError as error:
                sent = was_sent(error)
                delay = self.policy.after_failure(
                    attempt, sent=sent, idempotent=request.idempotent, timed_out=is_timeout(error)
                )
                if delay is None or is_hopeless(error):
                    raise unreachable(error, request, self.settings) from error
                doubtful = doubtful or sent
            else:
                if response.is_success:
                    return response, doubtful
                status, code = response.status_code, error_of(response).code
                found = self.policy.after_answer(
                    attempt, status, code, response.headers, idempotent=request.idempotent
                )
                if found is None:
                    return response, doubtful
                delay = found
                doubtful = doubtful or leaves_doubt(status)
            attempt += 1
            sync_sleep(delay)

    def _build(self, request: Request, body: Body | None) -> httpx2.Request:
        return self._http.build_request(
            request.method,
            self.settings.base_url + request.path,
            params=request.query or None,
            json=None if isinstance(request.json, Unset) else request.json,
            content=None if body is None else body(),
            headers={**self.settings.headers, **request.headers},
            timeout=timeouts(request, self.settings),
        )
