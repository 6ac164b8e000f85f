"""Where the SSH gateway is."""

from fastapi import APIRouter

from stead.api.callers import AnyCaller
from stead.api.dependencies import SshDep
from stead.api.errors import ApiError
from stead.api.wire import Wire

router = APIRouter(prefix="/v1/ssh", tags=["ssh"])


class SshGatewayModel(Wire):
    host: str | None
    port: int
    host_key: str


@router.get("")
async def get_ssh_gateway(caller: AnyCaller, gateway: SshDep) -> SshGatewayModel:
    """Get where `ssh` reaches VMs, and the gateway's host key. `host` is null for the host of this API."""
    if gateway.port is None:
        text = "this server has no SSH gateway: set STEAD_SSH_LISTEN and restart it"
        if gateway.state != "off":
            text = "the SSH gateway does not run now and is tried again: the server's log says why"
        raise ApiError("NOT_FOUND", text)
    return SshGatewayModel(host=gateway.host, port=gateway.port, host_key=gateway.host_key)
