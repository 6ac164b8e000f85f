"""Clone URLs of published examples, with the real git and `insteadOf`."""

import logging
from pathlib import Path

import pytest

from support.git_client import GitClient
from support.git_hosting import served

ELSEWHERE = "git.freestyle.sh"


async def test_clone_urls_with_a_token_work_and_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    git = GitClient(tmp_path)
    caplog.set_level(logging.DEBUG)
    async with served(tmp_path) as repo_server:
        hosting = repo_server.hosting
        repository = await hosting.repository()
        identity = await hosting.identities.create(hosting.ours)
        await hosting.access.grant(hosting.ours, identity.id, repository.id, "write")
        _, token = await hosting.identities.create_token(hosting.ours, identity.id)
        name = f"url.{repo_server.url}/x-access-token:stid_.insteadOf"
        await git("config", "--global", name, "https://x-access-token:stid_")

        address = f"https://x-access-token:{token}@{ELSEWHERE}/{repository.id}"
        work = await git.work_tree("work")
        await git("push", "-q", address, "main", cwd=work)
        await git("clone", "-q", address, "clone")
        assert (tmp_path / "clone" / "README").read_text() == "hello\n"
        assert await git("remote", "get-url", "--all", "origin", cwd=tmp_path / "clone") != address
        assert await git("config", "remote.origin.url", cwd=tmp_path / "clone") == address

        wrong = address.replace(token, "stid_" + "x" * 43)
        refused = await git.run("ls-remote", wrong)
        assert refused.status != 0
        # A GitHub token is not ours: the URL stays unchanged.
        theirs = await git("ls-remote", "--get-url", "https://x-access-token:ghs_1@github.com/o/r")
        assert theirs == "https://x-access-token:ghs_1@github.com/o/r"
    assert repository.id in caplog.text and token not in caplog.text
