"""The routing table in memory: which VM and port a host name leads to."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stead.domains.hostnames import WILDCARD
from stead.store.domains import DomainRow, MappingRow


@dataclass(frozen=True)
class Route:
    """Where requests for a host name go. `domain` is the mapped name: the host name or a wildcard."""

    domain: str
    machine: str
    port: int
    account: str


class RouteTable:
    """Owned domains and mappings by name. A lookup takes two or three dictionary accesses."""

    def __init__(self, reserved: frozenset[str]) -> None:
        self._reserved = reserved
        self.owned: dict[str, DomainRow] = {}
        self._owned_by_id: dict[str, DomainRow] = {}
        self.mappings: dict[str, MappingRow] = {}
        self._by_machine: defaultdict[str, set[str]] = defaultdict(set)
        self._by_ownership: defaultdict[str, set[str]] = defaultdict(set)

    def route(self, hostname: str) -> Route | None:
        """The route of a name in any case, with or without a dot at its end: its own, else a wildcard's."""
        name = hostname.removesuffix(".").lower()
        if name in self._reserved or name.startswith(WILDCARD):
            return None
        found = self.mappings.get(name)
        if found is None:
            found = self.mappings.get(WILDCARD + name.partition(".")[2])
            owner = self.owned.get(name)
            # A wildcard does not reach a subdomain that another account verified.
            if found is None or (owner is not None and owner.account != found.account):
                return None
        return Route(found.domain, found.machine, found.port, found.account)

    def of_machine(self, machine: str) -> list[MappingRow]:
        """The mappings of a VM, oldest first."""
        found = [self.mappings[name] for name in self._by_machine.get(machine, ())]
        return sorted(found, key=lambda row: (row.created_at, row.domain))

    def uses(self, ownership: str) -> int:
        """How many names are mapped by this ownership."""
        return len(self._by_ownership.get(ownership, ()))

    def unused(self, ownerships: Iterable[str]) -> list[DomainRow]:
        """Those of these domains that are owned only while they are mapped, and are not mapped any more."""
        found = (self._owned_by_id.get(each) for each in sorted(set(ownerships)) if not self.uses(each))
        return [row for row in found if row is not None and row.implicit]

    def own(self, rows: Iterable[DomainRow]) -> None:
        for row in rows:
            self.owned[row.domain] = self._owned_by_id[row.id] = row

    def disown(self, row: DomainRow) -> None:
        del self.owned[row.domain], self._owned_by_id[row.id]

    def put(self, rows: Iterable[MappingRow]) -> None:
        """Add mappings, or replace those of the same name."""
        for row in rows:
            before = self.mappings.get(row.domain)
            self.mappings[row.domain] = row
            if before is not None:
                self._forget(before, row)
            self._by_machine[row.machine].add(row.domain)
            self._by_ownership[row.ownership].add(row.domain)

    def remove(self, domain: str) -> None:
        self._forget(self.mappings.pop(domain))

    def _forget(self, row: MappingRow, after: MappingRow | None = None) -> None:
        for index, key, new in (
            (self._by_machine, row.machine, after and after.machine),
            (self._by_ownership, row.ownership, after and after.ownership),
        ):
            if key != new:
                index[key].discard(row.domain)
                if not index[key]:
                    del index[key]
