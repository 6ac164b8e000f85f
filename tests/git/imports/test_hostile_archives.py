"""Archives that are malicious, corrupt or too large."""

import bz2
import gzip
import lzma
import os
import random
import stat
import struct
import tarfile
import zipfile
import zlib
from collections import deque
from pathlib import Path

import pytest

from stead.repos.errors import InvalidPath, RepoError, TooLarge
from stead.repos.transfer.archive_import import ArchiveTree
from stead.repos.transfer.archives import (
    FILE,
    LINK,
    ArchiveInvalid,
    ArchiveLimits,
    ArchiveMember,
    Kind,
    members,
    reading,
)
from stead.repos.transfer.remotes import SourceInvalid
from support.git_imports import Importing, file, files, link, special, tar_of, zip_of, zipped
from support.git_server import Page


def greedy_xz() -> bytes:
    """Its header requires 4 GiB of memory to unpack."""
    packed = bytearray(lzma.compress(tar_of(file("a"))))
    end = 12 + (packed[12] + 1) * 4
    packed[16] = 40
    packed[end - 4 : end] = struct.pack("<I", zlib.crc32(packed[12 : end - 4]))
    return bytes(packed)


HOSTILE_TARS: dict[str, bytes] = {
    "up": tar_of(file("../evil")),
    "up inside": tar_of(file("a/../../evil")),
    "absolute": tar_of(file("/etc/evil")),
    "other spelling of git": tar_of(file("a/.GIT/config")),
    "git on ntfs": tar_of(file("git~1/config")),
    "git on hfs": tar_of(file(".g\u200cit/config")),
    "control": tar_of(file("a\nb")),
    "not unicode": tar_of(file("a\udcff"), form=tarfile.GNU_FORMAT),
    "absolute link": tar_of(link("a", "/etc/passwd")),
    "link up": tar_of(link("a/b", "../../x")),
    "link by windows": tar_of(link("a", "..\\..\\x")),
    "link by link": tar_of(link("x/y/up", "../.."), link("out", "x/y/up/../secret")),
    "link by later link": tar_of(link("out", "x/y/up/../secret"), link("x/y/up", "../..")),
    "hard link to such a link": tar_of(link("a/b", "../x"), special("c", tarfile.LNKTYPE, "a/b")),
    "through a link": tar_of(link("a", "b"), file("a/file")),
    "link over a folder": tar_of(file("a/file"), link("a", "b")),
    "file over a folder": tar_of(file("a/file"), file("a")),
    "hard link to nothing": tar_of(special("a", tarfile.LNKTYPE, "b")),
    "hard link out": tar_of(special("a", tarfile.LNKTYPE, "../../etc/passwd")),
    "hard link to the root": tar_of(special("a", tarfile.LNKTYPE, "/etc/passwd")),
    "device": tar_of(special("a", tarfile.CHRTYPE)),
    "block device": tar_of(special("a", tarfile.BLKTYPE)),
    "fifo": tar_of(special("a", tarfile.FIFOTYPE)),
    "sparse": tar_of(special("a", tarfile.GNUTYPE_SPARSE), form=tarfile.GNU_FORMAT),
    "empty link": tar_of(link("a", "")),
    "submodule trick": tar_of(file(".gitmodules", b'[submodule "../x"]\n\tpath = x\n\turl = http://a/b\n')),
    "submodule link": tar_of(file("other"), link(".gitmodules", "other")),
    "cut": tar_of(file("a", b"x" * 5000))[:2000],
    "cut in a header": tar_of(file("a"))[:100],
    "nothing": b"",
    "not a tar": b"<html>not found</html>" * 100,
    "zip": zip_of(("a", b"b")),
    "cut gzip": gzip.compress(tar_of(file("a", os.urandom(5000))))[:3000],
    "broken gzip": b"\x1f\x8b\x08" + b"\0" * 1000,
    "cut bzip2": bz2.compress(tar_of(file("a", os.urandom(5000))))[:3000],
    "cut xz": lzma.compress(tar_of(file("a", os.urandom(5000))))[:3000],
    "greedy xz": greedy_xz(),
    "zstd": b"\x28\xb5\x2f\xfd" + b"\0" * 100,
}


