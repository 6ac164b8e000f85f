"""Files that hostile processes may have replaced, and the limit of open files."""

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stead.errors import HostError
from stead.files import raise_descriptor_limit, sync_file
from stead.host import checkpoints, disks
from stead.host.commands import run
from stead.host.disk_process import DiskProcess, grow
from stead.host.local import _host_cpu
from stead.host.sandbox import Sandbox
from stead.installation import open_machines
from stead.processes import ProcessId, of_user
from stead.settings import Settings
from support.installations import other_settings


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """A FIFO in place of a disk layer. Opening one waits for a writer, unless told not to."""
    path = tmp_path / "layer.qcow2"
    os.mkfifo(path)
    yield path


def flush(fifo: Path) -> None:
    checkpoints._flush(fifo.parent)


def open_with(opener: Callable[[Path, contextlib.ExitStack], object]) -> Callable[[Path], None]:
    def use(fifo: Path) -> None:
        with contextlib.ExitStack() as opened:
            opener(fifo, opened)

    return use


@pytest.mark.parametrize(
    ("use", "refused"),
    [
        (open_with(disks.open_top), HostError),
        (open_with(disks.open_frozen), HostError),
        (sync_file, OSError),
        (flush, None),
    ],
)
async def test_a_fifo_in_place_of_a_disk_layer_blocks_nothing(
    fifo: Path, use: Callable[[Path], None], refused: type[Exception] | None
) -> None:
    used = asyncio.ensure_future(asyncio.to_thread(use, fifo))
    done, _ = await asyncio.wait({used}, timeout=60)
    if not done:
        # Let the thread end, or the test process never would.
        os.close(os.open(fifo, os.O_WRONLY))
        await asyncio.wait({used})
    assert done, "it waits for a writer"
    if refused is None:
        used.result()
    else:
        with pytest.raises(refused, match="not a regular file"):
            used.result()


async def test_a_disk_that_is_a_fifo_cannot_be_grown(fifo: Path) -> None:
    with pytest.raises(HostError, match="not a regular file"):
        async with asyncio.timeout(60):
            await grow(Sandbox(), 1, fifo, 1 << 30)


async def test_a_layer_is_grown_by_a_user_without_rights(
    root: None, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resize, processes = DiskProcess.grow, list[list[ProcessId]]()

    async def look_and_grow(process: DiskProcess, layer: str, size: int) -> None:
        processes.append(list(of_user(settings.disk_uid)))
        await resize(process, layer, size)

    monkeypatch.setattr(DiskProcess, "grow", look_and_grow)
    path = tmp_path / "layer.qcow2"
    disks.make_layer(path, 20 << 30)
    sandbox = Sandbox()
    try:
        for size in (4096 << 30, 30 << 30):  # the second is smaller, and does nothing
            await grow(sandbox, settings.disk_uid, path, size)
    finally:
        sandbox.close()
    assert [len(each) for each in processes] == [1]
    facts = json.loads((await run("qemu-img", "info", "--output=json", path)).stdout)
    assert facts["virtual-size"] == 4096 << 30
    await run("qemu-img", "check", "-q", path)
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o600)


# The limit of open files


@pytest.fixture
def low_limit() -> Iterator[int]:
    """This process may open few files, but may raise that; the value is what it may raise it to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    yield 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised_and_never_lowered(low_limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for _ in range(2):
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low_limit, hard)


async def test_an_open_installation_may_open_many_files(
    settings: Settings, low_limit: int, tmp_path: Path
) -> None:
    with other_settings(settings, cache=tmp_path) as other:
        async with open_machines(other):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == low_limit


# The identity of the CPU

CPU = """
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Gold 6140 CPU @ 2.30GHz
stepping\t: 4
microcode\t: 0x2006e05
cpu MHz\t\t: 2300.000
flags\t\t: fpu vme sse sse2 constant_tsc rep_good nopl cpuid aes avx avx2 rtm ibrs ibpb pti
bugs\t\t: spectre_v1
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0x2006e05", "0x2007006"),
        (" pti", " pti ibrs_enhanced user_shstk tsc_known_freq"),
        ("fpu vme", "vme fpu"),
        ("2300.000", "1000.000"),
        ("spectre_v1", "spectre_v1 gds"),
    ],
)
def test_updates_of_kernel_and_microcode_leave_the_cpu_the_same(before: str, after: str) -> None:
    assert before in CPU
    assert _host_cpu(CPU.replace(before, after)) == _host_cpu(CPU)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("6140", "6150"),
        ("model\t\t: 85", "model\t\t: 86"),
        ("stepping\t: 4", "stepping\t: 5"),
        (" avx2", ""),
        (" rtm", ""),
        (" ibrs", ""),
        (" avx2", " avx2 avx512f"),
    ],
)
def test_a_cpu_that_a_guest_can_tell_apart_is_another(before: str, after: str) -> None:
    assert before in CPU
    assert _host_cpu(CPU.replace(before, after)) != _host_cpu(CPU)


def test_this_cpu_is_identified() -> None:
    assert _host_cpu() == _host_cpu(Path("/proc/cpuinfo").read_text())
    assert _host_cpu() != _host_cpu(CPU)
