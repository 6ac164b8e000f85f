"""Settings of an installation, read once from the environment."""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Literal, Self, TypeVar, cast, get_args

from stead.deadlines import VARIABLE, parse_scale
from stead.errors import InvalidRequest
from stead.limits import UNLIMITED, Limits

Accelerator = Literal["auto", "kvm", "tcg"]
T = TypeVar("T")

_SIZE = re.compile(r"(?P<vcpus>\d+)x(?P<memory>\d+)(?P<unit>[MG])x(?P<disk>\d+)G")

_SLOTS = 65536


@dataclass(frozen=True, order=True)
class Size:
    """Size of a VM: virtual CPUs, memory and disk."""

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
        memory = f"{self.memory_mib // 1024}G" if self.memory_mib % 1024 == 0 else f"{self.memory_mib}M"
        return f"{self.vcpus}x{memory}x{self.disk_gib}G"

    @property
    def key(self) -> str:
        """The size in the ids of templates and cached builds: must stay the same over versions."""
        return f"{self.vcpus}x{self.memory_mib}Mx{self.disk_gib}G"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `4x8Gx20G` (vCPUs x memory x disk); memory may be given in M."""
        match = _SIZE.fullmatch(text)
        if match is None:
            raise InvalidRequest(
                f"invalid size {text!r}: must be VCPUSxMEMORYxDISK, such as 4x8Gx20G or 1x512Mx20G"
            )
        memory = int(match["memory"]) * (1024 if match["unit"] == "G" else 1)
        return cls(int(match["vcpus"]), memory, int(match["disk"]))


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class Settings:
    """One installation of Stead. Installations with different data folders are independent."""

    data: Path = Path("/var/lib/stead")
    runtime: Path = Path("/run/stead")
    cache: Path | None = None
    """Folder of images and templates; by default inside the data folder."""
    default_size: Size = field(default_factory=Size)
    pool: int = 2
    """VMs of the default size that are kept restored and paused for the next creates."""
    idle_timeout: int | None = 300
    """Seconds without activity after which a VM is suspended, unless it is created with its own timeout."""
    idle_check: float = 5.0
    """Seconds between two checks for idle VMs."""
    accelerator: Accelerator = "auto"
    deadline_scale: float = 1.0
    """Scale of all deadlines, for slow hosts. Only the variable sets it: see deadlines.py."""
    carry_host_certificates: bool = True
    mirror: str | None = None
    """Debian mirror for building the image; by default the one that mmdebstrap chooses."""
    allowed_private_networks: tuple[IPv4Network, ...] = ()
    """Private networks that VMs may reach."""
    dialled_private_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Private networks that webhooks and imports may connect to, as for local development."""
    uid_base: int = 1_900_000_000
    listen: str = "127.0.0.1:8600"
    """Address of the API. Put TLS in front of any address that is not loopback."""
    git_url: str | None = None
    """URL under which git clients reach the repositories; by default that of the API."""
    max_calls: int = 1000
    """Concurrent API calls; more are refused."""
    max_creations: int = 64
    """VMs that are being created or wait for it; more are refused."""
    origins: tuple[str, ...] = ("*",)
    """CORS origins that may call the API; they send a token, never a cookie."""
    limits: Limits = UNLIMITED
    """Limits of accounts that have none of their own."""

    def __post_init__(self) -> None:
        try:
            _listen(self.listen)
        except InvalidRequest as error:
            raise InvalidRequest(f"invalid listen address {self.listen!r}: {error}") from error

    @property
    def address(self) -> tuple[str, int]:
        return _address(self.listen)

    @property
    def clone_root(self) -> str:
        """The clone URL of a repository without its id."""
        return (self.git_url or f"http://{self.listen}").rstrip("/")

    @property
    def instance(self) -> str:
        """Six characters in the names of this installation's namespaces, taps and processes."""
        return hashlib.sha256(str(self.data.resolve()).encode()).hexdigest()[:6]

    def uid(self, slot: int) -> int:
        """The Linux user that the QEMU of a slot runs as: no two VMs share one."""
        return self.uid_base + self._number * _SLOTS + slot

    def owns_uid(self, uid: int) -> bool:
        """Whether a QEMU of this installation may run as this Linux user."""
        return self.uid(0) <= uid < self.uid(_SLOTS)

    @property
    def git_uid(self) -> int:
        """The Linux user that git runs as and that owns the repositories."""
        return self.uid_base - 1 - self._number

    @property
    def _number(self) -> int:
        return int(self.instance, 16) % 3000

    @property
    def cache_folder(self) -> Path:
        return self.cache or self.data / "cache"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read every `STEAD_` variable; InvalidRequest names the variable, its value and what is allowed."""
        defaults = cls()

        def read(name: str, parse: Callable[[str], T], default: T) -> T:
            text = environment.get(name)
            if text is None:
                return default
            try:
                return parse(text)
            except InvalidRequest as error:
                raise InvalidRequest(f"invalid {name}={text!r}: {error}") from error

        cache = environment.get("STEAD_CACHE")
        limits = {
            field.name: read(f"STEAD_LIMIT_{field.name.upper()}", _limit, None) for field in fields(Limits)
        }
        return cls(
            data=read("STEAD_DATA", Path, defaults.data),
            runtime=read("STEAD_RUNTIME", Path, defaults.runtime),
            cache=Path(cache) if cache else None,
            default_size=read("STEAD_DEFAULT_SIZE", Size.parse, defaults.default_size),
            pool=read("STEAD_POOL", _integer(0), defaults.pool),
            idle_timeout=read("STEAD_IDLE_TIMEOUT", _seconds, defaults.idle_timeout),
            accelerator=read("STEAD_ACCELERATOR", _accelerator, defaults.accelerator),
            deadline_scale=read(VARIABLE, parse_scale, defaults.deadline_scale),
            carry_host_certificates=read("STEAD_HOST_CERTIFICATES", _flag, defaults.carry_host_certificates),
            mirror=environment.get("STEAD_MIRROR"),
            allowed_private_networks=read("STEAD_ALLOW_PRIVATE", _networks(IPv4Network), ()),
            dialled_private_networks=read("STEAD_DIAL_PRIVATE", _networks(ip_network), ()),
            uid_base=read("STEAD_UID_BASE", _integer(1), defaults.uid_base),
            listen=read("STEAD_LISTEN", _listen, defaults.listen),
            git_url=environment.get("STEAD_GIT_URL"),
            max_calls=read("STEAD_MAX_CALLS", _integer(1), defaults.max_calls),
            max_creations=read("STEAD_MAX_CREATIONS", _integer(1), defaults.max_creations),
            origins=read("STEAD_ORIGINS", lambda text: tuple(_words(text)), defaults.origins),
            limits=Limits(**limits),
        )


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port) if port.isascii() and port.isdigit() else -1


def _listen(text: str) -> str:
    host, port = _address(text)
    if not host or not 0 <= port < 65536:
        raise InvalidRequest("must be HOST:PORT with a port up to 65535, such as 127.0.0.1:8600")
    return text


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _integer(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest:
            raise InvalidRequest(f"must be an integer of at least {lowest}")
        return number

    return parse


def _limit(text: str) -> int | None:
    """Empty is no limit."""
    return _integer(0)(text) if text else None


def _seconds(text: str) -> int | None:
    if text.lower() == "never":
        return None
    try:
        return _integer(1)(text)
    except InvalidRequest as error:
        raise InvalidRequest("must be `never` or a number of seconds of at least 1") from error


def _accelerator(text: str) -> Accelerator:
    for known in get_args(Accelerator):
        if text == known:
            return cast("Accelerator", known)
    raise InvalidRequest("must be auto, kvm or tcg")


def _networks(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def networks(text: str) -> tuple[T, ...]:
        try:
            return tuple(parse(word) for word in _words(text))
        except ValueError as error:
            raise InvalidRequest(
                f"must be networks such as 10.1.0.0/16, separated by commas or spaces ({error})"
            ) from error

    return networks


def _flag(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise InvalidRequest("must be 1, true, yes, on, 0, false, no or off")
