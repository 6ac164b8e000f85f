"""`stead vm fs` and `stead vm cp`: files in a VM."""

import contextlib
import os
import posixpath
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.output import (
    Json,
    local_time,
    note,
    print_facts,
    print_json,
    print_table,
    show_progress,
    to_plain,
)
from stead.cli.references import Vm

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk._sync.files import Files

app = typer.Typer(no_args_is_help=True, help="Files in a VM.")

User = Annotated[str | None, typer.Option("--user", "-u", help="The Linux user. Default: root.")]
GuestPath = Annotated[str, typer.Argument(metavar="PATH", help="A path in the VM.")]
_CHUNK = 256 * 1024
_LARGE = 8 << 20
"""Files of this size or more get a progress bar."""


def _files(stead: "Stead", vm: str, user: str | None) -> "Files":
    handle = stead.vms.find(vm)
    return handle.fs if user is None else handle.user(user).fs


@app.command("ls")
def list_folder(
    vm: Vm,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory in the VM.")] = "/",
    user: User = None,
    as_json: Json = False,
) -> None:
    """List a directory."""
    with connected() as stead:
        entries = sorted(_files(stead, vm, user).read_dir(path), key=lambda entry: entry.name)
    if as_json:
        print_json({"path": path, "files": entries})
    elif sys.stdout.isatty():
        print_table(("name", "kind"), [(entry.name, entry.kind) for entry in entries], "empty directory")
    else:
        for entry in entries:
            typer.echo(entry.name)


@app.command("cat")
def print_file(vm: Vm, path: GuestPath, user: User = None) -> None:
    """Print a file."""
    with connected() as stead, _files(stead, vm, user).read_chunks(path) as chunks:
        _write_out(chunks)


@app.command("write")
def write_file(
    vm: Vm,
    path: GuestPath,
    content: Annotated[
        str | None, typer.Option("--content", help="The content as text. Default: standard input.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="MODE", help="Permissions in octal, for example 755.")
    ] = None,
    user: User = None,
    as_json: Json = False,
) -> None:
    """Write standard input, or --content, to a file. Missing directories are created."""
    permissions = None if mode is None else _permissions(mode)
    counted = _Counter()
    with connected() as stead:
        data = counted.through(_standard_input()) if content is None else os.fsencode(content)
        _files(stead, vm, user).write(path, data, mode=permissions)
    if as_json:
        print_json({"path": path, "bytes": counted.bytes if content is None else len(os.fsencode(content))})


@app.command("rm")
def remove(
    vm: Vm,
    path: GuestPath,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Remove a directory with its content.")
    ] = False,
    user: User = None,
    as_json: Json = False,
) -> None:
    """Remove a file or an empty directory."""
    with connected() as stead:
        _files(stead, vm, user).remove(path, recursive=recursive)
    if as_json:
        print_json({"path": path, "removed": True})


@app.command("mv")
def move(
    vm: Vm,
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path in the VM.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The new path; an existing file is replaced.")],
    user: User = None,
    as_json: Json = False,
) -> None:
    """Move or rename a file or directory, like `mv -T`."""
    with connected() as stead:
        _files(stead, vm, user).move(source, target)
    if as_json:
        print_json({"from": source, "to": target})


@app.command("mkdir")
def make_folder(
    vm: Vm,
    path: GuestPath,
    parents: Annotated[
        bool, typer.Option("--parents", "-p", help="Create missing parents; no error if it exists.")
    ] = False,
    user: User = None,
    as_json: Json = False,
) -> None:
    """Create a directory."""
    with connected() as stead:
        _files(stead, vm, user).mkdir(path, parents=parents)
    if as_json:
        print_json({"path": path})


@app.command("stat")
def show_file(vm: Vm, path: GuestPath, user: User = None, as_json: Json = False) -> None:
    """Show the kind, size, owner and permissions of a file."""
    with connected() as stead:
        found = _files(stead, vm, user).stat(path)
    if as_json:
        print_json({"path": path} | to_plain(found))
        return
    print_facts(
        [
            ("path", path),
            ("kind", found.kind),
            ("size", found.size),
            ("permissions", None if found.mode is None else f"{found.mode:o}"),
            ("owner", f"{found.owner or found.uid}:{found.group or found.gid}"),
            ("modified", local_time(found.modified)),
        ]
    )


