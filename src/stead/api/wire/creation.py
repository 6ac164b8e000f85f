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
from stead.builds.builder import SnapshotOrder
from stead.builds.plan import plan_machine
from stead.builds.spec import Layer
from stead.creation.creation import VmOrder
from stead.domains.domains import Target
from stead.errors import InvalidRequest
from stead.machines import Properties
from stead.machines.persistence import PERSISTENT

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

    def order(self, account: str, request: str, *, refuse_unknown: bool = False) -> VmOrder:
        """What this asks for; an error if it cannot be."""
        warnings = self.ignored_keys(refuse=refuse_unknown)
        self._refuse_unsupported()
        spec, template = (None if each is None else each.layer() for each in (self.spec, self.template))
        plan = plan_machine(spec, template, Layer(**self.fields()))
        return VmOrder(
            plan,
            Properties(
                # SDKs put the name into the spec.
                name=self.spec.name if self.name is None and self.spec is not None else self.name,
                persistence=PERSISTENT if self.persistence is None else self.persistence.persistence(),
                activity_threshold=self.activity_threshold_bytes or 0,
                recreate=bool(self.recreate),
                account=account,
                request=request,
            ),
            nic=self.nics[0].request() if self.nics else None,
            targets=tuple(
                Target(each.domain, plan.domain_port if each.vm_port is None else each.vm_port)
                for each in self.domains or ()
            ),
            git_access=self.git_access,
            warnings=warnings,
        )

    def _refuse_unsupported(self) -> None:
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

    def order(self, account: str, request: str, *, refuse_unknown: bool = False) -> SnapshotOrder:
        """What this asks for; an error if it cannot be."""
        warnings = self.ignored_keys(refuse=refuse_unknown)
        return SnapshotOrder(
            account=account,
            layer=self._layer(),
            name=self.name,
            persistence=None if self.persistence is None else self.persistence.of_snapshot(),
            lifetime=self.lifetime(),
            request=request,
            warnings=warnings,
        )

    def _layer(self) -> Layer:
        if self.docker_credentials:
            raise InvalidRequest(_NO_REGISTRIES)
        if self.spec is not None and self.template is not None:
            raise InvalidRequest("both spec and template are given: use spec only")
        given = self.spec or self.template
        if given is None:
            raise InvalidRequest("neither spec nor template is given: say what to build the snapshot from")
        return given.layer()
