"""The pages of a VM's RAM that were written: finding and copying them."""

import ctypes
import errno
import os
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import PAGESIZE
from pathlib import Path

import pytest

from stead.errors import HostError
from stead.host import memory_delta, page_scan
from stead.host.checkpoints import place_memory
from stead.host.memory_delta import Delta
from stead.host.page_scan import Region, Runs, _Mapping, _spans, find_ram, written_pages
from support.memory_guest import (
    CONTENT,
    PAGES,
    SIZE,
    WRITINGS,
    Guest,
    NewGuest,
    copied,
    pages_of,
    ram_with,
    runs_of,
)

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


def test_memory_is_placed_in_a_process_once_it_has_mapped_its_ram(new_guest: NewGuest) -> None:
    parent, child = new_guest(), new_guest(layout="late")
    parent.write(range(7))
    delta = copied(parent, range(7))
    with ThreadPoolExecutor(1) as thread:
        placing = thread.submit(place_memory, child.pid, delta, SIZE, True, threading.Event())
        with pytest.raises(HostError, match="no private mappings"):
            _ = child.region
        assert not placing.done()
        child.map()
        placing.result(60)
    delta.close()
    assert child.ram() == ram_with(range(7))


def test_placing_memory_ends_when_it_is_given_up_and_with_the_process(new_guest: NewGuest) -> None:
    parent, child = new_guest(), new_guest(layout="late")
    delta = copied(parent, range(7))
    given_up = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        placing = thread.submit(place_memory, child.pid, delta, SIZE, True, given_up)
        given_up.set()
        placing.result(60)
    child.end()
    with pytest.raises(HostError, match="cannot read the memory map"):
        place_memory(child.pid, delta, SIZE, True, threading.Event())
    delta.close()


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
def test_exited_process_is_an_error_not_an_empty_delta(
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
