"""HTTP clients, their options, and the classification of their failures."""

import socket
import ssl
from typing import Any
from urllib.request import getproxies

import httpx2

from stead.sdk.connect_problems import connect_problem
from stead.sdk.errors import InvalidArgument, NoAnswerInTime, ServerUnreachable
from stead.sdk.requests import CONNECT_TIMEOUT, ConnectionSettings, Request, Unset

LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=4.0)
"""Idle connections expire before common servers close them, so that no request hits a closed connection."""

LONGEST_TIMEOUT = 30 * 86400.0
"""Seconds; sockets take no timeouts of many years."""
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_PERMANENT = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)


def _keepalive() -> list[tuple[int, int, int]]:
    """TCP keepalive: detects a dead server within two minutes, even during a command without output."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    return options


def _options(settings: ConnectionSettings) -> dict[str, Any]:
    # Loading the system's certificates takes longer than a request: do it only for HTTPS.
    return {"verify": settings.encrypted, "limits": LIMITS}


def _direct(settings: ConnectionSettings) -> bool:
    return settings.loopback or not getproxies()


def async_client(settings: ConnectionSettings) -> httpx2.AsyncClient:
    options = _options(settings)
    if not _direct(settings):
        return httpx2.AsyncClient(**options)
    return httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(socket_options=_keepalive(), **options))


def sync_client(settings: ConnectionSettings) -> httpx2.Client:
    options = _options(settings)
    if not _direct(settings):
        return httpx2.Client(**options)
    return httpx2.Client(transport=httpx2.HTTPTransport(socket_options=_keepalive(), **options))


def timeouts(request: Request, settings: ConnectionSettings) -> httpx2.Timeout:
    """Each call sets the read timeout; the connect timeout is the same for all."""
    seconds = settings.timeout if isinstance(request.timeout, Unset) else request.timeout
    if seconds is not None and not seconds > 0:
        raise InvalidArgument(f"timeout must be a number of seconds above 0, not {seconds!r}")
    if seconds is not None and seconds > LONGEST_TIMEOUT:
        seconds = None
    connect = CONNECT_TIMEOUT if seconds is None else min(CONNECT_TIMEOUT, seconds)
    return httpx2.Timeout(connect=connect, read=seconds, write=settings.timeout, pool=None)


def was_sent(error: httpx2.TransportError) -> bool:
    return not isinstance(error, (*_NEVER_SENT, *_PERMANENT))


def is_permanent(error: httpx2.TransportError) -> bool:
    """A retry cannot succeed: the request is malformed, TLS failed, or the certificate is invalid."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return isinstance(error, _PERMANENT)


def is_timeout(error: httpx2.TransportError) -> bool:
    return isinstance(error, httpx2.TimeoutException)


def unreachable(
    error: httpx2.TransportError, request: Request, settings: ConnectionSettings
) -> ServerUnreachable:
    sent = was_sent(error)
    retryable = (not sent or request.idempotent) and not is_permanent(error)
    call = f"{request.method} {settings.base_url}{request.path}"
    reason = str(error) or type(error).__name__
    if sent and is_timeout(error):
        seconds = timeouts(request, settings).read
        limit = "the timeout" if seconds is None else f"{seconds:g} seconds"
        return NoAnswerInTime(f"{call}: no answer within {limit}", sent=True, retryable=retryable)
    if sent:
        return ServerUnreachable(f"{call}: connection lost: {reason}", sent=True, retryable=retryable)
    reason = connect_problem(error, settings.base_url)
    text = f"{call}: cannot connect: {reason}"
    return ServerUnreachable(text, sent=False, retryable=retryable, reason=reason)
