"""A process with the RAM of a VM, and copies of its pages."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from mmap import PAGESIZE
from pathlib import Path

from stead.host import page_scan
from stead.host.memory_delta import Delta
from stead.host.page_scan import Region, Runs, find_ram

PAGES = 4096
SIZE = PAGES * PAGESIZE
GUEST = """
import mmap, struct, sys

def mapped(descriptor, size):
    flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    return mmap.mmap(descriptor, size, flags=flags)

descriptor, size, layout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
page = mmap.PAGESIZE
if layout == "late":
    print(flush=True)
    sys.stdin.readline()
ram = mapped(descriptor, size + (16 * page if layout == "neighbour" else 0))
# Memory with another advice is another mapping to the kernel; QEMU gives its RAM this one.
if layout == "split":
    ram.madvise(mmap.MADV_DONTFORK, 64 * page, 64 * page)
else:
    ram.madvise(mmap.MADV_DONTFORK, 0, size)
second = mapped(descriptor, size) if layout == "twice" else None
print(flush=True)
for line in sys.stdin:
    what, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    if what == "write":
        seed = numbers.pop(0)
        for number in numbers:
            ram[number * page : (number + 1) * page] = struct.pack("<QQ", number, seed) * (page // 16)
        print(flush=True)
    elif what == "read":
        print(sum(ram[number * page] for number in numbers), flush=True)
    elif what == "unmap":
        ram.close()
        print(flush=True)
    elif what == "dump":
        sys.stdout.buffer.write(ram[:size])
        sys.stdout.flush()
"""


def pattern(page: int, seed: int) -> bytes:
    return struct.pack("<QQ", page, seed) * (PAGESIZE // 16)


class Guest:
    """A process with RAM of its own, told by a pipe what to do with it."""

    def __init__(self, template: int | None, layout: str = "plain") -> None:
        descriptor = -1 if template is None else template
        self._process = subprocess.Popen(
            [sys.executable, "-c", GUEST, str(descriptor), str(SIZE), layout],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[] if template is None else [template],
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid
        self._stdout.readline()
        self._copied = template is not None

    @property
    def region(self) -> Region:
        return find_ram(self.pid, SIZE, self._copied)

    def _tell(self, what: str, *numbers: int) -> None:
        self._stdin.write(" ".join([what, *map(str, numbers)]).encode() + b"\n")
        self._stdin.flush()

    def write(self, pages: Iterable[int], seed: int = 1) -> None:
        self._tell("write", seed, *pages)
        self._stdout.readline()

    def read(self, pages: Iterable[int]) -> None:
        self._tell("read", *pages)
        self._stdout.readline()

    def map(self) -> None:
        """Map the RAM of the layout "late"."""
        self._tell("map")
        self._stdout.readline()

    def unmap(self) -> None:
        self._tell("unmap")
        self._stdout.readline()

    def ram(self) -> bytes:
        self._tell("dump")
        return self._stdout.read(SIZE)

    def kill(self) -> None:
        self._process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


NewGuest = Callable[..., Guest]
CONTENT = b"".join(pattern(page, 0) for page in range(PAGES))


def runs_of(pages: Iterable[int]) -> Runs:
    return page_scan._joined((page, page + 1) for page in sorted(pages))


def pages_of(runs: Runs) -> set[int]:
    return {page for first, count in runs for page in range(first, first + count)}


def ram_with(pages: Iterable[int], seed: int = 1, on: bytes = CONTENT) -> bytes:
    ram = bytearray(on)
    for page in pages:
        ram[page * PAGESIZE : (page + 1) * PAGESIZE] = pattern(page, seed)
    return bytes(ram)


def copied(guest: Guest, pages: Iterable[int]) -> Delta:
    runs = runs_of(pages)
    delta = Delta.prepare(runs.pages)
    delta.copy_from(guest.pid, guest.region, runs)
    return delta


WRITINGS = {
    "nothing": set[int](),
    "first": {0},
    "last": {PAGES - 1},
    "both ends": {0, PAGES - 1},
    "long run": set(range(700, 2900)),
    "everything": set(range(PAGES)),
    # More runs than the kernel gathers in one go, and more than one call copies.
    "scattered": {0, 1, PAGES - 1, *range(100, 3900, 3)},
}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
