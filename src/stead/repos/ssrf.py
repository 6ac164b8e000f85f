"""SSRF guard: resolves, checks and pins every user-supplied address before Stead connects to it.

A URL is parsed, its host is resolved once, and every resolved address is checked. The connection goes to one
of these addresses only (pinning), so DNS rebinding has no effect. Proxies are not used.

Names that this installation serves itself are not looked up in DNS. Webhooks reach those that are mapped to a
VM through its own HTTPS server, as any client does.
"""

import asyncio
import base64
import contextlib
import copy
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Protocol, Self
from urllib.parse import unquote, urljoin

import httpcore2
import httpx2

from stead.addresses import NOT_THE_INTERNET
from stead.repos.errors import RepoError, TooLarge
from stead.repos.name_lookups import NameLookups

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host name for connections to a port."""

MAX_URL = 4096
MAX_REDIRECTS = 5
_LOOKUP_TIMEOUT = 20.0
"""Seconds with the wait for the account's share of lookups."""
_CONNECT_TIMEOUT = 10.0
_READ_TIMEOUT = 60.0
_MAX_ADDRESSES = 8
_PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)")
_REDIRECTS = (301, 302, 303, 307, 308)

# Not globally reachable, by the IANA special-purpose address registries.
_NOT_PUBLIC_4 = (
    *NOT_THE_INTERNET,
    IPv4Network("192.0.2.0/24"),  # documentation
    IPv4Network("192.88.99.0/24"),  # 6to4 relays
    IPv4Network("198.51.100.0/24"),  # documentation
    IPv4Network("203.0.113.0/24"),  # documentation
)
_PUBLIC_6 = IPv6Network("2000::/3")
_NOT_PUBLIC_6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # IETF protocol assignments: Teredo, benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressRefused(RepoError):
    """The SSRF guard refuses to connect to this URL."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"connection to {url} refused: {why}")
        self.url = url


class RequestFailed(RepoError):
    """The request failed: no connection, a timeout or an invalid response."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"request to {url} failed: {why}")
        self.url = url


@dataclass(frozen=True)
class OwnServer:
    """The HTTPS server of this installation."""

    address: str
    port: int
    tls: ssl.SSLContext
    """Trusts the CA of this installation too."""


class OwnNames(Protocol):
    """The names that this installation serves itself."""

    def in_zone(self, hostname: str) -> bool:
        """Whether it is a preview zone or below one."""

    def route(self, hostname: str) -> object | None:
        """The VM and port of a mapped name; None for any other."""


@dataclass(frozen=True)
class PinnedTarget:
    """A checked URL with the addresses that may be used for it."""

    scheme: str
    host: str
    port: int
    path: str
    """Path and query, as sent."""
    addresses: tuple[str, ...]
    authorization: str | None = field(default=None, repr=False)
    """The Authorization header from the user name and password in the URL."""
    server: OwnServer | None = field(default=None, repr=False)
    """For a mapped name of this installation: where it is served, on whatever port the URL names."""

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def url(self) -> str:
        """The URL without user name and password."""
        return self.origin + self.path

    @property
    def shown(self) -> str:
        """The URL for messages: also without its query, which may hold a secret."""
        return self.origin + self.path.partition("?")[0]


@dataclass(frozen=True)
class RemoteResponse:
    """A response whose body has not been read."""

    target: PinnedTarget
    """The final target, after redirects."""
    status: int
    headers: Mapping[str, str]
    """Names are in lower case."""
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces])


