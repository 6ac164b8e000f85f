"""Repositories that plain git reads."""

import os
import subprocess
from pathlib import Path

from stead.repos.committing import Change
from stead.repos.repository import Repository


def git(repository: Repository | Path, *arguments: str, stdin: bytes = b"") -> str:
    """Plain git, to verify results independently."""
    folder = repository.path if isinstance(repository, Repository) else repository
    environment = os.environ | {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "C",
        "GIT_COMMITTER_EMAIL": "c@example.org",
    }
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def write(path: str, text: str = "text\n") -> Change:
    return Change(path, text.encode())
