"""Errors that pass (EMFILE, ENOMEM, EIO) fail one call; they cost no VM its disk and no VM its memory."""

import contextlib
import errno
import json
import os
import resource
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from stead.errors import CheckpointUnusable, HostError, StartFailed
from stead.host import checkpoints, templates
from stead.host.checkpoints import LocalCapturedState
from stead.host.image import BaseImage
from stead.host.local import LocalHost
from stead.host.memory_delta import Delta
from stead.host.network import Network
from stead.host.qemu import Command, Memory, OpenLayer, QemuPlatform, Saved, is_announced
from stead.host.templates import LocalTemplate, TemplateInputs
from stead.machines import Machines
from stead.machines.layers import LayerMissing
from stead.machines.records import Properties, Record
from stead.machines.states import Lost, MachineState, Stopped, Suspended
from stead.settings import Settings, Size
from stead.store.database import open_database
from stead.store.machines import MachineStore
from support.internals import inside

pytestmark = pytest.mark.usefixtures("root")  # frozen layers are given to root

SIZE = Size(1, 512, 20)
PLATFORM = QemuPlatform("tcg", (7, 2, 0), "pc-q35-7.2")
ERRORS = (errno.EMFILE, errno.ENOMEM, errno.EIO)
passing = pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])


@contextlib.contextmanager
def failing(path: Path, number: int) -> Iterator[None]:
    """Every attempt to open or stat a file, or one in a folder, fails with this error."""

    def check(subject: object) -> None:
        if isinstance(subject, str | os.PathLike) and Path(subject).is_relative_to(path):
            raise OSError(number, os.strerror(number), str(subject))

    def checked(call: Any) -> Any:
        def run(subject: object, *arguments: Any, **options: Any) -> Any:
            check(subject)
            return call(subject, *arguments, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "open"), (Path, "stat"), (Path, "iterdir"), (os, "open")):
            patch.setattr(owner, name, checked(getattr(owner, name)))
        yield


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """This process cannot open any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class InstallationOnDisk:
    """An installation with one template, whose VMs are only rows and files."""

    def __init__(self, data: Path, machines: Machines, host: LocalHost, image: BaseImage) -> None:
        self.data = data
        self.machines = machines
        self.host = host
        self.image = image
        self.template = f"{TemplateInputs(image, SIZE, PLATFORM, 'certificate').key}-1"

    @property
    def template_folder(self) -> Path:
        return self.host.templates_folder / self.template

    def make_template(self) -> None:
        self.template_folder.mkdir(parents=True)
        for name in ("memory", "devices", "disk.qcow2"):
            (self.template_folder / name).touch()
        build = templates.image_build(self.image)
        facts = {"image": self.image.key, "image_build": build, "size": SIZE.key}
        (self.template_folder / "template.json").write_text(json.dumps(facts))

    async def machine(self, state: MachineState) -> Record:
        """A VM in a state, recorded without the transitions that lead there."""
        (self.data / "machines/one").mkdir(parents=True)
        record = Record("one", 0, SIZE, self.template, "one", "one", None, Properties(), state)
        await inside(self.machines).store.insert(record.to_row())
        return await self.record()

    async def record(self) -> Record:
        return await inside(self.machines).journal.find("one")

    def save_memory(self, checkpoint: str = "saved", platform: QemuPlatform = PLATFORM) -> Path:
        folder = self.host.checkpoints.folder(checkpoint)
        moment = LocalCapturedState(SIZE, self.template, platform, b"devices", Delta.prepare(0))
        checkpoints.save(moment, folder)
        moment.close()
        return folder


@pytest_asyncio.fixture
async def on_disk(tmp_path: Path) -> AsyncIterator[InstallationOnDisk]:
    settings = Settings(data=tmp_path, cache=tmp_path / "cache", default_size=SIZE, pool=0)
    image = BaseImage("image", settings.cache_folder / "images/image")
    image.folder.mkdir(parents=True)
    for path in (image.disk, image.kernel, image.initrd):
        path.touch()
    database = await open_database(tmp_path / "stead.db")
    host = LocalHost(settings, cast(Network, None))
    host._image, host._platform = image, PLATFORM
    on_disk = InstallationOnDisk(tmp_path, Machines(settings, host, MachineStore(database)), host, image)
    on_disk.make_template()
    yield on_disk
    host._spawner.close()
    await database.dispose()


# Templates


@passing
@pytest.mark.parametrize("part", ["", "template.json", "memory", "disk.qcow2"])
async def test_a_template_that_cannot_be_read_is_not_taken_for_a_missing_one(
    on_disk: InstallationOnDisk, number: int, part: str
) -> None:
    host = on_disk.host

    def load() -> LocalTemplate | None:
        return host.templates.load(on_disk.template)

    def find() -> LocalTemplate | None:
        inputs = TemplateInputs(on_disk.image, SIZE, PLATFORM, "certificate")
        return templates.find(host.templates_folder, inputs)

    for call in (load, find):
        fails = pytest.raises(HostError, match=os.strerror(number))
        with failing(on_disk.template_folder / part, number), fails:
            call()
        assert (found := call()) is not None
        assert found.id == on_disk.template
    (on_disk.template_folder / part if part else on_disk.image.disk).unlink()
    assert (load(), find()) == (None, None)


async def test_an_unreadable_image_is_not_taken_for_a_missing_one(on_disk: InstallationOnDisk) -> None:
    for path in (on_disk.image.disk, on_disk.image.kernel):
        with failing(path, errno.EIO), pytest.raises(HostError, match="Input/output error"):
            on_disk.host.templates.load(on_disk.template)
    with failing(on_disk.image.disk, errno.EIO), pytest.raises(HostError, match="Input/output error"):
        await on_disk.host.image()
    assert on_disk.host.templates.load(on_disk.template) is not None


# Disks


async def unchanged(on_disk: InstallationOnDisk, record: Record) -> bool:
    return await on_disk.record() == record


async def test_without_descriptors_a_vm_is_not_lost(on_disk: InstallationOnDisk) -> None:
    record = await on_disk.machine(Stopped(None, "stopped"))
    with no_descriptor_left(), pytest.raises(HostError, match="Too many open files"):
        await inside(on_disk.machines).disks.whole(record)
    assert await unchanged(on_disk, record)
    assert (await inside(on_disk.machines).disks.whole(record)).id == on_disk.template


@passing
@pytest.mark.parametrize("part", ["top", "layer"])
async def test_an_unreadable_layer_does_not_make_a_vm_lost(
    on_disk: InstallationOnDisk, number: int, part: str
) -> None:
    record = await on_disk.machine(Stopped("top", "stopped"))
    top = on_disk.host.disks.layer("one", "top")
    top.touch()
    if part == "layer":
        record = await inside(on_disk.machines).disks.freeze(record, Stopped(None, "stopped"))
    path = top if part == "top" else on_disk.data / "layers/top.qcow2"
    with failing(path, number), pytest.raises(HostError, match=os.strerror(number)) as raised:
        await inside(on_disk.machines).disks.whole(record)
    assert not isinstance(raised.value, LayerMissing)
    assert await unchanged(on_disk, record)
    assert (await inside(on_disk.machines).disks.whole(record)).id == on_disk.template
    path.unlink()
    with pytest.raises(StartFailed, match="is lost"):
        await inside(on_disk.machines).disks.whole(record)
    assert isinstance((await on_disk.record()).state, Lost)


@passing
async def test_a_frozen_layer_that_cannot_be_adopted_now_does_not_make_a_vm_lost(
    on_disk: InstallationOnDisk, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash came between the record of the frozen layer and the move of its file."""
    record = await on_disk.machine(Stopped("top", "stopped"))
    frozen = on_disk.host.disks.layer("one", "top")
    frozen.touch()
    record = await inside(on_disk.machines).journal.freeze(record, Stopped(None, "stopped"))
    with monkeypatch.context() as patch:
        opened = os.open

        def refused(path: Any, *arguments: Any, **options: Any) -> int:
            if path == frozen:
                raise OSError(number, os.strerror(number))
            return opened(path, *arguments, **options)

        patch.setattr(os, "open", refused)
        with pytest.raises(HostError, match="cannot adopt the disk layer"):
            await inside(on_disk.machines).disks.whole(record)
    assert await unchanged(on_disk, record)
    assert (await inside(on_disk.machines).disks.whole(record)).id == on_disk.template
    assert (on_disk.data / "layers/top.qcow2").exists()


