"""How connections to the server are made and what their failures mean."""

import socket
import ssl
from typing import Any
from urllib.request import getproxies

import httpx2

from stead.sdk.errors import NoAnswerInTime, ServerUnreachable
from stead.sdk.requests import CONNECT_TIMEOUT, Request, Settings, Unset

LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
"""Idle connections are given up before servers commonly do, so that no request runs into their closing."""

_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_HOPELESS = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)


def _keepalive() -> list[tuple[int, int, int]]:
    """A server that vanishes is noticed within two minutes, also in the middle of a command that prints
    nothing."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    return options


def _options(settings: Settings) -> dict[str, Any]:
    # Reading the system's certificates takes longer than a request, so it is done only when they are needed.
    return {"verify": settings.encrypted, "limits": LIMITS}


def _direct(settings: Settings) -> bool:
    return settings.loopback or not getproxies()


def async_client(settings: Settings) -> httpx2.AsyncClient:
    options = _options(settings)
    if not _direct(settings):
        return httpx2.AsyncClient(**options)
    return httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(socket_options=_keepalive(), **options))


def sync_client(settings: Settings) -> httpx2.Client:
    options = _options(settings)
    if not _direct(settings):
        return httpx2.Client(**options)
    return httpx2.Client(transport=httpx2.HTTPTransport(socket_options=_keepalive(), **options))


def timeouts(request: Request, settings: Settings) -> httpx2.Timeout:
    """Only the wait for the answer differs from call to call; connecting is always quick or never."""
    seconds = settings.timeout if isinstance(request.timeout, Unset) else request.timeout
    connect = CONNECT_TIMEOUT if seconds is None else min(CONNECT_TIMEOUT, seconds)
    return httpx2.Timeout(connect=connect, read=seconds, write=settings.timeout, pool=None)


def was_sent(error: httpx2.TransportError) -> bool:
    return not isinstance(error, (*_NEVER_SENT, *_HOPELESS))


def is_hopeless(error: httpx2.TransportError) -> bool:
    """Trying again cannot help: the request is malformed or the server's certificate is not valid."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return isinstance(error, _HOPELESS)


def is_timeout(error: httpx2.TransportError) -> bool:
    return isinstance(error, httpx2.TimeoutException)


def unreachable(error: httpx2.TransportError, request: Request, settings: Settings) -> ServerUnreachable:
    sent = was_sent(error)
    call = f"{request.method} {settings.base_url}{request.path}"
    reason = str(error) or type(error).__name__
    if sent and is_timeout(error):
        return NoAnswerInTime(f"{call}: no answer in time", sent=True)
    if sent:
        return ServerUnreachable(f"{call}: the connection broke: {reason}", sent=True)
    return ServerUnreachable(f"{call}: no connection could be made: {reason}", sent=False)
