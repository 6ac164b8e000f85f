"""VPCs: private networks of accounts."""

import asyncio
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from stead.errors import AddressTaken, CapacityExceeded
from stead.host.interface import PrivateNetwork, PrivateNetworkHost
from stead.limits import LimitExceeded, LimitName
from stead.names import check_name
from stead.networks.errors import VpcFull, VpcInUse, VpcNotFound
from stead.networks.names import names_of
from stead.networks.ranges import lowest_free, parse_address, parse_cidr
from stead.store.machines import MachineStore
from stead.store.networks import VpcRow, VpcStore
from stead.tasks import finished

MAX_VPCS = 100
"""VPCs of an account."""
NUMBERS = range(1, 10_000)
"""Each VPC of the installation has a number, which names its interface and namespace."""
_ALPHABET = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class Vpc:
    """A private network of an account. No other VPC's traffic meets it, so ranges may overlap."""

    id: str
    account: str
    name: str | None
    cidr: IPv4Network
    created_at: float


@dataclass(frozen=True)
class Member:
    """A VM in a VPC."""

    machine: str
    address: IPv4Address
    names: tuple[str, ...] = ()
    """Names of the address inside the VPC; none of a deleted VM, which `recreate` keeps the address for."""


class Networks:
    """All VPCs of one installation. Accounts see only their own."""

    def __init__(
        self,
        store: VpcStore,
        machines: MachineStore,
        opened: Sequence[IPv4Network],
        host: PrivateNetworkHost | None = None,
    ) -> None:
        self._store = store
        self._machines = machines
        self._opened = opened
        self._host = host
        self._creating = asyncio.Lock()

    async def create(
        self, account: str, cidr: str, name: str | None = None, vpc_id: str | None = None
    ) -> Vpc:
        """A new VPC. `opened` networks of the host, and ranges that are not private, are refused."""
        check_name(name)
        wanted = VpcRow(vpc_id or _new_id(), 0, account, name, str(parse_cidr(cidr, self._opened)))
        async with self._creating:
            count = await self._store.count(account)
            if count >= MAX_VPCS:
                raise LimitExceeded(LimitName.VPCS, MAX_VPCS, count, 1)
            row = await self._store.create(wanted, NUMBERS)
        if row is None:
            raise CapacityExceeded(f"this installation has {len(NUMBERS)} VPCs, which is the limit")
        if self._host is not None:
            try:
                await self._host.add(private_network(row))
            except BaseException:
                await finished(self._remove(row))
                raise
        return _vpc(row)

    async def named(self, account: str, name: str) -> Sequence[Vpc]:
        return [_vpc(row) for row in await self._store.named(account, name)]

    async def get(self, account: str, vpc: str) -> Vpc:
        return _vpc(await find_row(self._store, account, vpc))

    async def members(self, account: str, vpc: str) -> list[Member]:
        """The VMs in a VPC, by id."""
        row = await find_row(self._store, account, vpc)
        names = {each.id: names_of(each.id, each.name) for each in self._machines.members_of(row.id)}
        found = await self._store.members(row.id)
        return [Member(machine, IPv4Address(text), names.get(machine, ())) for machine, text in found]

    async def check_nic(self, account: str, vpc: str, address: str | None) -> None:
        """Refuse a NIC that a new VM cannot have: VpcNotFound, InvalidAddress, AddressTaken or VpcFull.

        The address is not claimed: it is when the VM is recorded.
        """
        row = await find_row(self._store, account, vpc)
        cidr = IPv4Network(row.cidr)
        taken = {IPv4Address(text) for _, text in await self._store.members(row.id)}
        if address is None:
            if lowest_free(cidr, taken) is None:
                raise VpcFull(row.id, row.cidr)
        elif parse_address(address, cidr) in taken:
            raise AddressTaken(row.id, address)

    async def delete(self, account: str, vpc: str) -> None:
        """Delete a VPC; VpcInUse while VMs are in it."""
        row = await find_row(self._store, account, vpc)
        if not await finished(self._remove(row)):
            raise VpcInUse(row.id, [machine for machine, _ in await self._store.members(row.id)])

    async def _remove(self, row: VpcRow) -> bool:
        # What is left on the host after a crash here is removed at the next start.
        if not await self._store.remove(row.id):
            return False
        if self._host is not None:
            await self._host.remove(private_network(row))
        return True

    async def list(self, account: str) -> list[Vpc]:
        """An account's VPCs, oldest first."""
        return [_vpc(row) for row in await self._store.list(account)]


async def find_row(store: VpcStore, account: str, vpc: str) -> VpcRow:
    """A VPC of an account; VpcNotFound for any other."""
    row = await store.owned(account, vpc)
    if row is None:
        raise VpcNotFound(vpc)
    return row


def _new_id() -> str:
    return "vpc-" + "".join(secrets.choice(_ALPHABET) for _ in range(20))


def private_network(row: VpcRow) -> PrivateNetwork:
    """What a host needs to know of a VPC."""
    return PrivateNetwork(row.id, row.number, IPv4Network(row.cidr), row.account)


def _vpc(row: VpcRow) -> Vpc:
    return Vpc(row.id, row.account, row.name, IPv4Network(row.cidr), row.created_at / 1e9)
