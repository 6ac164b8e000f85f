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
    total_disk_gib: int | None = _limit("Disks of all VMs in GiB.")
    """The sum of their disk sizes."""
    repos: int | None = _limit("Repositories.")
    repo_mib: int | None = _limit("Size of one repository in MiB, LFS files included.")
    total_repos_mib: int | None = _limit("Size of all repositories in MiB.")
    domains: int | None = _limit("Verified domains.")
    mappings: int | None = _limit("Host names that lead to VMs.")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise InvalidRequest(f"limit {name} must be an integer of at least 0 or none, not {value!r}")

    @classmethod
    def from_json(cls, text: str, defaults: Self | None = None) -> Self:
        """The limits set in a JSON object; the others are those of `defaults`."""
        known = {field.name for field in fields(cls)}
        base: dict[str, Any] = asdict(defaults) if defaults is not None else {}
        return cls(**base | {name: value for name, value in json.loads(text).items() if name in known})


UNLIMITED = Limits()
