"""VPCs: private networks between VMs."""

import builtins
from collections.abc import Sequence
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_vm, find_vpc
from stead.sdk.arguments import checks_arguments
from stead.sdk.models import CreatedVpc, Vpc, WireGuardClient, WireGuardPeer, WireGuardSession
from stead.sdk.parsing import parse, parse_list
from stead.sdk.requests import request

DEFAULT_CIDR = "10.0.0.0/16"
_ROOT = "/v1/vpcs"


@checks_arguments
class AsyncVpcs:
    """Private networks of the account. No VPC reaches another one, so their ranges may overlap."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(
        self,
        cidr: str = DEFAULT_CIDR,
        *,
        name: str | None = None,
        if_missing: bool = False,
        idempotency_key: str | None = None,
    ) -> CreatedVpc:
        """Create a VPC with a private IPv4 range, such as `192.168.10.0/24`; `name` is a label.

        With `if_missing`, a VPC of this name is returned as it is, and its `created` is False;
        `NameNotUnique` if there are several. A call that is repeated with the same `idempotency_key` within
        24 h returns the same VPC.
        """
        body: dict[str, Any] = {"cidr": cidr} if name is None else {"cidr": cidr, "name": name}
        if if_missing:
            body["ifMissing"] = True
        call = request("POST", _ROOT, json=body, idempotent=if_missing, idempotency_key=idempotency_key)
        return parse(CreatedVpc, await self._connection.call(call))

    async def list(self) -> builtins.list[Vpc]:
        """All VPCs, oldest first; `vms` is empty in a list."""
        return parse_list(Vpc, await self._connection.call(request("GET", _ROOT)), "vpcs")

    async def get(self, vpc: str) -> Vpc:
        """A VPC with its VMs, by id, unique id prefix or unique name."""
        call = request("GET", f"{_ROOT}/{{}}", await find_vpc(self._connection, vpc))
        return parse(Vpc, await self._connection.call(call))

    async def connect(self, vpc: str) -> WireGuardSession:
        """Let a computer join a VPC with WireGuard, until `disconnect` or for a day: see `client_config`."""
        path = f"{_ROOT}/{{}}/wireguard/ephemeral"
        call = request("POST", path, await find_vpc(self._connection, vpc), json={})
        return parse(WireGuardSession, await self._connection.call(call))

    async def clients(self, vpc: str) -> Sequence[WireGuardClient]:
        """The computers that may join a VPC with WireGuard, oldest first."""
        call = request("GET", f"{_ROOT}/{{}}/wireguard", await find_vpc(self._connection, vpc))
        return parse_list(WireGuardClient, await self._connection.call(call), "clients")

    async def disconnect(self, client: WireGuardSession | WireGuardClient) -> None:
        """Close a WireGuard session, or remove a computer with a key of its own: its tunnel ends at once."""
        session = client.id if isinstance(client, WireGuardSession) else client.session_id
        if session is None and client.client_public_key is not None:
            await self.delete_peer(client.vpc_id, client.client_public_key)
            return
        path = f"{_ROOT}/{{}}/wireguard/ephemeral"
        await self._connection.call(request("DELETE", path, client.vpc_id, json={"sessionId": session}))

    async def set_peer(self, vpc: str, public_key: str, gateway: str) -> WireGuardPeer:
        """Let a computer with a WireGuard key of its own join a VPC.

        It ends when the VM `gateway` is deleted, or this API key is revoked.
        """
        path = f"{_ROOT}/{{}}/wireguard/peers"
        vm, _ = await find_vm(self._connection, gateway)
        body = {"gatewayVmId": vm, "clientPublicKey": public_key}
        call = request("POST", path, await find_vpc(self._connection, vpc), json=body)
        return parse(WireGuardPeer, await self._connection.call(call))

    async def delete_peer(self, vpc: str, public_key: str) -> None:
        """Remove a computer that `set_peer` let in: its tunnel ends at once."""
        path = f"{_ROOT}/{{}}/wireguard/peers"
        body = {"clientPublicKey": public_key}
        call = request("DELETE", path, await find_vpc(self._connection, vpc), json=body)
        await self._connection.call(call)

    async def delete(self, vpc: str) -> None:
        """Delete a VPC, by id, unique id prefix or unique name. Raises `Conflict` while it has VMs."""
        call = request("DELETE", f"{_ROOT}/{{}}", await find_vpc(self._connection, vpc))
        await self._connection.call(call)
