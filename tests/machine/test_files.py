"""Files of a real machine: read, written, listed, moved, packed; as root and as somebody else."""

import asyncio
import contextlib
import hashlib
import io
import os
import re
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead.errors import GuestError, InvalidRequest, SteadError
from stead.guest.execution import Output
from stead.guest.files import GuestFiles
from stead.machines import Machine
from support.waiting import until

MIB = 1 << 20


@pytest.fixture
def files(shared: Machine) -> GuestFiles:
    return shared.files()


@pytest_asyncio.fixture(scope="module")
async def alice(shared: Machine) -> GuestFiles:
    assert (await shared.exec("useradd --create-home --groups video alice")).ok
    return shared.files("alice")


async def names(files: GuestFiles, folder: str) -> list[str]:
    return [entry.name for entry in await files.list(folder)]


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@contextlib.contextmanager
def refused(code: str) -> Iterator[None]:
    """Around a call that the guest must refuse with this code."""
    with pytest.raises(GuestError) as error:
        yield
    assert error.value.code == code, f"{error.value.code}: {error.value}"


# Reading and writing


async def test_what_is_written_is_read_whole_in_part_and_as_a_stream(files: GuestFiles, folder: str) -> None:
    data = os.urandom(3 * MIB + 17)
    path = f"{folder}/data"
    assert await files.write(path, data) == len(data)
    assert await files.read(path) == data
    assert await files.read(path, 5, 10) == data[5:15]
    assert await files.read(path, len(data) - 3) == data[-3:]
    assert await files.read(path, len(data) - 3, 1000) == data[-3:]
    assert await files.read(path, 7, 0) == b""
    for start in (len(data), len(data) + 1, 1 << 40):
        assert await files.read(path, start) == b""
        assert await files.read(path, start, 10) == b""
    chunks = [chunk async for chunk in files.stream(path)]
    assert len(chunks) > 1
    assert b"".join(chunks) == data
    with pytest.raises(InvalidRequest):
        await files.read(path, -1)


async def test_small_empty_and_sizeless_files(files: GuestFiles, folder: str) -> None:
    await files.write(f"{folder}/empty", b"")
    assert await files.read(f"{folder}/empty") == b""
    assert await files.read(f"{folder}/empty", 0, 10) == b""
    await files.write(f"{folder}/empty", b"0123456789")
    assert await files.read(f"{folder}/empty", 3, 4) == b"3456"
    version = await files.read("/proc/version")
    assert version.startswith(b"Linux version ")
    assert await files.read("/proc/version", 6, 7) == b"version", "/proc says that its files are empty"


async def test_a_reader_may_leave_early(files: GuestFiles, folder: str) -> None:
    await files.write(f"{folder}/big", bytes(20 * MIB))
    async with asyncio.timeout(60):
        for _ in range(5):
            async with contextlib.aclosing(files.stream(f"{folder}/big")) as chunks:
                assert await anext(chunks)
        assert (await files.stat(f"{folder}/big")).size == 20 * MIB


async def test_writing_makes_parents_and_sets_mode_and_owner(
    files: GuestFiles, folder: str, alice: GuestFiles
) -> None:
    path = f"{folder}/deep/er/file"
    assert await files.write(path, pieces(b"stream", b"", b"ed")) == 8
    assert await files.read(path) == b"streamed"
    assert (await files.stat(f"{folder}/deep")).mode == 0o755
    info = await files.stat(path)
    assert (info.kind, info.size, info.mode, info.user, info.group) == ("file", 8, 0o644, "root", "root")

    await files.write(path, b"#!/bin/sh\n", mode=0o4751, owner="alice", group="video")
    info = await files.stat(path)
    assert (info.mode, info.user, info.group) == (0o4751, "alice", "video")
    await files.write(path, b"again")
    info = await files.stat(path)
    assert (info.mode, info.user, info.group) == (0o4751, "alice", "video"), "replacing keeps them"
    await files.write(path, b"", mode=0o600, owner="4321", group="1234")
    info = await files.stat(path)
    assert (info.mode, info.uid, info.gid, info.user) == (0o600, 4321, 1234, "4321")
    with refused("user_not_found"):
        await files.write(path, b"", owner="nobody-of-that-name")


