"""Sends requests, repeats them where that is safe, and reads the answers."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Any

import httpx2

from stead.sdk.answers import decode_error, decode_json
from stead.sdk.blocking import async_sleep
from stead.sdk.errors import ClientClosed, Gone, InvalidArgument, NotFound, SnapshotAlreadyDeleted
from stead.sdk.requests import ConnectionSettings, Request, Unset, encode_json
from stead.sdk.retries import RetryPolicy, may_have_executed
from stead.sdk.transport import async_client, is_permanent, is_timeout, timeouts, unreachable, was_sent

Body = Callable[[], AsyncIterable[bytes]]
"""Returns the body of a request; called once for each attempt."""


class AsyncConnection:
    """A pool of connections to one server."""

    def __init__(
        self, settings: ConnectionSettings, policy: RetryPolicy, http_client: httpx2.AsyncClient | None = None
    ) -> None:
        self.settings = settings
        self.policy = policy
        self._http = async_client(settings) if http_client is None else http_client
        self._owned = http_client is None

    async def aclose(self) -> None:
        """Close the pool, unless the caller supplied the HTTP client."""
        if self._owned:
            await self._http.aclose()

    def check_open(self) -> None:
        """Raise `ClientClosed` if the client is closed."""
        if self._http.is_closed:
            raise ClientClosed("the client is closed: create another one")

    async def call(self, request: Request, body: Body | None = None) -> Any:
        """Send a request and return the JSON of its answer."""
        response, doubtful = await self._exchange(request, body, stream=False)
        if not response.is_success:
            error = decode_error(response, idempotent=request.idempotent)
            # The retry of a delete whose first answer was lost finds nothing: the delete has succeeded.
            if (
                doubtful
                and request.method == "DELETE"
                and isinstance(error, NotFound | Gone | SnapshotAlreadyDeleted)
            ):
                return {}
            raise error
        return decode_json(response)

    async def send(self, request: Request, body: Body | None = None) -> httpx2.Response:
        """Send a request and return its complete answer, also if it is an error."""
        response, _ = await self._exchange(request, body, stream=False)
        return response

    async def stream(self, request: Request, body: Body | None = None) -> AsyncGenerator[bytes]:
        """Send a request and yield the bytes of its answer as they arrive."""
        response, _ = await self._exchange(request, body, stream=True)
        try:
            if not response.is_success:
                raise decode_error(response, idempotent=request.idempotent)
            async for chunk in response.aiter_bytes():
                yield chunk
        except httpx2.TransportError as error:
            raise unreachable(error, request, self.settings) from error
        finally:
            await response.aclose()

    async def _exchange(
        self, request: Request, body: Body | None, *, stream: bool
    ) -> tuple[httpx2.Response, bool]:
        """The final answer, and whether the server may have executed an earlier attempt."""
        self.check_open()
        attempt, doubtful = 1, False
        while True:
            try:
                response = await self._http.send(self._build(request, body), stream=True)
                if not stream or not response.is_success:
                    try:
                        await response.aread()
                    finally:
                        await response.aclose()
            except httpx2.TransportError as error:
                sent = was_sent(error)
                delay = self.policy.after_failure(
                    attempt, sent=sent, idempotent=request.idempotent, timed_out=is_timeout(error)
                )
                if delay is None or is_permanent(error):
                    raise unreachable(error, request, self.settings) from error
                doubtful = doubtful or sent
            else:
                if response.is_success:
                    return response, doubtful
                status, refusal = response.status_code, decode_error(response)
                found = self.policy.after_answer(
                    attempt,
                    status,
                    refusal.code,
                    response.headers,
                    idempotent=request.idempotent,
                    refused=refusal.refused,
                )
                if found is None:
                    return response, doubtful
                delay = found
                doubtful = doubtful or may_have_executed(status)
            attempt += 1
            await async_sleep(delay)

    def _build(self, request: Request, body: Body | None) -> httpx2.Request:
        headers = {**self.settings.headers, **request.headers}
        content: Any = None if body is None else body()
        if not isinstance(request.json, Unset):
            headers["Content-Type"] = "application/json"
            content = encode_json(request.json)
        try:
            return self._http.build_request(
                request.method,
                self.settings.base_url + request.path,
                params=request.query or None,
                content=content,
                headers=headers,
                timeout=timeouts(request, self.settings),
            )
        except (ValueError, httpx2.InvalidURL) as error:
            raise InvalidArgument(f"cannot send this {request.method} request: {error}") from None
