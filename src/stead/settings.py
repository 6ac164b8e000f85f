"""Settings of an installation: from variables `STEAD_*`, else from the configuration file, else defaults."""

import difflib
import hashlib
import os
import re
import socket
import stat
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from stead.errors import InvalidRequest
from stead.limits import (
    LIMIT_NAMES,
    ConfiguredLimits,
    HostResources,
    Limits,
    default_limits,
)

Accelerator = Literal["auto", "kvm", "tcg"]
T = TypeVar("T")

CONFIG_FILE = Path("/etc/stead/stead.toml")
"""The configuration file, unless STEAD_CONFIG names another one."""

SEALING_KEY_FILE = Path("/etc/stead/sealing-key")
"""Keys for the secrets in databases, unless STEAD_SEALING_KEY or a credential of systemd has them."""
_CREDENTIAL = "stead-sealing-key"

_SIZE = re.compile(r"(?P<vcpus>\d+)x(?P<memory>\d+)(?P<unit>[MG])x(?P<disk>\d+)G")

_SLOTS = 65536
_INSTALLATIONS = 3000
"""Ranges of Linux users: more installations on one host could share one."""
_GIT_USERS = 16384
"""Users of git in an installation; all stay below 2**31 by default, as some tools need it."""
_VPCS = 10_000
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOSTNAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


RESERVED_LABELS = (
    # Services of an installation.
    *("api", "git", "ssh", "vm-ssh", "www", "console", "dashboard", "status"),
    # What people and programs trust by its name.
    *("login", "auth", "sso", "oauth", "account", "accounts", "admin", "root", "billing", "pay", "payments"),
    *("security", "secure", "support", "help", "abuse", "postmaster", "hostmaster", "webmaster"),
    # What mail programs, browsers and certificate authorities look up by themselves.
    *("mail", "smtp", "imap", "pop", "webmail", "autodiscover", "autoconfig", "mta-sts", "openpgpkey"),
    *("wpad", "isatap", "ns", "ns1", "ns2", "dns", "ftp", "vpn", "localhost"),
)
"""Default of `reserved_labels`."""


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
        for problem in self.problems(self.vcpus, self.memory_mib, self.disk_gib):
            match problem.part:
                case "vcpus":
                    rule = f"vcpus must be a power of two up to {problem.high}"
                case "memory":
                    rule = f"memory must be a power of two from {problem.low} to {problem.high} MiB"
                case "disk":
                    rule = f"disk must be from {problem.low} to {problem.high} GiB"
            raise InvalidRequest(f"{rule}, not {problem.got}")

    @classmethod
    def problems(
        cls, vcpus: int | None = None, memory_mib: float | None = None, disk_gib: float | None = None
    ) -> "list[SizeProblem]":
        """What is wrong with the given parts of a size, in this order: the one place with these rules."""
        parts: tuple[tuple[SizePart, float | None, int, int], ...] = (
            ("vcpus", vcpus, 1, cls.MAX_VCPUS),
            ("memory", memory_mib, cls.MIN_MEMORY_MIB, cls.MAX_MEMORY_MIB),
            ("disk", disk_gib, cls.MIN_DISK_GIB, cls.MAX_DISK_GIB),
        )
        found = []
        for part, got, low, high in parts:
            if got is None:
                continue
            if not low <= got <= high:
                found.append(SizeProblem(part, "out_of_range", got, low, high))
            elif part == "disk" and got != int(got):
                found.append(SizeProblem(part, "not_whole", got, low, high))
            elif part != "disk" and (got != int(got) or int(got).bit_count() != 1):
                found.append(SizeProblem(part, "not_power_of_two", got, low, high))
        return found

    def __str__(self) -> str:
        return f"{self.compute}x{self.disk_gib}G"

    @property
    def compute(self) -> str:
        """The part without the disk, `4x8G`."""
        memory = f"{self.memory_mib // 1024}G" if self.memory_mib % 1024 == 0 else f"{self.memory_mib}M"
        return f"{self.vcpus}x{memory}"

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


