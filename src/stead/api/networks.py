"""VPCs: private networks between VMs."""

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from stead.api.callers import CurrentCall, Owner
from stead.api.declared import invalid_code
from stead.api.dependencies import NetworksDep, TunnelsDep
from stead.api.large_answers import Items, large_answer
from stead.api.repeatable import CurrentCreate, IfMissing, answer_of, vpc_id
from stead.api.wire import Nothing
from stead.api.wire.networks import (
    ClosedSession,
    CreatedVpc,
    GatewayPeerModel,
    KnownClientModel,
    KnownClients,
    MemberModel,
    NewPeer,
    NewSession,
    NewVpc,
    RemovedPeer,
    SessionModel,
    VpcDetails,
    VpcList,
    VpcModel,
)
from stead.creation.results import Ensured
from stead.networks.networks import Vpc

router = APIRouter(prefix="/v1/vpcs", tags=["networks"])


@router.post("", response_model=CreatedVpc)
@invalid_code("BAD_REQUEST")
async def create_vpc(
    owner: Owner, networks: NetworksDep, create: CurrentCreate, body: NewVpc | None = None
) -> JSONResponse:
    """Create a VPC. Ranges of different VPCs may overlap: no VPC reaches another one."""
    wanted = body or NewVpc()

    async def make() -> Ensured[Vpc]:
        return Ensured(await networks.create(owner.account, wanted.cidr, wanted.name, vpc_id(create.request)))

    async def existing(name: str) -> list[Ensured[Vpc]]:
        return [Ensured(vpc, created=False) for vpc in await networks.named(owner.account, name)]

    if_missing = IfMissing("VPC", wanted.name, existing) if wanted.if_missing else None
    made = await create.run(Ensured[Vpc], make, if_missing)
    return answer_of(CreatedVpc.of(made.value).model_copy(update={"created": made.created}))


@router.get("")
@invalid_code("BAD_REQUEST")
async def list_vpcs(owner: Owner, networks: NetworksDep) -> VpcList:
    """List the account's VPCs, oldest first."""
    return VpcList(vpcs=[VpcModel.of(each) for each in await networks.list(owner.account)])


@router.get("/{vpc_id}", response_model=VpcDetails)
@invalid_code("BAD_REQUEST")
async def get_vpc(vpc_id: str, owner: Owner, call: CurrentCall, networks: NetworksDep) -> Response:
    """Get a VPC and the VMs in it."""
    found = VpcDetails.of(await networks.get(owner.account, vpc_id))
    members = await networks.members(owner.account, vpc_id)
    vms = Items(MemberModel, len(members), lambda: map(MemberModel.of, members))
    return await large_answer(call, found, {"vms": vms})


@router.delete("/{vpc_id}")
@invalid_code("BAD_REQUEST")
async def delete_vpc(vpc_id: str, owner: Owner, networks: NetworksDep) -> Nothing:
    """Delete a VPC. It must have no VMs."""
    await networks.delete(owner.account, vpc_id)
    return Nothing()


@router.get("/{vpc_id}/wireguard")
@invalid_code("BAD_REQUEST")
async def list_wireguard_clients(vpc_id: str, owner: Owner, tunnels: TunnelsDep) -> KnownClients:
    """List the computers that may join a VPC with WireGuard, oldest first."""
    found = await tunnels.clients(owner.account, vpc_id)
    return KnownClients(clients=[KnownClientModel.of(each) for each in found])


@router.post("/{vpc_id}/wireguard/ephemeral")
@invalid_code("BAD_REQUEST")
async def create_wireguard_session(
    vpc_id: str, owner: Owner, tunnels: TunnelsDep, wanted: NewSession | None = None
) -> SessionModel:
    """Let a computer join a VPC with WireGuard until the session is closed or expires (`expiresAt`), or the
    API key that made it is revoked.
    """
    return SessionModel.of(await tunnels.create(owner.account, vpc_id, owner.credential))


@router.delete("/{vpc_id}/wireguard/ephemeral")
@invalid_code("BAD_REQUEST")
async def close_wireguard_session(
    vpc_id: str, owner: Owner, tunnels: TunnelsDep, wanted: ClosedSession
) -> Nothing:
    """Close a WireGuard session: its tunnel ends at once."""
    await tunnels.delete(owner.account, vpc_id, wanted.session_id)
    return Nothing()


@router.post("/{vpc_id}/wireguard/peers")
@invalid_code("BAD_REQUEST")
async def set_wireguard_peer(
    vpc_id: str, owner: Owner, tunnels: TunnelsDep, wanted: NewPeer
) -> GatewayPeerModel:
    """Let a computer with its own WireGuard key join a VPC, until its gateway VM is deleted or the API key
    that has set it last is revoked.
    """
    made = await tunnels.set_peer(
        owner.account, vpc_id, wanted.gateway_vm_id, wanted.client_public_key, owner.credential
    )
    return GatewayPeerModel.of(made)


@router.delete("/{vpc_id}/wireguard/peers")
@invalid_code("BAD_REQUEST")
async def delete_wireguard_peer(
    vpc_id: str, owner: Owner, tunnels: TunnelsDep, wanted: RemovedPeer
) -> Nothing:
    """Remove a computer with a WireGuard key of its own: its tunnel ends at once."""
    await tunnels.delete_peer(owner.account, vpc_id, wanted.client_public_key)
    return Nothing()
