"""The checks of `stead doctor` for what one tenant can learn of another through shared hardware.

They matter where accounts belong to people who do not trust each other: `trusted_tenants` says that all do.
"""

from collections.abc import Iterator
from pathlib import Path

from stead.host.examination import Finding
from stead.settings import Settings

_SYSFS = Path("/sys")
_SWAPS = Path("/proc/swaps")
_TRUSTED = "accounts trust each other (STEAD_TRUSTED_TENANTS)"
_TRUST = "if all accounts trust each other, set STEAD_TRUSTED_TENANTS=yes"


def isolation(settings: Settings, kvm: Finding) -> Finding:
    """Whether VMs are a security boundary at all: QEMU's emulation is none."""
    if kvm.status == "ok":
        return Finding("isolation", "ok", "VMs are isolated by KVM")
    what = "VMs run in emulation (TCG), which QEMU does not promise to isolate them by"
    if settings.accepts_emulation:
        return Finding("isolation", "ok", f"{what}; the settings accept that")
    return Finding(
        "isolation",
        "degraded",
        what,
        "a program that breaks out of its VM is confined by QEMU's own user and seccomp alone",
        f"use a host with KVM; {_TRUST}",
    )


def side_channels(settings: Settings, sysfs: Path = _SYSFS, swaps: Path = _SWAPS) -> Iterator[Finding]:
    """What VMs of different accounts share."""
    for finding in (smt(sysfs), ksm(sysfs), swap(swaps, sysfs), vulnerabilities(sysfs)):
        if finding.status != "ok" and settings.trusted_tenants:
            yield Finding(finding.name, "ok", f"{finding.what}; {_TRUSTED}")
        else:
            yield finding
    yield _template_memory(settings)


def smt(sysfs: Path = _SYSFS) -> Finding:
    if _content(sysfs / "devices/system/cpu/smt/active") != "1":
        return Finding("smt", "ok", "no core runs two threads at the same time")
    return Finding(
        "smt",
        "degraded",
        "simultaneous multithreading is on",
        "two VMs that run on the two threads of a core can observe each other through its caches and buffers",
        f"boot with nosmt, or `echo off > {sysfs}/devices/system/cpu/smt/control`; {_TRUST}",
    )


def ksm(sysfs: Path = _SYSFS) -> Finding:
    run = sysfs / "kernel/mm/ksm/run"
    if _content(run) != "1":
        return Finding("ksm", "ok", "the kernel does not merge equal pages of VMs")
    return Finding(
        "ksm",
        "degraded",
        "the kernel merges equal pages (KSM), those of VMs too",
        "a VM finds out by the time of a write whether another one has a page with the same content",
        f"`echo 2 > {run}` and disable ksmtuned; {_TRUST}",
    )


def swap(swaps: Path = _SWAPS, sysfs: Path = _SYSFS) -> Finding:
    """Swap in memory (zram) and on encrypted volumes keeps nothing that can be read later."""
    lines = (_content(swaps) or "").splitlines()[1:]
    plain = [name for name in (line.split()[0] for line in lines if line) if not _is_private(name, sysfs)]
    if not plain:
        return Finding("swap", "ok", "memory of VMs is not written to a disk in clear")
    return Finding(
        "swap",
        "degraded",
        f"unencrypted swap on {', '.join(plain)}",
        "memory of VMs, with their secrets, stays on that disk after they are deleted",
        "encrypt the swap space (/etc/crypttab with the option swap), use zram, or `swapoff -a`",
    )


def vulnerabilities(sysfs: Path = _SYSFS) -> Finding:
    folder = sysfs / "devices/system/cpu/vulnerabilities"
    found = {path.name: _content(path) or "" for path in sorted(folder.glob("*"))}
    if not found:
        return Finding("cpu vulnerabilities", "ok", "the kernel does not list any")
    open_ones = [name for name, text in found.items() if text.startswith(("Vulnerable", "Unknown"))]
    with_smt = [name for name, text in found.items() if "SMT vulnerable" in text]
    if not open_ones and not with_smt:
        return Finding("cpu vulnerabilities", "ok", f"{len(found)} known, none of them open on this host")
    parts = [", ".join(open_ones), f"with SMT: {', '.join(with_smt)}" if with_smt else ""]
    return Finding(
        "cpu vulnerabilities",
        "degraded",
        f"not mitigated: {'; '.join(part for part in parts if part)}",
        "a VM may read memory of the host or of other VMs by speculative execution",
        f"install the CPU's microcode (intel-microcode, amd64-microcode) and kernel updates, boot without"
        f" mitigations=off, and look into {folder}; {_TRUST}",
    )


def _template_memory(settings: Settings) -> Finding:
    if settings.share_template_memory:
        what = (
            "VMs share unmodified pages of their template; STEAD_SHARE_TEMPLATE_MEMORY=no gives each a copy"
        )
    else:
        what = "each VM has its own copy (STEAD_SHARE_TEMPLATE_MEMORY=no)"
    return Finding("template memory", "ok", what)


def _is_private(device: str, sysfs: Path) -> bool:
    name = Path(device).resolve().name
    uuid = _content(sysfs / "class/block" / name / "dm/uuid") or ""
    return name.startswith("zram") or uuid.startswith("CRYPT-")


def _content(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
