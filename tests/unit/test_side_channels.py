"""What `stead doctor` says about hardware that VMs of different accounts share."""

from pathlib import Path

import pytest

from stead.host.examination import Finding
from stead.host.side_channels import isolation, ksm, side_channels, smt, swap, vulnerabilities
from stead.settings import Accelerator, Settings

_HEAD = "Filename\tType\tSize\tUsed\tPriority\n"


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


@pytest.mark.parametrize(("active", "status"), [("1", "degraded"), ("0", "ok"), (None, "ok")])
def test_smt(tmp_path: Path, active: str | None, status: str) -> None:
    if active is not None:
        put(tmp_path / "devices/system/cpu/smt/active", active)
    finding = smt(tmp_path)
    assert finding.status == status
    assert ("nosmt" in finding.remedy) == (status == "degraded")


@pytest.mark.parametrize(("run", "status"), [("1", "degraded"), ("0", "ok"), ("2", "ok"), (None, "ok")])
def test_ksm(tmp_path: Path, run: str | None, status: str) -> None:
    if run is not None:
        put(tmp_path / "kernel/mm/ksm/run", run)
    assert ksm(tmp_path).status == status


def test_swap(tmp_path: Path) -> None:
    swaps = tmp_path / "swaps"
    assert swap(tmp_path / "none", tmp_path).status == "ok"
    swaps.write_text(_HEAD)
    assert swap(swaps, tmp_path).status == "ok"
    put(tmp_path / "class/block/dm-0/dm/uuid", "CRYPT-PLAIN-swap")
    put(tmp_path / "class/block/dm-1/dm/uuid", "LVM-abc")
    swaps.write_text(f"{_HEAD}/dev/zram0 partition 1 0 100\n/dev/dm-0 partition 1 0 -2\n")
    assert swap(swaps, tmp_path).status == "ok"
    swaps.write_text(
        f"{_HEAD}/dev/dm-0 partition 1 0 -2\n/dev/dm-1 partition 1 0 -2\n/swapfile file 1 0 -3\n"
    )
    finding = swap(swaps, tmp_path)
    assert finding.status == "degraded" and "/dev/dm-1, /swapfile" in finding.what
    assert "/dev/dm-0" not in finding.what


def test_cpu_vulnerabilities(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/cpu/vulnerabilities"
    assert vulnerabilities(tmp_path).status == "ok"
    put(folder / "meltdown", "Not affected")
    put(folder / "spectre_v1", "Mitigation: barriers")
    assert vulnerabilities(tmp_path).status == "ok"
    put(folder / "mds", "Mitigation: Clear CPU buffers; SMT vulnerable")
    put(folder / "retbleed", "Vulnerable: no microcode")
    finding = vulnerabilities(tmp_path)
    assert finding.status == "degraded"
    assert finding.what == "not mitigated: retbleed; with SMT: mds"
    assert "microcode" in finding.remedy


def test_installation_of_people_who_trust_each_other_is_not_warned(tmp_path: Path) -> None:
    put(tmp_path / "devices/system/cpu/smt/active", "1")
    put(tmp_path / "kernel/mm/ksm/run", "1")
    found = {each.name: each for each in side_channels(Settings(), tmp_path, tmp_path / "swaps")}
    assert found["smt"].status == found["ksm"].status == "degraded"
    for each in found.values():
        assert each.status == "ok" or (each.cost and each.remedy)
    trusted = side_channels(Settings(trusted_tenants=True), tmp_path, tmp_path / "swaps")
    assert {each.status for each in trusted} == {"ok"}


@pytest.mark.parametrize(
    ("accelerator", "trusted", "status"),
    [("auto", False, "degraded"), ("auto", True, "ok"), ("tcg", False, "ok")],
)
def test_emulation_isolates_no_vms(accelerator: Accelerator, trusted: bool, status: str) -> None:
    emulated = Finding("kvm", "degraded", "/dev/kvm is missing")
    settings = Settings(accelerator=accelerator, trusted_tenants=trusted)
    finding = isolation(settings, emulated)
    assert finding.status == status and "emulation" in finding.what
    assert isolation(settings, Finding("kvm", "ok", "KVM works")).status == "ok"
