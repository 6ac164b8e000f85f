"""Wire models of private networks."""

from typing import Any, Literal, Self

from pydantic import Field

from stead.addresses import TUNNEL_SERVER
from stead.api.wire import Time, Wire
from stead.api.wire.domains import Text
from stead.api.wire.unknown import Tracked
from stead.machines.nics import NicRequest
from stead.networks.networks import Member, Vpc
from stead.networks.tunnels import GatewayPeer, KnownClient, TunnelClient, TunnelSession

DEFAULT_CIDR = "10.0.0.0/16"


class NicModel(Tracked):
    """A NIC in a VPC. A VM has at most one, through which it reaches the internet and resolves names too."""

    vpc: Text
    mode: Literal["routed"] = "routed"
    ipv4: Text | Literal[True] = Field(
        default=True, description="An address of the VPC; `true` for the lowest free one."
    )
    default: bool | None = Field(default=None, description="Without effect: the NIC is the only one.")
    backend: Literal["dedicatedDevice", "vlan"] | None = Field(default=None, description="Without effect.")

    def request(self) -> NicRequest:
        return NicRequest(self.vpc, None if self.ipv4 is True else self.ipv4)


class NewVpc(Wire):
    cidr: Text = Field(default=DEFAULT_CIDR, description="A private IPv4 range.")
    name: Text | None = None
    if_missing: bool | None = Field(
        default=None, description="Answer with the VPC of this name if there is one, else create it."
    )


class VpcModel(Wire):
    vpc_id: str
    name: str | None = None
    cidr: str
    account_id: str
    created_at: Time

    @classmethod
    def of(cls, vpc: Vpc) -> Self:
        return cls(
            vpc_id=vpc.id,
            name=vpc.name,
            cidr=str(vpc.cidr),
            account_id=vpc.account,
            created_at=vpc.created_at,
        )


class CreatedVpc(VpcModel):
    created: bool = Field(default=True, description="False: it existed, and `ifMissing` was given.")


class NewSession(Tracked):
    """Nothing yet; unknown keys are ignored."""


class ClosedSession(Wire):
    session_id: Text


class TunnelClientModel(Wire):
    vpc_id: str
    endpoint_host: str
    endpoint_port: int
    listen_port: int
    interface_name: str
    server_public_key: str
    client_public_key: str
    server_tunnel_ip: str
    client_tunnel_ip: str
    vpc_cidr: str


def _client(client: TunnelClient) -> dict[str, Any]:
    """The fields of TunnelClientModel."""
    return {
        "vpc_id": client.vpc,
        "endpoint_host": client.endpoint,
        "endpoint_port": client.port,
        "listen_port": client.port,
        "interface_name": client.interface,
        "server_public_key": client.server_key,
        "client_public_key": client.public_key,
        "server_tunnel_ip": str(TUNNEL_SERVER),
        "client_tunnel_ip": str(client.address),
        "vpc_cidr": str(client.cidr),
    }


class SessionModel(TunnelClientModel):
    session_id: str
    client_private_key: str = Field(description="It is not kept: this answer alone has it.")
    vpc_ip: str = Field(description="The address that VMs of the VPC see.")
    client_allowed_ips: list[str]
    client_config: str = Field(description="A complete file for `wg-quick`, with the private key.")
    expires_at: Time

    @classmethod
    def of(cls, session: TunnelSession) -> Self:
        return cls(
            **_client(session),
            session_id=session.id,
            client_private_key=session.private_key,
            vpc_ip=str(session.address),
            client_allowed_ips=[str(session.cidr)],
            client_config=session.config,
            expires_at=session.expires_at,
        )


class RemovedPeer(Wire):
    client_public_key: Text


class NewPeer(RemovedPeer):
    gateway_vm_id: Text


class GatewayPeerModel(TunnelClientModel):
    gateway_vm_id: str
    client_config: str = Field(description="A file for `wg-quick`, but for the private key.")

    @classmethod
    def of(cls, peer: GatewayPeer) -> Self:
        return cls(**_client(peer), gateway_vm_id=peer.machine, client_config=peer.config)


class KnownClientModel(Wire):
    """A computer that may join a VPC: of a session, or with a key of its own."""

    vpc_id: str
    session_id: str | None = Field(default=None, description="Of a session only.")
    gateway_vm_id: str | None = Field(default=None, description="Of a computer with a key of its own only.")
    client_public_key: str
    client_tunnel_ip: str
    created_at: Time
    expires_at: Time | None = Field(default=None, description="When a session ends.")

    @classmethod
    def of(cls, client: KnownClient) -> Self:
        return cls(
            vpc_id=client.vpc,
            session_id=client.session,
            gateway_vm_id=client.machine,
            client_public_key=client.public_key,
            client_tunnel_ip=str(client.address),
            created_at=client.created_at,
            expires_at=client.expires_at,
        )


class KnownClients(Wire):
    clients: list[KnownClientModel]


class VpcList(Wire):
    vpcs: list[VpcModel]


class MemberModel(Wire):
    vm_id: str
    ipv4: str
    names: list[str] = Field(default=[], description="Names of the address inside the VPC.")

    @classmethod
    def of(cls, member: Member) -> Self:
        return cls(vm_id=member.machine, ipv4=str(member.address), names=list(member.names))


class VpcDetails(VpcModel):
    vms: list[MemberModel] = Field(default=[], description="The VMs in it, also suspended and stopped ones.")