async def test_an_upload_that_breaks_off_leaves_the_old_file_and_nothing_else(
    files: GuestFiles, folder: str
) -> None:
    path = f"{folder}/file"
    await files.write(path, b"old")

    async def broken() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield bytes(MIB)
        assert len(await names(files, folder)) == 2, "the upload is under way beside the file"
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        await files.write(path, broken())
    with pytest.raises(InvalidRequest, match="after 4 of "):
        await files.write(path, pieces(b"new", b"!"), size=5)
    with pytest.raises(InvalidRequest):
        await files.write(path, pieces(b"new", b"and more"), size=5)

    async def swept() -> bool:
        return await names(files, folder) == ["file"]

    await until(swept, 60)
    assert await files.read(path) == b"old"
    assert await files.write(path, pieces(b"n", b"ew"), size=3) == 3
    assert await files.read(path) == b"new"


async def test_whoever_has_a_file_open_keeps_the_old_one(
    files: GuestFiles, folder: str, shared: Machine
) -> None:
    """Writing through a link replaces the file that it leads to, and the link stays."""
    await files.write(f"{folder}/file", b"old\n")
    assert (await shared.exec(["ln", "-s", "file", f"{folder}/link"])).ok
    replaced = asyncio.Event()

    async def go() -> AsyncIterator[bytes]:
        await replaced.wait()
        yield b"go\n"

    printed = b""
    command = "exec 3< file; echo open; read go; cat <&3; cat file"
    async with asyncio.timeout(60):
        async for event in shared.stream(command, cwd=folder, stdin=go()):
            printed += event.data if isinstance(event, Output) else b""
            if printed == b"open\n":
                await files.write(f"{folder}/link", b"new\n")
                replaced.set()
    assert printed == b"open\nold\nnew\n"
    assert (await files.stat(f"{folder}/link", follow=False)).kind == "symlink"


async def test_a_full_file_system_leaves_the_old_file(
    files: GuestFiles, folder: str, shared: Machine
) -> None:
    assert (await shared.exec(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder])).ok
    try:
        await files.write(f"{folder}/file", b"old")
        with refused("no_space"):
            await files.write(f"{folder}/file", bytes(9 * MIB))
        with refused("no_space"):
            await files.write(f"{folder}/file", pieces(*[bytes(MIB)] * 100))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            add(tar, "big", b"x" * 9 * MIB)
        with refused("no_space"):
            await files.upload_tar(f"{folder}/tree", archive.getvalue())
        await files.remove(f"{folder}/tree", recursive=True)
        assert await names(files, folder) == ["file"]
        assert await files.read(f"{folder}/file") == b"old"
        assert await files.write(f"{folder}/file", bytes(6 * MIB)) == 6 * MIB
    finally:
        assert (await shared.exec(["umount", folder])).ok


# Folders


async def test_what_is_there(files: GuestFiles, folder: str, shared: Machine) -> None:
    await files.write(f"{folder}/b-file", b"12345", mode=0o640)
    await files.make_folder(f"{folder}/a-folder", mode=0o1770)
    made = await shared.exec(
        "ln -s b-file to-file; ln -s /nowhere/at/all dangling; mkfifo pipe; mknod null c 1 3;"
        " touch -d @1700000000.123456789 b-file",
        cwd=folder,
    )
    assert made.ok
    listed = {entry.name: entry for entry in await files.list(folder)}
    assert list(listed) == ["a-folder", "b-file", "dangling", "null", "pipe", "to-file"]
    kinds = {name: entry.kind for name, entry in listed.items()}
    assert kinds == {
        "a-folder": "directory",
        "b-file": "file",
        "dangling": "symlink",
        "null": "device",
        "pipe": "fifo",
        "to-file": "symlink",
    }
    assert listed["a-folder"].mode == 0o1770
    assert listed["dangling"].target == "/nowhere/at/all"
    file = listed["b-file"]
    assert (file.size, file.mode, file.mtime_ns, file.target) == (5, 0o640, 1700000000_123456789, None)
    assert await files.stat(f"{folder}/b-file") == file
    assert await files.stat(f"{folder}/to-file", follow=False) == listed["to-file"]
    followed = await files.stat(f"{folder}/to-file")
    assert (followed.kind, followed.size, followed.mode) == ("file", 5, 0o640)
    assert (await files.stat("/")).kind == "directory"
    for missing in ("dangling", "nothing"):
        with refused("not_found"):
            await files.stat(f"{folder}/{missing}")
        with refused("not_found"):
            await files.list(f"{folder}/{missing}")
        with refused("not_found"):
            await files.read(f"{folder}/{missing}")
    with refused("not_directory"):
        await files.list(f"{folder}/b-file")
    with refused("not_directory"):
        await files.write(f"{folder}/b-file/below", b"")
    for call in (files.read(folder), files.read(folder, 1, 2), files.write(folder, b"")):
        with refused("is_directory"):
            await call
    for name in ("pipe", "null"):
        with refused("invalid_request"):
            async with asyncio.timeout(60):
                await files.read(f"{folder}/{name}")