@pytest.mark.parametrize("name", HOSTILE_TARS)
async def test_malicious_and_corrupt_tars_are_refused(importing: Importing, name: str) -> None:
    importing.server.pages["/a"] = Page(HOSTILE_TARS[name])
    await importing.refused(importing.archive("tar"), (InvalidPath, SourceInvalid))


async def test_tars_with_corrupt_headers_are_refused(importing: Importing) -> None:
    pax = tarfile.TarInfo("x")
    pax.type = tarfile.XHDTYPE
    for data in (
        b"5 path=x\n",
        b"99999999999 path=x\n",
        b"path",
        b"11 size=-1\n",
        b"12 size=\xc2\xb2\n",
        b"22 GNU.sparse.major=1\n",
    ):
        pax.size = len(data)
        header = pax.tobuf() + data + b"\0" * (-len(data) % 512)
        importing.server.pages["/a"] = Page(header + tar_of(file("a")))
        await importing.refused(importing.archive("tar"), SourceInvalid)
    pax.size = 1 << 30
    importing.server.pages["/a"] = Page(pax.tobuf() + b"\0" * 10_000)
    await importing.refused(importing.archive("tar"), SourceInvalid, "too long")


def lying_zip() -> bytes:
    """Its central directory states a larger size than the content."""
    packed = bytearray(zip_of(("a", b"x" * 100)))
    place = packed.index(b"PK\x01\x02") + 24
    packed[place : place + 4] = struct.pack("<I", 1000)
    return bytes(packed)


def changed_zip() -> bytes:
    packed = bytearray(zip_of(("a", b"x" * 100), method=zipfile.ZIP_STORED))
    packed[packed.index(b"xxxx")] = ord("y")
    return bytes(packed)


def encrypted_zip() -> bytes:
    packed = bytearray(zip_of(("a", b"x" * 100)))
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    packed[6] |= 1
    return bytes(packed)


HOSTILE_ZIPS: dict[str, bytes] = {
    "up": zip_of(("../evil", b"x")),
    "absolute": zip_of(("/etc/evil", b"x")),
    "by windows": zip_of(("..\\evil", b"x")),
    "git": zip_of((".Git/config", b"x")),
    "link up": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"../x")),
    "absolute link": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"/etc/passwd")),
    "long link": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"a/" * 5000)),
    "through a link": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"b"), ("a/file", b"x")),
    "device": zip_of((zipped("a", stat.S_IFCHR | 0o644), b"")),
    "lzma": zip_of(("a", b"x" * 100), method=zipfile.ZIP_LZMA),
    "bzip2": zip_of(("a", b"x" * 100), method=zipfile.ZIP_BZIP2),
    "no name": zip_of(("Za", b"x")).replace(b"Za", b"\0a"),
    "lie": lying_zip(),
    "changed": changed_zip(),
    "encrypted": encrypted_zip(),
    "cut": zip_of(("a", os.urandom(1000)))[:500],
    "tar": tar_of(file("a")),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE_ZIPS)
async def test_malicious_and_corrupt_zips_are_refused(importing: Importing, name: str) -> None:
    importing.server.pages["/a"] = Page(HOSTILE_ZIPS[name])
    await importing.refused(importing.archive("zip"), (InvalidPath, SourceInvalid))


