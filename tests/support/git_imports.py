"""Repositories to import from, what an import made, and archives."""

import io
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stead.repos.repos import Fill
from stead.repos.repository import Repository
from stead.repos.ssrf import SsrfGuard
from stead.repos.transfer.archives import Kind
from stead.repos.transfer.imports import Imports
from support.git_hosting import RepoHosting
from support.git_repos import git
from support.git_server import GitServer, Page

LOCAL = SsrfGuard([IPv4Network("127.0.0.0/8")])


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
    lines = git(repository, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def tree(repository: Repository | Path, rev: str = "HEAD") -> str:
    return git(repository, "rev-parse", f"{rev}^{{tree}}")


def files(repository: Repository) -> dict[str, str]:
    """Paths and modes."""
    lines = git(repository, "ls-tree", "-r", "-z", "HEAD").split("\0")[:-1]
    return {line.partition("\t")[2]: line.split()[0] for line in lines}


def shown(repository: Repository, path: str) -> str:
    return git(repository, "cat-file", "blob", f"HEAD:{path}")


Raised = TypeVar("Raised", bound=Exception)


@dataclass(frozen=True)
class Importing:
    """Repositories of this server, and another server to import from."""

    hosting: RepoHosting
    server: GitServer
    sources: Imports

    def limited(self, **limits: Any) -> "Importing":
        return replace(self, sources=Imports(LOCAL, **limits))

    def url(self, path: str = "origin.git") -> str:
        return f"{self.server.url}/{path}"

    def source(self, path: str = "origin.git", **options: Any) -> Fill:
        return self.sources.source(self.url(path), **options)

    def archive(self, kind: Kind, path: str = "a", message: str = "all", **options: Any) -> Fill:
        return self.sources.archive(kind, self.url(path), message, **options)

    async def make(self, fill: Fill, **options: Any) -> Repository:
        return await self.hosting.repository(fill=fill, **options)

    async def tar(self, *members: tuple[tarfile.TarInfo, bytes]) -> Repository:
        """The repository that a tar archive is imported as."""
        self.server.pages["/a"] = Page(tar_of(*members))
        return await self.make(self.archive("tar"))

    async def refused(
        self, fill: Fill, error: type[Raised] | tuple[type[Raised], ...], match: str | None = None
    ) -> Raised:
        """The import fails with this error, and nothing is left."""
        before = (await self.hosting.repos.list(self.hosting.ours, limit=1)).total
        with pytest.raises(error, match=match) as raised:
            await self.make(fill)
        self.nothing_is_left()
        assert (await self.hosting.repos.list(self.hosting.ours, limit=1)).total == before
        return raised.value

    def nothing_is_left(self) -> None:
        assert list((self.hosting.folder / "repos" / "new").iterdir()) == []


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
