"""The NIC of a VM in a VPC: its address is claimed with the VM's row, so that no two VMs have one."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from typing import TypeVar

from stead.errors import AddressTaken, InvalidRequest
from stead.host.interface import Nic
from stead.machines.records import Properties
from stead.networks.errors import VpcFull
from stead.networks.ranges import lowest_free, parse_address
from stead.store.networks import VpcStore

T = TypeVar("T")


@dataclass(frozen=True)
class NicRequest:
    """A NIC that a caller wants: an address of the VPC, or any that is free."""

    vpc: str
    address: str | None = None


class VpcAddresses:
    """Gives VMs addresses in VPCs."""

    def __init__(self, store: VpcStore) -> None:
        self._store = store

    async def claim(
        self,
        wanted: NicRequest,
        properties: Properties,
        write: Callable[[Properties], Awaitable[T]],
    ) -> T:
        """Write a VM with the NIC that is wanted; AddressTaken when another VM has the address.

        Any free address is the lowest one. `write` is repeated when another VM was faster to get it.
        """
        row = await self._store.owned(properties.account or "", wanted.vpc)
        if row is None:
            raise InvalidRequest(f"VPC {wanted.vpc[:80]} not found")
        cidr = IPv4Network(row.cidr)
        if wanted.address is not None:
            address = parse_address(wanted.address, cidr)
            return await write(replace(properties, nic=Nic(row.id, address), fixed_address=True))
        while True:
            taken = {IPv4Address(text) for _, text in await self._store.members(row.id)}
            free = lowest_free(cidr, taken)
            if free is None:
                raise VpcFull(row.id, row.cidr)
            try:
                return await write(replace(properties, nic=Nic(row.id, free)))
            except AddressTaken:
                continue
