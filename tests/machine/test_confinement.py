"""A guest that broke out of its QEMU would find itself with nothing: no rights, no files, no network."""

import contextlib
import fcntl
import mmap
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stead.host import cgroups
from stead.host.vm import running_machines
from stead.machines import Machine, Machines
from stead.settings import Settings
from support.installations import local_template
from support.internals import inside


def qemu_of(settings: Settings, machine: Machine) -> Path:
    """The folder in /proc of a machine's QEMU."""
    pids = [pid for pid, name in running_machines(settings).items() if name == machine.id]
    assert len(pids) == 1
    return Path("/proc") / str(pids[0])


@pytest.fixture(scope="module")
def process(settings: Settings, shared: Machine) -> Path:
    return qemu_of(settings, shared)


@pytest_asyncio.fixture(scope="module")
async def top(machines: Machines, shared: Machine) -> str:
    """The name of the file with the disk layer that is the machine's own to write."""
    row = await inside(machines).store.get(shared.id)
    assert row is not None
    return f"{row.top}.qcow2"


def status(task: Path) -> dict[str, list[str]]:
    lines = (task / "status").read_text().splitlines()
    return {name: value.split() for name, value in (line.split(":", 1) for line in lines)}


def user_of(process: Path) -> int:
    return int(status(process)["Uid"][0])


async def test_every_thread_is_an_unprivileged_user_of_its_own(settings: Settings, process: Path) -> None:
    user = user_of(process)
    assert user >= settings.uid_base
    threads = list((process / "task").iterdir())
    assert len(threads) > 2, "a thread for each virtual CPU and the main loop"
    for thread in threads:
        facts = status(thread)
        assert facts["Uid"] == facts["Gid"] == [str(user)] * 4, thread
        assert set(facts["Groups"]) <= {str(user)}, thread
        assert {int(facts[name][0], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}, thread


async def test_every_thread_is_filtered_and_can_gain_nothing(process: Path) -> None:
    for thread in (process / "task").iterdir():
        facts = status(thread)
        assert (facts["Seccomp"], facts["NoNewPrivs"]) == (["2"], ["1"]), thread


async def test_two_machines_are_two_users(settings: Settings, shared: Machine, machine: Machine) -> None:
    folders = [settings.data / "machines" / each.id for each in (shared, machine)]
    users = [user_of(qemu_of(settings, each)) for each in (shared, machine)]
    assert users[0] != users[1]
    assert [path.stat().st_uid for path in folders] == [0, 0], "their disks are theirs by descriptors only"
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700, 0o700]


async def test_its_world_has_programs_and_nothing_else(process: Path) -> None:
    root = process / "root"
    found = {path.name for path in root.iterdir() if not path.is_symlink()}
    programs = {"usr", "lib", "lib32", "lib64", "libx32", "bin", "sbin", "nix", "gnu"}
    assert found <= {*programs, "etc", "dev", "proc"}
    assert {path.name for path in (root / "etc").iterdir()} <= {"ld.so.cache"}
    assert {path.name for path in (root / "dev").iterdir()} <= {"null", "urandom", "kvm"}
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    assert mounts
    for fields in mounts:
        options = set(fields[5].split(","))
        assert {"ro", "nosuid"} <= options, fields
    environment = (process / "environ").read_bytes().split(b"\0")
    assert {line.partition(b"=")[0] for line in environment if line} <= {b"PATH", b"LC_ALL"}


async def test_it_has_no_network(process: Path) -> None:
    assert (process / "ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    lines = (process / "net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in lines] == ["lo"]
    assert len((process / "net/route").read_text().splitlines()) <= 1, "a heading and no route"