async def test_making_and_removing(files: GuestFiles, folder: str) -> None:
    deep = f"{folder}/one/two/three"
    with refused("not_found"):
        await files.make_folder(deep)
    await files.make_folder(deep, parents=True, mode=0o700)
    assert (await files.stat(deep)).mode == 0o700
    await files.make_folder(deep, parents=True)
    with refused("exists"):
        await files.make_folder(deep)
    await files.write(f"{deep}/file", b"")
    with refused("exists"):
        await files.make_folder(f"{deep}/file", parents=True)

    with refused("not_empty"):
        await files.remove(deep)
    await files.remove(f"{deep}/file")
    await files.remove(deep)
    with refused("not_found"):
        await files.remove(deep)
    with refused("not_found"):
        await files.remove(deep, recursive=True)
    await files.write(f"{deep}/file", b"")
    await files.remove(f"{folder}/one", recursive=True)
    assert await names(files, folder) == []
    with refused("invalid_request"):
        await files.remove("/", recursive=True)


async def test_removing_a_link_leaves_what_it_leads_to(
    files: GuestFiles, folder: str, shared: Machine
) -> None:
    await files.write(f"{folder}/kept/file", b"kept")
    assert (await shared.exec("mkdir tree; ln -s ../kept tree/link; ln -s kept link", cwd=folder)).ok
    await files.remove(f"{folder}/link", recursive=True)
    await files.remove(f"{folder}/tree", recursive=True)
    assert await names(files, folder) == ["kept"]
    assert await files.read(f"{folder}/kept/file") == b"kept"


async def test_moving(files: GuestFiles, folder: str, shared: Machine) -> None:
    await files.write(f"{folder}/a", b"a", mode=0o741)
    await files.write(f"{folder}/b", b"b")
    with refused("exists"):
        await files.move(f"{folder}/a", f"{folder}/b")
    assert await files.read(f"{folder}/b") == b"b"
    await files.move(f"{folder}/a", f"{folder}/b", overwrite=True)
    assert await names(files, folder) == ["b"]
    assert await files.read(f"{folder}/b") == b"a"
    with refused("not_found"):
        await files.move(f"{folder}/a", f"{folder}/c")
    with refused("not_found"):
        await files.move(f"{folder}/b", f"{folder}/nowhere/b")

    await files.make_folder(f"{folder}/tree")
    await files.move(f"{folder}/b", f"{folder}/tree/b")
    away = f"/dev/shm/{secrets.token_hex(8)}"
    assert (await shared.exec(["ln", "-s", "b", f"{folder}/tree/link"])).ok
    await files.move(f"{folder}/tree", away)
    assert await names(files, folder) == []
    assert await names(files, away) == ["b", "link"]
    assert (await files.stat(f"{away}/b")).mode == 0o741
    assert (await files.stat(f"{away}/link", follow=False)).target == "b"
    with refused("exists"):
        await files.move(f"{folder}", away)
    await files.move(away, f"{folder}/back")
    assert await files.read(f"{folder}/back/link") == b"a"
    assert Path(away).name not in await names(files, "/dev/shm")


# Archives

ODD_NAMES = [
    "with space",
    "new\nline",
    "-rf",
    "quote'\"\\",
    "ünï-🎈",
    os.fsdecode(b"\xff\xfe\x80 raw"),
    "100%2F+&?#",
    "n" * 255,
    ".hidden",
    "CON",
]


