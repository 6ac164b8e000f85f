"""A QEMU that its guest has broken: a program in its place, with its user, sandbox and descriptors."""

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from stead.errors import HostError, StartFailed
from stead.host import cgroups, disks, qcow2
from stead.host.cgroups import ControlGroups, Hierarchy, VmGroup
from stead.host.disk_process import disk_process
from stead.host.layer_files import LayerFiles
from stead.host.qemu import OpenLayer
from stead.host.quarantine import Quarantine
from stead.host.sandbox import Sandbox
from stead.host.vm import running_machines
from stead.machines import Machine, Machines
from stead.processes import ProcessId, WatchedProcess, of_user
from stead.settings import Settings, Size
from support.guests import sh
from support.layers_on_disk import Bottom
from support.waiting import until

CGROUPS = Path("/sys/fs/cgroup")
EXTERNAL_DATA = 1 << 2
DATA_FILE_NAME = 0x44415441


def with_data_file(size: int, name: str) -> bytes:
    """The beginning of a qcow2 file whose data is in another file."""
    _, parts = qcow2.empty_layer(size)
    header = bytearray(next(parts)[1])
    header[72:80] = struct.pack(">Q", EXTERNAL_DATA)
    padded = name.encode().ljust(-(-len(name) // 8) * 8, b"\0")
    return bytes(header) + struct.pack(">II", DATA_FILE_NAME, len(name)) + padded + bytes(8)


@dataclass
class BrokenQemu:
    """A program in the place of a QEMU. It does what it is told, and prints what it reached."""

    watched: WatchedProcess
    orders: int
    printed: Path

    async def run(self, script: str) -> list[str]:
        before = self.printed.read_text()
        os.write(self.orders, f"{{ {script}; }} 2> /dev/null; echo done >&2\n".encode())
        await until(lambda: self.printed.read_text()[len(before) :].endswith("done\n"), 60)
        return self.printed.read_text()[len(before) :].splitlines()[:-1]


@dataclass
class Attack:
    """A folder with layers as the server has them, and what may break there."""

    settings: Settings
    sandbox: Sandbox = field(default_factory=Sandbox)

    def __post_init__(self) -> None:
        for name in ("layers", "machines"):
            (self.settings.data / name).mkdir(mode=0o700)
        self.image = self.settings.data / "image.raw"
        self.image.write_bytes(b"\x11" * (1 << 20))

    @property
    def uid(self) -> int:
        return self.settings.uid(7)

    @property
    def layers(self) -> LayerFiles:
        data = self.settings.data
        folders = data / "layers", data / "machines"
        return LayerFiles(*folders, Quarantine(data), self.sandbox, self.settings.disk_uid)

    def make_top(self, machine: str = "vm") -> Path:
        folder = self.settings.data / "machines" / machine
        folder.mkdir(mode=0o700, exist_ok=True)
        disks.make_layer(folder / "top.qcow2", 1 << 20)
        return folder / "top.qcow2"

    @contextlib.asynccontextmanager
    async def broken_qemu(self, layers: Sequence[OpenLayer]) -> AsyncIterator[BrokenQemu]:
        printed = self.settings.data / "printed"
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        with printed.open("ab") as errors:
            program = [
                "bash",
                "-c",
                f'exec {{told}}>&2; while read -ru {theirs} order; do eval "$order"; done',
            ]
            descriptors = [theirs, *(each for layer in layers for each in layer.descriptors)]
            process = await self.sandbox.spawn(program, uid=self.uid, descriptors=descriptors, errors=errors)
        os.close(theirs)
        assert process is not None
        watched = WatchedProcess(process)
        try:
            yield BrokenQemu(watched, ours, printed)
        finally:
            os.close(ours)
            watched.kill()
            await watched.wait()


@pytest_asyncio.fixture
async def attack(root: None, open_folder: Path) -> AsyncIterator[Attack]:
    attack = Attack(Settings(data=open_folder))
    yield attack
    attack.sandbox.close()


async def test_it_reaches_no_file_of_the_host(attack: Attack) -> None:
    secret = attack.settings.data / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)  # also what everyone on the host may read
    top = attack.make_top()
    secrets = ["/etc/shadow", "/etc/passwd", "/proc/1/environ", "/dev/kvm", "/dev/vda", secret]
    places = ["/", "/tmp", "/usr/bin", "/dev", "/proc", "/var/tmp", attack.settings.data]
    with contextlib.ExitStack() as opened:
        layers = (disks.open_top(top, opened), disks.open_frozen(attack.image, opened))
        async with attack.broken_qemu(layers) as qemu:
            reads = " ".join(f"'{path}'" for path in (*secrets, top, attack.image))
            writes = " ".join(f"'{path}'" for path in places)
            reached = await qemu.run(
                f"for each in {reads}; do head -c 1 < $each > /dev/null && echo read $each >&$told; done;"
                f" for each in {writes}; do : > $each/written && echo wrote $each >&$told; done;"
                " for each in /proc/[0-9]*; do [ $each = /proc/$$ ] || echo saw $each >&$told; done;"
                " setpriv --reuid=0 true && echo is root >&$told;"
                " chroot /usr /bin/true && echo left >&$told"
            )
    assert reached == []


async def test_it_cannot_open_its_descriptors_for_more_than_they_are(attack: Attack) -> None:
    with contextlib.ExitStack() as opened:
        top = disks.open_top(attack.make_top(), opened)
        frozen = disks.open_frozen(attack.image, opened)
        async with attack.broken_qemu((top, frozen)) as qemu:
            reopened = await qemu.run(
                f"for each in {top.reading} {top.writing} {frozen.reading}; do"
                " ( : >> /proc/self/fd/$each ) && echo $each >&$told;"
                " chmod 666 /proc/self/fd/$each && echo chmod $each >&$told; done"
            )
            written = await qemu.run(f"printf x >&{top.writing} && echo own >&$told")
    assert reopened == []
    assert written == ["own"], "what is its own to write"
    assert attack.image.read_bytes() == b"\x11" * (1 << 20)


async def test_a_layer_that_it_still_can_write_is_not_the_one_that_others_get(attack: Attack) -> None:
    """It rewrites the header of its frozen layer after the check, for the data of a VM to be /etc/shadow."""
    top = attack.make_top()
    with contextlib.ExitStack() as opened:
        async with attack.broken_qemu([disks.open_top(top, opened)]) as qemu:
            descriptor = writable_descriptor(qemu, top)
            opened.close()
            assert await attack.layers.adopt("vm", "top", "frozen.qcow2")
            frozen = attack.settings.data / "layers" / "frozen.qcow2"
            with contextlib.ExitStack() as for_others:
                layer, _ = await asyncio.to_thread(
                    attack.layers.open, ["frozen.qcow2"], Bottom(attack.image), for_others
                )
                evil = with_data_file(1 << 20, "/etc/shadow")
                octal = "".join(f"\\{byte:03o}" for byte in evil)
                assert await qemu.run(f"printf '{octal}' >&{descriptor} && echo written >&$told") == [
                    "written"
                ]
                assert not qcow2.read_header(layer.reading, "frozen").incompatible
                assert frozen.read_bytes()[: len(evil)] != evil
                assert frozen.stat().st_uid == 0 and stat.S_IMODE(frozen.stat().st_mode) == 0o600
    assert not list((attack.settings.data / "layers").glob(".*")), "no copy is left"


def writable_descriptor(qemu: BrokenQemu, path: Path) -> int:
    process = Path(f"/proc/{qemu.watched.identity.pid}")
    for each in (process / "fd").iterdir():
        # Its launcher may be loading libraries yet.
        with contextlib.suppress(FileNotFoundError):
            flags = int((process / "fdinfo" / each.name).read_text().split()[3], 8)
            if each.readlink() == path and flags & os.O_ACCMODE == os.O_RDWR:
                return int(each.name)
    raise AssertionError(f"{path} is not open for writing")


async def test_a_header_that_it_wrote_before_it_was_frozen_is_refused(attack: Attack) -> None:
    top = attack.make_top()
    with top.open("r+b") as file:
        file.write(with_data_file(1 << 20, "/etc/shadow"))
    with contextlib.ExitStack() as opened, pytest.raises(HostError, match="has an unknown format"):
        disks.open_top(top, opened)
    assert await attack.layers.adopt("vm", "top", "frozen.qcow2")
    with contextlib.ExitStack() as opened, pytest.raises(HostError, match="has an unknown format"):
        attack.layers.open(["frozen.qcow2"], Bottom(attack.image), opened)


@pytest.mark.parametrize("name", ["/etc/shadow", "/etc/passwd"])
async def test_a_header_that_no_check_saw_leads_to_no_file_of_the_host(attack: Attack, name: str) -> None:
    """The user and the sandbox of the process that reads it are enough, whatever a header says."""
    top = attack.make_top()
    with top.open("r+b") as file:
        file.write(with_data_file(1 << 20, name))
    with contextlib.ExitStack() as opened:
        reading = os.open(top, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, reading)
        with pytest.raises(HostError, match=f"Could not open '{name}': No such file or directory"):
            async with disk_process(
                attack.sandbox, attack.uid, [OpenLayer("top", "qcow2", reading)], timeout=60
            ):
                pytest.fail("it is open")


async def test_a_frozen_layer_without_a_writer_is_not_copied(attack: Attack) -> None:
    top = attack.make_top()
    inode = top.stat().st_ino
    assert await attack.layers.adopt("vm", "top", "frozen.qcow2")
    with contextlib.ExitStack() as opened:
        layer, _ = attack.layers.open(["frozen.qcow2"], Bottom(attack.image), opened)
        assert os.fstat(layer.reading).st_ino == inode


# A real one


def layers_of(settings: Settings, machine: Machine) -> dict[str, bool]:
    """The frozen layers that the QEMU of a VM has open, and whether it can write them."""
    (pid,) = [pid for pid, name in running_machines(settings).items() if name == machine.id]
    found: dict[str, bool] = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = path.readlink()
            flags = (Path(f"/proc/{pid}/fdinfo") / path.name).read_text().split()
            if target.parent == settings.data / "layers":
                can_write = int(flags[3], 8) & os.O_ACCMODE != os.O_RDONLY
                found[target.name] = found.get(target.name, False) or can_write
    return found


async def test_a_vm_cannot_write_its_frozen_layers(
    machines: Machines, settings: Settings, machine: Machine
) -> None:
    """Each fork freezes the layer that the VM wrote until then."""
    files = {path: path.stat().st_ino for path in (settings.data / "layers").iterdir()}
    for number in range(2):
        await sh(machine, f"echo {number} > /root/note; sync")
        (child,) = await machine.fork()
        assert await sh(child, "cat /root/note") == str(number)
        await child.delete()
    layers = layers_of(settings, machine)
    assert len(layers) == 2
    assert not any(layers.values()), layers
    # Neither was copied: QEMU gave its descriptors up by itself.
    made = set((settings.data / "layers").iterdir()) - set(files)
    assert {path.name for path in made} == set(layers)
    await sh(machine, "echo 3 > /root/note; sync")


async def test_its_folder_is_roots(settings: Settings, machine: Machine) -> None:
    folder = settings.data / "machines" / machine.id
    for path in (folder, *folder.iterdir()):
        facts = path.stat()
        assert facts.st_uid == facts.st_gid == 0 and not facts.st_mode & 0o077, path


# Resource limits


@contextlib.contextmanager
def prepared(settings: Settings, hierarchy: Hierarchy, root: Path) -> Iterator[VmGroup]:
    groups = ControlGroups(settings, hierarchy, root)
    with contextlib.ExitStack() as opened:
        try:
            group = groups.prepare("vm", settings.default_size, opened)
            assert group is not None
            yield group
        finally:
            groups.release("vm")
            groups.remove()


FIRST_WORDS = 'cat /proc/self/cgroup >&2; ls -l /proc/self/fd >&2; read -r line; echo "read: $line" >&2'


async def test_a_program_is_in_the_group_of_its_vm_from_its_first_instruction_on(attack: Attack) -> None:
    """What it allocates before stays with the group of the server."""
    hierarchy = cgroups.detect()
    if hierarchy.version != 1 or "memory" not in hierarchy.controllers:
        pytest.skip("this host has no control groups of version 1")
    printed = attack.settings.data / "printed"
    with prepared(attack.settings, hierarchy, CGROUPS) as group, printed.open("ab") as errors:
        process = await attack.sandbox.spawn(
            ["sh", "-c", FIRST_WORDS], uid=attack.uid, errors=errors, group=group
        )
        await ended(process)
        lines = printed.read_text().splitlines()
        entered = [
            line.split(":")[1] for line in lines if line.endswith(f"/stead-{attack.settings.instance}/vm")
        ]
        assert sorted(entered) == sorted(hierarchy.controllers)
        # The folder of the groups is not open any more.
        assert [line for line in lines if "cgroup" in line.partition("->")[2]] == []
        assert lines[-1] == "read: "


async def test_a_vm_without_limits_is_refused_where_the_host_has_them(attack: Attack) -> None:
    hierarchy = cgroups.detect()
    if hierarchy.version != 1 or "memory" not in hierarchy.controllers:
        pytest.skip("this host has no control groups of version 1")
    printed = attack.settings.data / "printed"
    with prepared(attack.settings, hierarchy, CGROUPS) as group, printed.open("ab") as errors:
        (CGROUPS / group.folders[0]).rmdir()
        process = await attack.sandbox.spawn(
            ["sh", "-c", "echo ran >&2"], uid=attack.uid, errors=errors, group=group
        )
        await ended(process)
    assert "vm/tasks: " in printed.read_text() and "ran" not in printed.read_text()


async def test_a_process_is_moved_into_a_group_of_version_2(attack: Attack) -> None:
    """Without controllers, which may all be in use by version 1."""
    root = next(
        (each for each in (CGROUPS, CGROUPS / "unified") if (each / "cgroup.controllers").exists()), None
    )
    if root is None:
        pytest.skip("this host has no control groups of version 2")
    printed = attack.settings.data / "printed"
    with prepared(attack.settings, Hierarchy(2, ()), root) as group, printed.open("ab") as errors:
        descriptors = os.pipe()
        process = await attack.sandbox.spawn(
            ["bash", "-c", f"read -ru {descriptors[0]}; cat /proc/self/cgroup >&2"],
            uid=attack.uid,
            descriptors=descriptors[:1],
            errors=errors,
            group=group,
        )
        for each in descriptors:
            os.close(each)
        await ended(process)
        assert f"0::/stead-{attack.settings.instance}/vm\n" in printed.read_text()
        (root / group.folders[0]).rmdir()
        with pytest.raises(HostError, match="cannot limit the resources of VM vm"):
            await attack.sandbox.spawn(["sleep", "600"], uid=attack.uid, errors=errors, group=group)
    assert list(of_user(attack.uid)) == []


async def ended(process: ProcessId | None) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            await WatchedProcess(process).wait()


@pytest.mark.parametrize("required", [False, True])
def test_a_host_without_usable_groups_is_reported_once(
    root: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, required: bool
) -> None:
    # Folders cannot be made in sysfs, as little as in the cgroups of most containers.
    settings = Settings(data=tmp_path, require_cgroups=required)
    groups = ControlGroups(settings, Hierarchy(1, ("memory", "pids", "cpu")), Path("/sys/kernel"))
    for _ in range(2):
        with contextlib.ExitStack() as opened:
            if required:
                with pytest.raises(HostError, match="STEAD_REQUIRE_CGROUPS"):
                    groups.prepare("vm", settings.default_size, opened)
            else:
                assert groups.prepare("vm", settings.default_size, opened) is None
    said = [record.getMessage() for record in caplog.records if "resource limits" in record.getMessage()]
    assert len(said) == (0 if required else 1)


async def test_a_vm_that_gets_no_group_does_not_run(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cgroups.detect().version:
        pytest.skip("this host has no control groups")
    prepare = ControlGroups.prepare

    def remove_too_early(
        self: ControlGroups, machine: str, size: Size, opened: contextlib.ExitStack
    ) -> VmGroup | None:
        group = prepare(self, machine, size, opened)
        if group is not None:
            (CGROUPS / group.folders[0]).rmdir()
        return group

    before = set(running_machines(settings))
    with monkeypatch.context() as patch:
        patch.setattr(ControlGroups, "prepare", remove_too_early)
        with pytest.raises(StartFailed, match=r"cannot limit the resources|vm/tasks|tasks: "):
            await machines.create()
    assert set(running_machines(settings)) == before