async def test_it_has_a_group_with_limits(settings: Settings, shared: Machine, process: Path) -> None:
    hierarchy = cgroups.detect()
    if "memory" not in hierarchy.controllers:
        pytest.skip("this host has no memory control groups")
    group = f"/stead-{settings.instance}/{shared.id}"
    joined = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
    inside = {name for _, names, path in joined if path.endswith(group) for name in names.split(",")}
    if hierarchy.version == 2:
        assert inside == {""}
        limit = Path(f"/sys/fs/cgroup{group}/memory.max")
    else:
        assert set(hierarchy.controllers) <= inside
        limit = Path(f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes")
    memory = (await shared.info()).size.memory_mib
    assert memory << 20 < int(limit.read_text()) <= (memory + 1024) << 20


async def test_each_of_its_vcpus_counts_as_one_process_when_cpus_are_short(
    settings: Settings, shared: Machine
) -> None:
    hierarchy = cgroups.detect()
    if "cpu" not in hierarchy.controllers:
        pytest.skip("this host has no CPU control groups")
    root, name, one = (
        ("/sys/fs/cgroup", "cpu.weight", 100)
        if hierarchy.version == 2
        else ("/sys/fs/cgroup/cpu", "cpu.shares", 1024)
    )
    base = Path(root) / f"stead-{settings.instance}"
    vcpus = (await shared.info()).size.vcpus
    assert int((base / shared.id / name).read_text()) == one * vcpus
    assert int((base / name).read_text()) == min(
        one * (os.cpu_count() or 1), 10_000 if one == 100 else 1 << 18
    )


def test_a_group_is_made_in_one_that_an_administrator_made_idle(settings: Settings, tmp_path: Path) -> None:
    hierarchy = cgroups.detect()
    if "cpu" not in hierarchy.controllers:
        pytest.skip("this host has no CPU control groups")
    other = settings.replace(data=tmp_path)
    base = Path("/sys/fs/cgroup" if hierarchy.version == 2 else "/sys/fs/cgroup/cpu")
    base /= f"stead-{other.instance}"
    groups = cgroups.ControlGroups(other)
    try:
        with contextlib.ExitStack() as opened:
            groups.prepare("first", other.default_size, opened)
            (base / "cpu.idle").write_text("1")
            groups.prepare("second", other.default_size, opened)
        assert (base / "second" / "cgroup.procs").exists()
    finally:
        groups.release("first")
        groups.release("second")
        groups.remove()


async def test_its_memory_never_lands_in_a_core_file(process: Path) -> None:
    lines = (process / "limits").read_text().splitlines()
    core = next(line for line in lines if line.startswith("Max core file size"))
    assert core.split()[4:6] == ["0", "0"]


async def test_a_qemu_that_is_quicker_than_stead_has_its_limits_too(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host, QEMU has given up root before Stead gets to run again."""
    spawn = subprocess.Popen

    def spawn_and_lag(*arguments: Any, **options: Any) -> Any:
        child = spawn(*arguments, **options)
        deadline = time.monotonic() + 10
        while user_of(Path("/proc") / str(child.pid)) == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        return child

    monkeypatch.setattr(subprocess, "Popen", spawn_and_lag)
    machine = await machines.create()
    monkeypatch.undo()
    await test_its_memory_never_lands_in_a_core_file(qemu_of(settings, machine))
    await machine.delete()


@dataclass(frozen=True)
class Descriptor:
    path: Path
    target: str
    flags: int

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def is_template_memory(self) -> bool:
        return "memfd:stead-template" in self.target or self.target.endswith("/memory")


def descriptors(process: Path) -> Iterator[Descriptor]:
    for path in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            facts = (process / "fdinfo" / path.name).read_text().split()
            yield Descriptor(path, str(path.readlink()), int(facts[facts.index("flags:") + 1], 8))


async def test_nothing_it_may_write_is_outside_of_its_own(
    settings: Settings, shared: Machine, process: Path, top: str
) -> None:
    own = (settings.data / "machines" / shared.id, settings.runtime / settings.instance / shared.id)
    opened = list(descriptors(process))
    assert any(each.target == str(own[0] / top) and each.writable for each in opened)
    for each in opened:
        if not each.writable or each.target.startswith(("socket:", "anon_inode:", "pipe:")):
            continue
        if each.is_template_memory:
            continue  # its own test below
        if stat.S_ISCHR(each.path.stat().st_mode):
            assert each.target in ("/dev/net/tun", "/dev/null"), each
        else:
            assert Path(each.target).is_relative_to(own[0]) or Path(each.target).parent == own[1], each


async def test_the_layers_below_are_open_for_reading_only(machines: Machines, process: Path) -> None:
    template = local_template(await machines.template())
    below = {str(template.disk): 0, str(template.image.disk): 0}
    for each in descriptors(process):
        if each.target in below:
            below[each.target] += 1
            assert not each.writable, each
    assert all(below.values()), "both layers are open"


async def test_the_templates_memory_cannot_be_poisoned(process: Path) -> None:
    """What all machines are woken from refuses to be written, even through QEMU's own descriptor."""
    held = [each for each in descriptors(process) if each.is_template_memory]
    mappings = [line for line in (process / "maps").read_text().splitlines() if "stead-template" in line]
    assert held or mappings
    for line in mappings:
        assert line.split()[1].endswith("p"), f"not a private mapping: {line}"
    for each in held:
        if not each.writable and "memfd:" not in each.target:
            continue
        again = os.open(each.path, os.O_RDWR)
        try:
            assert fcntl.fcntl(again, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
            assert fcntl.fcntl(again, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
            with pytest.raises(PermissionError):
                os.pwrite(again, b"poison", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(again, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.ftruncate(again, 0)
        finally:
            os.close(again)


async def test_what_machines_stand_on_belongs_to_root(machines: Machines) -> None:
    template = local_template(await machines.template())
    files = [
        *template.folder.iterdir(),
        *template.image.folder.iterdir(),
        template.folder,
        template.image.folder,
    ]
    assert len(files) > 7
    for path in files:
        facts = path.stat()
        assert facts.st_uid == 0, path
        assert not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH), path


async def test_what_is_recorded_is_for_root_alone(machines: Machines, settings: Settings) -> None:
    """Machines' folders lie beside it, so the folder that holds both must let others pass."""
    assert settings.data == inside(machines).settings.data
    database = (settings.data / "stead.db").stat()
    assert database.st_uid == 0
    assert not database.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
