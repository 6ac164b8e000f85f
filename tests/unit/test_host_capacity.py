"""Capacity of a host without VMs: copies of templates, the reserve of disk space, cgroups."""

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stead.disk_marks import DiskSpace
from stead.errors import CapacityExceeded
from stead.host import cgroups, memory, templates
from stead.host.cgroups import ControlGroups, Hierarchy
from stead.host.disk_reserve import DiskReserve
from stead.host.git_groups import GitGroups
from stead.host.memory import SealedCopies
from stead.settings import Settings, Size

# Sealed copies of templates


def template(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(name.encode() * 4096)
    return path


def memory_files() -> set[str]:
    """The sealed files that this process has open."""
    links = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.add(str(each.readlink()))
    return {link for link in links if "stead-template" in link}


class Host:
    """A host whose VMs map copies of the memory of templates."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder = folder
        self.copies = SealedCopies(most)

    async def start(self, machine: str, template_id: str, account: str | None = None, **options: bool) -> int:
        """Start a VM; returns the inode of the copy that it has mapped."""
        path = template(self.folder, template_id)
        async with self.copies.opened(template_id, path, machine, account, **options) as descriptor:
            assert os.pread(descriptor, 1, 0) == template_id[:1].encode()
            assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
            return os.fstat(descriptor).st_ino

    async def run(self, template_id: str, account: str | None = None, **options: bool) -> int:
        """Start a VM that ends."""
        inode = await self.start("passing", template_id, account, **options)
        self.copies.release("passing")
        return inode

    @property
    def open(self) -> set[str]:
        return set(self.copies._copies)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path, most=3)
    yield host
    host.copies.close()
    assert not memory_files()


async def test_few_sealed_copies_are_kept(host: Host) -> None:
    """Their number does not follow from how many sizes of VMs tenants ask for."""
    for name in ("a", "b", "c", "a", "d", "e"):
        await host.run(name)
    assert host.open == {"a", "d", "e"}, "the least recently used go"
    host.copies.close(["d", "gone"])
    assert host.open == {"a", "e"} and len(memory_files()) == 1


async def test_a_copy_that_a_vm_has_mapped_is_used_again(host: Host) -> None:
    """To close it would free nothing, and the next VM of its template would need one more."""
    mapped = await host.start("vm", "a", "alice")
    for name in "bcdef":
        await host.run(name, "alice")
    assert await host.start("other", "a", "alice") == mapped
    host.copies.release("vm")
    for name in "bcdef":
        await host.run(name, "alice")
    assert await host.run("a", "alice") == mapped
    host.copies.release("other")
    for name in "bcdef":
        await host.run(name, "alice")
    assert host.open == {"d", "e", "f"}
    assert await host.run("a", "alice") != mapped


async def test_a_start_that_fails_maps_nothing(host: Host) -> None:
    with pytest.raises(RuntimeError):
        async with host.copies.opened("a", template(host.folder, "a"), "vm", "alice"):
            raise RuntimeError
    for name in "bcd":
        await host.run(name, "alice")
    assert "a" not in host.open


async def test_a_vm_has_one_copy_mapped(host: Host) -> None:
    """It was restored again without a word of the end of its process."""
    await host.start("vm", "a")
    await host.start("vm", "b")
    for name in "cdef":
        await host.run(name)
    assert host.open == {"b", "d", "e", "f"}


async def test_an_account_that_uses_many_sizes_loses_its_own_copies(host: Host) -> None:
    kept = await host.run("b", "bob")
    for name in ("m1", "m2", "m3", "m4", "m5"):
        await host.run(name, "mallory")
    assert host.open == {"b", "m4", "m5"}
    assert await host.run("b", "bob") == kept


async def test_a_copy_of_several_accounts_is_of_none_of_them(host: Host) -> None:
    """The account that had it made cannot have it evicted by its other sizes."""
    shared = await host.run("a", "mallory")
    await host.run("a", "bob")
    for name in ("m1", "m2", "m3", "m4"):
        await host.run(name, "mallory")
    assert await host.run("a", "bob") == shared


async def test_the_copy_of_the_default_size_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    default = await host.run("default", default=True)
    for name in "abcdef":
        await host.run(name)
    assert host.open == {"default", "d", "e", "f"}
    available = memory.available
    monkeypatch.setattr(memory, "available", lambda: memory._FLOOR)
    with pytest.raises(CapacityExceeded):
        await host.run("g")
    assert host.open == {"default"}
    monkeypatch.setattr(memory, "available", available)
    assert await host.run("default", default=True) == default
    # The template was built again.
    await host.run("newer", default=True)
    for name in "abc":
        await host.run(name)
    assert host.open == {"newer", "a", "b", "c"}


async def test_a_copy_in_use_outlives_its_place(host: Host) -> None:
    """QEMU inherits a descriptor of its own."""
    async with host.copies.opened("a", template(host.folder, "a"), "vm", None) as descriptor:
        host.copies.close()
        assert os.pread(descriptor, 1, 0) == b"a"
        await host.start("other", "a")
        host.copies.release("other")
    host.copies.release("vm")
    assert host.open == {"a"}


async def test_a_copy_counts_in_the_capacity_of_the_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    await host.run("a")
    await host.start("vm", "b")
    monkeypatch.setattr(memory, "available", lambda: memory._FLOOR)
    with pytest.raises(CapacityExceeded):
        await host.run("c")
    assert host.open == {"b"}, "those that no VM needs right now are closed first"


async def test_a_copy_whose_caller_has_left_is_closed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    make = memory.sealed_copy

    def slow(path: Path) -> int:
        begun.set()
        assert go_on.wait(60)
        return make(path)

    monkeypatch.setattr(memory, "sealed_copy", slow)
    starting = asyncio.create_task(host.start("vm", "a"))
    assert await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not memory_files() and not host.open


# Templates


def test_templates_without_a_vm_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last stay; one that was used a moment ago may be for a VM without a row yet."""
    monkeypatch.setattr(templates, "_KEPT", 2)
    for name, age in (("needed", 9000), ("d", 8000), ("c", 7000), ("b", 6000), ("a", 5000), ("now", 0)):
        facts = tmp_path / name / "template.json"
        facts.parent.mkdir()
        facts.write_text("{}")
        os.utime(facts, (facts.stat().st_mtime - age,) * 2)
    assert [each.name for each in templates.unused(tmp_path, {"needed"})] == ["b", "c", "d"]
    monkeypatch.setattr(templates, "_KEPT", 0)
    assert "now" not in [each.name for each in templates.unused(tmp_path, {"needed"})]


# The reserve


def test_the_reserve_is_released_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10 << 20
    monkeypatch.setattr(
        "stead.host.disk_reserve.DiskSpace.of", lambda _: DiskSpace(free, 100 << 20), raising=True
    )
    reserve, file = DiskReserve(tmp_path), tmp_path / "reserve"
    for free, allocated in (
        (10 << 20, True),
        (1 << 20, True),
        (100 << 10, False),
        # What it gave back is no reason to take it again.
        (1 << 20, False),
        (2 << 20, False),
        # As much is left beside it.
        (3 << 20, True),
    ):
        reserve.adjust()
        assert reserve.allocated is allocated, free
        if allocated:
            assert file.stat().st_blocks * 512 >= 1 << 20
            assert file.stat().st_mode & 0o777 == 0o600


# Memory pressure


@pytest.mark.parametrize(
    ("pressure", "stalled"),
    [
        (
            "some avg10=31.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=90.00 avg60=0 avg300=0 total=0\n",
            31.5,
        ),
        ("full avg10=90.00\n", 0.0),
        ("", 0.0),
    ],
)
def test_pressure_is_read_from_the_kernel(pressure: str, stalled: float) -> None:
    assert memory._stalled(pressure) == stalled


def test_memory_is_short_below_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_stalled", lambda _: 0.0)
    monkeypatch.setattr(memory, "available", lambda: memory._SHORT - 1)
    assert memory.is_short()
    monkeypatch.setattr(memory, "available", lambda: memory._SHORT)
    assert not memory.is_short()
    monkeypatch.setattr(memory, "_stalled", lambda _: memory._STALLED)
    assert memory.is_short() == Path("/proc/pressure/memory").exists()


# I/O limits


def test_the_io_of_a_vm_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "disk_of", lambda _: "8:0")
    root = tmp_path / "cgroup"
    settings = Settings(data=tmp_path / "data", vm_io_mib=100)
    base = root / f"stead-{settings.instance}"
    groups = ControlGroups(settings, Hierarchy(2, ("memory", "pids", "cpu")), root)
    with contextlib.ExitStack() as opened:
        groups.prepare("vm", Size(1, 512, 20), opened)
    assert (base / "vm" / "io.max").read_text() == "8:0 rbps=104857600 wbps=104857600"
    assert (base / "vm" / "memory.max").exists()
    unlimited = ControlGroups(settings.replace(vm_io_mib=0), Hierarchy(2, ("memory",)), root)
    with contextlib.ExitStack() as opened:
        unlimited.prepare("other", Size(1, 512, 20), opened)
    assert not (base / "other" / "io.max").exists()


