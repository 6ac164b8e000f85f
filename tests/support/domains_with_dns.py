"""Domains on a real database, with VMs that exist as rows and TXT records that exist in memory."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stead.domains.domains import Domains
from stead.domains.errors import DnsUnavailable
from stead.domains.names import Names
from stead.identity.accounts import Accounts
from stead.limits import Limits
from stead.store.database import Database, open_database
from stead.store.machines import MachineRow, MachineStore
from support.databases import put_database

ZONES = ("stead.localhost", "style.dev")
RESERVED = ("api.freestyle.sh", "git.freestyle.sh", "vm-ssh.freestyle.sh")


@dataclass
class DomainsWithDns:
    database: Database
    accounts: Accounts
    limits: Limits = field(default_factory=Limits)
    records: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """TXT records by name."""
    asked: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Names that the resolver cannot look up."""
    slots: int = 0

    async def machine(self, account: str, machine_id: str | None = None) -> str:
        self.slots += 1
        row = MachineRow(
            id=machine_id or f"{'m' * 17}{self.slots:03}",
            name=None,
            state="running",
            step=None,
            vcpus=1,
            memory_mib=512,
            disk_gib=20,
            slot=self.slots,
            template="t",
            hostname="h",
            guest_machine_id="g",
            account=account,
        )
        await MachineStore(self.database).insert(row)
        return row.id

    async def delete_machine(self, domains: Domains, machine: str) -> None:
        """As the engine does: the row first, then the event."""
        await MachineStore(self.database).delete(machine)
        await domains.remove_machine(machine)

    async def owns(self, account: str, machine: str) -> bool:
        row = await MachineStore(self.database).get(machine)
        return row is not None and row.account == account

    async def limits_of(self, account: str) -> Limits:
        return self.limits

    async def lookup(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name in self.broken:
            raise DnsUnavailable(name, "no answer within 5 s")
        return self.records[name]

    async def open(self, zones: Sequence[str] = ZONES) -> Domains:
        """As one start of the server does."""
        names = Names.of(zones, RESERVED)
        return await Domains.open(self.database, names, self.owns, self.limits_of, self.lookup)

    async def verified(self, domains: Domains, account: str, domain: str) -> str:
        """The id of a domain after its verification."""
        pending = await domains.verify(account, domain)
        self.records[pending.record].append(pending.code)
        return (await domains.complete(account, domain=domain)).id


@contextlib.asynccontextmanager
async def domains_with_dns(folder: Path) -> AsyncIterator[DomainsWithDns]:
    database = await open_database(await put_database(folder / "stead.db"))
    try:
        yield DomainsWithDns(database, Accounts(database))
    finally:
        await database.dispose()
