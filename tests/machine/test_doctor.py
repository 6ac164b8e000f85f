"""`stead doctor` tells the truth about the host it runs on."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from stead.host import accelerator, examination
from stead.host.accelerator import probe_kvm
from stead.host.doctor import Finding, examine, healthy, render, to_json
from stead.host.image import BaseImage
from stead.settings import Settings


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


async def test_doctor_reports_this_host(image: BaseImage, settings: Settings, tmp_path: Path) -> None:
    """KVM by a probe of our own, the rest by what this test host is known to need for every other test."""
    findings = await examine(settings)
    found = by_name(findings)
    assert len(found) == len(findings)
    assert healthy(findings)
    for finding in findings:
        assert finding.what
        assert (finding.status == "ok") or (finding.cost and finding.remedy)
    if settings.accelerator == "auto":
        works = os.access("/dev/kvm", os.R_OK | os.W_OK) and await probe_kvm(image.kernel) is None
        assert found["kvm"].status == ("ok" if works else "degraded")
    assert found["image"].status == "ok" and str(image.folder) in found["image"].what
    assert found["mke2fs"].what == shutil.which("mke2fs")


async def test_a_missing_tool_names_its_package(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `ip` and `nft` can be found on PATH."""
    for tool in ("ip", "nft"):
        path = shutil.which(tool)
        assert path
        (tmp_path / tool).symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_name([await examination.qemu(), *examination.tools()])
    assert found["qemu"].status == "missing" and "qemu-system-x86" in found["qemu"].remedy
    assert found["mmdebstrap"].status == "missing"
    assert found["mmdebstrap"].remedy == "apt-get install mmdebstrap"
    assert found["git"].status == "degraded" and found["git"].remedy == "apt-get install git"
    assert found["nft"].status == found["ip"].status == "ok"
    assert not healthy(list(found.values()))


async def test_the_image_and_kvm_before_the_first_build(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_any_kernel", lambda _: None)
    mine = settings.replace(cache=tmp_path, accelerator="auto")
    finding = await examination.kvm(mine, None)
    assert finding.status == "degraded"
    if os.access("/dev/kvm", os.R_OK | os.W_OK):
        assert "not tested yet" in finding.what
    assert examination.base_image(None).status == "degraded"


async def test_kvm_reports_the_whole_reason_and_the_cost(
    settings: Settings, image: BaseImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU's own messages hold colons, so that no part of the reason can be cut at one."""
    words = "QEMU does not start with kvm (qemu: kvm.c:3183: set_msrs: Assertion `a: b' failed.)"

    async def fails(_: Path) -> str:
        return words

    monkeypatch.setattr(accelerator, "_DEVICE", Path("/dev/null"))
    monkeypatch.setattr(accelerator, "probe_kvm", fails)
    finding = await examination.kvm(settings.replace(cache=tmp_path, accelerator="auto"), image)
    assert (finding.status, finding.what) == ("degraded", words)
    assert finding.cost == "VMs run in emulation (TCG), about 15 to 30 times slower"


async def test_only_features_that_are_used_are_reported(settings: Settings) -> None:
    """Forks share memory through page deltas: neither reflinks nor userfaultfd are used."""
    assert not {"reflink", "userfaultfd"} & {finding.name for finding in await examine(settings)}


def test_json_has_a_fixed_shape() -> None:
    findings = [Finding("one", "ok", "fine"), Finding("two", "missing", "gone", "all", "install it")]
    document = json.loads(to_json(findings))
    assert document["healthy"] is False
    assert document["findings"][1] == {
        "name": "two",
        "status": "missing",
        "what": "gone",
        "cost": "all",
        "remedy": "install it",
    }


def test_output_shows_effect_and_fix() -> None:
    output = io.StringIO()
    render([Finding("two", "missing", "gone [x]", "all of it", "install it")], Console(file=output, width=80))
    text = output.getvalue()
    for words in ("missing", "two", "gone [x]", "effect: all of it", "fix: install it"):
        assert words in text


def test_forward_chains_with_policy_drop_are_reported() -> None:
    """Docker's chain counts; Stead's own and those of other hooks do not."""
    chain = {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}
    own = {**chain, "table": "stead-abc123"}
    other = {**chain, "name": "INPUT", "hook": "input"}
    open_ = {**chain, "name": "open", "policy": "accept"}
    ruleset = {"nftables": [{"metainfo": {}}, *({"chain": one} for one in (chain, own, other, open_))]}
    assert examination.drop_chains(ruleset) == ["ip filter FORWARD"]


def test_cgroup_controllers_that_are_read_only_do_not_count(tmp_path: Path) -> None:
    assert examination.cgroups(tmp_path).what == "none"
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert examination.cgroups(tmp_path).status == "ok"
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    assert examination.cgroups(tmp_path).what == "version 2 without memory"
