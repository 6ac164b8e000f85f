"""Repositories to import from, what an import made, and archives."""

import io
import os
import subprocess
import tarfile
import zipfile
from ipaddress import IPv4Network
from pathlib import Path
from typing import TypeVar

import pytest

from stead.repos.repos import Fill
from stead.repos.repository import Repository
from stead.repos.ssrf import SsrfGuard
from support.git_hosting import Stage

LOCAL = SsrfGuard([IPv4Network("127.0.0.0/8")])


def git(folder: Path, *arguments: str, stdin: bytes = b"", bare: bool = True) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        **({"GIT_DIR": str(folder)} if bare else {}),
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, input=stdin, capture_output=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def add(place: Path, branch: str, *names: str, content: bytes = b"text\n", start: str | None = None) -> str:
    """Add one commit per name to a branch; returns the last id."""
    lines = [b"feature done\n"]
    for number, name in enumerate(names):
        lines += [
            f"commit refs/heads/{branch}\ncommitter A <a@b> {number} +0000\n".encode(),
            b"data 4\nadd\n\n",
        ]
        known = subprocess.run(
            ["git", "rev-parse", "-q", "--verify", f"refs/heads/{branch}"], cwd=place, capture_output=True
        )
        if number == 0 and (start or known.returncode == 0):
            lines.append(f"from {start or f'refs/heads/{branch}^0'}\n".encode())
        lines += [f"M 644 inline {name}\ndata {len(content)}\n".encode(), content, b"\n"]
    git(place, "fast-import", "--quiet", stdin=b"".join([*lines, b"done\n"]))
    return git(place, "rev-parse", f"refs/heads/{branch}")


def refs(repository: Repository | Path) -> dict[str, str]:
    place = repository.path if isinstance(repository, Repository) else repository
    lines = git(place, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def tree(repository: Repository | Path, rev: str = "HEAD") -> str:
    return git(
        repository.path if isinstance(repository, Repository) else repository, "rev-parse", f"{rev}^{{tree}}"
    )


def files(repository: Repository) -> dict[str, str]:
    """Paths and modes."""
    lines = git(repository.path, "ls-tree", "-r", "-z", "HEAD").split("\0")[:-1]
    return {line.partition("\t")[2]: line.split()[0] for line in lines}


def shown(repository: Repository, path: str) -> str:
    return git(repository.path, "cat-file", "blob", f"HEAD:{path}")


Raised = TypeVar("Raised", bound=Exception)


async def refused(
    stage: Stage, fill: Fill, error: type[Raised] | tuple[type[Raised], ...], match: str | None = None
) -> Raised:
    """The import fails with this error, and nothing is left."""
    before = (await stage.repos.list(stage.ours, limit=1)).total
    with pytest.raises(error, match=match) as raised:
        await stage.repository(fill=fill)
    assert list((stage.folder / "repos" / "new").iterdir()) == []
    assert (await stage.repos.list(stage.ours, limit=1)).total == before
    return raised.value


def file(name: str, content: bytes = b"text\n", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    return info, content


def special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, b""


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return special(name, tarfile.SYMTYPE, target)


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zip_of(*members: tuple[zipfile.ZipInfo | str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return packed.getvalue()


def zipped(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    return info
