"""Repositories with a history, and the git processes of a site."""

import shutil
from pathlib import Path

from stead.processes import command_lines
from stead.repos.repos import RepoInfo
from support.git_client import GitClient
from support.git_hosting import RepoServer

NOWHERE = "0" * 40


def gits_in(repo_server: RepoServer) -> list[int]:
    """All git processes of these repositories, except pooled readers."""
    folder = str(repo_server.hosting.folder).encode()
    lines = [(pid, b" ".join(line)) for pid, line in command_lines()]
    return [pid for pid, line in lines if folder in line and b"cat-file" not in line]


templates: dict[int, Path] = {}


async def filled(
    host: RepoServer, git: GitClient, commits: int = 1, *, public: bool = False
) -> tuple[RepoInfo, Path]:
    """A repository with some commits on main, and the work tree that they came from."""
    repo = await host.repo(public=public)
    work = git.home / f"work-{repo.id[:8]}"
    shutil.copytree(templates[commits], work)
    with (work / ".git" / "config").open("a") as config:
        config.write(
            f'[remote "origin"]\n\turl = {host.remote(repo)}\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n'
        )
    for part in ("objects", "refs"):
        shutil.copytree(work / ".git" / part, host.path(repo) / part, dirs_exist_ok=True)
    return repo, work
