"""Limits of an account."""

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from stead.errors import InvalidRequest, SteadError


class LimitName(StrEnum):
    """Limits that `LimitExceeded` names: most of those in `Limits`, and some that all accounts have."""

    VMS = "vms"
    RUNNING = "running"
    SNAPSHOTS = "snapshots"
    VCPUS = "vcpus"
    MEMORY_GIB = "memory_gib"
    DISK_GIB = "disk_gib"
    TOTAL_MEMORY_GIB = "total_memory_gib"
    TOTAL_DISK_GIB = "total_disk_gib"
    DOMAINS = "domains"
    MAPPINGS = "mappings"
    DOMAIN_VERIFICATIONS = "domain_verifications"
    VPCS = "vpcs"
    WIREGUARD_SESSIONS = "wireguard_sessions"
    WIREGUARD_VPCS = "wireguard_vpcs"
    IDENTITIES = "identities"
    TOKENS = "tokens"
    TEMPLATES = "templates"


class LimitExceeded(SteadError):
    """The request exceeds a limit of the account."""

    def __init__(self, name: LimitName, limit: int, current: float, requested: float) -> None:
        words = name.replace("_gib", " (GiB)").replace("_", " ")
        used = f"{current:g} in use, {requested:g} more requested" if current else f"{requested:g} requested"
        super().__init__(f"account limit exceeded: {words} is limited to {limit}, {used}")
        self.limit_name = name
        self.limit = limit
        self.current = current
        self.requested = requested


def _limit(text: str) -> int | None:
    """A limit, and its help in the command line."""
    limit: int | None = field(default=None, metadata={"help": text})
    return limit


@dataclass(frozen=True)
class Limits:
    """Each is a number, or None for no limit."""

    vms: int | None = _limit("VMs.")
    """In any state."""
    running: int | None = _limit("VMs that run at the same time.")
    snapshots: int | None = _limit("Snapshots.")
    vcpus: int | None = _limit("vCPUs of one VM.")
    memory_gib: int | None = _limit("Memory of one VM in GiB.")
    disk_gib: int | None = _limit("Disk of one VM in GiB.")
    total_memory_gib: int | None = _limit("Memory of all VMs in GiB.")
    """Of those that run."""
    total_disk_gib: int | None = _limit("Disks of all VMs, and snapshots, in GiB.")
    """The sum of the VMs' disk sizes, and what snapshots took when they were captured."""
    repos: int | None = _limit("Repositories.")
    repo_mib: int | None = _limit("Size of one repository in MiB, LFS files included.")
    total_repos_mib: int | None = _limit("Size of all repositories in MiB.")
    domains: int | None = _limit("Verified domains.")
    mappings: int | None = _limit("Host names that lead to VMs.")
    identities: int | None = _limit("Identities.")
    tokens: int | None = _limit("Tokens of all identities.")
    templates: int | None = _limit(
        "Combinations of vCPUs and memory of VMs: each needs a template, which takes disk and memory."
    )

    def __post_init__(self) -> None:
        for name in LIMIT_NAMES:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise InvalidRequest(f"limit {name} must be an integer of at least 0 or none, not {value!r}")

    @classmethod
    def from_json(cls, text: str, defaults: Self | None = None) -> Self:
        """The limits set in a JSON object; the others are those of `defaults`."""
        known = {field.name for field in fields(cls)}
        base: dict[str, Any] = asdict(defaults) if defaults is not None else {}
        return cls(**base | {name: value for name, value in json.loads(text).items() if name in known})


LIMIT_NAMES = tuple(each.name for each in fields(Limits))
UNLIMITED = Limits()


@dataclass(frozen=True, eq=False)
class ConfiguredLimits(Limits):
    """Limits as an operator configured them: `given` names those that were; the others follow the host."""

    given: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Limits):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in LIMIT_NAMES)

    __hash__ = Limits.__hash__

    def over(self, defaults: Limits) -> Limits:
        """These limits, and the others from `defaults`."""
        chosen = {name: getattr(self if name in self.given else defaults, name) for name in LIMIT_NAMES}
        return Limits(**chosen)


@dataclass(frozen=True)
class HostResources:
    """What a host has in all."""

    cpus: int
    memory_mib: int
    disk_gib: int
    """The file system with the disks of VMs."""

    @property
    def largest_vm_mib(self) -> int:
        """Memory of the largest VM: sizes are powers of two, and a host reports a little less than it has."""
        return 1 << (self.memory_mib - 1).bit_length()


_ONE_ACCOUNT = 0.9
"""The part of the host that one account may have: with one account, nearly all of it."""
_SMALLEST_VM_MIB = 128
"""Memory that a running VM takes at least: QEMU, and what its guest writes."""


def default_limits(
    host: HostResources,
    smallest: tuple[int, int, int],
    *,
    memory_overcommit: float,
    disk_overcommit: float,
) -> Limits:
    """Limits of an account on this host; `smallest` is a size (vCPUs, MiB, GiB) that is always allowed.

    They keep one account from taking what the others need, and leave a single account the host. A VM may be
    as large as the host. Sums are those that the host can promise (see `overcommit` in the settings).
    """
    vcpus, memory_mib, disk_gib = smallest
    memory, disk = host.memory_mib / 1024, host.disk_gib
    disk_mib = disk * 1024
    return Limits(
        vms=10_000,
        running=max(16, int(_ONE_ACCOUNT * host.memory_mib / _SMALLEST_VM_MIB)),
        snapshots=10_000,
        vcpus=max(vcpus, min(64, 4 * host.cpus)),
        memory_gib=max(memory_mib, host.largest_vm_mib, 1024) // 1024,
        disk_gib=max(disk_gib, disk),
        total_memory_gib=max(-(-2 * memory_mib // 1024), int(_ONE_ACCOUNT * memory * memory_overcommit)),
        total_disk_gib=max(9 * disk_gib, int(_ONE_ACCOUNT * disk * disk_overcommit)),
        repos=10_000,
        repo_mib=max(1024, disk_mib // 2),
        total_repos_mib=max(1024, int(_ONE_ACCOUNT * disk_mib)),
        domains=1_000,
        mappings=10_000,
        identities=10_000,
        tokens=20_000,
        templates=32,
    )
