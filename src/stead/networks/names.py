"""Names of VMs in a VPC: `LABEL.internal`, where the label comes from the VM's name or is its id."""

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from stead.addresses import PRIVATE_ZONE
from stead.store.machines import MachineStore, MemberRow

MAX_ADDRESSES = 16
"""Addresses of one answer: it then fits 512 bytes, so that no client needs TCP."""
_MAX_LABEL = 63
_OTHERS = re.compile(r"[^a-z0-9]+")


def label_of(name: str) -> str | None:
    """The DNS label of a name: lower case, accents dropped, anything but a-z and 0-9 a hyphen.

    None when nothing is left.
    """
    letters = unicodedata.normalize("NFKD", name).casefold()
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return _OTHERS.sub("-", plain).strip("-")[:_MAX_LABEL].rstrip("-") or None


_cached_label = functools.lru_cache(8192)(label_of)
"""Caches labels of VM names only: queried labels would evict them."""


def names_of(machine: str, name: str | None) -> tuple[str, ...]:
    """The names of a VM in its VPC, the one of its own first."""
    label = None if name is None else _cached_label(name)
    return tuple(f"{each}.{PRIVATE_ZONE}" for each in (label, machine) if each is not None)


@dataclass
class _Table:
    """The names of one VPC, with addresses as text: few of those that are read are asked for."""

    by_id: dict[str, str] = field(default_factory=dict)
    by_label: dict[str, list[str]] = field(default_factory=dict)
    by_address: dict[str, MemberRow] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Iterable[MemberRow]) -> "_Table":
        made = cls()
        for member in members:
            made.by_id[member.id] = member.address
            made.by_address[member.address] = member
            if member.name is not None and (label := _cached_label(member.name)):
                made.by_label.setdefault(label, []).append(member.address)
        return made


class PrivateNames:
    """What VMs in VPCs may resolve. Tables are read from rows, and again after a change of any VM's row."""

    def __init__(self, store: MachineStore) -> None:
        self._store = store
        self._version = -1
        self._vpcs: dict[int, str | None] = {}
        """The VPC of each slot that has asked."""
        self._tables: dict[str, _Table] = {}

    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]:
        """Addresses of the VMs with this id or name in the VPC of the VM in `slot`, the oldest VM's first.

        An id is never ambiguous, so a VM that is named after it does not count.
        """
        table = self._table(slot)
        found = table.by_id.get(label.lower())
        known = table.by_label.get(label_of(label) or "", []) if found is None else [found]
        return [IPv4Address(each) for each in known[:MAX_ADDRESSES]]

    def name(self, slot: int, address: IPv4Address) -> str | None:
        """The name of the VM with this address in the VPC of the VM in `slot`."""
        found = self._table(slot).by_address.get(str(address))
        return None if found is None else names_of(found.id, found.name)[0]

    def _table(self, slot: int) -> _Table:
        if self._version != self._store.version:
            self._version = self._store.version
            self._vpcs.clear()
            self._tables.clear()
        if slot not in self._vpcs:
            self._vpcs[slot] = self._store.vpc_of_slot(slot)
        vpc = self._vpcs[slot]
        if vpc is None:
            return _Table()
        if vpc not in self._tables:
            self._tables[vpc] = _Table.of(self._store.members_of(vpc))
        return self._tables[vpc]
