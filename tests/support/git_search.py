"""Repositories to search in."""

import os
import subprocess
from collections.abc import Mapping

from stead.repos.committing import Change, commit
from stead.repos.repository import Repository
from stead.repos.search.search import ContentFound


async def put(repository: Repository, files: Mapping[str, str | bytes | None], message: str = "m") -> str:
    changes = [Change(path, text.encode() if isinstance(text, str) else text) for path, text in files.items()]
    return (await commit(repository, changes, message)).sha


def git(repository: Repository, *arguments: str, stdin: bytes = b"") -> bytes:
    """Plain git, to verify results independently."""
    environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C.UTF-8"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "A", f"GIT_{who}_EMAIL": "a@example.org"}
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=repository.path,
        input=stdin,
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def paths(found: ContentFound) -> list[str]:
    return [file.path for file in found.files]