def _permissions(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise typer.BadParameter(
            f"invalid permissions {text!r}: expected octal digits, for example 755", param_hint="--mode"
        )
    return mode


# Copying


@dataclass(frozen=True)
class CopyPath:
    """One end of a copy: a path on this host, or in a VM."""

    path: str
    vm: str | None = None

    @classmethod
    def parse(cls, text: str) -> "CopyPath":
        """`VM:PATH` is in a VM. Text without a colon, or with a slash before it, is a path on this host."""
        vm, colon, path = text.partition(":")
        if not colon or not vm or "/" in vm:
            return cls(text)
        return cls(path or "/", vm)

    @property
    def is_stream(self) -> bool:
        return self.vm is None and self.path == "-"


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="PATH, VM:PATH, or - for standard input.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="VM:PATH, PATH, or - for standard output.")],
    user: User = None,
    as_json: Json = False,
) -> None:
    """Copy a file or directory to or from a VM, like `cp -r`.

    A copy into an existing directory keeps its name.
    """
    origin, goal = CopyPath.parse(source), CopyPath.parse(target)
    if (origin.vm is None) == (goal.vm is None):
        wrong = (
            "one of them must be in a VM: VM:PATH"
            if origin.vm is None
            else "one of them must be a local path"
        )
        raise typer.BadParameter(wrong, param_hint="SRC DST")
    skipped: list[str] = []
    with connected() as stead:
        files = _files(stead, origin.vm or goal.vm or "", user)
        if goal.vm is not None:
            placed = _upload(files, origin, goal.path)
        else:
            placed, skipped = _download(files, origin.path, goal)
    for name in skipped:
        note(f"skipped: {name}")
    if as_json and not goal.is_stream:
        print_json({"path": placed, "skipped": skipped})


def _upload(files: "Files", origin: CopyPath, goal: str) -> str:
    if origin.is_stream:
        files.write(goal, _standard_input())
        return goal
    source = Path(origin.path)
    name = source.resolve().name
    placed = posixpath.join(goal, name) if goal.endswith("/") or _is_folder(files, goal) else goal
    if source.is_dir():
        with show_progress(f"copying {name}"):
            files.upload(source, placed)
        return placed
    found = source.stat()
    with _bar(name, found.st_size) as advance:
        if advance is None:
            files.upload(source, placed)
        else:
            with source.open("rb") as file:
                files.write(placed, advance(_chunks(file.read)), mode=found.st_mode & 0o777)
    return placed


def _is_folder(files: "Files", path: str) -> bool:
    from stead.sdk.errors import FileNotFound

    try:
        return files.stat(path).is_directory
    except FileNotFound:
        return False


def _download(files: "Files", path: str, goal: CopyPath) -> tuple[str, list[str]]:
    if goal.is_stream:
        with files.read_chunks(path) as chunks:
            _write_out(chunks)
        return "-", []
    target = Path(goal.path)
    found = files.stat(path)
    name = posixpath.basename(path.rstrip("/")) or "root"
    if target.is_dir() or goal.path.endswith("/"):
        target.mkdir(exist_ok=True)
        target = target / name
    if found.is_directory:
        with show_progress(f"copying {name}"):
            return str(target), files.download(path, target)
    with _bar(name, found.size) as advance:
        if advance is None:
            return str(target), files.download(path, target)
        with files.read_chunks(path) as chunks:
            _write_whole(target, advance(chunks), 0o644 if found.mode is None else found.mode & 0o755 | 0o600)
    return str(target), []


def _write_whole(target: Path, chunks: Iterable[bytes], mode: int) -> None:
    """Write a temporary file and rename it: an interrupted copy leaves the old file."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.close()
            part.chmod(mode)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _bar(name: str, size: int) -> Iterator[Callable[[Iterable[bytes]], Iterator[bytes]] | None]:
    """Yields a function that counts bytes on a progress bar; None for small files or without a terminal."""
    if size < _LARGE or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=size)

        def count(chunks: Iterable[bytes]) -> Iterator[bytes]:
            for chunk in chunks:
                yield chunk
                progress.advance(task, len(chunk))

        yield count


class _Counter:
    def __init__(self) -> None:
        self.bytes = 0

    def through(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.bytes += len(chunk)
            yield chunk


def _standard_input() -> Iterator[bytes]:
    return _chunks(lambda size: os.read(sys.stdin.fileno(), size))


def _chunks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while chunk := read(_CHUNK):
        yield chunk


def _write_out(chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()
