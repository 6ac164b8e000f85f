"""Writes git objects without a process for each."""

import hashlib
import itertools
import zlib
from collections.abc import Mapping
from pathlib import Path

from support.git_client import GitClient

_WHO = "tests <tests@stead.invalid> 1700000000 +0000"


class Objects:
    def __init__(self, git: GitClient, folder: Path) -> None:
        self.git = git
        self.folder = folder
        self._numbers = itertools.count()

    @classmethod
    async def make(cls, git: GitClient, name: str) -> "Objects":
        await git("init", "-q", "--bare", name)
        return cls(git, git.home / name)

    def write(self, kind: str, content: bytes) -> str:
        whole = f"{kind} {len(content)}\0".encode() + content
        sha = hashlib.sha1(whole).hexdigest()
        place = self.folder / "objects" / sha[:2] / sha[2:]
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(zlib.compress(whole, 0))
        return sha

    def commit(self, *parents: str, files: Mapping[str, bytes] | None = None) -> str:
        """A unique commit with these files."""
        entries = [
            f"100644 {name}\0".encode() + bytes.fromhex(self.write("blob", content))
            for name, content in sorted((files or {}).items())
        ]
        lines = [f"tree {self.write('tree', b''.join(entries))}", *(f"parent {parent}" for parent in parents)]
        lines += [f"author {_WHO}", f"committer {_WHO}", "", f"{next(self._numbers)}", ""]
        return self.write("commit", "\n".join(lines).encode())

    def tag(self, commit: str) -> str:
        lines = [f"object {commit}", "type commit", "tag name", f"tagger {_WHO}", ""]
        return self.write("tag", "\n".join([*lines, f"{next(self._numbers)}", ""]).encode())
