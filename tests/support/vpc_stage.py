"""A VPC of an account, on a host in memory."""

from dataclasses import dataclass
from typing import Self

from stead.identity.accounts import Accounts
from stead.networks.networks import Networks
from support.fake_server import FakeServer


@dataclass
class VpcStage:
    server: FakeServer
    account: str
    vpc: str

    @classmethod
    async def of(cls, server: FakeServer, cidr: str) -> Self:
        """A new VPC of a new account."""
        account = (await Accounts(server.machines.database).create("ours")).id
        vpc = await Networks(server.machines.database, (), server.host).create(account, cidr)
        return cls(server, account, vpc.id)

    @property
    def networks(self) -> Networks:
        return Networks(self.server.machines.database, (), self.server.host)