# Saved memory


@passing
@pytest.mark.parametrize("part", ["checkpoint.json", "devices", "pages", "memory"])
async def test_memory_that_cannot_be_read_now_is_kept(
    on_disk: InstallationOnDisk, number: int, part: str
) -> None:
    folder = on_disk.save_memory()
    suspended = Suspended("saved", "suspended")
    record = await on_disk.machine(suspended)
    with failing(folder / part, number), pytest.raises(HostError, match=os.strerror(number)):
        await inside(on_disk.machines).wake.wake(record, suspended, "requested")
    assert await unchanged(on_disk, record)
    state = await on_disk.host.checkpoints.read("saved", SIZE)
    state.memory.verify()
    state.close()
    (folder / part).unlink()
    with pytest.raises(CheckpointUnusable, match="No such file"):
        await on_disk.host.checkpoints.read("saved", SIZE)


async def test_memory_whose_template_cannot_be_read_now_is_kept(on_disk: InstallationOnDisk) -> None:
    on_disk.save_memory()
    suspended = Suspended("saved", "suspended")
    record = await on_disk.machine(suspended)
    with (
        failing(on_disk.template_folder, errno.EMFILE),
        pytest.raises(HostError, match="Too many open files"),
    ):
        await inside(on_disk.machines).wake.wake(record, suspended, "use")
    assert (await on_disk.record()).state == suspended
    (await on_disk.host.checkpoints.read("saved", SIZE)).close()


