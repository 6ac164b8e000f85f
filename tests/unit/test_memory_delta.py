"""Pages that a process wrote into its private RAM are found, copied out, kept on disk and given to another.

An ordinary process that maps a file privately stands in for QEMU.
"""

import ctypes
import errno
import os
import resource
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from mmap import PAGESIZE
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import CheckpointUnusable, HostError
from stead.host import memory_delta, page_scan
from stead.host.memory_delta import Delta, save_pages
from stead.host.page_scan import Region, Runs, _Mapping, _spans, find_ram, minus, written_pages

PAGES = 4096
SIZE = PAGES * PAGESIZE

GUEST = """
import mmap, struct, sys

def mapped(descriptor, size):
    flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    return mmap.mmap(descriptor, size, flags=flags)

descriptor, size, layout = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
page = mmap.PAGESIZE
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


@pytest.fixture(scope="module")
def template() -> Iterator[int]:
    descriptor = os.memfd_create("template", os.MFD_CLOEXEC)
    os.pwrite(descriptor, CONTENT, 0)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def new_guest(template: int) -> Iterator[NewGuest]:
    guests = []

    def start(template: int | None = template, layout: str = "plain") -> Guest:
        guests.append(Guest(template, layout))
        return guests[-1]

    yield start
    for guest in guests:
        guest.end()


@pytest.fixture
def guest(new_guest: NewGuest) -> Guest:
    return new_guest()


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


# Finding the RAM


@pytest.mark.parametrize("layout", ["plain", "split"])
def test_ram_is_the_private_copy_of_the_template(new_guest: NewGuest, layout: str) -> None:
    """The kernel shows one mapping in several parts when parts of it were treated differently."""
    guest = new_guest(layout=layout)
    guest.write([0, PAGES - 1])
    delta = copied(guest, range(PAGES))
    assert delta._chunks[0].buffer[:SIZE] == ram_with([0, PAGES - 1])
    delta.close()


@pytest.mark.parametrize("layout", ["plain", "split", "neighbour"])
def test_ram_that_began_empty_is_found_too(new_guest: NewGuest, layout: str) -> None:
    """Other anonymous memory often lies directly beside it."""
    guest, other = new_guest(None, layout), new_guest(None)
    guest.write([0, 5, PAGES - 1])
    runs = written_pages(guest.pid, guest.region)
    assert pages_of(runs) >= {0, 5, PAGES - 1}
    delta = copied(guest, pages_of(runs))
    delta.apply_to(other.pid, other.region)
    delta.close()
    assert other.ram() == ram_with([0, 5, PAGES - 1], on=bytes(SIZE))


@pytest.mark.parametrize(
    ("file", "offset", "found"),
    [((1, 2), 8, [Region(100, 20)]), ((1, 2), 0, []), ((0, 0), 0, [Region(100, 20)])],
    ids=["next part", "same part again", "anonymous"],
)
def test_parts_of_a_file_belong_together_in_their_order(
    file: tuple[int, int], offset: int, found: list[Region]
) -> None:
    parts = [_Mapping(100, 108, 0, file), _Mapping(108, 120, offset, file)]
    assert list(_spans(parts, 20)) == found
    assert list(_spans([parts[0], _Mapping(109, 121, 8, file)], 20)) == [], "there is a gap"


def test_two_mappings_that_could_be_ram_are_refused(new_guest: NewGuest) -> None:
    with pytest.raises(HostError, match=": 2 private mappings"):
        _ = new_guest(layout="twice").region


def test_a_process_without_such_memory_is_refused(guest: Guest, new_guest: NewGuest) -> None:
    for size, of_a_file in [(SIZE // 2, True), (SIZE, False)]:
        with pytest.raises(HostError, match=f"process {guest.pid}: no private mappings"):
            find_ram(guest.pid, size, of_a_file)
    with pytest.raises(HostError, match=": no private mappings"):
        find_ram(new_guest(None).pid, SIZE, copied=True)


def test_ram_is_found_when_its_file_is_nowhere_any_more(new_guest: NewGuest) -> None:
    """The Stead that started the process, and had the only other descriptor, is gone."""
    descriptor = os.memfd_create("template", os.MFD_CLOEXEC)
    os.pwrite(descriptor, CONTENT, 0)
    guest = new_guest(descriptor)
    os.close(descriptor)
    guest.write([7])
    assert pages_of(written_pages(guest.pid, guest.region)) == {7}


# Finding the pages


@pytest.mark.parametrize("pages", WRITINGS.values(), ids=WRITINGS.keys())
def test_exactly_the_written_pages_are_found(
    guest: Guest, pages: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to look agree, whatever they take at a time; pages that were only read do not count."""
    guest.read(range(0, PAGES, 2))
    guest.write(pages)
    region = guest.region
    runs = written_pages(guest.pid, region)
    assert runs == runs_of(pages)
    assert runs.pages == len(pages)
    pagemap = os.open(f"/proc/{guest.pid}/pagemap", os.O_RDONLY)
    try:
        for pieces, regions in [(1 << 18, 16384), (7, 3), (1000, 600), (1, 1)]:
            monkeypatch.setattr(page_scan, "_PIECE", pieces)
            monkeypatch.setattr(page_scan, "_REGIONS", regions)
            assert page_scan._by_pagemap(pagemap, region) == runs
            assert page_scan._by_ioctl(pagemap, region) == runs
    finally:
        os.close(pagemap)


