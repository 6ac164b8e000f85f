"""Bodies of POST /v1/vms and POST /v1/vms/snapshots."""

from typing import Any

from pydantic import Field

from stead.api.wire import LARGEST
from stead.api.wire.domains import Text
from stead.api.wire.layers import LayerFields, Spec
from stead.api.wire.lifetimes import LifetimeFields
from stead.api.wire.networks import NicModel
from stead.api.wire.numbers import Count, Rounded
from stead.api.wire.unknown import Tracked
from stead.api.wire.vms import PersistenceModel
from stead.builds.spec import Layer
from stead.domains.domains import Target
from stead.errors import InvalidRequest
from stead.machines.nics import NicRequest

_NO_REGISTRIES = (
    "dockerCredentials: this server pulls no images from registries; every VM is made from Debian 13."
    " Leave dockerCredentials out"
)


class NewDomain(Tracked):
    """A host name that is mapped to a new VM."""

    domain: Text
    vm_port: Count | None = Field(
        default=None, description="The port in the VM; default: the target of port 443 in `ports`, 3000."
    )


class CreateVm(LayerFields):
    """A VM. Every field is optional; `{}` is a VM of the default size from the base image."""

    name: str | None = None
    if_missing: bool | None = Field(
        default=None, description="Answer with the VM of this name if there is one, else create it."
    )
    spec: Spec | None = None
    template: Spec | None = None
    activity_threshold_bytes: Rounded | None = Field(
        default=None, ge=0, le=LARGEST, description="Less traffic than this between two checks is idle."
    )
    persistence: PersistenceModel | None = None
    recreate: bool | None = Field(
        default=None, description="Whether the VM may be created again with the same id after its deletion."
    )
    domains: list[NewDomain] | None = Field(
        default=None, description="Host names to map to the VM, of verified domains or preview zones."
    )
    git_access: str | None = Field(
        default=None,
        description="Id of a repository of this account that git in the VM may fetch from and push to."
        " Its token is revoked with the VM.",
    )
    nics: list[NicModel] | None = Field(
        default=None, max_length=1, description="The VPC that the VM is in, and its address there."
    )
    docker_credentials: Any = Field(default=None, description="Not supported: leave it out.")
    udp_hole_punch_ports: list[Any] | None = Field(default=None, description="Not supported: leave it out.")

    def top(self) -> Layer:
        return Layer(**self.fields())

    def nic(self) -> NicRequest | None:
        return self.nics[0].request() if self.nics else None

    def label(self) -> str | None:
        """The name of the VM; SDKs put it into the spec."""
        return self.spec.name if self.name is None and self.spec is not None else self.name

    def targets(self, default_port: int) -> list[Target]:
        """The host names to map, each with its port."""
        return [
            Target(each.domain, default_port if each.vm_port is None else each.vm_port)
            for each in self.domains or ()
        ]

    def refuse_unsupported(self) -> None:
        """Refuse fields that this server cannot honour: a VM that silently lacks them would be worse."""
        if self.docker_credentials:
            raise InvalidRequest(_NO_REGISTRIES)
        if self.udp_hole_punch_ports:
            text = "udpHolePunchPorts: this version of Stead has no UDP hole punching."
            raise InvalidRequest(f"{text} Leave udpHolePunchPorts out")
        if self.spec is not None and self.spec.persistence is not None:
            text = "spec.persistence: the outermost layer of a spec is the VM itself, not a snapshot"
            raise InvalidRequest(f"{text}; put persistence beside spec, or into spec.snapshot")


class CreateSnapshot(LifetimeFields):
    """A snapshot. It is built unless the account has one with the same content."""

    name: str | None = None
    spec: Spec | None = None
    template: Spec | None = None
    persistence: PersistenceModel | None = None
    docker_credentials: Any = Field(default=None, description="Not supported: leave it out.")

    def layer(self) -> Layer:
        if self.docker_credentials:
            raise InvalidRequest(_NO_REGISTRIES)
        if self.spec is not None and self.template is not None:
            raise InvalidRequest("both spec and template are given: use spec only")
        given = self.spec or self.template
        if given is None:
            raise InvalidRequest("neither spec nor template is given: say what to build the snapshot from")
        return given.layer()
