"""Both clients of the SDK, run against a scripted server."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from stead import AsyncStead, Stead
from stead.sdk import errors
from support.scripted_server import Seen, Step, scripted

Client = Callable[..., Any]
"""Makes a client of either kind for a URL: the fixture `client`."""


@pytest.fixture(params=[Stead, AsyncStead])
def client(request: pytest.FixtureRequest) -> Client:
    """Makes a client of the SDK, of each of the two kinds in turn."""
    return lambda url, **options: request.param(api_key="key", base_url=url, **options)


async def done(result: Any) -> Any:
    """The result of a call of either client; of a stream, all its events."""
    if hasattr(result, "__aiter__"):
        return [each async for each in result]
    if hasattr(result, "__next__"):
        return list(result)
    return await result if inspect.isawaitable(result) else result


async def close(stead: Any) -> None:
    await done(stead.aclose() if hasattr(stead, "aclose") else stead.close())


async def attempt(
    client: Client, call: Callable[[Any], Any], *steps: Step, **options: Any
) -> tuple[Any, list[Seen]]:
    """The result or the error of a call, and the requests that the server received."""
    with scripted(*steps) as server:
        stead = client(server.url, **options)
        result: Any
        try:
            result = await done(call(stead))
        except errors.SteadException as error:
            result = error
        finally:
            await close(stead)
        return result, server.seen
