"""What can be asked for when a machine or a snapshot is made."""

from typing import Any

from pydantic import Field

from stead.api.wire import LARGEST, Wire
from stead.api.wire.layers import LayerFields, Spec
from stead.api.wire.numbers import Rounded
from stead.api.wire.vms import PersistenceModel
from stead.builds.spec import Layer
from stead.errors import InvalidRequest


class CreateVm(LayerFields):
    """A machine. Everything may be left out: then it is one of the default size from the base image."""

    name: str | None = None
    spec: Spec | None = None
    template: Spec | None = None
    activity_threshold_bytes: Rounded | None = Field(default=None, ge=0, le=LARGEST)
    persistence: PersistenceModel | None = None
    recreate: bool | None = Field(default=None, description="Whether it may be made anew after its deletion.")
    domains: list[dict[str, Any]] | None = None
    nics: list[dict[str, Any]] | None = None

    def top(self) -> Layer:
        return Layer(**self.fields())

    def label(self) -> str | None:
        """Its name; SDKs put it into the spec."""
        return self.name or (None if self.spec is None else self.spec.name) or None

    def refuse_what_is_missing(self) -> None:
        """Better no machine than one that silently lacks what was asked for."""
        if self.domains:
            raise InvalidRequest("this version of Stead has no domains yet: create the VM without")
        if self.nics:
            raise InvalidRequest("this version of Stead has no private networks yet: create the VM without")


class CreateSnapshot(Wire):
    """A snapshot that is built, unless the account has one with the same content."""

    name: str | None = None
    spec: Spec | None = None
    template: Spec | None = None
    persistence: PersistenceModel | None = None

    def layer(self) -> Layer:
        if self.spec is not None and self.template is not None:
            raise InvalidRequest("give a spec or a template, not both")
        given = self.spec or self.template
        if given is None:
            raise InvalidRequest("say what the snapshot is made of: give a spec or a template")
        return given.layer()
