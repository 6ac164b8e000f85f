"""Which accelerator is chosen, and that KVM is believed only when it booted a kernel."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from stead.errors import HostError
from stead.host import accelerator
from stead.host.accelerator import (
    AcceleratorChoice,
    choose_accelerator,
    machine_type,
    newest_machine_type,
    probe,
    qemu_version,
)
from stead.host.commands import run
from stead.host.image import BaseImage
from stead.settings import Settings
from support.installations import another_installation
from support.internals import inside


async def test_the_probe_recognises_a_kernel_that_runs(image: BaseImage) -> None:
    """The same probe with emulation instead of KVM, so that its good end is tested on every host."""
    assert await probe(image.kernel, "tcg", "max", deadline=60) is None


async def test_the_probe_recognises_a_kernel_that_does_not_end(image: BaseImage, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel"
    kernel.symlink_to(image.kernel)
    problem = await probe(kernel, "tcg", "max", deadline=0.3)
    assert problem and "did not boot in it within 0.3 s" in problem
    assert str(kernel) not in (await run("ps", "axwwo", "args")).stdout.decode()


async def test_the_probe_reports_what_qemu_says(tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(b"no kernel")
    problem = await probe(tmp_path / "kernel", "tcg", "max", deadline=10)
    assert problem and problem.startswith("QEMU does not start with tcg (")


@dataclass
class Probes:
    """Stands in for the probe of KVM, on hosts with and without KVM."""

    settings: Settings
    kernel: Path
    problem: str | None = None
    number: int = 0

    async def probe(self, _: Path) -> str | None:
        self.number += 1
        return self.problem

    async def choice(self, **options: bool) -> AcceleratorChoice:
        return await choose_accelerator(self.settings, self.kernel, **options)


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probes:
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"a kernel")
    probes = Probes(Settings(cache=tmp_path, accelerator="auto"), kernel)
    monkeypatch.setattr(accelerator, "_DEVICE", Path("/dev/null"))
    monkeypatch.setattr(accelerator, "probe_kvm", probes.probe)
    return probes


async def test_the_choice_is_that_of_the_probe_and_is_remembered(probes: Probes) -> None:
    for _ in range(2):
        assert await probes.choice() == AcceleratorChoice("kvm", "KVM works (a kernel booted in it)")
    assert probes.number == 1


async def test_a_failed_probe_means_emulation_until_it_is_repeated(probes: Probes) -> None:
    probes.problem = "no kernel boots"
    cost = "VMs run in emulation (TCG), about 15 to 30 times slower"
    for _ in range(2):
        assert await probes.choice() == AcceleratorChoice("tcg", "no kernel boots", cost)
    with pytest.raises(HostError, match="STEAD_ACCELERATOR is kvm, but no kernel boots"):
        await choose_accelerator(probes.settings.replace(accelerator="kvm"), probes.kernel)
    assert probes.number == 1
    probes.problem = None
    assert (await probes.choice(again=True)).name == "kvm"
    assert probes.number == 2


async def test_a_result_of_another_boot_is_not_believed(probes: Probes) -> None:
    await probes.choice()
    memory = probes.settings.cache_folder / "kvm-probe.json"
    memory.write_text(json.dumps({**json.loads(memory.read_text()), "boot_id": "another"}))
    await probes.choice()
    assert probes.number == 2
    memory.write_text("{")
    await probes.choice()
    assert probes.number == 3


async def test_no_device_and_no_kernel_mean_emulation(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = settings.replace(cache=tmp_path, accelerator="auto")
    monkeypatch.setattr(accelerator, "_DEVICE", tmp_path / "kvm")
    choice = await choose_accelerator(mine, None)
    assert choice.name == "tcg" and choice.reason == f"{tmp_path / 'kvm'} is missing"
    monkeypatch.setattr(accelerator, "_DEVICE", Path("/dev/null"))
    choice = await choose_accelerator(mine, None)
    assert choice.name == "tcg" and "not tested yet" in choice.reason


async def test_the_machine_type_is_the_newest_versioned_one() -> None:
    listing = "pc-q35-7.2 Standard PC\npc-q35-10.0 Standard PC\npc-q35-9.2.1 x\npc-i440fx-11.0 x\nq35 alias\n"
    assert newest_machine_type(listing, (10, 0, 2)) == "pc-q35-10.0"
    assert newest_machine_type(listing, (8, 0, 0)) == "pc-q35-7.2"
    with pytest.raises(HostError, match="no q35"):
        newest_machine_type("microvm\n", (8, 0, 0))
    binary = shutil.which("qemu-system-x86_64")
    assert binary
    text = (await run(binary, "--version")).stdout.decode()
    version = await qemu_version()
    assert "version " + ".".join(map(str, version)) in text
    listed = (await run(binary, "-machine", "help")).stdout.decode()
    assert f"\n{await machine_type(version)} " in listed


async def test_emulation_is_said_once_and_with_its_cost(
    settings: Settings, image: BaseImage, caplog: pytest.LogCaptureFixture
) -> None:
    async with another_installation(settings) as installation:
        machines = installation.machines
        platform = await inside(machines).host.platform()
        await inside(machines).host.platform()
    said = [record.getMessage() for record in caplog.records if record.name == "stead.host"]
    if platform.accelerator == "kvm":
        assert said == []
    else:
        cost, isolation = said
        assert "VMs run in emulation (TCG), about 15 to 30 times slower" in cost
        assert "QEMU does not promise to isolate VMs in emulation (TCG)" in isolation
