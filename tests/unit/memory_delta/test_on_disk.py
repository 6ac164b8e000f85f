"""Written pages on disk, and their runs."""

import errno
import os
import resource
import struct
from mmap import PAGESIZE
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import CheckpointUnusable, DiskSpaceExceeded, HostError
from stead.host import memory_delta
from stead.host.memory_delta import Delta, save_pages
from stead.host.page_scan import Runs, minus, written_pages
from support.memory_guest import (
    CONTENT,
    PAGES,
    SIZE,
    WRITINGS,
    Guest,
    NewGuest,
    copied,
    flip,
    pages_of,
    ram_with,
    runs_of,
)

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


def test_memory_is_not_saved_into_the_rest_of_the_disk(
    guest: Guest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is for the database."""
    delta = copied(guest, range(1000))
    left = 1000 * PAGESIZE
    monkeypatch.setattr(memory_delta, "writable", lambda _: left)
    delta.write_to(tmp_path)
    left -= 1
    (tmp_path / "other").mkdir()
    with pytest.raises(DiskSpaceExceeded, match="cannot save memory: the disk of the host is nearly full"):
        delta.write_to(tmp_path / "other")
    delta.close()


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
