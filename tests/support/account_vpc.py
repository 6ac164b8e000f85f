"""A VPC of an account, on a host in memory."""

from dataclasses import dataclass
from typing import Self

from stead.identity.accounts import Accounts
from stead.networks.networks import Networks
from stead.store.networks import VpcStore
from support.fake_server import FakeServer


def networks_of(server: FakeServer) -> Networks:
    return Networks(VpcStore(server.database), server.store, (), server.host.vpcs)


@dataclass
class AccountVpc:
    server: FakeServer
    account: str
    vpc: str

    @classmethod
    async def of(cls, server: FakeServer, cidr: str) -> Self:
        """A new VPC of a new account."""
        account = (await Accounts(server.database).create("ours")).id
        vpc = await networks_of(server).create(account, cidr)
        return cls(server, account, vpc.id)

    @property
    def networks(self) -> Networks:
        return networks_of(self.server)
