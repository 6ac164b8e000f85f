"""WireGuard sessions: computers outside that join a VPC."""

import base64
import contextlib
import ipaddress
import secrets
import string
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stead.addresses import TUNNEL_SERVER, TUNNELS, wireguard_link
from stead.errors import HostError, InvalidRequest, SteadError, TooBusy
from stead.host.interface import Peer, PrivateNetworkHost, WireGuardTunnel
from stead.limits import LimitExceeded, LimitName
from stead.logs import get_logger
from stead.networks.errors import PeerNotFound, SessionNotFound, VpcNotFound
from stead.networks.networks import find_row, private_network
from stead.networks.ranges import lowest_free
from stead.settings import Settings
from stead.shares import KeyedLock
from stead.store.database import Database
from stead.store.networks import SessionRow, SessionStore, VpcRow, VpcStore
from stead.store.sealing import SealingError
from stead.supervision import repeat
from stead.tasks import TaskSet, finished

MAX_SESSIONS = 500
"""WireGuard clients of a VPC."""
MAX_TUNNELS = 20
"""VPCs of an account that have WireGuard clients: each may need a process of the host. For those of all
accounts there is a setting."""
_CHECK = 30.0
"""Seconds between two looks for clients that have expired, or whose API key was revoked."""
_NEVER = 2**63 - 1
_KEEPALIVE = 25
_MTU = 1420
_ALPHABET = string.ascii_lowercase + string.digits

log = get_logger("stead.networks")


_LOOPBACK_NOTE = "# This endpoint works on the host of Stead only: see STEAD_WIREGUARD_HOST.\n"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


@dataclass(frozen=True, kw_only=True)
class TunnelClient:
    """A computer that may join a VPC, and what it needs for that."""

    id: str
    vpc: str
    cidr: IPv4Network
    endpoint: str
    port: int
    interface: str
    server_key: str
    public_key: str
    address: IPv4Address

    def _file(self, private_key: str) -> str:
        host = f"[{self.endpoint}]" if ":" in self.endpoint else self.endpoint
        note = _LOOPBACK_NOTE if _is_loopback(self.endpoint) else ""
        return f"""[Interface]
Address = {self.address}/32
{private_key}
MTU = {_MTU}

[Peer]
PublicKey = {self.server_key}
AllowedIPs = {self.cidr}
{note}Endpoint = {host}:{self.port}
PersistentKeepalive = {_KEEPALIVE}
"""


@dataclass(frozen=True, kw_only=True)
class TunnelSession(TunnelClient):
    """A new WireGuard session. The private key is known to its caller only."""

    private_key: str = field(repr=False)
    expires_at: float

    @property
    def config(self) -> str:
        """A complete file for `wg-quick`."""
        return self._file(f"PrivateKey = {self.private_key}")


@dataclass(frozen=True, kw_only=True)
class GatewayPeer(TunnelClient):
    """A WireGuard client with a key of its own. It belongs to a VM of the VPC, its gateway."""

    machine: str

    @property
    def config(self) -> str:
        """A file for `wg-quick`, but for the private key, which only the client knows."""
        return self._file(f"# Add the private key of {self.public_key}:\n# PrivateKey =")


@dataclass(frozen=True)
class KnownClient:
    """A computer that may join a VPC, as it is recorded: without the configuration, which is shown once."""

    vpc: str
    public_key: str
    address: IPv4Address
    created_at: float
    session: str | None
    """None for a client with a key of its own."""
    expires_at: float | None
    machine: str | None


