"""Domains of accounts: verification, ownership, and host names mapped to ports of VMs."""

import asyncio
import secrets
import string
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

from stead.domains.errors import (
    DomainNotFound,
    DomainNotVerified,
    DomainTaken,
    InvalidDomain,
    MappingNotFound,
    VerificationNotFound,
)
from stead.domains.hostnames import base, canonical, canonical_pattern, with_parents
from stead.domains.names import Names
from stead.domains.routes import Route, RouteTable
from stead.domains.verification import Lookup, Verifier, lookup_txt, record_names
from stead.errors import InvalidRequest, MachineNotFound
from stead.limits import LimitExceeded, LimitName, Limits
from stead.store.database import Database
from stead.store.domains import (
    DomainRow,
    DomainStore,
    MappingRow,
    MappingStore,
    VerificationRow,
    VerificationStore,
)
from stead.tasks import finished

PAGE = 1000
"""Entries of a list."""
MAX_PENDING = 100
"""Verifications of an account that are not completed."""
MAX_AT_ONCE = 100
"""Domains in one request."""
MAX_PORT = 65535
_PREVIEW_LENGTH = 16
_PREVIEW_ALPHABET = string.ascii_lowercase + string.digits

Owns = Callable[[str, str], Awaitable[bool]]
"""Whether an account has a VM."""
LimitsOf = Callable[[str], Awaitable[Limits]]


@dataclass(frozen=True)
class Domain:
    """A domain of an account. `implicit` for a name of a preview zone: it is owned while it is mapped."""

    id: str
    domain: str
    account: str
    implicit: bool
    created_at: float


@dataclass(frozen=True)
class Verification:
    """A pending verification; `record` is the name of the TXT record that must contain `code`."""

    id: str
    domain: str
    account: str
    code: str
    record: str
    created_at: float


@dataclass(frozen=True)
class Mapping:
    """A host name that leads to a port of a VM; `ownership` is the id of the domain that allows it."""

    id: str
    domain: str
    account: str
    ownership: str
    machine: str
    port: int
    created_at: float


@dataclass(frozen=True)
class Target:
    """A name to map, and the port of the VM that it leads to."""

    domain: str
    port: int


