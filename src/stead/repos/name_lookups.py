"""Looks up the addresses of host names, asynchronously: in the host's file of names, then in DNS.

A name server that does not answer costs its caller a place and no thread.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from stead.repos.errors import RepoBusy
from stead.shares import KeyedLimit
from stead.tasks import in_thread

TIMEOUT = 8.0
"""Seconds for one name, in all name servers of the host."""
AT_ONCE = 64
PER_ACCOUNT = 8
_MAX_WAITING = 64
_MAX_WAIT = 10.0
_MAX_FILE = 1 << 20
_HOSTS = Path("/etc/hosts")
_RESOLVERS = Path("/etc/resolv.conf")
_LOCAL = ("127.0.0.1", "::1")

_Version = tuple[int, int, int]
"""Of a file: a changed file has another one."""


class NameLookups:
    """Looks up names for all accounts; each has a share of the lookups at a time."""

    def __init__(
        self,
        *,
        hosts: Path = _HOSTS,
        resolvers: Path = _RESOLVERS,
        port: int = 53,
        timeout: float = TIMEOUT,
        at_once: int = AT_ONCE,
        per_account: int = PER_ACCOUNT,
    ) -> None:
        self._hosts = _HostsFile(hosts)
        self._resolvers = resolvers
        self._port = port
        self._timeout = timeout
        self._known: tuple[_Version | None, dns.asyncresolver.Resolver] | None = None
        self._lookups = KeyedLimit(
            at_once,
            per_account,
            max_waiting=_MAX_WAITING,
            max_wait=_MAX_WAIT,
            busy=lambda: RepoBusy("lookups of host names"),
        )

    async def addresses(self, account: str | None, host: str) -> Sequence[str]:
        """The addresses of a name, IPv4 first. Raises OSError if there is none."""
        name = host.lower().removesuffix(".")
        if name == "localhost" or name.endswith(".localhost"):
            return _LOCAL
        if found := self._hosts.addresses(name):
            return found
        async with self._lookups.hold(account):
            resolver = await self._resolver()
            answers = await asyncio.gather(
                *(self._ask(resolver, name, kind) for kind in (dns.rdatatype.A, dns.rdatatype.AAAA)),
                return_exceptions=True,
            )
        known = [address for answer in answers if not isinstance(answer, BaseException) for address in answer]
        for answer in answers:
            if isinstance(answer, BaseException) and (not known or not isinstance(answer, OSError)):
                raise answer
        return known

    async def _ask(
        self, resolver: dns.asyncresolver.Resolver, name: str, kind: dns.rdatatype.RdataType
    ) -> Sequence[str]:
        """The addresses of one family: none if the name exists without them."""
        try:
            answer = await resolver.resolve(name, kind, search=True, lifetime=self._timeout)
        except dns.resolver.NoAnswer:
            return ()
        except dns.resolver.LifetimeTimeout:
            raise TimeoutError(f"no answer from DNS within {self._timeout:g} s") from None
        except (dns.exception.DNSException, ValueError) as error:
            # ValueError: labels that are too long, or not ASCII.
            raise OSError(f"{name}: {type(error).__name__}") from error
        return [str(record.address) for record in answer]

    async def _resolver(self) -> dns.asyncresolver.Resolver:
        """The name servers of the host, read again when the file has changed."""
        version = _version(self._resolvers)
        if self._known is None or self._known[0] != version:
            self._known = version, await in_thread(self._configured, version is not None)
        return self._known[1]

    def _configured(self, exists: bool) -> dns.asyncresolver.Resolver:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.port = self._port
        # Without a name server, the C library asks this host too.
        resolver.nameservers = ["127.0.0.1"]
        if exists:
            with contextlib.suppress(dns.exception.DNSException, OSError, ValueError):
                resolver.read_resolv_conf(str(self._resolvers))
        return resolver


class _HostsFile:
    """/etc/hosts: names and their addresses, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: _Version | None = None
        self._names: dict[str, list[str]] = {}

    def addresses(self, name: str) -> Sequence[str]:
        version = _version(self._path)
        if version != self._read:
            self._read, self._names = version, {} if version is None else _parse(self._path)
        return self._names.get(name, ())


def _parse(path: Path) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    with path.open(errors="replace") as file:
        for line in file.read(_MAX_FILE).splitlines():
            address, *aliases = line.partition("#")[0].split() or [""]
            try:
                # Without the zone of a link-local address.
                known = str(ip_address(address.partition("%")[0]))
            except ValueError:
                continue
            for alias in aliases:
                names.setdefault(alias.lower().removesuffix("."), []).append(known)
    return {name: sorted(found, key=lambda each: ":" in each) for name, found in names.items()}


def _version(path: Path) -> _Version | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