def test_fuzzed_archives_are_imported_or_refused(tmp_path: Path) -> None:
    """Archives with random bytes changed: they are refused as corrupt, or have other content."""
    inside = file("a/b", b"text" * 300), link("c", "a/b"), file("d" * 120, b"x"), file("e", mode=0o755)
    entries = ("a/b", b"text" * 300), (zipped("c", stat.S_IFLNK | 0o777), b"a/b"), ("d", b"x")
    whole: list[tuple[Kind, bytes]] = [
        ("tar", tar_of(*inside)),
        ("tar", tar_of(*inside, form=tarfile.GNU_FORMAT)),
        ("tar", gzip.compress(tar_of(*inside))),
        ("tar", bz2.compress(tar_of(*inside))),
        ("tar", lzma.compress(tar_of(*inside))),
        ("zip", zip_of(*entries)),
    ]
    archive = tmp_path / "archive"
    ends: set[int | type[RepoError]] = set()
    for seed in range(800):
        chance = random.Random(seed)
        kind, data = chance.choice(whole)
        changed = bytearray(data)
        for _ in range(chance.randint(0, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        archive.write_bytes(changed[: chance.choice([len(changed), chance.randrange(len(changed))])])
        snapshot = ArchiveTree()
        try:
            with reading(kind):
                for _ in snapshot.blobs(members(kind, archive, ArchiveLimits(unpacked=1 << 20))):
                    pass
            ends.add(len(list(snapshot.lines())))
        except RepoError as error:
            ends.add(type(error))
    assert {4, 3, ArchiveInvalid, InvalidPath} <= ends


async def test_archive_bombs_are_refused(importing: Importing) -> None:
    zeros = bytes(3 << 16)
    plain = tar_of(file("a", zeros))
    archives: dict[str, tuple[Kind, bytes]] = {
        "plain": ("tar", plain),
        "gzip": ("tar", gzip.compress(plain)),
        "bzip2": ("tar", bz2.compress(plain)),
        "xz": ("tar", lzma.compress(plain)),
        "twice": ("tar", gzip.compress(plain[:1000]) + gzip.compress(plain[1000:])),
        "zip": ("zip", zip_of(("a", zeros))),
        "many": ("zip", zip_of(*((f"{number}", zeros[:6000]) for number in range(30)))),
    }
    bounded = importing.limited(bounds=ArchiveLimits(unpacked=2 << 16))
    for name, (kind, data) in archives.items():
        importing.server.pages[f"/{name}"] = Page(data)
        await importing.refused(bounded.archive(kind, name), TooLarge)
    for name, (kind, _) in archives.items():
        repository = await importing.make(importing.archive(kind, name))
        assert len(files(repository)) == (30 if name == "many" else 1)


async def test_compression_ratio_limit(importing: Importing) -> None:
    """Far below the size limit, but over the compression ratio limit."""
    plain = tar_of(file("a", bytes(1 << 20)))
    importing.server.pages["/bomb"] = Page(gzip.compress(plain, 1))
    limited = importing.limited(bounds=ArchiveLimits(ratio=50, ratio_from=1 << 19))
    await importing.refused(limited.archive("tar", "bomb"), TooLarge)


async def test_archive_entry_limit(importing: Importing) -> None:
    names = [f"{number}" for number in range(11)]
    importing.server.pages["/tar"] = Page(tar_of(*(file(name) for name in names)))
    importing.server.pages["/folders"] = Page(tar_of(*(special(name, tarfile.DIRTYPE) for name in names)))
    importing.server.pages["/zip"] = Page(zip_of(*((name, b"") for name in names)))
    few, enough = (importing.limited(bounds=ArchiveLimits(entries=most)) for most in (10, 11))
    await importing.refused(few.archive("tar", "tar"), TooLarge)
    await importing.refused(few.archive("tar", "folders"), TooLarge)
    await importing.refused(few.archive("zip", "zip"), TooLarge)
    kinds: tuple[Kind, ...] = ("tar", "zip")
    for kind in kinds:
        repository = await importing.make(enough.archive(kind, kind))
        assert len(files(repository)) == 11


def test_archive_name_and_link_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small compressed archives that would take hours to process."""
    monkeypatch.setattr("stead.repos.transfer.archive_import._MAX_NAMES", 1 << 20)
    monkeypatch.setattr("stead.repos.transfer.archive_import._MAX_STEPS", 1_000_000)
    long = "/".join(["a" * 250] * 16)
    with pytest.raises(TooLarge):
        deque(
            ArchiveTree().blobs(ArchiveMember(f"{number}/{long}", FILE) for number in range(200_000)),
            maxlen=0,
        )
    with pytest.raises(InvalidPath):
        deque(ArchiveTree().blobs([ArchiveMember("a/" * 2000 + "f", FILE)]), maxlen=0)
    chain = [_leading(f"{number:02}", "x/../" * 800 + f"{number + 1:02}") for number in range(38)]
    links = [_leading(f"l{number}", "00") for number in range(3000)]
    snapshot = ArchiveTree()
    deque(snapshot.blobs([*chain, *links]), maxlen=0)
    with pytest.raises(TooLarge):
        deque(snapshot.lines(), maxlen=0)


def _leading(name: str, target: str) -> ArchiveMember:
    return ArchiveMember(name, LINK, len(target), lambda: iter((target.encode(),)))