class SsrfGuard:
    def __init__(
        self,
        allowed: Sequence[Network] = (),
        *,
        resolve: Resolve | None = None,
        lookups: NameLookups | None = None,
        tls: ssl.SSLContext | None = None,
        own_names: OwnNames | None = None,
    ) -> None:
        """`allowed` are non-public networks that may be connected to; `resolve` is used instead of DNS."""
        self._allowed = tuple(allowed)
        self._lookups = lookups or NameLookups()
        self._resolve = resolve
        self._account: str | None = None
        self._tls = tls
        self._own_names = own_names
        self.own_server: OwnServer | None = None
        """Set while this installation serves HTTPS."""

    def for_account(self, account: str) -> Self:
        """The same guard, whose lookups of names count for an account."""
        bound = copy.copy(self)
        bound._account = account
        return bound

    async def check(self, url: str, *, credentials: bool = False, own: bool = False) -> PinnedTarget:
        """Parse and resolve a URL; refuse hosts that are not on the public internet.

        A user name and password in the URL are refused without `credentials`. With `own` the URL may name a
        mapped name of this installation.
        """
        scheme, host, port, path, authorization = _parse(url)
        target = PinnedTarget(scheme, host, port, path, (), authorization)
        if authorization is not None and not credentials:
            raise AddressRefused(target.shown, "user name and password are not allowed in this URL")
        names = self._own_names
        if names is not None and own and (names.in_zone(host) or names.route(host) is not None):
            return self._served_here(target, names)
        if names is not None and names.in_zone(host):
            raise AddressRefused(target.shown, f"only webhooks may use {host}, a name of this installation")
        addresses = await self._addresses(target)
        for address in addresses:
            if why := self._refusal(address):
                raise AddressRefused(target.shown, f"{address} is {why}")
        found = tuple(dict.fromkeys(str(address) for address in addresses))[:_MAX_ADDRESSES]
        return PinnedTarget(scheme, host, port, path, found, authorization)

    def _served_here(self, target: PinnedTarget, names: OwnNames) -> PinnedTarget:
        server = self.own_server
        if names.route(target.host) is None:
            why = "names of this installation reach VMs only"
            raise RequestFailed(target.shown, f"{target.host} is not mapped to a VM: {why}")
        if server is None:
            raise RequestFailed(target.shown, "HTTPS of this installation does not run")
        if target.scheme != "https":
            raise AddressRefused(target.shown, f"{target.host} is a name of this installation: use https")
        if target.port not in (_PORTS["https"], server.port):
            where = f"served on port {server.port}, not on {target.port}"
            raise AddressRefused(target.shown, f"{target.host} is a name of this installation, {where}")
        return replace(target, addresses=(server.address,), server=server)

    async def _addresses(self, target: PinnedTarget) -> list[Address]:
        with contextlib.suppress(ValueError):
            return [ip_address(target.host)]
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT):
                found = await self._look_up(target)
        except (OSError, UnicodeError):
            raise RequestFailed(target.shown, f"cannot resolve {target.host}") from None
        try:
            # Drop the zone of a link-local address.
            addresses = [ip_address(each.partition("%")[0]) for each in found]
        except ValueError:
            raise RequestFailed(target.shown, f"{target.host} resolves to an invalid address") from None
        if not addresses:
            raise RequestFailed(target.shown, f"{target.host} has no address")
        return addresses

    async def _look_up(self, target: PinnedTarget) -> Sequence[str]:
        if self._resolve is not None:
            return await self._resolve(target.host, target.port)
        return await self._lookups.addresses(self._account, target.host)

    def _refusal(self, address: Address) -> str | None:
        """Why an address, or the IPv4 address embedded in it, is refused; None if it is allowed."""
        meant = embedded(address)
        if any(each in network for each in (address, meant) for network in self._allowed):
            return None
        if not is_public(meant):
            found = "not a public address"
        elif is_own(address) or is_own(meant):
            found = "an address of this host"
        else:
            return None
        return f"{found} (STEAD_DIAL_PRIVATE sets which private networks the server may connect to)"

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        target: PinnedTarget,
        *,
        most_bytes: int,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> AsyncIterator[RemoteResponse]:
        """One request to a checked target; redirects are returned, not followed.

        Streamed content needs a Content-Length in `headers`. The response is limited to `most_bytes` and
        `timeout`.
        """
        sent = {"Host": target.origin.partition("://")[2], "Accept-Encoding": "identity"}
        sent |= {"User-Agent": "stead", **(headers or {})}
        if target.authorization is not None:
            sent["Authorization"] = target.authorization
        if isinstance(content, bytes):
            sent["Content-Length"] = str(len(content))
        server = target.server
        tls = self._context() if server is None else server.tls
        timeouts = {"connect": _CONNECT_TIMEOUT, "read": _READ_TIMEOUT, "write": _READ_TIMEOUT}
        try:
            async with (
                asyncio.timeout(timeout),
                httpcore2.AsyncConnectionPool(
                    ssl_context=tls if target.scheme == "https" else None,
                    max_connections=1,
                    network_backend=_PinnedBackend(target.addresses, None if server is None else server.port),
                ) as pool,
                pool.stream(
                    method,
                    target.url,
                    headers=list(sent.items()),
                    content=content,
                    extensions={"timeout": timeouts},
                ) as response,
            ):
                names = {name.decode("latin-1").lower(): value for name, value in response.headers}
                received = {name: value.decode("latin-1") for name, value in names.items()}
                if (
                    received.get("content-length", "").isdigit()
                    and int(received["content-length"]) > most_bytes
                ):
                    raise _too_large(target, most_bytes)
                body = _bounded(response.aiter_stream(), target, most_bytes)
                async with contextlib.aclosing(body) as pieces:
                    yield RemoteResponse(target, response.status, received, pieces)
        except TimeoutError:
            raise RequestFailed(target.shown, f"timed out after {timeout:g} s") from None
        except httpcore2.TimeoutException:
            raise RequestFailed(target.shown, "timed out") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise RequestFailed(target.shown, str(error) or type(error).__name__) from error

    @contextlib.asynccontextmanager
    async def stream_get(
        self,
        url: str,
        *,
        most_bytes: int,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        credentials: bool = False,
    ) -> AsyncIterator[RemoteResponse]:
        """GET a URL. Every redirect is checked; secret headers are not sent to another origin."""
        deadline = asyncio.get_running_loop().time() + timeout
        target = await self.check(url, credentials=credentials)
        for _ in range(MAX_REDIRECTS + 1):
            left = max(deadline - asyncio.get_running_loop().time(), 0.001)
            async with self.request(
                "GET", target, most_bytes=most_bytes, timeout=left, headers=headers
            ) as answer:
                location = answer.headers.get("location")
                if answer.status not in _REDIRECTS or location is None:
                    yield answer
                    return
            target, headers = await self._follow(target, location, headers)
        raise RequestFailed(target.shown, f"too many redirects (max {MAX_REDIRECTS})")

    async def _follow(
        self, target: PinnedTarget, location: str, headers: Mapping[str, str] | None
    ) -> tuple[PinnedTarget, Mapping[str, str] | None]:
        redirected = await self.check(urljoin(target.url, location))
        if target.scheme == "https" and redirected.scheme == "http":
            raise AddressRefused(redirected.shown, "redirect from https to http")
        if redirected.origin != target.origin:
            kept = {name: value for name, value in (headers or {}).items() if name.lower() not in _SECRETS}
            return redirected, kept
        return replace(redirected, authorization=target.authorization), headers

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = httpcore2.default_ssl_context()
        return self._tls


