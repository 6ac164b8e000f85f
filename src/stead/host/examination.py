"""The checks of `stead doctor`. Each tests one feature of the host without changing anything."""

import contextlib
import ctypes
import http.client
import json
import mmap
import os
import platform
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stead import landlock
from stead.addresses import resolvers
from stead.deadlines import scaled
from stead.errors import HostError
from stead.files import nearest_existing
from stead.host import disks
from stead.host.accelerator import MINIMUM_QEMU, choose_accelerator, qemu_version
from stead.host.authority import CERTIFICATE_FILE, Authority
from stead.host.cgroups import detect
from stead.host.commands import run
from stead.host.image import BaseImage
from stead.host.trust_store import find_store
from stead.settings import Settings
from stead.tasks import in_thread

Status = Literal["ok", "degraded", "missing"]

_GIB = 1 << 30
_ANSWER_TIMEOUT = scaled(3.0)
_MAX_ANSWER = 1 << 16
_CAPABILITIES = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    8: "CAP_SETPCAP",
    12: "CAP_NET_ADMIN",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
}
_TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "dnsmasq": "dnsmasq-base",
    "mke2fs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
}


_KERNEL_WIREGUARD = Path("/sys/module/wireguard")


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was found, the consequence, and how to fix it."""

    name: str
    status: Status
    what: str
    cost: str = ""
    remedy: str = ""


def python() -> Finding:
    return Finding("python", "ok", platform.python_version())


def architecture() -> Finding:
    machine = platform.machine()
    if machine != "x86_64":
        return Finding(
            "architecture",
            "missing",
            f"unsupported CPU architecture {machine}",
            "VMs cannot run",
            "use an x86_64 host",
        )
    return Finding("architecture", "ok", f"x86_64, {os.cpu_count()} CPUs")


def privileges() -> Finding:
    if os.geteuid() != 0:
        return Finding("privileges", "missing", "not root", "VMs cannot run", "run as root")
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    lacking = [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        return Finding(
            "privileges",
            "missing",
            f"root without {', '.join(lacking)}",
            "VMs cannot run",
            "run outside of a container, or give the container these capabilities",
        )
    return Finding("privileges", "ok", "root")


async def kvm(settings: Settings, image: BaseImage | None) -> Finding:
    kernel = image.kernel if image else _any_kernel(settings)
    try:
        choice = await choose_accelerator(settings, kernel, again=True)
    except HostError as error:
        return Finding("kvm", "missing", str(error), "VMs cannot run", "set STEAD_ACCELERATOR=auto")
    if choice.name == "kvm":
        return Finding("kvm", "ok", choice.reason)
    if not Path("/dev/kvm").exists():
        remedy = "enable virtualisation in the BIOS, or use a cloud instance with nested virtualisation"
    elif kernel is None:
        remedy = "run `stead prepare`, then `stead doctor` again"
    elif settings.accelerator == "tcg":
        remedy = "set STEAD_ACCELERATOR=auto"
    else:
        remedy = "use a host where KVM boots a stock Linux kernel"
    return Finding("kvm", "degraded", choice.reason, choice.cost, remedy)


async def qemu() -> Finding:
    remedy = "apt-get install qemu-system-x86"
    try:
        version = await qemu_version()
    except HostError as error:
        return Finding("qemu", "missing", str(error), "VMs cannot run", remedy)
    text = ".".join(map(str, version))
    if version < MINIMUM_QEMU:
        oldest = ".".join(map(str, MINIMUM_QEMU[:2]))
        return Finding(
            "qemu", "missing", f"version {text} is too old (minimum {oldest})", "VMs cannot run", remedy
        )
    return Finding("qemu", "ok", text)


def tools() -> Iterator[Finding]:
    for tool, package in _TOOLS.items():
        path = shutil.which(tool)
        if path:
            yield Finding(tool, "ok", path)
        else:
            cost = (
                "the base image cannot be built"
                if tool in {"mmdebstrap", "mke2fs", "e2fsck"}
                else "VMs cannot run"
            )
            yield Finding(tool, "missing", "not installed", cost, f"apt-get install {package}")
    for tool, package in (("git", "git"), ("perl", "perl-base")):
        if shutil.which(tool) is None:
            cost = "Git repositories cannot be created or served"
            yield Finding(tool, "degraded", "not installed", cost, f"apt-get install {package}")
    for tool in ("wg", "wireguard-go"):
        if shutil.which(tool) is None and not (tool == "wireguard-go" and _KERNEL_WIREGUARD.exists()):
            package = "wireguard-tools" if tool == "wg" else tool
            cost = "computers cannot join VPCs with WireGuard"
            yield Finding(tool, "degraded", "not installed", cost, f"apt-get install {package}")
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if not keyring.exists():
        yield Finding(
            "debian keys",
            "missing",
            f"{keyring} does not exist",
            "the base image cannot be built",
            "apt-get install debian-archive-keyring",
        )


def tun() -> Finding:
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return Finding(
            "tun", "missing", f"/dev/net/tun: {error.strerror}", "VMs have no network", "modprobe tun"
        )
    return Finding("tun", "ok", "/dev/net/tun can be opened")


async def namespaces() -> Finding:
    """Creates a veth pair in a network namespace that ends with the command."""
    try:
        await run("unshare", "--net", "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    except HostError as error:
        return Finding(
            "namespaces",
            "missing",
            str(error),
            "VMs have no network",
            "modprobe veth; in a container, allow network namespaces",
        )
    return Finding("namespaces", "ok", "network namespaces and veth work")


async def nftables() -> Finding:
    try:
        await run("unshare", "--net", "nft", "-f", "-", stdin=b"add table inet probe\n")
    except HostError as error:
        return Finding("nftables", "missing", str(error), "VMs have no network", "modprobe nf_tables")
    return Finding("nftables", "ok", "rules can be added")


def overcommit() -> Finding:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        return Finding(
            "overcommit",
            "degraded",
            "vm.overcommit_memory is 2",
            "each VM reserves its whole memory when it starts",
            "sysctl vm.overcommit_memory=0",
        )
    return Finding("overcommit", "ok", "memory is allocated when a VM uses it")


def pagemap() -> Finding:
    with mmap.mmap(-1, mmap.PAGESIZE) as page, contextlib.suppress(OSError):
        page[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(address // mmap.PAGESIZE * 8)
            if struct.unpack("<Q", file.read(8))[0] >> 63:
                return Finding("pagemap", "ok", "modified memory pages can be detected")
    return Finding(
        "pagemap",
        "missing",
        "/proc/self/pagemap does not show memory pages",
        "VMs cannot be forked, suspended or captured in snapshots with memory",
        "use a stock kernel",
    )


def seccomp() -> Finding:
    if "Seccomp:" not in Path("/proc/self/status").read_text():
        return Finding(
            "seccomp",
            "degraded",
            "not available",
            "QEMU runs without its system-call filter",
            "use a stock kernel",
        )
    return Finding("seccomp", "ok", "system-call filters are available")


def memory(settings: Settings) -> Finding:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
    size = settings.default_size.memory_mib
    available = kib["MemAvailable"] // 1024
    full = available // size
    what = (
        f"{available / 1024:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB available, enough for {full} VMs"
        f" that use all of their {size} MiB"
    )
    if full < 1:
        return Finding(
            "memory",
            "degraded",
            what,
            "the kernel may kill a VM that uses all of its memory",
            "set a smaller STEAD_DEFAULT_SIZE",
        )
    return Finding("memory", "ok", what)


def disk(settings: Settings) -> Finding:
    folder = nearest_existing(settings.data)
    free = shutil.disk_usage(folder).free
    what = f"{free / _GIB:.1f} GiB free at {folder}"
    if free < 4 * _GIB:
        return Finding("disk", "missing", what, "the base image cannot be built", "free at least 4 GiB")
    return Finding("disk", "ok", what)


def cgroups(root: Path = Path("/sys/fs/cgroup")) -> Finding:
    found = detect(root)
    remedy = "use cgroup v2 (boot with systemd.unified_cgroup_hierarchy=1), outside of a container"
    usable = [
        name
        for name in found.controllers
        # A container may list controllers that are read-only.
        if os.access(root if found.version == 2 else root / name, os.W_OK)
    ]
    lacking = [name for name in ("memory", "pids", "cpu") if name not in usable]
    if lacking:
        what = f"version {found.version} without {', '.join(lacking)}" if found.version else "none"
        return Finding("cgroups", "degraded", what, f"no {', '.join(lacking)} limit for VMs", remedy)
    what = f"version {found.version} with {', '.join(usable)}"
    if found.version == 1:
        return Finding("cgroups", "degraded", what, "the swap space of a VM is not limited", remedy)
    return Finding("cgroups", "ok", what)


def file_access(version: int | None = None) -> Finding:
    """Whether the kernel can limit git and other programs to their own files."""
    version = landlock.version() if version is None else version
    if version:
        return Finding("landlock", "ok", f"version {version}: git uses the files of its repository only")
    return Finding(
        "landlock",
        "degraded",
        "the kernel has no Landlock, or one older than version 2",
        "who breaks git can read the files of the host that all users may read",
        "use Linux 5.19 or newer, and add landlock to the kernel's parameter lsm= if it is set",
    )


def leases(settings: Settings) -> Finding:
    """Whether a writer of a frozen disk layer is noticed."""
    folder = nearest_existing(settings.data)
    if not os.access(folder, os.W_OK):
        return Finding("leases", "ok", f"not examined: {folder} cannot be written by this user")
    if disks.knows_writers(folder):
        return Finding("leases", "ok", f"the file system of {folder} tells whether a disk layer is written")
    return Finding(
        "leases",
        "degraded",
        f"the file system of {folder} has no leases",
        "a QEMU that its guest has broken could go on writing a disk layer that snapshots and forks use",
        "keep the data folder on a file system of this host, such as ext4, xfs or btrfs",
    )


def resolver() -> Finding:
    servers = resolvers()
    if servers:
        return Finding("dns", "ok", f"VMs use name server {servers[0]}")
    return Finding(
        "dns",
        "degraded",
        "no IPv4 name server outside of loopback",
        "host names do not resolve in VMs",
        "add a name server that is not on loopback to /etc/resolv.conf",
    )


async def forwarding() -> Finding:
    """Docker and some firewalls set the policy of the forward chain to drop."""
    try:
        completed = await run("nft", "-j", "list", "chains")
        chains = drop_chains(json.loads(completed.stdout))
        if shutil.which("iptables-legacy"):
            legacy = await run("iptables-legacy", "-S", "FORWARD")
            if b"-P FORWARD DROP" in legacy.stdout:
                chains.append("iptables-legacy FORWARD")
    except (HostError, ValueError) as error:
        what = f"cannot list the firewall rules: {error}"
        return Finding(
            "forwarding",
            "degraded",
            what,
            "VMs may not reach the internet",
            "run as root with nftables installed",
        )
    if chains:
        return Finding(
            "forwarding",
            "degraded",
            f"forwarded packets are dropped by default in {', '.join(chains)}",
            "VMs may not reach the internet",
            "accept packets from and to Stead's link there (Docker: in the chain DOCKER-USER)",
        )
    return Finding("forwarding", "ok", "no firewall chain drops forwarded packets by default")


def drop_chains(ruleset: dict[str, Any]) -> list[str]:
    """Forward chains whose policy is drop, from nft's JSON."""
    found = (entry["chain"] for entry in ruleset.get("nftables", []) if "chain" in entry)
    return [
        f"{chain['family']} {chain['table']} {chain['name']}"
        for chain in found
        if chain.get("hook") == "forward" and chain.get("policy") == "drop"
        if not chain["table"].startswith("stead")
    ]