class Domains:
    """All domains of one installation. Accounts see only their own.

    Owned domains and mappings are also in memory, where routes are found. One lock orders the writers, so the
    memory is never behind the rows; a write is in both when its call returns.
    """

    def __init__(
        self,
        database: Database,
        names: Names,
        owns: Owns,
        limits_of: LimitsOf,
        lookup: Lookup = lookup_txt,
    ) -> None:
        self.names = names
        self.https_port = 443
        """Where clients reach the names; set by what serves them."""
        self._owned = DomainStore(database)
        self._verifications = VerificationStore(database)
        self._mapped = MappingStore(database)
        self._owns = owns
        self._limits_of = limits_of
        self._verifier = Verifier(lookup)
        self._routes = RouteTable(names.reserved)
        self._lock = asyncio.Lock()
        self._watchers: list[Callable[[Collection[str]], None]] = []

    @classmethod
    async def open(
        cls, database: Database, names: Names, owns: Owns, limits_of: LimitsOf, lookup: Lookup = lookup_txt
    ) -> Self:
        """Read all domains and mappings, after names of preview zones that no mapping uses were released."""
        opened = cls(database, names, owns, limits_of, lookup)
        await opened._owned.delete_unused()
        opened._routes.own(await opened._owned.all())
        opened._routes.put(await opened._mapped.all())
        return opened

    # Routes

    def in_zone(self, hostname: str) -> bool:
        """Whether a name is a preview zone or below one: it is this installation's, mapped or not."""
        return hostname in self.names.zones or self.names.zone_of(hostname) is not None

    def route(self, hostname: str) -> Route | None:
        """The VM and port that a host name leads to: its own mapping, else a wildcard's; from memory."""
        return self._routes.route(hostname)

    def of_machine(self, machine: str) -> list[Mapping]:
        """The mappings of a VM, oldest first; from memory."""
        return [_mapping(row) for row in self._routes.of_machine(machine)]

    def url(self, domain: str) -> str:
        """The URL of a mapped name."""
        return f"https://{domain}" + ("" if self.https_port == 443 else f":{self.https_port}")

    def mapped_names(self) -> list[str]:
        """All mapped host names and wildcards, of all accounts; from memory."""
        return list(self._routes.mappings)

    def watch(self, changed: Callable[[Collection[str]], None]) -> None:
        """Call this after every change of the mappings, with the names and wildcards that changed."""
        self._watchers.append(changed)

    # Verification

    async def verify(self, account: str, domain: str) -> Verification:
        """Start to verify a domain; a verification of the same domain that is pending is returned again."""
        name = self.names.to_verify(domain)
        async with self._lock:
            self._check_claimable(account, name)
            found = await self._verifications.find(account, name)
            if found is None:
                pending = len(await self._verifications.list(account))
                if pending >= MAX_PENDING:
                    raise LimitExceeded(LimitName.DOMAIN_VERIFICATIONS, MAX_PENDING, pending, 1)
                row = VerificationRow(str(uuid.uuid4()), account, name, f"stead-{secrets.token_hex(20)}")
                found = await self._verifications.insert(row)
        return _verification(found)

    async def complete(
        self, account: str, *, domain: str | None = None, verification: str | None = None
    ) -> Domain:
        """Complete a verification, by its domain or id, if a TXT record has its code."""
        if domain is not None and verification is None:
            name = self.names.to_verify(domain)
            pending = await self._verifications.find(account, name)
            owned = self._routes.owned.get(name)
            if pending is None and owned is not None and owned.account == account:
                return _domain(owned)
        elif domain is None and verification is not None:
            pending = await self._verifications.get(verification)
        else:
            raise InvalidRequest("give either the domain or the id of the verification")
        if pending is None or pending.account != account:
            raise VerificationNotFound(domain or verification or "")
        self._check_claimable(account, pending.domain)
        await self._verifier.check(account, pending.domain, pending.code)
        return await finished(self._claim(account, pending))

    async def _claim(self, account: str, pending: VerificationRow) -> Domain:
        async with self._lock:
            owned = self._routes.owned.get(pending.domain)
            if owned is not None and owned.account == account:
                await self._verifications.delete(pending.id)
                return _domain(owned)
            self._check_claimable(account, pending.domain)
            if await self._verifications.get(pending.id) is None:
                raise VerificationNotFound(pending.domain)
            most = (await self._limits_of(account)).domains
            current = await self._owned.count(account)
            if most is not None and current >= most:
                raise LimitExceeded(LimitName.DOMAINS, most, current, 1)
            row = DomainRow(str(uuid.uuid4()), pending.domain, account)
            claimed = await self._owned.claim(row, pending.id)
            if claimed is None:
                raise DomainTaken(pending.domain, pending.domain)
            self._routes.own([claimed])
            return _domain(claimed)

    async def verifications(self, account: str) -> list[Verification]:
        """The pending verifications of an account, oldest first."""
        return [_verification(row) for row in await self._verifications.list(account)]

    async def cancel(self, account: str, domain: str, code: str) -> Verification:
        """Cancel a pending verification."""
        name = canonical(domain)
        async with self._lock:
            found = await self._verifications.find(account, name)
            if found is None or found.code != code:
                raise VerificationNotFound(domain)
            await self._verifications.delete(found.id)
        return _verification(found)

    # Ownership

    async def owned(
        self, account: str, *, limit: int = PAGE, offset: int = 0, implicit: bool = False
    ) -> list[Domain]:
        """Verified domains, oldest first; with `implicit`, mapped names of preview zones too."""
        return [_domain(row) for row in await self._owned.page(account, limit, offset, implicit=implicit)]

    async def release(self, account: str, domain: str) -> None:
        """Give up a verified domain that nothing is mapped with."""
        await finished(self._release(account, canonical(domain)))

    async def _release(self, account: str, name: str) -> None:
        async with self._lock:
            row = self._routes.owned.get(name)
            if row is None or row.implicit or row.account != account:
                raise DomainNotFound(name)
            used = self._routes.uses(row.id)
            if used:
                raise InvalidRequest(f"cannot release {name}: unmap its names first ({used} mapped)")
            await self._owned.delete(row.id)
            self._routes.disown(row)

    def check_owned(self, account: str, domain: str) -> None:
        """Raise `DomainNotVerified` unless a domain or one of its parents belongs to the account."""
        name = self.names.to_verify(domain)
        owner = self._owner(name)
        if owner is None or owner.account != account:
            raise DomainNotVerified(name)

    # Mappings

    async def map(self, account: str, domain: str, machine: str, port: int) -> Mapping:
        """Map a host name to a port of a VM; a name that the account has mapped moves there at once."""
        return (await self.map_all(account, machine, [Target(domain, port)]))[0]

    async def map_all(self, account: str, machine: str, targets: Sequence[Target]) -> list[Mapping]:
        """Map several names to one VM: all, or none on an error."""
        return await finished(self._map_all(account, machine, targets))

    async def _map_all(self, account: str, machine: str, targets: Sequence[Target]) -> list[Mapping]:
        async with self._lock:
            return await self._put(account, machine, await self._checked(account, targets))

    async def check(self, account: str, targets: Sequence[Target]) -> None:
        """Raise the error of a `map_all` that cannot succeed, before there is a VM."""
        await self._checked(account, targets)

    async def map_preview(self, account: str, machine: str, port: int) -> Mapping:
        """A name of the first preview zone for a port of a VM: one that is mapped, else a new random one."""
        return await finished(self._map_preview(account, machine, port))

    async def _map_preview(self, account: str, machine: str, port: int) -> Mapping:
        if not self.names.zones:
            raise InvalidRequest("this installation has no preview zone (STEAD_PREVIEW_ZONES)")
        zone = self.names.zones[0]
        async with self._lock:
            for row in self._routes.of_machine(machine):
                exact = row.domain.partition(".")[2] == zone and not row.domain.startswith("*")
                if exact and row.port == port and row.account == account:
                    return _mapping(row)
            label = "".join(secrets.choice(_PREVIEW_ALPHABET) for _ in range(_PREVIEW_LENGTH))
            targets = await self._checked(account, [Target(f"{label}.{zone}", port)])
            return (await self._put(account, machine, targets))[0]

    async def unmap(self, account: str, domain: str) -> None:
        """Remove a mapping. A verified domain stays verified; a name of a preview zone becomes free."""
        await finished(self._unmap(account, canonical_pattern(domain)))

    async def _unmap(self, account: str, name: str) -> None:
        async with self._lock:
            row = self._routes.mappings.get(name)
            if row is None or row.account != account:
                raise MappingNotFound(name)
            await self._mapped.remove(name)
            self._routes.remove(name)
            await self._disown_unused([row])
        self._changed([name])

    async def mappings(
        self,
        account: str,
        *,
        domain: str | None = None,
        ownership: str | None = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> list[Mapping]:
        """Mappings of an account, oldest first: all, or those of one name or of one owned domain."""
        name = None if domain is None else canonical_pattern(domain)
        rows = await self._mapped.page(account, limit, offset, domain=name, ownership=ownership)
        return [_mapping(row) for row in rows]

    async def remove_machine(self, machine: str) -> None:
        """Remove the mappings of a deleted VM. Its row is gone, and their rows with it."""
        await finished(self._remove_machine(machine))

    async def _remove_machine(self, machine: str) -> None:
        async with self._lock:
            rows = self._routes.of_machine(machine)
            if not rows:
                return
            for row in rows:
                self._routes.remove(row.domain)
            await self._disown_unused(rows)
        self._changed([row.domain for row in rows])

    # Rules. Call them with the lock held, unless the result is only a forecast.

    def _owner(self, name: str) -> DomainRow | None:
        """The owner of the longest domain that a name is or belongs to."""
        preview = self.names.preview(name)
        known = self._routes.owned
        if preview is not None:
            return known.get(preview)
        # An implicit one is left of a preview zone that is not configured any more.
        found = (known[each] for each in with_parents(name) if each in known)
        return next((row for row in found if not row.implicit), None)

    def _check_claimable(self, account: str, name: str) -> None:
        owner = self._owner(name)
        if owner is not None and owner.account != account:
            raise DomainTaken(name, owner.domain)

    async def _checked(self, account: str, targets: Sequence[Target]) -> list[Target]:
        """The targets in canonical form, if the account may map them all."""
        if len(targets) > MAX_AT_ONCE:
            raise InvalidRequest(f"too many domains: {len(targets)} (max {MAX_AT_ONCE} in one request)")
        checked: dict[str, Target] = {}
        for target in targets:
            if not 1 <= target.port <= MAX_PORT:
                raise InvalidRequest(f"invalid port {target.port}: must be from 1 to {MAX_PORT}")
            name = self.names.to_map(target.domain)
            if name in checked:
                raise InvalidDomain(target.domain, "it is given twice")
            owner = self._owner(base(name))
            if owner is None and self.names.zone_of(base(name)) is None:
                raise DomainNotVerified(name)
            if owner is not None and owner.account != account:
                raise DomainTaken(name, owner.domain)
            checked[name] = Target(name, target.port)
        new = sum(name not in self._routes.mappings for name in checked)
        most = (await self._limits_of(account)).mappings if new else None
        current = 0 if most is None else await self._mapped.count(account)
        if most is not None and current + new > most:
            raise LimitExceeded(LimitName.MAPPINGS, most, current, new)
        return list(checked.values())

    async def _put(self, account: str, machine: str, targets: Sequence[Target]) -> list[Mapping]:
        if not await self._owns(account, machine):
            raise MachineNotFound(machine)
        now = time.time_ns()
        made: dict[str, DomainRow] = {}
        rows: list[MappingRow] = []
        replaced: list[MappingRow] = []
        for target in targets:
            name = base(target.domain)
            preview = self.names.preview(name)
            owner = self._owner(name) or (made.get(preview) if preview else None)
            if owner is None:
                owner = DomainRow(str(uuid.uuid4()), preview or name, account, True, now)
                made[owner.domain] = owner
            before = self._routes.mappings.get(target.domain)
            if before is not None and (before.machine, before.port) == (machine, target.port):
                rows.append(before)
                continue
            if before is not None:
                replaced.append(before)
            mapping_id = str(uuid.uuid4())
            rows.append(MappingRow(mapping_id, target.domain, account, owner.id, machine, target.port, now))
        if not await self._mapped.put(list(made.values()), rows):
            raise MachineNotFound(machine)
        self._routes.own(made.values())
        self._routes.put(rows)
        await self._disown_unused(replaced)
        self._changed([row.domain for row in rows])
        return [_mapping(row) for row in rows]

    async def _disown_unused(self, rows: Sequence[MappingRow]) -> None:
        """Release names of preview zones that these mappings were the last ones of."""
        unused = self._routes.unused(row.ownership for row in rows)
        for owned in unused:
            self._routes.disown(owned)
        if unused:
            await self._owned.delete_unused([owned.id for owned in unused])

    def _changed(self, names: Collection[str]) -> None:
        for changed in self._watchers:
            changed(names)


def _domain(row: DomainRow) -> Domain:
    return Domain(row.id, row.domain, row.account, row.implicit, row.created_at / 1e9)


def _verification(row: VerificationRow) -> Verification:
    record = record_names(row.domain)[0]
    return Verification(row.id, row.domain, row.account, row.code, record, row.created_at / 1e9)


def _mapping(row: MappingRow) -> Mapping:
    return Mapping(
        row.id, row.domain, row.account, row.ownership, row.machine, row.port, row.created_at / 1e9
    )
