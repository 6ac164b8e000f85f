"""Rows of VPCs."""

import dataclasses
import time
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.accounts import api_keys
from stead.store.machines import machines
from stead.store.rows import Rows, table_of


@dataclass(frozen=True)
class VpcRow:
    """A private network. `number` names what it has on the host; it is unique in the installation."""

    id: str
    number: int
    account: str
    name: str | None
    cidr: str
    wireguard_key: str | None = None
    """Private key of the server's end of WireGuard tunnels into it, sealed."""
    created_at: int = 0


@dataclass(frozen=True)
class SessionRow:
    """A WireGuard client of a VPC. Its private key is not kept."""

    id: str
    vpc: str
    public_key: str
    address: str
    expires_at: int
    created_at: int = 0
    machine: str | None = None
    """The gateway VM of a client that made its key itself: it ends with the VM."""
    api_key: str | None = None
    """The id of the API key that let it in, with which it ends; None if an earlier release let it in."""


sessions = table_of("wireguard_sessions", SessionRow)
vpcs = table_of("vpcs", VpcRow)


class VpcStore(Rows[VpcRow]):
    table = vpcs
    row = VpcRow

    async def create(self, row: VpcRow, numbers: range) -> VpcRow | None:
        """Insert a VPC with the lowest free number; None when there is none."""

        def insert(connection: sa.Connection) -> VpcRow | None:
            taken = set(connection.execute(sa.select(vpcs.c.number)).scalars())
            number = next((number for number in numbers if number not in taken), None)
            if number is None:
                return None
            made = dataclasses.replace(row, number=number, created_at=time.time_ns())
            connection.execute(vpcs.insert().values(**dataclasses.asdict(made)))
            return made

        return await self.database.write(insert)

    async def remove(self, vpc: str) -> bool:
        """Delete a VPC; False, and no change, while a VM refers to it."""
        try:
            await self.delete(vpc)
        except sa.exc.IntegrityError:
            return False
        return True

    async def all(self) -> list[VpcRow]:
        return await self._select(sa.select(vpcs).order_by(vpcs.c.number))

    async def owned(self, account: str, vpc: str) -> VpcRow | None:
        """A VPC of an account; None for another account's."""
        return self._select_one(sa.select(vpcs).where(vpcs.c.id == vpc, vpcs.c.account == account))

    async def count(self, account: str) -> int:
        statement = sa.select(sa.func.count()).select_from(vpcs).where(vpcs.c.account == account)
        with self.database.look_up() as connection:
            return connection.execute(statement).scalar_one()

    async def members(self, vpc: str) -> list[tuple[str, str]]:
        """The id and the address of every VM in a VPC, by id; also of deleted VMs with `recreate`."""
        statement = sa.select(machines.c.id, machines.c.vpc_address).where(machines.c.vpc == vpc)
        with self.database.look_up() as connection:
            return [
                (row.id, row.vpc_address) for row in connection.execute(statement.order_by(machines.c.id))
            ]

    async def list(self, account: str) -> list[VpcRow]:
        """An account's VPCs, oldest first."""
        mine = sa.select(vpcs).where(vpcs.c.account == account)
        return await self._select(mine.order_by(vpcs.c.created_at, vpcs.c.id))

    async def with_key(self) -> set[str]:
        """The VPCs that have, or had, WireGuard clients."""
        keyed = sa.select(vpcs.c.id).where(vpcs.c.wireguard_key.is_not(None))
        with self.database.look_up() as connection:
            return set(connection.execute(keyed).scalars())

    async def ensure_key(self, vpc: str, key: str) -> VpcRow | None:
        """Set the key of a VPC that has none; returns the VPC, None when there is none."""
        row = await self.get(vpc)
        if row is None or row.wireguard_key is not None:
            return row
        unset = vpcs.c.id == vpc, vpcs.c.wireguard_key.is_(None)
        sealed = self.seal(vpc, "wireguard_key", key)
        await self.database.execute(vpcs.update().where(*unset).values(wireguard_key=sealed))
        return await self.get(vpc)

    def wireguard_key(self, row: VpcRow) -> str | None:
        """The private key of a VPC in clear; None when it has none."""
        if row.wireguard_key is None:
            return None
        return self.unseal(row.id, "wireguard_key", row.wireguard_key)


class SessionStore(Rows[SessionRow]):
    table = sessions
    row = SessionRow

    async def list(self, vpc: str) -> list[SessionRow]:
        """The sessions of a VPC, oldest first."""
        statement = sa.select(sessions).where(sessions.c.vpc == vpc)
        return await self._select(statement.order_by(sessions.c.created_at, sessions.c.id))

    async def by_key(self, vpc: str, public_key: str) -> SessionRow | None:
        wanted = sessions.c.vpc == vpc, sessions.c.public_key == public_key
        return self._select_one(sa.select(sessions).where(*wanted))

    async def vpcs_of(self, account: str) -> int:
        """How many VPCs of an account have sessions."""
        owned = sa.select(sa.func.count(sessions.c.vpc.distinct())).join(vpcs, vpcs.c.id == sessions.c.vpc)
        with self.database.look_up() as connection:
            return connection.execute(owned.where(vpcs.c.account == account)).scalar_one()

    async def count_vpcs(self) -> int:
        """How many VPCs of all accounts have sessions."""
        counted = sa.select(sa.func.count(sessions.c.vpc.distinct()))
        with self.database.look_up() as connection:
            return connection.execute(counted).scalar_one()

    async def remove_ended(self, now: int) -> set[str]:
        """Delete sessions that have expired, or whose API key was revoked; returns their VPCs."""
        valid = sa.select(api_keys.c.id).where(api_keys.c.revoked_at.is_(None))
        revoked = sessions.c.api_key.is_not(None) & sessions.c.api_key.not_in(valid)
        ended = (sessions.c.expires_at <= now) | revoked
        statement = sessions.delete().where(ended).returning(sessions.c.vpc)
        return await self.database.write(lambda connection: set(connection.execute(statement).scalars()))