def authority(settings: Settings) -> Finding:
    """The root certificate of the installation's CA, and the one that this host trusts."""
    folder = settings.ca or settings.data / "ca"
    try:
        if settings.ca is None and not (folder / CERTIFICATE_FILE).exists():
            return Finding("ca", "ok", "made at the first start of the server")
        found = Authority.open(settings)
        store = find_store()
        trusted = store.file(settings).read_bytes() if store and store.file(settings).exists() else None
    except (OSError, HostError) as error:
        return Finding("ca", "degraded", f"cannot be examined: {error}", "", "run as root")
    if not found.is_constrained:
        return Finding(
            "ca",
            "degraded",
            f"the CA in {folder} has no name constraints",
            "an attacker who has its key can impersonate every site to hosts and VMs that trust it",
            "give the CA of STEAD_CA critical name constraints"
            if settings.ca
            else "start the server: it renews the certificate with the same key; then run `stead trust`",
        )
    if trusted is not None and trusted.strip() != found.certificate.strip():
        return Finding(
            "ca",
            "degraded",
            "this host trusts another certificate of the CA than the current one",
            "names that were added are refused, or names of others are accepted",
            "run `stead trust`",
        )
    return Finding(
        "ca", "ok", f"signs for its own domains only; {'' if trusted else 'not '}trusted by this host"
    )


