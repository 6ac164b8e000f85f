"""The header of a disk layer, and whether a layer has writers."""

import json
import mmap
import os
import struct
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from stead.errors import HostError
from stead.host import disks, qcow2

GIB = 1 << 30


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "layer.qcow2"
    disks.make_layer(path, 20 * GIB)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("size", [512, 32 << 20, (32 << 20) + 512, 20 * GIB, 4096 * GIB])
def test_an_empty_layer_is_one_of_qemu(tmp_path: Path, size: int) -> None:
    path = tmp_path / "layer.qcow2"
    disks.make_layer(path, size)
    subprocess.run(["qemu-img", "check", "-q", "-f", "qcow2", path], check=True)
    info = json.loads(subprocess.check_output(["qemu-img", "info", "--output=json", path]))
    assert (info["format"], info["virtual-size"], info["cluster-size"]) == ("qcow2", size, 65536)
    assert "backing-filename" not in info
    assert path.stat().st_blocks * 512 <= 64 << 10
    assert path.stat().st_mode & 0o777 == 0o600


def test_layers_of_many_sizes_leave_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "layer.qcow2"

    def make(gib: int) -> None:
        disks.make_layer(path, gib * GIB)
        path.unlink()

    make(20)
    tracemalloc.start()
    try:
        for gib in range(1000, 1100):
            make(gib)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000


def test_the_header_of_an_empty_layer(layer: int) -> None:
    header = qcow2.read_header(layer, "layer")
    assert header == qcow2.Header(20 * GIB, 0, 0)
    assert header.consistent


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, b"LUKS"),
        (4, struct.pack(">I", 2)),
        (32, struct.pack(">I", 1)),  # encryption
        (60, struct.pack(">I", 1)),  # internal snapshots
        (72, struct.pack(">Q", 1 << 2)),  # an external data file
        (72, struct.pack(">Q", 1 << 63)),  # a feature of the future
    ],
)
def test_a_header_that_stead_does_not_write_is_refused(layer: int, place: int, value: bytes) -> None:
    os.pwrite(layer, value, place)
    with pytest.raises(HostError, match="disk layer layer "):
        qcow2.read_header(layer, "layer")


def test_a_layer_that_was_not_closed_is_read_but_not_merged(layer: int) -> None:
    os.pwrite(layer, struct.pack(">Q", 1), 72)
    assert not qcow2.read_header(layer, "layer").consistent


@pytest.mark.parametrize("length", [0, 4, 103])
def test_a_short_file_is_damaged(layer: int, length: int) -> None:
    os.ftruncate(layer, length)
    with pytest.raises(HostError, match="is damaged"):
        qcow2.read_header(layer, "layer")


def test_a_writer_is_found_also_behind_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    reading = os.open(path, os.O_RDONLY)
    try:
        assert not disks.has_writers(reading)
        writing = os.open(path, os.O_RDWR)
        assert disks.has_writers(reading)
        mapped = mmap.mmap(writing, mmap.PAGESIZE)
        os.close(writing)
        assert disks.has_writers(reading)
        mapped.close()
        assert not disks.has_writers(reading)
        os.close(os.open(path, os.O_WRONLY))  # no lease is left that would delay it
    finally:
        os.close(reading)
