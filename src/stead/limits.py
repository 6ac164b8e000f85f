"""How much one account may have."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from stead.errors import InvalidRequest


@dataclass(frozen=True)
class Limits:
    """Each is a number or None, which is as much as the host can bear."""

    vms: int | None = None
    """Machines, whatever their state."""
    running: int | None = None
    """Machines that are up at the same time."""
    snapshots: int | None = None
    vcpus: int | None = None
    """Of one machine; so are the next two."""
    memory_gib: int | None = None
    disk_gib: int | None = None
    total_memory_gib: int | None = None
    """Of all machines that are up."""
    total_disk_gib: int | None = None
    """Of all machines, as large as they may grow."""
    repos: int | None = None
    """Git repositories."""
    repo_mib: int | None = None
    """Of one repository on the disk, with its large files."""
    total_repos_mib: int | None = None
    """Of all repositories."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise InvalidRequest(f"the limit {name} is a number from 0 or none, not {value!r}")

    @classmethod
    def from_json(cls, text: str, defaults: Self | None = None) -> Self:
        """What is set in `text`, over the defaults."""
        known = {field.name for field in fields(cls)}
        base: dict[str, Any] = asdict(defaults) if defaults is not None else {}
        return cls(**base | {name: value for name, value in json.loads(text).items() if name in known})


UNLIMITED = Limits()