def previews(settings: Settings) -> Finding:
    """Whether pages of accounts share a site with the API."""
    api, zone = settings.domain, settings.public_zone
    if api is None or zone is None:
        return Finding("previews", "ok", "not public: STEAD_DOMAIN is not set")
    # Without the public suffix list: domains of one registered domain mostly end with the same two labels.
    if api.split(".")[-2:] != zone.split(".")[-2:]:
        return Finding("previews", "ok", f"{zone} is another domain than that of the API, {api}")
    return Finding(
        "previews",
        "degraded",
        f"previews are names below {zone}, on the same site as the API at {api}",
        "pages of one account can set cookies for all names of the domain, which are one site for browsers",
        "set STEAD_PREVIEW_DOMAIN to a domain that is used for nothing else",
    )


async def ssh_gateway(settings: Settings) -> Finding:
    """The SSH gateway of the running server; without a server, whether its port is free."""
    if settings.ssh_address is None:
        return Finding("ssh", "ok", "no gateway: STEAD_SSH_LISTEN is empty")
    host, port = settings.ssh_address
    state = await in_thread(_ssh_state, settings)
    if state is None and (error := _bind_error(host, port)) is not None:
        return Finding(
            "ssh",
            "degraded",
            f"no server answers, and {host}:{port} cannot be used: {error}",
            "the server starts without its SSH gateway",
            "stop the program that has the port, or set STEAD_SSH_LISTEN to another address",
        )
    if state == "failed":
        return Finding(
            "ssh",
            "degraded",
            f"the gateway of the running server has failed on {host}:{port}; the server's log says why",
            "VMs cannot be reached with ssh until the server's next attempt succeeds",
            "stop the program that has the port, or set STEAD_SSH_LISTEN to another address",
        )
    return Finding("ssh", "ok", f"{state or 'no server is running; free'}: {host}:{port}")


def _ssh_state(settings: Settings) -> str | None:
    """The state of the SSH gateway as the running server reports it; None without a server."""
    connection = http.client.HTTPConnection(*settings.address, timeout=_ANSWER_TIMEOUT)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            answer = json.loads(connection.getresponse().read(_MAX_ANSWER))
        except (OSError, http.client.HTTPException, ValueError):
            return None
    return str(answer["ssh"]) if isinstance(answer, dict) and "ssh" in answer else None


def _bind_error(host: str, port: int) -> str | None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


def base_image(image: BaseImage | None) -> Finding:
    if image is None:
        return Finding(
            "image",
            "degraded",
            "not built yet",
            "the first VM waits until it is built (a few minutes)",
            "run `stead prepare`",
        )
    return Finding("image", "ok", f"{image.folder} ({image.disk.stat().st_blocks * 512 / 1e9:.2f} GB)")


def _any_kernel(settings: Settings) -> Path | None:
    """A kernel for the KVM probe when the image is not built: another image's or the host's own."""
    for folder, pattern in ((settings.cache_folder / "images", "[!.]*/kernel"), (Path("/boot"), "vmlinuz*")):
        readable = [path for path in folder.glob(pattern) if os.access(path, os.R_OK)]
        if readable:
            return max(readable, key=lambda path: path.stat().st_mtime)
    return None
