"""Tools for files in a VM."""

from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from stead.mcp.calls import Call, destructive, read_only, vm_of
from stead.mcp.excerpts import decoded, encoded
from stead.mcp.vms import VmRef
from stead.sdk import AsyncVm

Path = Annotated[str, Field(pattern="^/", description="An absolute path in the VM.")]
LinuxUser = Annotated[str | None, Field(description="The Linux user. Default: root.")]
Encoding = Annotated[
    Literal["utf-8", "base64"], Field(description="How `content` is given: as text, or as base64 of bytes.")
]

READ_LIMIT = 256 * 1024
EDIT_LIMIT = 2 * 1024 * 1024
_MOST_ENTRIES = 1000


class FilePart(BaseModel):
    """A part of a file."""

    path: str
    size: int = Field(description="Bytes of the whole file.")
    offset: int = Field(description="Where this part begins, in bytes.")
    next_offset: int | None = Field(description="Where the next part begins; null at the end of the file.")
    encoding: str = Field(description="utf-8, or base64 if the bytes are not text.")
    content: str


class FileWritten(BaseModel):
    """A file that was written."""

    path: str
    size: int = Field(description="Bytes of the file now.")


class FileEdited(FileWritten):
    """A file in which text was replaced."""

    replacements: int


class FolderEntry(BaseModel):
    """An entry of a folder."""

    name: str
    kind: str = Field(description="file or directory.")


class Folder(BaseModel):
    """A page of the entries of a folder."""

    path: str
    entries: list[FolderEntry]
    total: int
    next_offset: int | None = Field(description="The offset of the next page; null on the last.")


async def _read(vm: AsyncVm, path: str, offset: int, limit: int) -> tuple[bytes, bool]:
    """At most `limit` bytes from an offset on, and whether that is the end of the file."""
    data, skip = bytearray(), offset
    async with aclosing(vm.fs.read_chunks(path)) as chunks:
        async for chunk in chunks:
            data += chunk[skip:]
            skip = max(0, skip - len(chunk))
            if len(data) > limit:
                return bytes(data[:limit]), False
    return bytes(data), True


async def file_read(
    call: Call,
    vm: VmRef,
    path: Path,
    offset: Annotated[int, Field(ge=0, description="Begin at this byte.")] = 0,
    limit: Annotated[int, Field(ge=1, le=READ_LIMIT, description="Read at most this many bytes.")] = 65536,
    user: LinuxUser = None,
) -> FilePart:
    """Read a file of a VM, or a part of it. A long file is read in parts: continue at next_offset."""
    found = await vm_of(call, vm, user)
    stat = await found.fs.stat(path)
    if stat.is_directory:
        raise IsADirectoryError(f"{path} is a folder: use file_list")
    data, at_end = await _read(found, path, offset, limit)
    encoding, content, covered = decoded(data, at_end=at_end)
    return FilePart(
        path=path,
        size=max(stat.size, offset + len(data)) if data else stat.size,
        offset=offset,
        next_offset=None if at_end else offset + covered,
        encoding=encoding,
        content=content,
    )


async def file_write(
    call: Call,
    vm: VmRef,
    path: Path,
    content: Annotated[str, Field(description="The whole content of the file.")],
    encoding: Encoding = "utf-8",
    mode: Annotated[
        str | None, Field(pattern="^[0-7]{3,4}$", description="Permissions in octal, for example 755.")
    ] = None,
    user: LinuxUser = None,
) -> FileWritten:
    """Create a file in a VM with its parent folders, or replace it. Use file_edit to change a part."""
    data = encoded(content, encoding)
    found = await vm_of(call, vm, user)
    await found.fs.write(path, data, mode=None if mode is None else int(mode, 8))
    return FileWritten(path=path, size=len(data))


async def file_edit(
    call: Call,
    vm: VmRef,
    path: Path,
    old_text: Annotated[str, Field(min_length=1, description="Text of the file, with its whitespace.")],
    new_text: Annotated[str, Field(description="What replaces it.")],
    replace_all: Annotated[
        bool, Field(description="Replace it wherever it occurs. Otherwise it must occur exactly once.")
    ] = False,
    user: LinuxUser = None,
) -> FileEdited:
    """Replace text in a UTF-8 file of a VM, of up to 2 MiB. Nothing is changed if the text does not occur, or
    occurs more than once without replace_all."""
    found = await vm_of(call, vm, user)
    data, whole = await _read(found, path, 0, EDIT_LIMIT)
    if not whole:
        raise ValueError(f"{path} is longer than {EDIT_LIMIT} bytes: edit it with a command")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a UTF-8 text file: use file_write") from None
    count = text.count(old_text)
    if count == 0:
        raise ValueError(f"old_text does not occur in {path}: read the file again")
    if count > 1 and not replace_all:
        raise ValueError(f"old_text occurs {count} times in {path}: give more context, or replace_all")
    changed = text.replace(old_text, new_text).encode()
    await found.fs.write(path, changed)
    return FileEdited(path=path, size=len(changed), replacements=count)


async def file_list(
    call: Call,
    vm: VmRef,
    path: Path,
    limit: Annotated[int, Field(ge=1, le=_MOST_ENTRIES)] = 200,
    offset: Annotated[int, Field(ge=0)] = 0,
    user: LinuxUser = None,
) -> Folder:
    """List the entries of a folder of a VM by name."""
    found = await vm_of(call, vm, user)
    entries = sorted(await found.fs.read_dir(path), key=lambda each: each.name)
    shown = entries[offset : offset + limit]
    end = offset + len(shown)
    return Folder(
        path=path,
        entries=[FolderEntry(name=each.name, kind=each.kind) for each in shown],
        total=len(entries),
        next_offset=end if end < len(entries) else None,
    )


TOOLS = [
    read_only(file_read, "Read a file"),
    destructive(file_write, "Write a file", idempotent=True),
    destructive(file_edit, "Edit a file"),
    read_only(file_list, "List a folder"),
]