class Tunnels:
    """WireGuard sessions of all VPCs of an installation."""

    def __init__(self, database: Database, settings: Settings, host: PrivateNetworkHost) -> None:
        self._vpcs = VpcStore(database)
        self._sessions = SessionStore(database)
        self._settings = settings
        self._host = host
        self._locks = KeyedLock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the tunnels of recorded sessions, and end those that expire or lose their API key, inside the
        block.
        """
        await self._sessions.remove_ended(time.time_ns())
        # Also without sessions: a device of the kernel may be left of those that have ended.
        for vpc in await self._vpcs.with_key():
            await self._apply_logged(vpc)
        async with TaskSet() as tasks:
            tasks.start(repeat("end of WireGuard sessions", self._end_clients, _CHECK), "WireGuard expiry")
            yield

    async def create(self, account: str, vpc: str, api_key: str | None = None) -> TunnelSession:
        """A new session; its tunnel is up when this returns. It ends when the API key is revoked."""
        row = await self._prepared(account, vpc)
        private, public = _new_keys()
        async with self._adding(row):
            expires = time.time_ns() + self._settings.wireguard_lifetime * 10**9
            made = await self._add(SessionRow(_new_id(), row.id, public, "", expires, api_key=api_key), row)
        return TunnelSession(**self._client(row, made), private_key=private, expires_at=made.expires_at / 1e9)

    async def set_peer(
        self, account: str, vpc: str, machine: str, public_key: str, api_key: str | None = None
    ) -> GatewayPeer:
        """Let a client with a key of its own into a VPC; idempotent.

        It ends when its gateway VM is deleted, and when the API key that has set it last is revoked.
        """
        row = await self._prepared(account, vpc)
        key = _checked_key(public_key)
        if key == self._server_key(row):
            raise InvalidRequest(f"{key} is the public key of the server's end: send the client's")
        if machine not in {member for member, _ in await self._vpcs.members(row.id)}:
            raise InvalidRequest(f"VM {machine[:80]!r} is not in VPC {row.id}: the gateway VM must be")
        async with self._adding(row):
            found = await self._sessions.by_key(row.id, key)
            if found is not None and found.machine is None:
                raise InvalidRequest(f"{key} is the public key of WireGuard session {found.id}")
            if found is not None and (found.machine, found.api_key) != (machine, api_key):
                found = await self._sessions.update(found.id, machine=machine, api_key=api_key)
            if found is None:
                wanted = SessionRow(_new_id(), row.id, key, "", _NEVER, machine=machine, api_key=api_key)
                found = await self._add(wanted, row)
        return GatewayPeer(**self._client(row, found), machine=machine)

    def _client(self, row: VpcRow, found: SessionRow) -> dict[str, Any]:
        """The fields of TunnelClient."""
        return {
            "id": found.id,
            "vpc": row.id,
            "cidr": IPv4Network(row.cidr),
            "endpoint": self._settings.wireguard_endpoint,
            "port": self._port(row),
            "interface": wireguard_link(self._settings.instance, row.number),
            "server_key": self._server_key(row),
            "public_key": found.public_key,
            "address": IPv4Address(found.address),
        }

    async def clients(self, account: str, vpc: str) -> list[KnownClient]:
        """Sessions and clients with keys of their own, oldest first."""
        row = await find_row(self._vpcs, account, vpc)
        return [_known(each) for each in await self._sessions.list(row.id)]

    async def delete_peer(self, account: str, vpc: str, public_key: str) -> None:
        """Remove a client with a key of its own: its tunnel is closed when this returns."""
        row = await find_row(self._vpcs, account, vpc)
        key = _checked_key(public_key)
        async with self._locks.hold(row.id):
            found = await self._sessions.by_key(row.id, key)
            if found is None or found.machine is None:
                raise PeerNotFound(key)
            await self._sessions.delete(found.id)
            await finished(self._apply(row.id))

    async def machine_deleted(self, vpc: str) -> None:
        """Close the tunnels of a gateway VM; they are deleted with its row."""
        await self._apply_logged(vpc)

    async def delete(self, account: str, vpc: str, session: str) -> None:
        """End a session: its tunnel is closed when this returns."""
        row = await find_row(self._vpcs, account, vpc)
        async with self._locks.hold(row.id):
            found = await self._sessions.get(session)
            if found is None or found.vpc != row.id or found.machine is not None:
                raise SessionNotFound(session)
            await self._sessions.delete(session)
            await finished(self._apply(row.id))

    async def _prepared(self, account: str, vpc: str) -> VpcRow:
        """A VPC that clients can join, with the key of the server's end."""
        row = await find_row(self._vpcs, account, vpc)
        endpoint = self._settings.wireguard_endpoint
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(endpoint) in IPv4Network(row.cidr):
                raise InvalidRequest(
                    f"the WireGuard endpoint {endpoint} is inside the VPC's range {row.cidr}, so that a"
                    " tunnel would lead into itself: use a VPC with another range"
                )
        found = await self._vpcs.ensure_key(row.id, _new_keys()[0])
        if found is None:
            raise VpcNotFound(vpc)
        return found

    @contextlib.asynccontextmanager
    async def _adding(self, row: VpcRow) -> AsyncIterator[None]:
        """Hold the locks for a new client: the account's, whose VPCs are counted, and the VPC's."""
        async with self._locks.hold(f"account {row.account}"), self._locks.hold(row.id):
            yield

    def _server_key(self, row: VpcRow) -> str:
        """The public key of the server's end."""
        return _public(self._private_key(row) or "")

    def _private_key(self, row: VpcRow) -> str | None:
        """The key of the server's end; None while the VPC has none."""
        try:
            return self._vpcs.wireguard_key(row)
        except SealingError as error:
            log.error("cannot read the WireGuard key of a VPC", vpc=row.id, error=str(error))
            raise HostError(
                f"the WireGuard key of VPC {row.id} cannot be read: the operator of this server runs"
                " `stead doctor`"
            ) from error

    def _port(self, row: VpcRow) -> int:
        return self._settings.wireguard_port + row.number - 1

    async def _add(self, wanted: SessionRow, row: VpcRow) -> SessionRow:
        """Record a client with a free address, and let it in."""
        known = await self._sessions.list(row.id)
        if len(known) >= MAX_SESSIONS:
            raise LimitExceeded(LimitName.WIREGUARD_SESSIONS, MAX_SESSIONS, len(known), 1)
        address = lowest_free(TUNNELS, {TUNNEL_SERVER, *(IPv4Address(each.address) for each in known)})
        wanted = replace(wanted, address=str(address))
        if known:
            made = await self._sessions.add(wanted)
        else:
            async with self._locks.hold("first clients"):
                await self._check_vpcs(row.account)
                made = await self._sessions.add(wanted)
        if made is None:
            # The VPC, or the gateway VM, was deleted meanwhile.
            raise VpcNotFound(row.id)
        try:
            await self._apply(row.id)
        except BaseException:
            await finished(self._sessions.delete(made.id))
            raise
        return made

    async def _check_vpcs(self, account: str) -> None:
        """Raise unless one more VPC may have clients: of the account, and of all."""
        if (others := await self._sessions.vpcs_of(account)) >= MAX_TUNNELS:
            raise LimitExceeded(LimitName.WIREGUARD_VPCS, MAX_TUNNELS, others, 1)
        most = self._settings.max_tunnels
        if await self._sessions.count_vpcs() >= most:
            raise TooBusy(
                f"{most} VPCs of this server have WireGuard clients, which is the limit (STEAD_MAX_TUNNELS):"
                " try again when others have ended, or ask the operator for a higher limit"
            )

    async def _apply(self, vpc: str) -> None:
        """Make the tunnel of a VPC have the peers that are recorded."""
        row = await self._vpcs.get(vpc)
        key = None if row is None else self._private_key(row)
        if row is None or key is None:
            return
        found = await self._sessions.list(vpc)
        peers = tuple(Peer(each.public_key, IPv4Address(each.address)) for each in found)
        tunnel = WireGuardTunnel(private_network(row), self._port(row), key, peers)
        await self._host.set_tunnel(tunnel)

    async def _apply_logged(self, vpc: str) -> None:
        try:
            async with self._locks.hold(vpc):
                await self._apply(vpc)
        except SteadError as error:
            log.error("cannot set up the tunnels of a VPC", vpc=vpc, error=str(error))

    async def _end_clients(self) -> None:
        for vpc in await self._sessions.remove_ended(time.time_ns()):
            await self._apply_logged(vpc)


def _known(row: SessionRow) -> KnownClient:
    is_session = row.machine is None
    return KnownClient(
        row.vpc,
        row.public_key,
        IPv4Address(row.address),
        row.created_at / 1e9,
        session=row.id if is_session else None,
        expires_at=row.expires_at / 1e9 if is_session else None,
        machine=row.machine,
    )


def _new_id() -> str:
    # `wg-ID` names a device, from the file `wg-ID.conf`: at most 15 characters.
    return "".join(secrets.choice(_ALPHABET) for _ in range(12))


def _checked_key(text: str) -> str:
    """A public key as WireGuard writes it; InvalidRequest for anything else."""
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    key = base64.b64encode(raw).decode()
    if len(raw) != 32 or not any(raw) or key != text:
        raise InvalidRequest(
            f"invalid public key {text[:60]!r}: must be 32 bytes in base64, as of `wg pubkey`"
        )
    return key


def _new_keys() -> tuple[str, str]:
    """A private and a public key, as WireGuard writes them."""
    key = X25519PrivateKey.generate()
    private = base64.b64encode(key.private_bytes_raw()).decode()
    return private, _public(private)


def _public(private: str) -> str:
    key = X25519PrivateKey.from_private_bytes(base64.b64decode(private))
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()
