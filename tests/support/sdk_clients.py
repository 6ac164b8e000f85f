"""Both clients of the SDK, run against a scripted server."""

import inspect
from collections.abc import Callable
from typing import Any

from stead import AsyncStead, Stead
from stead.sdk import errors
from support.scripted_server import Seen, Step, scripted

CLIENTS = [Stead, AsyncStead]
Client = type[Stead] | type[AsyncStead]


async def awaited(result: Any) -> Any:
    """The result of a call of either client."""
    return await result if inspect.isawaitable(result) else result


async def attempt(
    client: Client, call: Callable[[Any], Any], *steps: Step, **options: Any
) -> tuple[Any, list[Seen]]:
    """The result or the error of a call, and the requests that the server received."""
    with scripted(*steps) as server:
        stead: Any = client(api_key="key", base_url=server.url, **options)
        result: Any
        try:
            result = await awaited(call(stead))
        except errors.SteadException as error:
            result = error
        finally:
            await awaited(stead.aclose() if hasattr(stead, "aclose") else stead.close())
        return result, server.seen
