"""Limits of an account."""

import json
from dataclasses import asdict, dataclass, fields
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


@dataclass(frozen=True)
class Limits:
    """Each is a number, or None for no limit."""

    vms: int | None = None
    """VMs in any state."""
    running: int | None = None
    """VMs that run at the same time."""
    snapshots: int | None = None
    vcpus: int | None = None
    """Of one VM; so are the next two."""
    memory_gib: int | None = None
    disk_gib: int | None = None
    total_memory_gib: int | None = None
    """Of all VMs that run."""
    total_disk_gib: int | None = None
    """Of all VMs: the sum of their disk sizes."""
    repos: int | None = None
    """Git repositories."""
    repo_mib: int | None = None
    """Of one repository on disk, with its LFS objects."""
    total_repos_mib: int | None = None
    """Of all repositories."""
    domains: int | None = None
    """Verified domains."""
    mappings: int | None = None
    """Host names that lead to VMs."""

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