@pytest.mark.parametrize("name", ["io.weight", "io.bfq.weight"])
def test_vms_and_users_of_git_have_equal_weights_at_the_disk(tmp_path: Path, name: str) -> None:
    settings = Settings(data=tmp_path / "data")
    hierarchy, root = Hierarchy(2, ("memory", "pids", "cpu")), tmp_path / "cgroup"
    vms, git = root / f"stead-{settings.instance}", root / f"stead-{settings.instance}-git"
    groups = [vms, vms / "one", vms / "other", git, git / "1000", git / "1001"]
    for group in groups:
        group.mkdir(parents=True)
        (group / name).write_text("default 1\n")
    # As a cgroup file system, which accepts each controller by itself.
    made, users = ControlGroups(settings, hierarchy, root), GitGroups(settings, hierarchy, root)
    with contextlib.ExitStack() as opened:
        made.prepare("one", Size(8, 512, 20), opened)
        made.prepare("other", Size(1, 512, 20), opened)
    assert users.enter(1000) and users.enter(1001)
    assert {(group / name).read_text() for group in groups} == {"default 100"}
    assert all((group / "cgroup.subtree_control").read_text() for group in (root, vms, git))


def test_a_kernel_without_weights_at_the_disk_is_no_failure(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path / "data")
    root = tmp_path / "cgroup"
    groups = ControlGroups(settings, Hierarchy(2, ("memory",)), root)
    with contextlib.ExitStack() as opened:
        groups.prepare("one", Size(1, 512, 20), opened)
    assert GitGroups(settings, Hierarchy(2, ("memory",)), root).enter(1000)
    assert not [*root.rglob("io.*weight")]


def test_io_limits_are_of_whole_disks(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    disk = tmp_path / "devices" / "sda"
    partition = disk / "sda1"
    partition.mkdir(parents=True)
    for folder, number in ((disk, "8:0"), (partition, "8:1")):
        (folder / "dev").write_text(f"{number}\n")
    (partition / "partition").write_text("1\n")
    known = tmp_path / "known"
    known.mkdir()
    (known / f"{os.major(device)}:{os.minor(device)}").symlink_to(partition)
    assert cgroups.disk_of(tmp_path, known) == "8:0"
    assert cgroups.disk_of(tmp_path, tmp_path / "none") is None