def test_memory_that_cannot_be_verified_now_is_usable_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Delta.prepare(0).write_to(tmp_path)
    loaded = Delta.load(tmp_path, facts, SIZE.memory_mib << 20)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        with pytest.raises(HostError, match="cannot read the memory file: Input/output error"):
            loaded.verify()
    loaded.verify()
    loaded.close()


@pytest.mark.parametrize(
    "platform", [replace(PLATFORM, version=(8, 0, 0)), replace(PLATFORM, host_cpu="other")]
)
async def test_memory_of_another_platform_is_set_aside(
    on_disk: InstallationOnDisk, platform: QemuPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VM boots from its disk; its memory is not garbage: it fits the QEMU or CPU from before."""
    content = {path.name: path.read_bytes() for path in on_disk.save_memory(platform=platform).iterdir()}
    started: list[Record] = []

    async def boot(record: Record, why: str, note: str | None) -> Record:
        started.append(record)
        return record

    monkeypatch.setattr(inside(on_disk.machines).wake.boot, "boot", boot)
    suspended = Suspended("saved", "suspended")
    record = await on_disk.machine(suspended)
    await inside(on_disk.machines).wake.wake(record, suspended, "requested")
    await inside(on_disk.machines).layers.collect()
    (kept,) = (on_disk.data / "quarantine").glob("*/checkpoints/saved")
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == content
    assert [type(each.state) for each in started] == [Stopped]
    assert not on_disk.host.checkpoints.folder("saved").exists()


async def test_memory_saved_by_an_older_version_is_restored_with_the_same_nics(
    on_disk: InstallationOnDisk,
) -> None:
    """A guest cannot be restored on a NIC that lacks what it uses, such as announcements."""
    facts_file = on_disk.save_memory() / "checkpoint.json"

    async def arguments() -> str:
        state = await on_disk.host.checkpoints.read("saved", SIZE)
        state.close()
        memory, saved, layers = Memory("own"), Saved(3), (OpenLayer("a", "qcow2", 7, 8),)
        taps = {"data_tap": 4, "management_tap": 5, "qmp": 6}
        command = Command(state.platform, "vm", SIZE, memory, layers, **taps, wake=saved)
        line = "\0".join(command.arguments())
        assert is_announced(line.encode()) == state.platform.announced
        return line

    assert (await arguments()).count("guest_announce=off") == 2
    facts = json.loads(facts_file.read_bytes())["facts"]
    del facts["platform"]["announced"]
    facts_file.write_text(json.dumps({"facts": facts, "sha256": checkpoints._checksum(facts)}))
    assert (await arguments()).count("guest_announce=off") == 0


async def test_a_vm_whose_memory_is_missing_boots_from_its_disk(
    on_disk: InstallationOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def boot(record: Record, why: str, note: str | None) -> Record:
        return record

    monkeypatch.setattr(inside(on_disk.machines).wake.boot, "boot", boot)
    suspended = Suspended("missing", "suspended")
    record = await on_disk.machine(suspended)
    assert isinstance(
        (await inside(on_disk.machines).wake.wake(record, suspended, "requested")).state, Stopped
    )
    assert not (on_disk.data / "quarantine").exists()
