"""Results of creates, as they are stored for background requests and idempotency keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from pydantic import JsonValue

T = TypeVar("T")


@dataclass(frozen=True)
class CreatedVm:
    """A VM with the host names that are mapped to it; not `created` if `ifMissing` found it."""

    id: str
    snapshot: str | None = None
    domains: tuple[str, ...] = ()
    created: bool = True
    kind: Literal["vm"] = "vm"


@dataclass(frozen=True)
class BuiltSnapshot:
    """The snapshot of a spec."""

    id: str
    kind: Literal["snapshot"] = "snapshot"


@dataclass(frozen=True)
class RequestFailure:
    """Why a request failed. `details` has further facts, by the names that clients know."""

    code: str
    message: str
    status: int
    details: Mapping[str, JsonValue]
    kind: Literal["failure"] = "failure"


@dataclass(frozen=True)
class TakenSnapshot:
    """The snapshot of a VM; `instance` is the run of the VM that was captured."""

    id: str
    source: str
    instance: str | None = None


@dataclass(frozen=True)
class ForkChild:
    id: str
    name: str | None = None


@dataclass(frozen=True)
class ForkChildren:
    parent: str
    children: tuple[ForkChild, ...]


@dataclass(frozen=True)
class Ensured(Generic[T]):
    """What a call made; not `created` if `ifMissing` found it."""

    value: T
    created: bool = True
