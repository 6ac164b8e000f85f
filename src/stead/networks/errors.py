"""Errors of private networks."""

from collections.abc import Sequence

from stead.errors import InvalidRequest, SteadError

_NAMED = 5
"""VMs that a message names."""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:79]}…")


class InvalidCidr(InvalidRequest):
    """A VPC cannot have this range."""

    def __init__(self, cidr: str, reason: str) -> None:
        super().__init__(f"invalid cidr {_shown(cidr)}: {reason}")


class InvalidAddress(InvalidRequest):
    """A VM cannot have this address in its VPC."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"invalid ipv4 {_shown(address)}: {reason}")


class VpcNotFound(SteadError):
    """There is no such VPC, or another account has it: the error is the same for both."""

    def __init__(self, vpc: str) -> None:
        super().__init__(f"VPC {vpc[:80]} not found")
        self.vpc = vpc[:80]


class VpcFull(SteadError):
    """Every address of the VPC is in use."""

    def __init__(self, vpc: str, cidr: str) -> None:
        super().__init__(f"VPC {vpc} has no free address in {cidr}: delete a VM in it, or use another VPC")
        self.vpc = vpc


class ForkUnsupported(InvalidRequest):
    """The VM has a fixed address in a VPC, which its copies could not have."""

    def __init__(self, machine: str, address: str) -> None:
        super().__init__(
            f"cannot fork VM {machine}: it has the fixed address {address} in a VPC. Create it with"
            " ipv4: true, so that forks get addresses of their own, or create VMs from a snapshot of it"
        )


class SessionNotFound(SteadError):
    """There is no such WireGuard session: it was closed, or it has expired."""

    def __init__(self, session: str) -> None:
        super().__init__(f"WireGuard session {session[:80]} not found")
        self.session = session[:80]


class PeerNotFound(SteadError):
    """The VPC has no WireGuard client with this key."""

    def __init__(self, public_key: str) -> None:
        super().__init__(f"no WireGuard peer with the public key {public_key}")
        self.public_key = public_key


class VpcInUse(SteadError):
    """VMs are attached to the VPC that is to be deleted."""

    def __init__(self, vpc: str, machines: Sequence[str]) -> None:
        named = ", ".join(machines[:_NAMED])
        more = f" and {len(machines) - _NAMED} more" if len(machines) > _NAMED else ""
        super().__init__(f"VPC {vpc} is in use by VM {named}{more}: delete them first")
        self.vpc = vpc
        self.machines = tuple(machines)
