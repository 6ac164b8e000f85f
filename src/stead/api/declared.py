"""Declarations of routes beside their schema: the code of invalid requests, and which bodies are streamed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declared:
    invalid_code: str = "INVALID_REQUEST"
    """The code on the wire of a request that can never succeed."""
    streamed: tuple[str, ...] = ()
    """Media types of bodies that the route reads in pieces; all others are read into memory."""


_DEFAULT = Declared()
_DECLARED: dict[Callable[..., Any], Declared] = {}


def _declared(endpoint: Callable[..., Any] | None) -> Declared:
    return _DEFAULT if endpoint is None else _DECLARED.get(endpoint, _DEFAULT)


def invalid_code(code: str) -> Callable[[Endpoint], Endpoint]:
    """Declare the code of a route's invalid requests. Clients know it: it is part of the wire."""

    def declare(endpoint: Endpoint) -> Endpoint:
        _DECLARED[endpoint] = replace(_declared(endpoint), invalid_code=code)
        return endpoint

    return declare


def streamed_body(*media_types: str) -> Callable[[Endpoint], Endpoint]:
    """Declare that a route reads bodies of these types in pieces, so that their size has no limit."""

    def declare(endpoint: Endpoint) -> Endpoint:
        _DECLARED[endpoint] = replace(_declared(endpoint), streamed=media_types)
        return endpoint

    return declare


def invalid_code_of(scope: Scope) -> str:
    """The code of an invalid request, of the route that was chosen for it."""
    return _declared(scope.get("endpoint")).invalid_code


def streamed_bodies(routes: Iterable[BaseRoute]) -> Callable[[Scope], bool]:
    """A function that tells before routing whether the body of a request is streamed."""
    streaming = [
        route for route in routes if isinstance(route, APIRoute) and _declared(route.endpoint).streamed
    ]

    def is_streamed(scope: Scope) -> bool:
        kind = Headers(scope=scope).get("content-type", "")
        return any(
            kind.startswith(_declared(route.endpoint).streamed) and route.matches(scope)[0] is Match.FULL
            for route in streaming
        )

    return is_streamed
