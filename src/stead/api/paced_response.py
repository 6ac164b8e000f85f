"""A streamed response with a minimum rate, for routes of FastAPI."""

from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from stead.api.streaming import PacedSend, TextError


class PacedResponse(StreamingResponse):
    """A streamed response that ends, with what makes it, when its client reads too slowly."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str]
    ) -> None:
        """`first` was read before, so that its errors are answers."""

        async def whole() -> AsyncGenerator[bytes]:
            yield first
            async for piece in rest:
                yield piece

        super().__init__(whole(), media_type=media_type, headers=headers)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, PacedSend(send))
        except TextError as error:
            # The response has begun: closing the connection is the only way to tell.
            raise ClientDisconnected from error
        finally:
            await self._rest.aclose()