_SECRETS = ("authorization", "cookie", "proxy-authorization")


def shown(url: str) -> str:
    """A URL for messages, without credentials and query."""
    try:
        scheme, host, port, path, _ = _parse(url)
    except AddressRefused as error:
        return error.url
    return PinnedTarget(scheme, host, port, path, ()).shown


def git_options(target: PinnedTarget) -> list[str]:
    """Options that pin git to the checked addresses and disable redirects."""
    options = ["-c", "http.followRedirects=false"]
    with contextlib.suppress(ValueError):
        ip_address(target.host)
        return options
    addresses = ",".join(f"[{each}]" if ":" in each else each for each in target.addresses)
    return [*options, "-c", f"http.curloptResolve={target.host}:{target.port}:{addresses}"]


def git_environment(target: PinnedTarget) -> dict[str, str]:
    """Pass the URL's credentials to git in its environment: other users can see command lines."""
    if target.authorization is None:
        return {}
    header = f"Authorization: {target.authorization}"
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "http.extraHeader", "GIT_CONFIG_VALUE_0": header}


def embedded(address: Address) -> Address:
    """The IPv4 address embedded in an IPv6 address (mapped, 6to4, NAT64), else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address


def is_public(address: Address) -> bool:
    """Whether an address is globally reachable."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    return address in _PUBLIC_6 and not any(address in network for network in _NOT_PUBLIC_6)


def is_own(address: Address) -> bool:
    """Whether the address belongs to this host."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: connect() on UDP only selects the source address.
        probe.connect((str(address), 9))
        return ip_address(probe.getsockname()[0]) == address
    return False


def _parse(url: str) -> tuple[str, str, int, str, str | None]:
    """Scheme, host, port, path with query, and the Authorization header from credentials."""
    without_secrets = re.sub(r"//.*@", "//", url, flags=re.DOTALL)[:200]
    if len(url) > MAX_URL:
        raise AddressRefused(without_secrets, f"URL too long (max {MAX_URL} characters)")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, UnicodeError, ValueError):
        raise AddressRefused(without_secrets, "invalid URL") from None
    host = parsed.raw_host.decode("ascii").removesuffix(".")
    if parsed.scheme not in _PORTS:
        raise AddressRefused(without_secrets, "only http and https URLs are supported")
    port = _PORTS[parsed.scheme] if parsed.port is None else parsed.port
    if not 0 < port < 65536:
        raise AddressRefused(without_secrets, f"invalid port {port}")
    try:
        host = str(ip_address(host))
    except ValueError:
        # 127.1, 2130706433 and 0x7f000001 are IP addresses to some parsers and names to others.
        if not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rpartition(".")[2]):
            raise AddressRefused(without_secrets, f"invalid host name {host!r}") from None
    if "%" in host:
        raise AddressRefused(without_secrets, f"{host!r} is a link-local address")
    authorization = None
    if parsed.userinfo:
        user, _, password = parsed.userinfo.decode("ascii").partition(":")
        pair = f"{unquote(user)}:{unquote(password)}".encode()
        authorization = f"Basic {base64.b64encode(pair).decode()}"
    return parsed.scheme, host, port, parsed.raw_path.decode("ascii"), authorization


async def _bounded(pieces: AsyncIterator[bytes], target: PinnedTarget, most: int) -> AsyncGenerator[bytes]:
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > most:
            raise _too_large(target, most)
        yield piece


def _too_large(target: PinnedTarget, most: int) -> TooLarge:
    return TooLarge(f"response from {target.shown} too large (max {most} bytes)")


class _PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to the pinned addresses in order, whatever host is requested."""

    def __init__(self, addresses: Sequence[str], port: int | None) -> None:
        """`port` is used instead of the requested one."""
        self._addresses = addresses
        self._port = port
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = httpcore2.ConnectError("no address to connect to")
        for address in self._addresses:
            try:
                return await self._backend.connect_tcp(
                    address, self._port or port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure
