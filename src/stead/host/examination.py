"""Single checks of the host. Each tries what it reports on, changes nothing, and says what a lack costs."""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stead.errors import HostError
from stead.host.accelerator import MINIMUM_QEMU, choose_accelerator, qemu_version
from stead.host.addresses import resolvers
from stead.host.cgroups import detect
from stead.host.commands import run
from stead.host.files import nearest_existing
from stead.host.image import BaseImage
from stead.settings import Settings

Status = Literal["ok", "degraded", "missing"]

_GIB = 1 << 30
_CAPABILITIES = {
    0: "CAP_CHOWN",
    1: "CAP_DAC_OVERRIDE",
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    12: "CAP_NET_ADMIN",
    18: "CAP_SYS_CHROOT",
    19: "CAP_SYS_PTRACE",
    21: "CAP_SYS_ADMIN",
}
_TOOLS = {
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "mke2fs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
}
_USERFAULTFD = 323
_FICLONE = 0x40049409


@dataclass(frozen=True)
class Finding:
    """One thing about this host: what is so, what that costs, and what to do about it."""

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
            "architecture", "missing", f"the CPU is {machine}", "no machine can run", "use an x86_64 host"
        )
    return Finding("architecture", "ok", f"x86_64, {os.cpu_count()} CPUs")


def privileges() -> Finding:
    if os.geteuid() != 0:
        return Finding("privileges", "missing", "not root", "no machine can run", "run as root")
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    lacking = [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        return Finding(
            "privileges",
            "missing",
            f"root without {', '.join(lacking)}",
            "no machine can run",
            "run outside of the container, or give it these capabilities",
        )
    return Finding("privileges", "ok", "root")


async def kvm(settings: Settings, image: BaseImage | None) -> Finding:
    kernel = image.kernel if image else _any_kernel(settings)
    try:
        choice = await choose_accelerator(settings, kernel, again=True)
    except HostError as error:
        return Finding("kvm", "missing", str(error), "no machine can run", "set STEAD_ACCELERATOR=auto")
    if choice.name == "kvm":
        return Finding("kvm", "ok", choice.reason)
    what, _, cost = choice.reason.partition(": ")
    if not Path("/dev/kvm").exists():
        remedy = "use a host with virtualisation switched on, or a cloud machine that allows nested machines"
    elif kernel is None:
        remedy = "build the image first, then ask again"
    elif settings.accelerator == "tcg":
        remedy = "set STEAD_ACCELERATOR=auto"
    else:
        remedy = "use a host whose KVM can boot a stock kernel"
    return Finding("kvm", "degraded", what, cost, remedy)


async def qemu() -> Finding:
    remedy = "apt-get install qemu-system-x86"
    try:
        version = await qemu_version()
    except HostError as error:
        return Finding("qemu", "missing", str(error), "no machine can run", remedy)
    text = ".".join(map(str, version))
    if version < MINIMUM_QEMU:
        oldest = ".".join(map(str, MINIMUM_QEMU[:2]))
        return Finding("qemu", "missing", f"{text} is older than {oldest}", "no machine can run", remedy)
    return Finding("qemu", "ok", text)


def tools() -> Iterator[Finding]:
    for tool, package in _TOOLS.items():
        path = shutil.which(tool)
        if path:
            yield Finding(tool, "ok", path)
        else:
            cost = (
                "the image cannot be built"
                if tool in {"mmdebstrap", "mke2fs", "e2fsck"}
                else "no machine can run"
            )
            yield Finding(tool, "missing", "not installed", cost, f"apt-get install {package}")
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    if not keyring.exists():
        yield Finding(
            "debian keys",
            "missing",
            f"{keyring} is not there",
            "the image cannot be built",
            "apt-get install debian-archive-keyring",
        )


def tun() -> Finding:
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return Finding(
            "tun", "missing", f"/dev/net/tun: {error.strerror}", "machines have no network", "modprobe tun"
        )
    return Finding("tun", "ok", "/dev/net/tun opens")


async def namespaces() -> Finding:
    """A veth pair is made in a namespace that ends with the command."""
    try:
        await run("unshare", "--net", "ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    except HostError as error:
        return Finding(
            "namespaces",
            "missing",
            str(error),
            "machines have no network",
            "modprobe veth; check the container's limits",
        )
    return Finding("namespaces", "ok", "network namespaces and veth work")


async def nftables() -> Finding:
    try:
        await run("unshare", "--net", "nft", "-f", "-", stdin=b"add table inet probe\n")
    except HostError as error:
        return Finding("nftables", "missing", str(error), "machines have no network", "modprobe nf_tables")
    return Finding("nftables", "ok", "rules can be set")


def overcommit() -> Finding:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        return Finding(
            "overcommit",
            "degraded",
            "vm.overcommit_memory is 2",
            "each machine needs its whole memory promised at once",
            "sysctl vm.overcommit_memory=0",
        )
    return Finding("overcommit", "ok", "memory is taken as it is used")


def userfaultfd() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_USERFAULTFD, os.O_CLOEXEC)
    if descriptor < 0:
        what = f"userfaultfd: {os.strerror(ctypes.get_errno())}"
        return Finding(
            "userfaultfd", "degraded", what, "memory cannot be loaded on demand", "use a stock kernel"
        )
    os.close(descriptor)
    return Finding("userfaultfd", "ok", "works")


def pagemap() -> Finding:
    with mmap.mmap(-1, mmap.PAGESIZE) as page, contextlib.suppress(OSError):
        page[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            file.seek(address // mmap.PAGESIZE * 8)
            if struct.unpack("<Q", file.read(8))[0] >> 63:
                return Finding("pagemap", "ok", "written pages can be told from untouched ones")
    return Finding(
        "pagemap",
        "missing",
        "/proc/self/pagemap tells nothing",
        "no machine can be forked",
        "use a stock kernel",
    )


def seccomp() -> Finding:
    if "Seccomp:" not in Path("/proc/self/status").read_text():
        return Finding("seccomp", "degraded", "absent", "QEMU runs without its sandbox", "use a stock kernel")
    return Finding("seccomp", "ok", "the kernel has it")


def memory(settings: Settings) -> Finding:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
    size = settings.default_size.memory_mib
    available = kib["MemAvailable"] // 1024
    full = available // size
    what = (
        f"{available / 1024:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB available, room for {full} machines"
        f" that use all of their {size} MiB"
    )
    if full < 1:
        return Finding(
            "memory", "degraded", what, "a busy machine may be ended", "set a smaller STEAD_DEFAULT_SIZE"
        )
    return Finding("memory", "ok", what)


def disk(settings: Settings) -> Finding:
    folder = nearest_existing(settings.data)
    free = shutil.disk_usage(folder).free
    what = f"{free / _GIB:.1f} GiB free at {folder}"
    if free < 4 * _GIB:
        return Finding("disk", "missing", what, "the image cannot be built", "free at least 4 GiB")
    return Finding("disk", "ok", what)


def reflink(settings: Settings) -> Finding:
    folder = nearest_existing(settings.data)
    slow = "memory is copied in full at a fork: about 0.2 s for each GiB"
    remedy = "keep the data folder on XFS or btrfs"
    try:
        with tempfile.TemporaryFile(dir=folder) as one, tempfile.TemporaryFile(dir=folder) as two:
            one.write(bytes(4096))
            one.flush()
            fcntl.ioctl(two.fileno(), _FICLONE, one.fileno())
    except OSError as error:
        known = error.errno in {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV}
        what = f"none at {folder}" if known else f"{folder}: {error.strerror}"
        return Finding("reflink", "degraded", what, slow, remedy)
    return Finding("reflink", "ok", f"files at {folder} are copied by reference")


def cgroups(root: Path = Path("/sys/fs/cgroup")) -> Finding:
    found = detect(root)
    remedy = "boot the host with cgroup v2, and outside of a container"
    usable = [
        name
        for name in found.controllers
        # A container may show controllers that it does not let us use.
        if os.access(root if found.version == 2 else root / name, os.W_OK)
    ]
    lacking = [name for name in ("memory", "pids", "cpu") if name not in usable]
    if lacking:
        what = f"version {found.version} without {', '.join(lacking)}" if found.version else "none"
        return Finding("cgroups", "degraded", what, f"machines have no limit of {', '.join(lacking)}", remedy)
    what = f"version {found.version} with {', '.join(usable)}"
    if found.version == 1:
        return Finding("cgroups", "degraded", what, "the swap that a machine takes is not limited", remedy)
    return Finding("cgroups", "ok", what)


def resolver() -> Finding:
    servers = resolvers()
    if servers:
        return Finding("dns", "ok", f"machines ask {servers[0]}")
    return Finding(
        "dns",
        "degraded",
        "no IPv4 name server that machines could reach",
        "names do not resolve inside machines",
        "name one that is not on loopback in /etc/resolv.conf",
    )


async def forwarding() -> Finding:
    """Docker and some firewalls drop every forwarded packet that they do not know."""
    try:
        completed = await run("nft", "-j", "list", "chains")
        chains = drop_chains(json.loads(completed.stdout))
        if shutil.which("iptables-legacy"):
            legacy = await run("iptables-legacy", "-S", "FORWARD")
            if b"-P FORWARD DROP" in legacy.stdout:
                chains.append("iptables-legacy FORWARD")
    except (HostError, ValueError) as error:
        what = f"the host's firewall cannot be read: {error}"
        return Finding("forwarding", "degraded", what, "not known", "run as root with nftables installed")
    if chains:
        return Finding(
            "forwarding",
            "degraded",
            f"the host drops forwarded packets in {', '.join(chains)}",
            "machines may not reach the internet",
            "accept packets from and to Stead's link there (with Docker: in its chain DOCKER-USER)",
        )
    return Finding("forwarding", "ok", "no chain of the host drops forwarded packets")


def drop_chains(ruleset: dict[str, Any]) -> list[str]:
    """Chains that end forwarding for what they do not allow, from nft's JSON."""
    found = (entry["chain"] for entry in ruleset.get("nftables", []) if "chain" in entry)
    return [
        f"{chain['family']} {chain['table']} {chain['name']}"
        for chain in found
        if chain.get("hook") == "forward" and chain.get("policy") == "drop"
        if not chain["table"].startswith("stead")
    ]


def base_image(image: BaseImage | None) -> Finding:
    if image is None:
        return Finding(
            "image",
            "degraded",
            "not built yet",
            "the first machine waits for it, about a minute",
            "run `stead prepare`",
        )
    return Finding("image", "ok", f"{image.folder} ({image.disk.stat().st_blocks * 512 / 1e9:.2f} GB)")


def _any_kernel(settings: Settings) -> Path | None:
    """Another image's kernel or the host's own proves KVM as well."""
    for folder, pattern in ((settings.cache_folder / "images", "[!.]*/kernel"), (Path("/boot"), "vmlinuz*")):
        readable = [path for path in folder.glob(pattern) if os.access(path, os.R_OK)]
        if readable:
            return max(readable, key=lambda path: path.stat().st_mtime)
    return None
