"""The program that checks paths and executes file operations in the VM, run on this computer."""

import os
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from stead.agents.openai.path_script import Refusal, path_command

Grants = tuple[tuple[Path, bool], ...]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with a file, a file outside it, and links between them."""
    root = tmp_path / "workspace"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_bytes(b"inside\0\xff\n")
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "out").mkdir()
    (root / "leak").symlink_to(tmp_path / "secret")
    (root / "away").symlink_to(tmp_path / "out")
    (root / "up").symlink_to("..")
    (root / "again").symlink_to("sub/file")
    return root


def call(
    root: Path, operation: str, path: str, argument: str = "", data: bytes = b"", grants: Grants = ()
) -> subprocess.CompletedProcess[bytes]:
    allowed = [(PurePosixPath(grant), read_only) for grant, read_only in grants]
    command = path_command(
        operation, PurePosixPath(root / path), argument, root=PurePosixPath(root), grants=allowed
    )
    return subprocess.run(command, input=data, capture_output=True, timeout=30)


def test_read_follows_links_inside_and_returns_bytes(root: Path) -> None:
    assert call(root, "read", "sub/file").stdout == b"inside\0\xff\n"
    assert call(root, "read", "again").stdout == b"inside\0\xff\n"
    assert call(root, "range", "sub/file", "3:4").stdout == b"side"
    assert call(root, "range", "sub/file", "8:100").stdout == b"\xff\n"


@pytest.mark.parametrize(
    ("operation", "path", "argument"),
    [
        ("read", "leak", ""),
        ("range", "leak", "1:5"),
        ("read", "up/secret", ""),
        ("read", "up/none/none", ""),
        ("write", "leak", "x"),
        ("write", "away/new", "x"),
        ("write", "away/deep/new", "x"),
        ("create", "away/new", "x"),
        ("create", "leak", "x"),
        ("create", "away", "x"),
        ("mkdir", "away/new", ""),
        ("mkdir", "away/new/deeper", "1"),
        ("rm", "up/out", "1"),
        ("rm", "up/secret", ""),
        ("mv", "up/secret", "{root}/stolen"),
        ("mv", "sub/file", "{root}/away/file"),
        ("ls", "up", ""),
        ("check", "leak", ""),
        ("check", "away/not/there", "1"),
        ("prepare", "leak", ""),
    ],
)
def test_links_that_lead_out_are_refused(root: Path, operation: str, path: str, argument: str) -> None:
    end = call(root, operation, path, argument.format(root=root), b"changed")
    target = operation == "mv" and not path.startswith("up/")
    assert end.returncode == (Refusal.ESCAPE_OF_TARGET if target else Refusal.ESCAPE), end
    assert (root.parent / "secret").read_text() == "outside"
    assert list((root.parent / "out").iterdir()) == []
    assert (root / "sub" / "file").exists()


def test_write_creates_folders_and_keeps_permissions_and_links(root: Path) -> None:
    assert call(root, "write", "new/deep/file", "x", b"\0new").returncode == 0
    assert (root / "new/deep/file").read_bytes() == b"\0new"
    (root / "sub/file").chmod(0o750)
    assert call(root, "write", "again", "x", b"through the link").returncode == 0
    assert (root / "sub/file").read_bytes() == b"through the link"
    assert (root / "sub/file").stat().st_mode & 0o777 == 0o750
    assert (root / "again").is_symlink()
    assert [path.name for path in (root / "sub").iterdir()] == ["file"]


def test_create_refuses_anything_that_exists(root: Path) -> None:
    assert call(root, "create", "fresh/file", "x", b"new").returncode == 0
    assert (root / "fresh/file").read_bytes() == b"new"
    (root / "dangling").symlink_to("nowhere")
    for path in ("fresh/file", "sub", "again", "dangling"):
        assert call(root, "create", path, "x", b"other").returncode == Refusal.EXISTS
    assert (root / "fresh/file").read_bytes() == b"new"
    assert [path.name for path in (root / "fresh").iterdir()] == ["file"]


def test_create_works_without_hard_links(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a mounted bucket; and it does not overwrite what another program creates meanwhile."""
    program = tmp_path / "bin" / "ln"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$4" != ./raced ] || echo other >./raced\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert call(root, "create", "fresh/file", "x", b"new\0\xff").returncode == 0
    assert (root / "fresh/file").read_bytes() == b"new\0\xff"
    for path in ("fresh/file", "fresh/raced"):
        assert call(root, "create", path, "x", b"again").returncode == Refusal.EXISTS
    assert (root / "fresh/raced").read_bytes() == b"other\n"
    assert sorted(path.name for path in (root / "fresh").iterdir()) == ["file", "raced"]


