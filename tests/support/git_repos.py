"""Plain git in repositories, to verify results independently."""

import os
import subprocess
from pathlib import Path

from stead.repos.committing import Change
from stead.repos.repository import Repository

_AS = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8"} | {
    f"GIT_{role}_{what}": value
    for role, name in (("AUTHOR", "A"), ("COMMITTER", "C"))
    for what, value in (("NAME", name), ("EMAIL", f"{name.lower()}@example.org"))
}


def git_output(place: Repository | Path, *arguments: str, stdin: bytes = b"") -> bytes:
    folder = place.path if isinstance(place, Repository) else place
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, timeout=60, env=os.environ | _AS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def git(place: Repository | Path, *arguments: str, stdin: bytes = b"") -> str:
    return git_output(place, *arguments, stdin=stdin).decode().strip()


def write(path: str, text: str = "text\n") -> Change:
    return Change(path, text.encode())
