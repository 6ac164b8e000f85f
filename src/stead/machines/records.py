"""A VM as the engine knows it: what never changes, what its owner may change, and its typed state."""

import functools
import secrets
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Address
from typing import Any, Literal

from stead import addresses
from stead.errors import InvalidRequest
from stead.guest.identity import GuestIdentity
from stead.host.interface import Nic, VmSlot
from stead.machines import persistence, states
from stead.machines.persistence import PERSISTENT, Persistence
from stead.machines.states import MachineState
from stead.names import check_name
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.store.snapshots import SnapshotRow

_ID_ALPHABET = string.ascii_lowercase + string.digits
Purpose = Literal["use", "build"]


@dataclass(frozen=True)
class Properties:
    """Properties of a VM that do not depend on its state."""

    name: str | None = None
    persistence: Persistence = PERSISTENT
    idle_timeout: int | None = None
    """Seconds without activity after which it is suspended; None is never."""
    activity_threshold: int = 0
    recreate: bool = False
    account: str | None = None
    """The owner; None for pool VMs and for programs that use the engine without accounts."""
    purpose: Purpose = "use"
    """`build` for a VM that a build runs in: its account does not see it."""
    workdir: str | None = None
    """Default working directory of commands."""
    build: str | None = None
    """The build of the snapshot that it was created from."""
    request: str | None = None
    """The request that it was created for."""
    snapshot: str | None = None
    """The snapshot that it was created from."""
    nic: Nic | None = None
    """Its VPC and its address there."""
    fixed_address: bool = False
    """Whether its owner chose the address."""

    def check(self) -> None:
        """InvalidRequest unless a caller may ask for this."""
        check_name(self.name)
        check_idle(self.idle_timeout, self.activity_threshold)
        if self.workdir is not None and (not self.workdir.startswith("/") or "\0" in self.workdir):
            raise InvalidRequest(f"workdir must be an absolute path, not {self.workdir!r}")

    def to_columns(self) -> dict[str, Any]:
        return (
            {name: getattr(self, name) for name in _PLAIN}
            | persistence.columns(self.persistence)
            | {
                "vpc": None if self.nic is None else self.nic.vpc,
                "vpc_address": None if self.nic is None else str(self.nic.address),
                "vpc_fixed": self.fixed_address,
            }
        )


_OTHERS = ("persistence", "nic", "fixed_address")
_PLAIN = tuple(field.name for field in fields(Properties) if field.name not in _OTHERS)


def check_idle(timeout: int | None, threshold: int) -> None:
    if timeout is not None and timeout <= 0:
        raise InvalidRequest(f"idle timeout must be at least 1 s, not {timeout}")
    if threshold < 0:
        raise InvalidRequest(f"activity threshold must be at least 0 bytes, not {threshold}")


@dataclass(frozen=True)
class Record:
    """One VM as recorded."""

    id: str
    slot: int
    size: Size
    template: str
    hostname: str
    guest_machine_id: str
    layer: str | None
    """The read-only disk layer below the one that it writes; None when that is the template's disk."""
    properties: Properties
    state: MachineState
    active_at: int = 0
    """When it last started or ended, in nanoseconds: the least recently used is evicted first."""

    @property
    def vm_slot(self) -> VmSlot:
        return VmSlot(self.id, self.slot, self.properties.nic, self.account)

    @property
    def account(self) -> str | None:
        return self.properties.account

    @property
    def address(self) -> IPv4Address:
        """Where the host reaches it."""
        return addresses.machine_address(self.slot)

    @property
    def guest_address(self) -> IPv4Address:
        """The address that its guest has: of its VPC, if it is in one."""
        return self.address if self.properties.nic is None else self.properties.nic.address

    @property
    def identity(self) -> GuestIdentity:
        return GuestIdentity(self.id, self.hostname, self.guest_machine_id, self.guest_address)

    @property
    def reason(self) -> str | None:
        return states.reason_of(self.state)

    @property
    def run(self) -> states.Run | None:
        return states.run_of(self.state)

    def to_row(self) -> MachineRow:
        return MachineRow(
            id=self.id,
            slot=self.slot,
            template=self.template,
            hostname=self.hostname,
            guest_machine_id=self.guest_machine_id,
            layer=self.layer,
            active_at=self.active_at,
            **asdict(self.size),
            **self.properties.to_columns(),
            **states.to_columns(self.state),
        )


_size = functools.lru_cache(Size)
"""Cached: there are few sizes, and lists with a thousand VMs."""


def size_of(row: MachineRow | SnapshotRow) -> Size:
    return _size(row.vcpus, row.memory_mib, row.disk_gib)


def persistence_of(row: MachineRow) -> Persistence:
    return persistence.from_columns(row.persistence, row.priority, row.delete_event)


def nic_of(row: MachineRow) -> Nic | None:
    if row.vpc is None or row.vpc_address is None:
        return None
    return Nic(row.vpc, IPv4Address(row.vpc_address))


def new_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


def record_of(row: MachineRow) -> Record:
    columns: Mapping[str, Any] = vars(row)
    return Record(
        id=row.id,
        slot=row.slot,
        size=size_of(row),
        template=row.template,
        hostname=row.hostname,
        guest_machine_id=row.guest_machine_id,
        layer=row.layer,
        properties=Properties(
            persistence=persistence_of(row),
            nic=nic_of(row),
            fixed_address=row.vpc_fixed,
            **{name: columns[name] for name in _PLAIN},
        ),
        state=states.from_columns(columns),
        active_at=row.active_at,
    )
