"""Folders that travel as archives: everything that belongs arrives, and nothing else is touched."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stead.sdk.archives import pack, unpack


def archive(*entries: tarfile.TarInfo) -> io.BytesIO:
    """An archive of these entries; files contain the text "evil"."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for entry in entries:
            entry.size = 4 if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(b"evil"))
    packed.seek(0)
    return packed


def entry(name: str, kind: bytes = tarfile.REGTYPE, to: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, to, mode
    return made


def link(name: str, to: str) -> tarfile.TarInfo:
    return entry(name, tarfile.SYMTYPE, to)


def hard(name: str, to: str) -> tarfile.TarInfo:
    return entry(name, tarfile.LNKTYPE, to)


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """The entries of a folder, with the content of files and the targets of links."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = ("link", path.readlink())
        elif path.is_dir():
            found[name] = ("folder", path.stat().st_mode & 0o777)
        else:
            found[name] = ("file", path.read_bytes(), path.stat().st_mode & 0o777, path.stat().st_mtime)
    return found


def sent(source: Path, target: Path) -> list[str]:
    return unpack(io.BytesIO(b"".join(pack(source))), target)


def test_pack_and_unpack_restore_a_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "some" / "target"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "tool").write_bytes(b"#!/bin/sh\n")
    (source / "deep" / "er" / "tool").chmod(0o755)
    (source / "deep" / "back").symlink_to("../large")
    (source / "dangling").symlink_to("nowhere/yet")
    (source / "large").write_bytes(os.urandom(700_001))
    (source / "exact").write_bytes(bytes(512))
    (source / "empty").touch()
    (source / ("long" * 60)).write_text("a name longer than old archives take")
    (source / "na\udcffme").write_text("a name that is not UTF-8")
    os.utime(source / "exact", (1_700_000_000.25, 1_700_000_000.25))
    os.mkfifo(source / "pipe")
    assert sent(source, target) == []
    (source / "pipe").unlink()
    assert contents(target) == contents(source)
    assert sent(source, target) == []
    assert contents(target) == contents(source)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 3000), name=st.text("abc é\n/.", min_size=1, max_size=300))
def test_pack_and_unpack_restore_any_file(
    tmp_path_factory: pytest.TempPathFactory, size: int, name: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    parts = [part[:200] for part in name.split("/") if part.strip(".")]
    if not parts:
        return
    file = folder.joinpath("source", *parts)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"z" * size)
    assert sent(folder / "source", folder / "target") == []
    assert (folder / "target").joinpath(*parts).read_bytes() == b"z" * size


def test_pack_fails_if_a_file_shrinks(tmp_path: Path) -> None:
    """Padding the file would corrupt the archive."""
    file = tmp_path / "log"
    file.write_bytes(b"x" * 600_000)
    chunks = pack(tmp_path)
    next(chunks), next(chunks)
    file.write_bytes(b"")
    with pytest.raises(OSError, match="was truncated"):
        list(chunks)


HOSTILE = {
    "climbing": [entry("../victim")],
    "climbing later": [entry("a/../../victim")],
    "absolute": [entry("/{outside}/victim")],
    "absolute link": [link("out", "{outside}"), entry("out/victim")],
    "climbing link": [link("out", "../outside"), entry("out/victim")],
    "deep climbing link": [entry("a/b/", tarfile.DIRTYPE), link("a/b/out", "../../../outside")],
    "link over a link": [link("a", "."), link("a/b", ".."), link("c", "a/b/outside"), entry("c/victim")],
    "up from where a link led": [
        entry("p/q/", tarfile.DIRTYPE),
        link("p/q/top", "../.."),
        link("out", "p/q/top/../outside"),
        entry("out/victim"),
    ],
    "a folder where a link was": [link("d", "{outside}"), entry("d/", tarfile.DIRTYPE), entry("d/victim2")],
    "hard link": [hard("hard", "../outside/victim"), entry("hard")],
    "hard link through a link": [link("out", "{outside}"), hard("hard", "out/victim"), entry("hard")],
    "devices": [entry("zero", tarfile.CHRTYPE), entry("pipe", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archive_cannot_write_outside_the_folder(name: str, tmp_path: Path) -> None:
    """The file outside keeps its content, and no extracted link points to it."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_text("precious")
    (tmp_path / "victim").write_text("precious")
    entries = [
        entry(
            made.name.replace("{outside}", str(outside)),
            made.type,
            made.linkname.replace("{outside}", str(outside)),
        )
        for made in HOSTILE[name]
    ]
    unpack(archive(*entries), folder)
    assert victim.read_text() == "precious" and (tmp_path / "victim").read_text() == "precious"
    assert list(outside.iterdir()) == [victim] and victim.stat().st_nlink == 1
    root = os.path.realpath(folder)
    for path in folder.rglob("*"):
        assert path.is_file() or path.is_dir() or path.is_symlink(), f"{path} is a device"
        assert os.path.realpath(path).startswith(root), f"{path} leads outside"


def test_unpack_does_not_write_through_local_symlinks(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.mkdir()
    (folder / "mine").symlink_to(outside)
    (folder / "config").symlink_to(outside / "config")
    skipped = unpack(archive(entry("mine/victim"), entry("config"), entry("fine")), folder)
    assert skipped == ["mine/victim"]
    assert list(outside.iterdir()) == []
    assert (folder / "config").read_text() == "evil" and not (folder / "config").is_symlink()
    assert (folder / "fine").read_text() == "evil"


def test_unpack_returns_skipped_names(tmp_path: Path) -> None:
    entries = [
        link("out", "/etc"),
        entry("zero", tarfile.CHRTYPE),
        entry("../up"),
        link("in", "fine"),
        entry("fine"),
    ]
    assert unpack(archive(*entries), tmp_path / "x") == ["out", "zero", "../up"]
    assert (tmp_path / "x" / "in").read_text() == "evil"


def test_unpack_drops_setuid_and_write_permissions_for_others(tmp_path: Path) -> None:
    """The owner can always delete the extracted files."""
    entries = [entry("d/", tarfile.DIRTYPE, mode=0o000), entry("d/su", mode=0o6777), hard("d/again", "d/su")]
    assert unpack(archive(*entries), tmp_path / "x") == []
    assert (tmp_path / "x" / "d").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "x" / "d" / "su").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "x" / "d" / "again").samefile(tmp_path / "x" / "d" / "su")
