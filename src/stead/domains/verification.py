"""Proof of ownership: a TXT record with the code of a verification, at the domain or one of its parents."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import dns.asyncresolver
import dns.exception
import dns.resolver

from stead.deadlines import scaled
from stead.domains.errors import DnsUnavailable, LookupsBusy, VerificationFailed
from stead.domains.hostnames import MAX_NAME, with_parents
from stead.shares import KeyedLimit
from stead.tasks import in_thread

LABEL = "_freestyle_custom_hostname"
MAX_RECORDS = 5
"""Names that are looked up for one verification: the domain and its nearest parents."""
_TIMEOUT = scaled(5.0)
_AT_ONCE = 32
_PER_ACCOUNT = 2
_MAX_WAIT = scaled(20.0)

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""The TXT records of a name; none when it does not exist. Raises `DnsUnavailable`."""


def record_names(domain: str) -> list[str]:
    """The names at which a TXT record proves the ownership of a domain, the domain's own first."""
    names = [f"{LABEL}.{name}" for name in with_parents(domain)]
    return [name for name in names if len(name) <= MAX_NAME][:MAX_RECORDS]


async def lookup_txt(name: str) -> Sequence[str]:
    """Ask the resolver of this host, in bounded time. An answer has at most 64 KiB."""
    try:
        resolver = await in_thread(dns.asyncresolver.Resolver)
        answer = await resolver.resolve(name, "TXT", search=False, lifetime=_TIMEOUT)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer, dns.resolver.YXDOMAIN):
        return ()
    except dns.resolver.LifetimeTimeout:
        raise DnsUnavailable(name, f"no answer within {_TIMEOUT:g} s") from None
    except (dns.exception.DNSException, OSError) as error:
        raise DnsUnavailable(name, type(error).__name__) from error
    return [b"".join(record.strings).decode("ascii", "replace") for record in answer]


class Verifier:
    """Looks up TXT records; all accounts share the lookups, and each has a part of them."""

    def __init__(self, lookup: Lookup = lookup_txt) -> None:
        self._lookup = lookup
        self._lookups = KeyedLimit(_AT_ONCE, _PER_ACCOUNT, max_wait=_MAX_WAIT, busy=LookupsBusy)

    async def check(self, account: str, domain: str, code: str) -> None:
        """Raise `VerificationFailed` unless a TXT record has the code, `DnsUnavailable` if DNS fails."""
        names = record_names(domain)
        failed: DnsUnavailable | None = None
        async with self._lookups.hold(account):
            for name in names:
                try:
                    async with asyncio.timeout(_TIMEOUT * 2):
                        records = await self._lookup(name)
                except DnsUnavailable as error:
                    failed = failed or error
                except TimeoutError:
                    failed = failed or DnsUnavailable(name, f"no answer within {_TIMEOUT * 2:g} s")
                else:
                    if any(record.strip() == code for record in records):
                        return
        if failed is not None:
            raise failed
        raise VerificationFailed(domain, names)