SizePart = Literal["vcpus", "memory", "disk"]


@dataclass(frozen=True)
class SizeProblem:
    """A part of a size that no VM can have. Memory is in MiB, disks are in GiB."""

    part: SizePart
    kind: Literal["out_of_range", "not_power_of_two", "not_whole"]
    got: float
    low: int
    high: int


@dataclass(frozen=True)
class Allowed:
    """What a setting may be, for the message about an invalid value."""

    values: str


def _from_text(parse: Callable[[str], Any]) -> BeforeValidator:
    """Parse text. Values from TOML or from the code may have their type already."""

    def parsed(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except InvalidRequest as error:
            raise ValueError(str(error)) from error

    return BeforeValidator(parsed)


def address_of(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`. Raises ValueError."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError
    return host.strip("[]"), int(port)


def every_address() -> str:
    """What to listen on for all addresses of the host: of IPv6 and IPv4, where one socket can have both."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _listen(text: str) -> str:
    address_of(text)
    return text


def _listen_or_none(text: str | None) -> str | None:
    return None if not text else _listen(text)


def _domain(text: str) -> str | None:
    return _checked_domain(text) if text else None


def _domains(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_checked_domain, names))


def _checked_domain(text: str) -> str:
    name = text.lower().removesuffix(".")
    if len(name) > 200 or not _HOSTNAME.fullmatch(name):
        raise ValueError
    return name


def _labels(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(map(_LABEL.fullmatch, names)):
        raise ValueError
    return names


def _configured_limits(limits: Any, handler: ValidatorFunctionWrapHandler) -> ConfiguredLimits:
    """`STEAD_LIMIT_VMS=` and `unlimited` are no limit. One that is not named follows the host."""
    if isinstance(limits, ConfiguredLimits):
        return limits
    given = frozenset(LIMIT_NAMES)
    if isinstance(limits, dict):
        given = frozenset(limits)
        limits = {name: None if value in ("", "unlimited") else value for name, value in limits.items()}
    return ConfiguredLimits(**asdict(handler(limits)), given=given)


_SPLIT = _from_text(lambda text: text.replace(",", " ").split())
_NETWORKS = Allowed("networks such as 10.1.0.0/16 (without host bits), separated by commas or spaces")
_DOMAIN = Allowed("a domain name such as stead.example.com")
_ZONES = Allowed("domain names such as stead.localhost, separated by commas or spaces")
_LABELS = Allowed("labels such as www, in lower case, separated by commas or spaces")
_LISTEN = Allowed("HOST:PORT with a port up to 65535, such as 127.0.0.1:443")
_YES_OR_NO = Allowed("1, true, yes, on, 0, false, no or off")
Count = Annotated[int, Ge(0), Allowed("an integer of at least 0")]
Positive = Annotated[int, Ge(1), Allowed("an integer of at least 1")]


class Settings(BaseModel):
    """One installation of Stead. Installations with different data folders are independent.

    The variable of `pool` is `STEAD_POOL`, that of `limit.vms` is `STEAD_LIMIT_VMS`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Path = Path("/var/lib/stead")
    runtime: Path = Path("/run/stead")
    cache: Annotated[Path | None, _from_text(lambda text: text or None)] = None
    """Folder of images and templates; by default inside the data folder."""
    default_size: Annotated[Size, _from_text(Size.parse)] = Size()
    pool: Count = 2
    """VMs of the default size that are kept restored and paused for the next creates."""
    idle_timeout: Annotated[
        Annotated[int, Ge(1)] | None,
        _from_text(lambda text: None if text.lower() == "never" else text),
        Allowed("`never` or a number of seconds of at least 1"),
    ] = 300
    """Seconds without activity after which a VM is suspended, unless it is created with its own timeout."""
    idle_check: Annotated[float, Gt(0), Allowed("a number of seconds above 0")] = 5.0
    """Seconds between two checks for idle VMs."""
    accelerator: Annotated[Accelerator, Allowed("auto, kvm or tcg")] = "auto"
    trusted_tenants: Annotated[bool, _YES_OR_NO] = False
    """Whether all accounts belong to people who trust each other: their VMs need not be isolated well."""
    share_template_memory: Annotated[bool, _YES_OR_NO] = True
    """Map the unmodified memory of a template into all of its VMs, instead of a copy for each."""
    deadline_scale: Annotated[float, Ge(1), Le(1000), Allowed("a number from 1 to 1000")] = 1.0
    """Scale of all deadlines, for slow hosts: see deadlines.py."""
    require_cgroups: Annotated[bool, _YES_OR_NO] = False
    """Refuse to start VMs on a host without cgroups for memory, processes and CPU."""
    host_certificates: Annotated[bool, _YES_OR_NO] = True
    """Copy the host's additional CA certificates into the image."""
    mirror: str | None = None
    """Debian mirror for building the image; by default the one that mmdebstrap chooses."""
    allow_private: Annotated[tuple[IPv4Network, ...], _SPLIT, _NETWORKS] = ()
    """Private networks that VMs may reach."""
    dial_private: Annotated[tuple[IPv4Network | IPv6Network, ...], _SPLIT, _NETWORKS] = ()
    """Private networks that webhooks and imports may connect to, as for local development (SSRF guard)."""
    uid_base: Positive = 1_900_000_000
    listen: Annotated[
        str,
        AfterValidator(_listen),
        Allowed("HOST:PORT with a port up to 65535, such as 127.0.0.1:8600"),
    ] = "127.0.0.1:8600"
    """Address of the API without TLS: for this host. Other clients use `https_listen`."""
    domain: Annotated[str | None, _from_text(_domain), _DOMAIN] = None
    """Public name of this installation: the API; Git is at git.NAME, previews are below it."""
    preview_domain: Annotated[str | None, _from_text(_domain), _DOMAIN] = None
    """Public domain of previews, apart from that of the API; by default `domain`."""
    https_listen: Annotated[str | None, AfterValidator(_listen_or_none), _LISTEN] = None
    """Address of HTTPS; by default port 443 of all addresses with `domain`, else of 127.0.0.1."""
    http_listen: Annotated[str | None, AfterValidator(_listen_or_none), _LISTEN] = None
    """Address of HTTP, which redirects to HTTPS; by default port 80 of the same address."""
    preview_zones: Annotated[tuple[str, ...], _SPLIT, AfterValidator(_domains), _ZONES] = (
        "stead.localhost",
        "style.dev",
    )
    """Zones whose names accounts may map without a verification; the public one is before them."""
    reserved_labels: Annotated[tuple[str, ...], _SPLIT, AfterValidator(_labels), _LABELS] = RESERVED_LABELS
    """Names directly below a preview zone that accounts cannot map."""
    ca: Annotated[Path | None, _from_text(lambda text: text or None)] = None
    """Folder with root.crt and root.key of the CA for preview zones; by default one is made."""
    sealing_key: Annotated[Path | None, _from_text(lambda text: text or None)] = None
    """File with the keys of secrets in the database; by default a credential of systemd, else in /etc."""
    acme_directory: str = "https://acme-v02.api.letsencrypt.org/directory"
    """ACME directory that issues certificates for `domain` and for mapped domains."""
    acme_email: str | None = None
    """Contact for the ACME account."""
    acme_dns: Annotated[Path | None, _from_text(lambda text: text or None)] = None
    """TOML file about a DNS provider, to order one certificate for all names of the public zone."""
    acme_names_per_day: Positive = 5
    """New names of an account in the public preview zone that get a certificate in a day."""
    acme_names_per_week: Positive = 40
    """New names of all accounts there that get one in a week; an account has a quarter."""
    acme_roots: Annotated[Path | None, _from_text(lambda text: text or None)] = None
    """File with CA certificates that the ACME directory's own certificate is checked with."""
    git_url: str | None = None
    """URL under which git clients reach the repositories; by default git.NAME of `domain`, else the API's."""
    max_calls: Positive = 2000
    """Concurrent API calls; more are refused. An account has at most a quarter, one of its identities half of
    that. Calls without a credential have a pool of their own, an eighth as large."""
    call_rate: Positive = 500
    """API calls a second of one account, averaged over 10 s; of one of its identities half as many."""
    anonymous_rate: Positive = 50
    """API calls a second without a valid credential from one address (IPv6: one /64), averaged over 10 s."""
    max_sockets: Positive = 2000
    """Open WebSockets (terminals, attached processes, forwarded connections); an account has at most a
    quarter, one of its identities half of that."""
    ssh_listen: Annotated[
        str | None,
        AfterValidator(lambda text: _listen(text) if text else text),
        Allowed("HOST:PORT with a port up to 65535, such as 0.0.0.0:22, or nothing for no gateway"),
    ] = None
    """Address of the SSH gateway: by default 127.0.0.1:2222, or [::]:22 with `domain`; empty for none."""
    max_ssh: Positive = 1000
    """Open SSH connections; an account has at most a quarter, one of its identities half of that."""
    wireguard_host: str | None = None
    """Where computers reach WireGuard tunnels: a name or address; by default `domain`, else 127.0.0.1."""
    wireguard_port: Annotated[int, Ge(1), Le(55_000), Allowed("a port from 1 to 55000")] = 51820
    """UDP port of the first VPC's WireGuard tunnels; each VPC has the next one."""
    wireguard_lifetime: Annotated[
        int, Ge(60), Le(315_360_000), Allowed("seconds from 60 to 315360000, ten years")
    ] = 86_400
    """Seconds after which a WireGuard session ends by itself."""
    max_tunnels: Positive = 100
    """VPCs of all accounts that have WireGuard clients. Without WireGuard in the kernel, each is a process of
    about 20 MB."""
    max_creations: Positive = 64
    """VMs that are being created at the same time; an account has at most a quarter, and then waits."""
    max_builds: Positive = 32
    """Layers and VMs that are being set up by builds; an account has at most a quarter, and then waits."""
    max_background: Positive = 1000
    """Background requests in progress; an account has at most a quarter."""
    origins: Annotated[tuple[str, ...], _SPLIT] = ("*",)
    """CORS origins that may call the API; they send a token, never a cookie."""
    vm_io_mib: Count = 0
    """MiB that a VM may read and write in a second, where cgroups of version 2 can limit it; 0: no limit."""
    memory_overcommit: Annotated[float, Ge(1), Le(1000), Allowed("a number from 1 to 1000")] = 8.0
    """Memory of all running VMs by size, as a multiple of the host's: most is shared or unused."""
    disk_overcommit: Annotated[float, Ge(1), Le(1000), Allowed("a number from 1 to 1000")] = 20.0
    """Disks of all VMs by size, as a multiple of the host's: they take what was written to them."""
    limit: Annotated[
        Limits, WrapValidator(_configured_limits), Allowed("an integer of at least 0, or `unlimited`")
    ] = ConfiguredLimits()
    """Limits of accounts that have none of their own; those that are not set follow the host."""

    @classmethod
    def load(cls) -> "Settings":
        """Read variables and configuration file; InvalidRequest names the invalid value and its place."""
        return Settings(**dict(_Sources()))

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(given)
        except ValidationError as invalid:
            error = invalid.errors()[0]
        names = [str(part) for part in error["loc"][: 2 if error["loc"][0] == "limit" else 1]]
        if error["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            known = [field.name for field in fields(Limits)] if names[:-1] else list(Settings.model_fields)
            close = difflib.get_close_matches(names[-1], known, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"it must be one of {', '.join(known)}"
            raise InvalidRequest(f"unknown setting {cls._place(names, error['input'])}: {hint}")
        allowed = [each for each in Settings.model_fields[names[0]].metadata if isinstance(each, Allowed)]
        reason = f"must be {allowed[0].values}" if allowed else error["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"invalid {cls._place(names, error['input'])}: {reason}")

    @staticmethod
    def _place(names: list[str], value: Any) -> str:
        return f"{'.'.join(names)}={value!r}"

    def replace(self, **changes: Any) -> "Settings":
        """A validated copy with some settings changed."""
        return Settings(**dict(self) | changes)

    def account_limits(self, host: HostResources) -> Limits:
        """The limits of accounts without their own, on this host."""
        size = self.default_size
        defaults = default_limits(
            host,
            (size.vcpus, size.memory_mib, size.disk_gib),
            memory_overcommit=self.memory_overcommit,
            disk_overcommit=self.disk_overcommit,
        )
        given = self.limit if isinstance(self.limit, ConfiguredLimits) else ConfiguredLimits()
        return given.over(defaults)

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self.listen)

    @property
    def zones(self) -> tuple[str, ...]:
        """All preview zones; the first is for URLs that Stead makes."""
        return tuple(dict.fromkeys([*([self.public_zone] if self.public_zone else []), *self.preview_zones]))

    @property
    def public_zone(self) -> str | None:
        """The preview zone whose names have certificates of a public CA."""
        return self.preview_domain or self.domain

    @property
    def api_names(self) -> tuple[str, ...]:
        """Host names of the API, the first of which is for URLs that Stead makes."""
        own = [self.domain, f"api.{self.domain}"] if self.domain else []
        return (*own, "stead.localhost", "api.stead.localhost", "api.freestyle.sh")

    @property
    def git_names(self) -> tuple[str, ...]:
        """Host names of the Git server."""
        own = [f"git.{self.domain}"] if self.domain else []
        return (*own, "git.stead.localhost", "git.freestyle.sh")

    @property
    def public_names(self) -> tuple[str, ...]:
        """Own names that a public CA can certify: those of `domain`."""
        found = (*self.api_names, *self.git_names) if self.domain else ()
        return tuple(name for name in found if f".{name}".endswith(f".{self.domain}"))

    @property
    def local_zones(self) -> tuple[str, ...]:
        """Preview zones that no public CA can certify."""
        return tuple(zone for zone in self.zones if zone != self.public_zone)

    @property
    def ssh_address(self) -> tuple[str, int] | None:
        """Where the SSH gateway listens; None for no gateway."""
        if self.ssh_listen is not None:
            return address_of(self.ssh_listen) if self.ssh_listen else None
        return (every_address(), 22) if self.domain else ("127.0.0.1", 2222)

    @property
    def wireguard_endpoint(self) -> str:
        return self.wireguard_host or self.domain or "127.0.0.1"

    @property
    def git_name_in_vms(self) -> str:
        """Host name of the Git server for VMs: git takes names in `.localhost` for the VM itself."""
        return f"git.{self.domain}" if self.domain else "git.freestyle.sh"

    @property
    def clone_root(self) -> str:
        """The clone URL of a repository without its id."""
        default = f"https://{self.git_names[0]}" if self.domain else f"http://{self.listen}"
        return (self.git_url or default).rstrip("/")

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
    def git_uids(self) -> range:
        """The Linux users that git runs as: each account with repositories has one, which owns them."""
        first = self.uid_base + _INSTALLATIONS * _SLOTS + self._number * _GIT_USERS
        return range(first, first + _GIT_USERS)

    @property
    def edge_uid(self) -> int:
        """The Linux user that Caddy runs as."""
        return self.uid_base - 1 - _INSTALLATIONS - self._number

    @property
    def resolver_uid(self) -> int:
        """The Linux user that the resolver of VMs runs as."""
        return self.uid_base - 1 - 2 * _INSTALLATIONS - self._number

    @property
    def disk_uid(self) -> int:
        """The Linux user of the process that merges disk layers."""
        return self.uid_base - 1 - 3 * _INSTALLATIONS - self._number

    def tunnel_uid(self, vpc: int) -> int:
        """The Linux user that the WireGuard process of a VPC, by its number, runs as."""
        return self.uid_base - 5 * _INSTALLATIONS - (self._number + 1) * _VPCS + vpc

    @property
    def ssh_uid(self) -> int:
        """The Linux user that the SSH gateway runs as."""
        return self.uid_base - 1 - 4 * _INSTALLATIONS - self._number

    @property
    def _number(self) -> int:
        return int(self.instance, 16) % _INSTALLATIONS

    @property
    def accepts_emulation(self) -> bool:
        """The operator knows that VMs run without the isolation of KVM, or trusts all that is in them."""
        return self.accelerator == "tcg" or self.trusted_tenants

    @property
    def lock(self) -> Path:
        """Held by the one process that has the installation open."""
        return self.data / "stead.lock"

    @property
    def sealing_key_files(self) -> tuple[Path, ...]:
        """Where keys for secrets in the database may be; the last one is where the first start puts one."""
        if self.sealing_key is not None:
            return (self.sealing_key,)
        credentials = os.environ.get("CREDENTIALS_DIRECTORY")
        return (*([Path(credentials) / _CREDENTIAL] if credentials else []), SEALING_KEY_FILE)

    @property
    def cache_folder(self) -> Path:
        return self.cache or self.data / "cache"


class _Sources(BaseSettings, Settings):
    """Settings as read from the environment and the configuration file."""

    model_config = SettingsConfigDict(
        env_prefix="STEAD_", env_nested_delimiter="_", env_nested_max_split=1, enable_decoding=False
    )

    @classmethod
    def settings_customise_sources(cls, *args: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return sources["env_settings"], InitSettingsSource(cls, _read_config_file())

    @staticmethod
    def _place(names: list[str], value: Any) -> str:
        variable = _variable(names)
        if variable in os.environ:
            return f"{variable}={os.environ[variable]!r}"
        return f"{'.'.join(names)} = {value!r} in {_config_file()}"


def sources() -> dict[str, str]:
    """Where each setting that is not a default comes from: a variable or the configuration file."""
    names = _Sources().model_fields_set
    variables = {name: [each for each in os.environ if each.startswith(_variable([name]))] for name in names}
    return {name: ", ".join(sorted(found)) or str(_config_file()) for name, found in variables.items()}


def _variable(names: list[str]) -> str:
    return "_".join(["STEAD", *names]).upper()


def _config_file() -> Path:
    return Path(os.environ.get("STEAD_CONFIG", CONFIG_FILE))


def _read_config_file() -> dict[str, Any]:
    path = _config_file()
    try:
        with path.open("rb") as file:
            if os.geteuid() == 0:
                _require_only_root_writes(path, os.fstat(file.fileno()))
            found = tomllib.load(file)
    except FileNotFoundError as error:
        if "STEAD_CONFIG" not in os.environ:
            return {}
        raise InvalidRequest(f"STEAD_CONFIG={path} not found: create it or unset the variable") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"the configuration file {path} is not valid TOML: {error}") from error
    return found


def _require_only_root_writes(path: Path, opened: os.stat_result) -> None:
    """Settings decide what root runs, so only root may change the file or replace it."""
    real = path.resolve()
    for each, status in [(real, opened), *((folder, folder.stat()) for folder in real.parents)]:
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or writable:
            raise InvalidRequest(
                f"cannot use the configuration file {path}: users other than root can write {each}."
                f" Run `chown root {each}` and `chmod go-w {each}`, or name another file by STEAD_CONFIG"
            )
