"""The sockets of the edge. Caddy inherits them, so that they outlive a restart of it."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from stead import addresses
from stead.errors import HostError
from stead.logs import get_logger
from stead.settings import Settings, address_of, every_address

log = get_logger("stead.edge")

_BACKLOG = 4096
_RETRY_FOR = 2.0
"""Seconds that a port in use is tried again: the Caddy of a server that was just killed may still have it."""
_HTTPS, _HTTP = 443, 80
_OTHER_HTTPS = 8443


@dataclass(frozen=True)
class PublicSockets:
    """Listening sockets in the host's own network namespace."""

    https: socket.socket
    quic: socket.socket | None
    """UDP, for HTTP/3; None when the port is taken."""
    http: socket.socket | None

    @property
    def https_port(self) -> int:
        return int(self.https.getsockname()[1])

    @property
    def address(self) -> str:
        """At which this host reaches HTTPS."""
        host = str(self.https.getsockname()[0])
        return "127.0.0.1" if host in ("0.0.0.0", "::") else host

    @property
    def ports(self) -> list[int]:
        found = [self.https, self.http] if self.http is not None else [self.https]
        return sorted({int(each.getsockname()[1]) for each in found})

    @property
    def public(self) -> bool:
        """Whether other hosts can connect."""
        host = self.https.getsockname()[0]
        return host != "::1" and not host.startswith("127.")


@contextlib.contextmanager
def bind_public(settings: Settings) -> Iterator[PublicSockets]:
    """Bind the public sockets, before anything else is opened: a port in use fails at once."""
    with contextlib.ExitStack() as stack:
        https = stack.enter_context(_https(settings))
        quic = _quic(https)
        if quic is not None:
            stack.enter_context(quic)
        http = _http(settings, str(https.getsockname()[0]))
        if http is not None:
            stack.enter_context(http)
        yield PublicSockets(https, quic, http)


def _https(settings: Settings) -> socket.socket:
    if settings.https_listen is not None:
        return _tcp(*address_of(settings.https_listen), "STEAD_HTTPS_LISTEN")
    if settings.domain is not None:
        return _tcp(every_address(), _HTTPS, "STEAD_HTTPS_LISTEN")
    try:
        return _tcp("127.0.0.1", _HTTPS, "STEAD_HTTPS_LISTEN")
    except HostError as error:
        log.warning("HTTPS is not on port 443", reason=str(error))
    try:
        return _tcp("127.0.0.1", _OTHER_HTTPS, "STEAD_HTTPS_LISTEN", retry_for=0)
    except HostError:
        return _tcp("127.0.0.1", 0, "STEAD_HTTPS_LISTEN")


def _quic(https: socket.socket) -> socket.socket | None:
    """UDP on the port of HTTPS. HTTP/3 is optional for every client, so a taken port is no error."""
    made = _made(https.family, socket.SOCK_DGRAM)
    try:
        made.bind(https.getsockname())
    except OSError as error:
        made.close()
        log.warning("no HTTP/3: the UDP port is not available", error=error.strerror)
        return None
    return made


def _http(settings: Settings, host: str) -> socket.socket | None:
    if settings.http_listen is not None:
        return _tcp(*address_of(settings.http_listen), "STEAD_HTTP_LISTEN")
    if settings.domain is not None:
        return _tcp(host, _HTTP, "STEAD_HTTP_LISTEN")
    try:
        return _tcp(host, _HTTP, "STEAD_HTTP_LISTEN", retry_for=0)
    except HostError as error:
        log.warning("no redirect from HTTP to HTTPS", error=str(error))
        return None


def _tcp(host: str, port: int, setting: str, retry_for: float = _RETRY_FOR) -> socket.socket:
    deadline = time.monotonic() + retry_for
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            return _listening(found[0], found[4])
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                text = f"cannot listen on {host}:{port}: {error.strerror}; {setting} sets another address"
                raise HostError(text) from error
            time.sleep(0.05)


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    made = _made(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _made(family: int, kind: int) -> socket.socket:
    made = socket.socket(family, kind)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made


def listen_for_guests(port: int) -> socket.socket:
    """A socket on the address at which VMs reach the edge. Call it in a thread of the taps' namespace."""
    return _tcp(str(addresses.GATEWAY), port, "no setting")


def listen_on_loopback() -> socket.socket:
    """A socket on any port of loopback. Call it in a thread of the taps' namespace."""
    return _tcp(str(IPv4Address("127.0.0.1")), 0, "no setting")


def bind_unix(path: Path, uid: int) -> socket.socket:
    """A listening Unix socket that one user may connect to."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o077)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
        os.chown(path, uid, uid)
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise HostError(f"cannot listen on {path}: {error.strerror}") from error
    return made