def test_missing_and_special_files(root: Path) -> None:
    assert call(root, "read", "none").returncode == Refusal.NOT_FOUND
    assert call(root, "read", "none/deeper").returncode == Refusal.NOT_FOUND
    assert call(root, "read", "sub/file/deeper").returncode == Refusal.NOT_FOUND
    assert call(root, "read", "sub").returncode == Refusal.NOT_A_FILE
    os.mkfifo(root / "pipe")
    assert call(root, "read", "pipe").returncode == Refusal.NOT_A_FILE
    assert call(root, "write", "pipe", "x", b"data").returncode == Refusal.NOT_A_FILE
    (root / "loop").symlink_to("loop")
    assert call(root, "read", "loop").returncode == Refusal.NOT_FOUND


def test_odd_names(root: Path) -> None:
    for name in ("-n", " space ", "new\nline\n", "*", "ünï", "$(touch x)", "'\"", "\\"):
        assert call(root, "write", f"{name}/{name}", "x", name.encode()).returncode == 0, name
        assert call(root, "read", f"{name}/{name}").stdout == name.encode()
        assert call(root, "mv", f"{name}/{name}", f"{root}/{name}/moved").returncode == 0, name
        listed = call(root, "ls", name).stdout.split(b"\0")
        assert [line.split(b"\t")[-1] for line in listed if line] == [b"moved"], name
        assert call(root, "rm", name, "1").returncode == 0
        assert not (root / name).exists()


def test_list_reports_types(root: Path) -> None:
    lines = call(root, "ls", ".").stdout.decode().split("\0")[:-1]
    kinds = {line.split("\t")[-1]: line[0] for line in lines}
    assert kinds == {"sub": "d", "leak": "l", "away": "l", "up": "l", "again": "l"}
    assert call(root, "ls", "none").returncode == Refusal.NOT_FOUND
    assert call(root, "ls", "sub/file").stdout.decode().split("\t")[0::4] == ["f", "9"]


def test_remove_and_make_folders(root: Path) -> None:
    assert call(root, "rm", "leak").returncode == 0
    assert (root.parent / "secret").exists() and not (root / "leak").is_symlink()
    assert call(root, "rm", "sub").returncode != 0
    assert call(root, "rm", "none").returncode != 0
    assert call(root, "rm", "none/deeper", "1").returncode == 0
    assert call(root, "rm", "sub", "1").returncode == 0
    assert call(root, "mkdir", "a/b/c").returncode == Refusal.NOT_FOUND
    assert call(root, "mkdir", "a/b/c", "1").returncode == 0
    assert call(root, "mkdir", "a/b/c", "1").returncode == 0
    assert call(root, "mkdir", "a/b/c").returncode == 1


def test_same_file_compares_entries(root: Path) -> None:
    other = str(root / "again")
    assert call(root, "same", "sub/file", other).returncode == 0
    assert call(root, "same-entry", "sub/file", other).returncode == 1
    os.link(root / "sub/file", root / "linked")
    assert call(root, "same-entry", "sub/file", str(root / "linked")).returncode == 0
    found = call(root, "same-entry", "sub/file", str(root / "sub/none"))
    assert (found.returncode, found.stdout) == (1, b"found")
    missing = call(root, "same-entry", "sub/file", str(root / "none/none"))
    assert (missing.returncode, missing.stdout) == (1, b"")


def test_grants_allow_more_and_read_only_ones_are_not_written(root: Path) -> None:
    out, secret = root.parent / "out", root.parent / "secret"
    readable: Grants = ((out, True), (secret, True))
    (out / "data").write_text("granted")
    assert call(root, "read", "away/data", grants=readable).stdout == b"granted"
    assert call(root, "read", "leak", grants=readable).stdout == b"outside"
    assert call(root, "write", "away/data", "x", b"no", grants=readable).returncode == Refusal.READ_ONLY
    assert call(root, "rm", "away/data", grants=readable).returncode == Refusal.READ_ONLY
    assert call(root, "read", "up/workspace/../secret", grants=((out, True),)).returncode == Refusal.ESCAPE
    assert call(root, "write", "away/data", "x", b"yes", grants=((out, False),)).returncode == 0
    assert (out / "data").read_text() == "yes"
    assert call(root, "read", "leak", grants=((Path("/"), True),)).returncode == Refusal.BAD_GRANT


def test_missing_workspace_is_created_by_writers_only(tmp_path: Path) -> None:
    root = tmp_path / "later"
    assert call(root, "read", "file").returncode == Refusal.NOT_FOUND
    assert call(root, "check", "file").returncode == 0
    assert not root.exists()
    assert call(root, "write", "file", "x", b"first").returncode == 0
    assert (root / "file").read_bytes() == b"first"