def test_a_run_ends_with_the_region(guest: Guest) -> None:
    guest.write(range(100, 200))
    whole = guest.region
    part = Region(whole.start + 120 * PAGESIZE, 50 * PAGESIZE)
    assert list(written_pages(guest.pid, part)) == [(0, 50)]
    pagemap = os.open(f"/proc/{guest.pid}/pagemap", os.O_RDONLY)
    assert list(page_scan._by_pagemap(pagemap, part)) == [(0, 50)]
    os.close(pagemap)


@pytest.mark.parametrize("number", [errno.ENOTTY, errno.EINVAL])
def test_a_kernel_that_cannot_scan_is_asked_page_by_page(
    guest: Guest, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def missing(pagemap: int, region: Region) -> Runs:
        raise OSError(number, os.strerror(number))

    guest.write(WRITINGS["scattered"])
    monkeypatch.setattr(page_scan, "_by_ioctl", missing)
    assert pages_of(written_pages(guest.pid, guest.region)) == WRITINGS["scattered"]


# Copying


@pytest.mark.parametrize("pages", WRITINGS.values(), ids=WRITINGS.keys())
def test_a_fresh_process_gets_the_same_ram(guest: Guest, new_guest: NewGuest, pages: set[int]) -> None:
    guest.write(pages)
    other = new_guest()
    region = guest.region
    runs = written_pages(guest.pid, region)
    delta = Delta.prepare(runs.pages)
    delta.copy_from(guest.pid, region, runs)
    assert (delta.pages, delta.size) == (len(pages), len(pages) * PAGESIZE)
    delta.apply_to(other.pid, other.region)
    delta.close()
    assert other.ram() == ram_with(pages) == guest.ram()
    assert written_pages(other.pid, other.region) == runs


def test_the_later_copy_of_a_page_counts(guest: Guest, new_guest: NewGuest, tmp_path: Path) -> None:
    """Pages may be copied while the guest runs, and once more when it stands still."""
    guest.write(range(10, 30), seed=1)
    delta = copied(guest, range(10, 30))
    guest.write(range(15, 20), seed=2)
    delta.copy_from(guest.pid, guest.region, runs_of(range(15, 20)))
    expected = ram_with(range(15, 20), 2, on=ram_with(range(10, 30), 1))
    assert delta.pages == 25
    kept = Delta.load(tmp_path, delta.write_to(tmp_path), SIZE)
    for each in (delta, kept):
        other = new_guest()
        each.apply_to(other.pid, other.region)
        assert other.ram() == expected
        each.close()


def test_more_pages_than_were_prepared_for_find_room(
    guest: Guest, new_guest: NewGuest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_delta, "_SLACK", 3)
    pages = {*range(50), *range(100, 1000, 2)}
    guest.write(pages)
    region = guest.region
    delta = Delta.prepare(10)
    for part in (range(5), range(5, 50), range(100, 1000, 2)):
        delta.copy_from(guest.pid, region, runs_of(part))
    assert len(delta._chunks) > 2
    assert delta.pages == len(pages)
    kept = Delta.load(tmp_path, delta.write_to(tmp_path), SIZE)
    kept.verify()
    for each in (delta, kept):
        other = new_guest()
        each.apply_to(other.pid, other.region)
        assert other.ram() == ram_with(pages)
        each.close()


@pytest.mark.parametrize(
    ("most", "pieces", "calls"), [(3 * PAGESIZE, 1024, 20), (256 << 20, 2, 11), (50 * PAGESIZE, 3, 7)]
)
def test_long_and_many_runs_take_several_calls(
    guest: Guest, new_guest: NewGuest, monkeypatch: pytest.MonkeyPatch, most: int, pieces: int, calls: int
) -> None:
    monkeypatch.setattr(memory_delta, "_BYTES_PER_CALL", most)
    monkeypatch.setattr(memory_delta, "_PIECES_PER_CALL", pieces)
    pages = {*range(40), *range(60, 100, 2)}
    guest.write(pages)
    batches = list(memory_delta._pieces(guest.region, runs_of(pages)))
    assert len(batches) == calls
    assert all(sum(batch[1::2]) <= most and len(batch) <= 2 * pieces for batch in batches)
    assert all(all(batch[1::2]) for batch in batches), "no piece is empty"
    delta = copied(guest, pages)
    other = new_guest()
    delta.apply_to(other.pid, other.region)
    delta.close()
    assert other.ram() == ram_with(pages)


def test_a_call_that_did_a_part_is_continued(
    guest: Guest, new_guest: NewGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("process_vm_readv", "process_vm_writev"):
        call = getattr(memory_delta._libc, name)

        def partly(pid: int, here: int, *others: int, call: Callable[..., int] = call) -> int:
            place, length = (ctypes.c_uint64 * 2).from_address(here)
            less = array("Q", (place, min(length, 5000)))
            return call(pid, less.buffer_info()[0], *others)

        monkeypatch.setattr(memory_delta._libc, name, partly)
    pages = {*range(20), *range(30, 50, 2)}
    guest.write(pages)
    delta = copied(guest, pages)
    other = new_guest()
    delta.apply_to(other.pid, other.region)
    delta.close()
    assert other.ram() == ram_with(pages)


@pytest.mark.parametrize("advice", [23, 9999], ids=["populate", "touch"])
def test_prepared_room_is_there_before_it_is_needed(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_delta, "_MADV_POPULATE_WRITE", advice)
    delta = Delta.prepare(1000)
    buffer = delta._chunks[0].buffer
    room = Region(memory_delta._address(buffer), len(buffer))
    assert written_pages(os.getpid(), room).pages == 1000 + 1000 // 8 + 4096
    delta.close()


def test_pages_outside_of_ram_are_never_touched(guest: Guest) -> None:
    region = guest.region
    beyond = Runs(array("Q", (PAGES - 1, 2)))
    delta = Delta.prepare(2)
    with pytest.raises(ValueError, match="pages beyond"):
        delta.copy_from(guest.pid, region, beyond)
    assert delta.pages == 0
    delta.copy_from(guest.pid, region, runs_of([PAGES - 1]))
    with pytest.raises(ValueError, match="pages beyond"):
        delta.apply_to(guest.pid, Region(region.start, SIZE // 2))
    delta.close()


# Processes that are gone


@pytest.mark.parametrize("collected", [False, True], ids=["zombie", "collected"])
def test_a_process_that_ended_is_an_error(guest: Guest, collected: bool) -> None:
    guest.write(range(10))
    region = guest.region
    delta = copied(guest, range(10))
    guest.kill()
    if collected:
        guest.end()
    with pytest.raises(HostError):
        find_ram(guest.pid, SIZE, copied=True)
    with pytest.raises(HostError, match="cannot read the page map"):
        written_pages(guest.pid, region)
    ended = f"the memory of process {guest.pid}: the process has exited"
    with pytest.raises(HostError, match=f"cannot read {ended}"):
        delta.copy_from(guest.pid, region, runs_of([1]))
    with pytest.raises(HostError, match=f"cannot write {ended}"):
        delta.apply_to(guest.pid, region)
    assert delta.pages == 10
    delta.close()


@pytest.mark.parametrize("scan", [page_scan._scan, page_scan._by_pagemap])
def test_a_process_that_ends_before_it_was_looked_at_is_not_one_that_wrote_nothing(
    guest: Guest, scan: Callable[[int, Region], Runs]
) -> None:
    guest.write(range(10))
    region = guest.region
    pagemap = os.open(f"/proc/{guest.pid}/pagemap", os.O_RDONLY)
    guest.kill()
    with pytest.raises(ProcessLookupError):
        scan(pagemap, region)
    os.close(pagemap)


def test_a_process_that_ends_while_it_is_looked_at_is_an_error(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_ioctl = page_scan._by_ioctl

    def too_late(pagemap: int, region: Region) -> Runs:
        guest.kill()
        return by_ioctl(pagemap, region)

    guest.write(range(10))
    monkeypatch.setattr(page_scan, "_by_ioctl", too_late)
    with pytest.raises(HostError, match="No such process"):
        written_pages(guest.pid, guest.region)


def test_ram_that_is_no_longer_there_is_an_error_and_leaves_the_delta_closable(guest: Guest) -> None:
    region = guest.region
    delta = Delta.prepare(PAGES)
    guest.unmap()
    try:
        delta.copy_from(guest.pid, region, runs_of(range(10)))
    except HostError as error:
        assert "a part of it is not mapped" in str(error)
        delta.close()
    else:
        pytest.fail("it was copied")


# On disk


@pytest.fixture
def folder(guest: Guest, tmp_path: Path) -> Path:
    guest.write(WRITINGS["scattered"])
    return tmp_path


@pytest.fixture
def facts(guest: Guest, folder: Path) -> dict[str, object]:
    delta = copied(guest, WRITINGS["scattered"])
    facts = delta.write_to(folder)
    delta.close()
    return facts


def test_kept_pages_give_the_same_ram(folder: Path, facts: dict[str, object], new_guest: NewGuest) -> None:
    pages = WRITINGS["scattered"]
    assert facts["bytes"] == (folder / "memory").stat().st_size == len(pages) * PAGESIZE
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "memory": 0o600,
        "pages": 0o600,
    }
    delta = Delta.load(folder, facts, SIZE)
    delta.verify()
    assert (delta.pages, delta.size) == (len(pages), facts["bytes"])
    other = new_guest()
    delta.apply_to(other.pid, other.region)
    delta.close()
    assert other.ram() == ram_with(pages)


def test_no_pages_at_all_are_kept_too(guest: Guest, tmp_path: Path) -> None:
    facts = Delta.prepare(0).write_to(tmp_path)
    delta = Delta.load(tmp_path, facts, SIZE)
    delta.verify()
    delta.apply_to(guest.pid, guest.region)
    assert delta.size == 0
    delta.close()
    assert guest.ram() == CONTENT


@pytest.mark.parametrize("place", [0, 777_777, -1])
def test_changed_memory_does_not_verify(folder: Path, facts: dict[str, object], place: int) -> None:
    flip(folder / "memory", place)
    delta = Delta.load(folder, facts, SIZE)
    with pytest.raises(CheckpointUnusable, match="checksum mismatch in the file `memory`"):
        delta.verify()
    delta.close()


def test_memory_that_is_cut_after_it_was_loaded_does_not_verify(
    folder: Path, facts: dict[str, object]
) -> None:
    delta = Delta.load(folder, facts, SIZE)
    os.truncate(folder / "memory", 100)
    with pytest.raises(CheckpointUnusable, match="checksum mismatch in the file `memory`"):
        delta.verify()
    delta.close()


@pytest.mark.parametrize("place", [0, -1])
def test_changed_pages_are_refused(folder: Path, facts: dict[str, object], place: int) -> None:
    flip(folder / "pages", place)
    with pytest.raises(CheckpointUnusable, match="checksum mismatch in the file `pages`"):
        Delta.load(folder, facts, SIZE)


def test_files_that_were_cut_are_refused(folder: Path, facts: dict[str, object]) -> None:
    length = (folder / "memory").stat().st_size
    os.truncate(folder / "memory", length - 1)
    with pytest.raises(CheckpointUnusable, match=f"has {length - 1} bytes instead of {length}"):
        Delta.load(folder, facts, SIZE)
    os.truncate(folder / "pages", 16)
    with pytest.raises(CheckpointUnusable, match="checksum mismatch in the file `pages`"):
        Delta.load(folder, facts, SIZE)


@pytest.mark.parametrize("name", ["memory", "pages"])
def test_missing_files_are_refused(folder: Path, facts: dict[str, object], name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointUnusable, match="cannot open the memory file: No such file"):
        Delta.load(folder, facts, SIZE)


def test_memory_that_cannot_be_mapped_now_is_usable_later(
    folder: Path, facts: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(memory_delta._Saved, "map", refuse)
        with pytest.raises(HostError, match="cannot map the memory file: Cannot allocate memory"):
            Delta.load(folder, facts, SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    Delta.load(folder, facts, SIZE).close()


def test_pages_of_a_larger_machine_are_refused(folder: Path, facts: dict[str, object]) -> None:
    with pytest.raises(CheckpointUnusable, match="a run ends beyond"):
        Delta.load(folder, facts, SIZE - PAGESIZE)


def test_facts_of_something_else_are_refused(folder: Path, facts: dict[str, object]) -> None:
    with pytest.raises(CheckpointUnusable):
        Delta.load(folder, {}, SIZE)
    with pytest.raises(CheckpointUnusable, match="instead of 1"):
        Delta.load(folder, facts | {"bytes": 1}, SIZE)
    length = (folder / "memory").stat().st_size
    os.truncate(folder / "memory", length + PAGESIZE)
    with pytest.raises(CheckpointUnusable, match=f"instead of {length}"):
        Delta.load(folder, facts | {"bytes": length + PAGESIZE}, SIZE)


def test_loading_and_refusing_leaves_no_descriptor(folder: Path, facts: dict[str, object]) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    Delta.load(folder, facts, SIZE).close()
    os.truncate(folder / "memory", 1)
    with pytest.raises(CheckpointUnusable):
        Delta.load(folder, facts, SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_disk_that_takes_no_more_is_told(guest: Guest, tmp_path: Path) -> None:
    delta = copied(guest, range(1000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        delta.write_to(tmp_path)
    except HostError as error:
        assert str(error) == "cannot save memory: File too large"
        delta.close()
    else:
        pytest.fail("it was saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# Runs


page_sets = st.one_of(
    st.sets(st.integers(0, 60)),
    st.sets(st.integers(0, PAGES - 1), max_size=30),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=8).map(
        lambda spans: {page for first, count in spans for page in range(first, first + count)}
    ),
)


@given(page_sets, page_sets)
def test_minus_is_the_difference(pages: set[int], others: set[int]) -> None:
    left = minus(runs_of(pages), runs_of(others))
    assert pages_of(left) == pages - others
    assert left.pages == len(pages - others)
    assert list(left) == sorted(left)


@given(page_sets)
def test_runs_come_back_from_bytes(pages: set[int]) -> None:
    runs = runs_of(pages)
    assert Runs.from_bytes(runs.to_bytes(), SIZE) == runs
    assert runs.to_bytes() == b"".join(struct.pack("<QQ", *run) for run in runs)


@given(page_sets, st.integers(0, 100))
def test_a_split_keeps_the_order(pages: set[int], count: int) -> None:
    head, tail = runs_of(pages).split(count)
    assert pages_of(head) == set(sorted(pages)[:count])
    assert pages_of(tail) == set(sorted(pages)[count:])
    assert all(count for _, count in (*head, *tail))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([1], "8 bytes are not a whole number of runs"),
        ([1, 1, 2], "not a whole number of runs"),
        ([1, 1, 5, 0], "empty run of pages"),
        ([PAGES, 1], "beyond"),
        ([0, PAGES + 1], "beyond"),
        ([1, (1 << 64) - 1], "beyond"),
        ([(1 << 64) - 1, 1], "beyond"),
    ],
)
def test_what_cannot_be_runs_is_refused(words: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Runs.from_bytes(struct.pack(f"<{len(words)}Q", *words), SIZE)


def test_pages_are_saved_piece_by_piece(
    guest: Guest, new_guest: NewGuest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes to disk at once needs no room for all of it, and loads like any other."""
    guest.write(range(3, 50))
    guest.write([60, 70, 71])
    monkeypatch.setattr("stead.host.memory_delta._PIECE", 7)
    pages = written_pages(guest.pid, guest.region)
    facts = save_pages(guest.pid, guest.region, pages, tmp_path)
    loaded = Delta.load(tmp_path, facts, SIZE)
    loaded.verify()
    twin = new_guest()
    loaded.apply_to(twin.pid, twin.region)
    loaded.close()
    assert twin.ram() == guest.ram()
