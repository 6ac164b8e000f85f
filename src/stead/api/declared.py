"""Declarations of routes beside their schema: the code of invalid requests, and the bodies that they take."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

SMALL_BODY = 64 << 10
"""Bytes of a body, unless the route declares more."""
_FEW_VALUES = 4000
"""Values of a JSON body, unless the route declares more: each may become an error of the validation."""


@dataclass(frozen=True)
class BodyLimit:
    """What a route reads into memory."""

    size: int | None = SMALL_BODY
    """Bytes; None for a body that is streamed, which the route bounds itself."""
    values: int = _FEW_VALUES
    """Values in its JSON: members of objects and elements of lists."""


@dataclass(frozen=True)
class Declared:
    invalid_code: str = "INVALID_REQUEST"
    """The code on the wire of a request that can never succeed."""
    streamed: tuple[str, ...] = ()
    """Media types of bodies that the route reads in pieces; all others are read into memory."""
    body: BodyLimit = BodyLimit()


_DEFAULT = Declared()
_DECLARED: dict[Callable[..., Any], Declared] = {}
_STREAMED = BodyLimit(None)


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


def large_body(size: int, values: int = _FEW_VALUES) -> Callable[[Endpoint], Endpoint]:
    """Declare that a route takes larger bodies. It has to check the caller's access before it reads one."""

    def declare(endpoint: Endpoint) -> Endpoint:
        _DECLARED[endpoint] = replace(_declared(endpoint), body=BodyLimit(size, values))
        return endpoint

    return declare


def invalid_code_of(scope: Scope) -> str:
    """The code of an invalid request, of the route that was chosen for it."""
    return _declared(scope.get("endpoint")).invalid_code


def body_limits(routes: Iterable[BaseRoute]) -> Callable[[Scope], BodyLimit]:
    """A function that finds before routing what may be read of the body of a request."""
    special = [
        route
        for route in routes
        if isinstance(route, APIRoute)
        and (_declared(route.endpoint).streamed or _declared(route.endpoint).body != _DEFAULT.body)
    ]

    def body_limit(scope: Scope) -> BodyLimit:
        for route in special:
            if route.matches(scope)[0] is Match.FULL:
                declared = _declared(route.endpoint)
                kind = Headers(scope=scope).get("content-type", "")
                return _STREAMED if kind.startswith(declared.streamed) else declared.body
        return _DEFAULT.body

    return body_limit
