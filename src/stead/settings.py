"""Where Stead keeps its things and how it behaves, read once from the environment."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Literal, Self, get_args

from stead.errors import InvalidRequest
from stead.limits import UNLIMITED, Limits

Accelerator = Literal["auto", "kvm", "tcg"]

_SIZE = re.compile(r"(?P<vcpus>\d+)x(?P<memory>\d+)(?P<unit>[MG])x(?P<disk>\d+)G")


@dataclass(frozen=True, order=True)
class Size:
    """What a machine has: virtual CPUs, memory and disk."""

    vcpus: int = 4
    memory_mib: int = 8192
    disk_gib: int = 20

    MAX_VCPUS = 64
    MIN_MEMORY_MIB = 512
    MAX_MEMORY_MIB = 512 * 1024
    MIN_DISK_GIB = 20
    MAX_DISK_GIB = 4096

    def __post_init__(self) -> None:
        if not _power_of_two(self.vcpus) or self.vcpus > self.MAX_VCPUS:
            raise InvalidRequest(f"vcpus must be a power of two up to {self.MAX_VCPUS}, not {self.vcpus}")
        memory = self.memory_mib
        if not _power_of_two(memory) or not self.MIN_MEMORY_MIB <= memory <= self.MAX_MEMORY_MIB:
            raise InvalidRequest(
                f"memory must be a power of two from {self.MIN_MEMORY_MIB} to {self.MAX_MEMORY_MIB} MiB,"
                f" not {memory}"
            )
        if not self.MIN_DISK_GIB <= self.disk_gib <= self.MAX_DISK_GIB:
            raise InvalidRequest(
                f"disk must be from {self.MIN_DISK_GIB} to {self.MAX_DISK_GIB} GiB, not {self.disk_gib}"
            )

    def __str__(self) -> str:
        return f"{self.vcpus}x{self.memory_mib}Mx{self.disk_gib}G"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `4x8Gx20G` (vCPUs x memory x disk); memory may be given in M."""
        match = _SIZE.fullmatch(text)
        if match is None:
            raise InvalidRequest(f"a size looks like 4x8Gx20G, not {text!r}")
        memory = int(match["memory"]) * (1024 if match["unit"] == "G" else 1)
        return cls(int(match["vcpus"]), memory, int(match["disk"]))


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Settings:
    """One installation of Stead. Two with different data folders do not see each other."""

    data: Path = Path("/var/lib/stead")
    runtime: Path = Path("/run/stead")
    cache: Path | None = None
    """Where images and templates are kept; by default inside the data folder."""
    default_size: Size = field(default_factory=Size)
    pool: int = 2
    """Machines of the default size that are kept restored and paused, ready to be handed out."""
    idle_timeout: int | None = 300
    """Seconds without activity after which a machine is suspended, unless it is created with another time."""
    idle_check: float = 5.0
    """Seconds between two looks for idle machines."""
    accelerator: Accelerator = "auto"
    carry_host_certificates: bool = True
    mirror: str | None = None
    """Debian mirror for building the image; by default the one that mmdebstrap chooses."""
    allowed_private_networks: tuple[IPv4Network, ...] = ()
    """Private ranges that machines may reach although they are not the internet."""
    dialled_private_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Private ranges that webhooks and imports may be dialled in, as for local development."""
    uid_base: int = 1_900_000_000
    listen: str = "127.0.0.1:8600"
    """Where the API is served. Whatever is not loopback belongs behind TLS."""
    git_url: str | None = None
    """Where git reaches the repositories from outside; by default, where the API is served."""
    max_calls: int = 1000
    """Calls under way at the same time; one more is refused."""
    max_creations: int = 64
    """Machines that are being made, or wait for it, at the same time; one more is refused."""
    origins: tuple[str, ...] = ("*",)
    """Web pages that may call the API; they bring a token, never a cookie."""
    limits: Limits = UNLIMITED
    """What each account may have that has no limits of its own."""

    def __post_init__(self) -> None:
        host, port = self.address
        if not host or not 0 <= port < 65536:
            raise InvalidRequest(f"an address to listen on looks like 127.0.0.1:8600, not {self.listen!r}")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port) if port.isdigit() else -1

    @property
    def clone_root(self) -> str:
        """What stands before a repository's id in the address that it is cloned from."""
        return (self.git_url or f"http://{self.listen}").rstrip("/")

    @property
    def instance(self) -> str:
        """Six characters that tell this installation's namespaces, taps and processes from another's."""
        return hashlib.sha256(str(self.data.resolve()).encode()).hexdigest()[:6]

    def uid(self, slot: int) -> int:
        """The user that the machine in a slot runs as: no two machines share one."""
        return self.uid_base + self._number * 65536 + slot

    @property
    def git_uid(self) -> int:
        """The user that git runs as, who has this installation's repositories."""
        return self.uid_base - 1 - self._number

    @property
    def _number(self) -> int:
        return int(self.instance, 16) % 3000

    @property
    def cache_folder(self) -> Path:
        return self.cache or self.data / "cache"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        defaults = cls()
        accelerator = environment.get("STEAD_ACCELERATOR", "auto")
        if accelerator not in get_args(Accelerator):
            raise InvalidRequest(f"STEAD_ACCELERATOR must be auto, kvm or tcg, not {accelerator!r}")
        networks = environment.get("STEAD_ALLOW_PRIVATE", "").replace(",", " ").split()
        dialled = environment.get("STEAD_DIAL_PRIVATE", "").replace(",", " ").split()
        cache = environment.get("STEAD_CACHE")
        try:
            return cls(
                data=Path(environment.get("STEAD_DATA", defaults.data)),
                runtime=Path(environment.get("STEAD_RUNTIME", defaults.runtime)),
                cache=Path(cache) if cache else None,
                default_size=Size.parse(environment.get("STEAD_DEFAULT_SIZE", str(defaults.default_size))),
                pool=int(environment.get("STEAD_POOL", defaults.pool)),
                idle_timeout=_seconds(environment.get("STEAD_IDLE_TIMEOUT", "300")),
                accelerator=accelerator,  # type: ignore[arg-type]  # checked above
                carry_host_certificates=_flag(environment.get("STEAD_HOST_CERTIFICATES", "1")),
                mirror=environment.get("STEAD_MIRROR"),
                allowed_private_networks=tuple(IPv4Network(network) for network in networks),
                dialled_private_networks=tuple(ip_network(network) for network in dialled),
                uid_base=int(environment.get("STEAD_UID_BASE", defaults.uid_base)),
                listen=environment.get("STEAD_LISTEN", defaults.listen),
                git_url=environment.get("STEAD_GIT_URL"),
                max_calls=int(environment.get("STEAD_MAX_CALLS", defaults.max_calls)),
                max_creations=int(environment.get("STEAD_MAX_CREATIONS", defaults.max_creations)),
                origins=tuple(environment.get("STEAD_ORIGINS", "*").replace(",", " ").split()),
                limits=_limits(environment),
            )
        except ValueError as error:
            raise InvalidRequest(f"bad STEAD_ setting in the environment: {error}") from error


def _limits(environment: Mapping[str, str]) -> Limits:
    """`STEAD_LIMIT_VMS=20`, `STEAD_LIMIT_TOTAL_MEMORY_GIB=64` and so on."""
    given = ((field.name, environment.get(f"STEAD_LIMIT_{field.name.upper()}")) for field in fields(Limits))
    return Limits(**{name: int(value) for name, value in given if value})


def _seconds(text: str) -> int | None:
    if text.lower() == "never":
        return None
    seconds = int(text)
    if seconds <= 0:
        raise ValueError(f"an idle timeout is at least a second, or `never`, not {text}")
    return seconds


def _flag(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError(f"{text!r} is neither yes nor no")