def add(
    tar: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    mode: int = 0o644,
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode, entry.size = kind, link, mode, len(content)
    entry.uid, entry.gid, entry.mtime = 1234, 4321, 1_600_000_000
    tar.addfile(entry, io.BytesIO(content))


def tree() -> bytes:
    """An archive with one of everything."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "empty", kind=tarfile.DIRTYPE, mode=0o750)
        add(tar, "locked", kind=tarfile.DIRTYPE, mode=0o500)
        add(tar, "locked/inside", b"inside", mode=0o400)
        add(tar, "run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
        add(tar, "set", b"", mode=0o6711)
        add(tar, "hole", bytes(MIB) + b"end")
        add(tar, "link", kind=tarfile.SYMTYPE, link="run.sh", mode=0o777)
        add(tar, "dangling", kind=tarfile.SYMTYPE, link="/nowhere/" + "far" * 50, mode=0o777)
        add(tar, "same", kind=tarfile.LNKTYPE, link="run.sh", mode=0o755)
        for number, name in enumerate(ODD_NAMES):
            add(tar, f"odd/{name}", b"content %d" % number)
            add(tar, f"{name}/{name}/x", kind=tarfile.SYMTYPE, link=name, mode=0o777)
    return archive.getvalue()


def content_of(archive: bytes) -> dict[str, tuple[object, ...]]:
    """Everything but the folders that an archive need not name."""
    found: dict[str, tuple[object, ...]] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), encoding="utf-8", errors="surrogateescape") as tar:
        for entry in tar:
            if entry.isdir() and entry.name not in ("empty", "locked"):
                continue
            opened = tar.extractfile(entry) if entry.isreg() or entry.islnk() else None
            content = opened.read() if opened else entry.linkname
            found[entry.name] = (entry.mode, entry.uid, entry.gid, entry.mtime, content)
    return found


async def download(files: GuestFiles, path: str) -> bytes:
    return b"".join([chunk async for chunk in files.download_tar(path)])


async def test_a_folder_goes_up_and_comes_down_unchanged(files: GuestFiles, folder: str) -> None:
    sent = tree()
    target = f"{folder}/made/on the way"
    halves = pieces(sent[:1000], sent[1000:])
    assert await files.upload_tar(target, halves) == 6 + 1 + 2 * len(ODD_NAMES)
    odd = sorted(os.fsencode(name) for name in ODD_NAMES)
    assert [os.fsencode(name) for name in await names(files, f"{target}/odd")] == odd
    for number, name in enumerate(ODD_NAMES):
        assert await files.read(os.fsencode(f"{target}/odd/{name}")) == b"content %d" % number
    back = await download(files, target)
    assert content_of(back) == content_of(sent)
    assert await files.upload_tar(target, back) > 0, "what is there is replaced"
    assert content_of(await download(files, target)) == content_of(sent)


async def test_every_odd_name_works_everywhere(files: GuestFiles, folder: str) -> None:
    for name in ODD_NAMES:
        path = f"{folder}/{name}"
        await files.write(path, b"x")
        assert (await files.stat(path)).name == name
        await files.move(path, f"{folder}/plain")
        assert await names(files, folder) == ["plain"]
        await files.move(f"{folder}/plain", os.fsencode(path))
        assert await names(files, folder) == [name]
        await files.remove(path)


async def test_nothing_in_an_archive_leads_outside(files: GuestFiles, folder: str) -> None:
    """By a name that climbs, by a link that the archive made itself, or by one that was there before."""
    await files.write(f"{folder}/outside/victim", b"untouched")
    for number, entries in enumerate(
        (
            [("../outside/new", tarfile.REGTYPE, "")],
            [("a/../../outside/new", tarfile.REGTYPE, "")],
            [("out", tarfile.SYMTYPE, "../outside"), ("out/new", tarfile.REGTYPE, "")],
            [("out", tarfile.SYMTYPE, f"{folder}/outside"), ("out/victim", tarfile.REGTYPE, "")],
            [("a", tarfile.SYMTYPE, "."), ("a/b", tarfile.SYMTYPE, ".."), ("a/b/new", tarfile.REGTYPE, "")],
            [("victim", tarfile.LNKTYPE, "../outside/victim"), ("victim", tarfile.REGTYPE, "")],
            [("out", tarfile.SYMTYPE, "../outside"), ("out", tarfile.DIRTYPE, "")],
            [("out", tarfile.SYMTYPE, "../outside"), ("out/new", tarfile.DIRTYPE, "")],
            [("out", tarfile.SYMTYPE, "../outside"), ("out/new", tarfile.SYMTYPE, "x")],
        )
    ):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, kind, link in entries:
                add(tar, name, b"escaped" if kind == tarfile.REGTYPE else b"", kind, link, mode=0o700)
        try:
            await files.upload_tar(f"{folder}/inside{number}", archive.getvalue())
        except GuestError as error:
            assert error.code == "invalid_request", f"{entries}: {error}"
        assert await names(files, f"{folder}/outside") == ["victim"], entries
        assert await files.read(f"{folder}/outside/victim") == b"untouched", entries
        outside = await files.stat(f"{folder}/outside")
        assert (outside.mode, outside.user) == (0o755, "root"), entries
        assert all(name == "outside" or name.startswith("inside") for name in await names(files, folder))


async def test_archives_that_are_none(files: GuestFiles, folder: str) -> None:
    whole = tree()
    for archive in (b"", b"no tar at all" * 100, whole[:2000]):
        with refused("invalid_request"):
            await files.upload_tar(f"{folder}/tree", archive)
    with refused("not_found"):
        await download(files, f"{folder}/nothing")
    await files.write(f"{folder}/file", b"")
    with refused("not_directory"):
        await download(files, f"{folder}/file")
    with refused("not_directory"):
        await files.upload_tar(f"{folder}/file", whole)


# As somebody else


async def test_files_as_another_user(
    shared: Machine, files: GuestFiles, alice: GuestFiles, folder: str
) -> None:
    assert await alice.write(f"{folder}/deep/hers", b"hers") == 4
    for path in (f"{folder}/deep", f"{folder}/deep/hers"):
        info = await files.stat(path)
        assert (info.user, info.group) == ("alice", "alice")
    assert await alice.read(f"{folder}/deep/hers") == b"hers"
    await files.write(f"{folder}/for-video", b"shared", mode=0o640, group="video")
    assert await alice.read(f"{folder}/for-video") == b"shared", "her groups count"

    await files.write(f"{folder}/private/secret", b"root's", mode=0o600)
    await files.write(f"{folder}/readable", b"root's", mode=0o644)
    with refused("permission_denied"):
        await alice.list("/root")
    with refused("permission_denied"):
        await alice.stat("/root/.bashrc")
    for path in (f"{folder}/private/secret", "/etc/shadow"):
        with refused("permission_denied"):
            await alice.read(path)
    for path in (f"{folder}/private/new", f"{folder}/readable", "/etc/passwd", "/usr/new"):
        with refused("permission_denied"):
            await alice.write(path, b"alice's")
    for call in (
        alice.make_folder("/usr/new"),
        alice.remove(f"{folder}/private/secret"),
        alice.remove(f"{folder}/private", recursive=True),
        alice.move(f"{folder}/private/secret", f"{folder}/mine"),
        alice.move(f"{folder}/deep/hers", f"{folder}/private/hers"),
        download(alice, "/root"),
        alice.upload_tar("/usr/new", tree()),
    ):
        with refused("permission_denied"):
            await call
    assert await files.read(f"{folder}/readable") == b"root's"

    await alice.upload_tar(f"{folder}/tree", tree())
    entries = [*await files.list(f"{folder}/tree"), *await files.list(f"{folder}/tree/odd")]
    assert {(entry.user, entry.group) for entry in entries} == {("alice", "alice")}
    assert await download(alice, f"{folder}/tree")
    with refused("user_not_found"):
        await shared.files("nobody-of-that-name").stat("/")


async def test_a_folder_with_a_secret_inside_does_not_come_down_as_if_whole(
    files: GuestFiles, alice: GuestFiles, folder: str
) -> None:
    await files.write(f"{folder}/readable", b"x" * MIB)
    await files.write(f"{folder}/secret", b"root's", mode=0o600)
    with pytest.raises(SteadError):
        await download(alice, folder)


# Large


def peak_rss() -> int:
    return kib(Path("/proc/self/status").read_bytes(), "VmHWM")


def kib(status: bytes, field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", status.decode())
    assert match
    return int(match[1])


async def test_places_beyond_four_gigabytes(files: GuestFiles, folder: str, shared: Machine) -> None:
    path, size = f"{folder}/sparse", 5 << 30
    assert (await shared.exec(f"truncate -s {size} {path} && printf end >> {path}")).ok
    assert (await files.stat(path)).size == size + 3
    assert await files.read(path, size) == b"end"
    assert await files.read(path, size - 2, 4) == b"\0\0en"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mib", [160, pytest.param(2048, marks=pytest.mark.slow)])
async def test_a_large_file_goes_up_and_down_in_little_memory(machine: Machine, mib: int) -> None:
    """Neither side ever holds more than a part of the file; the VM's memory could not hold the largest."""
    size = mib * MIB
    assert mib < 1000 or mib > (await machine.info()).size.memory_mib
    noise = os.urandom(MIB - 8)
    sent, received = hashlib.sha256(), hashlib.sha256()

    async def source() -> AsyncIterator[bytes]:
        for number in range(size // MIB):
            chunk = number.to_bytes(8, "big") + noise
            sent.update(chunk)
            yield chunk

    files = machine.files()
    agent = (await machine.exec(["pidof", "/usr/lib/stead/agent"])).stdout.decode().strip()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_rss()
    assert await files.write("/var/large", source()) == size
    async for chunk in files.stream("/var/large"):
        received.update(chunk)
    assert received.digest() == sent.digest()
    assert peak_rss() - before < 100 << 10
    assert kib(await files.read(f"/proc/{agent}/status"), "VmHWM") < 100 << 10
