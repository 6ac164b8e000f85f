"""Names of branches and paths are accepted only if git accepts them."""

import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stead.repos.committing import commit
from stead.repos.errors import InvalidBranch, InvalidPath
from stead.repos.names import check_path, is_ref
from stead.repos.repository import Repository
from support.git_repos import git, write


@given(st.text(max_size=12) | st.from_regex(r"[a-z./@{~^:.-]{1,8}", fullmatch=True))
@settings(max_examples=150, deadline=None)
def test_accepted_branch_names_are_valid_in_git(name: str) -> None:
    if "\0" in name or not is_ref(name):
        return
    checked = subprocess.run(["git", "check-ref-format", "--branch", name], capture_output=True, timeout=10)
    assert checked.returncode == 0


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "a/",
        "a//b",
        ".",
        "..",
        "../a",
        "a/../b",
        "./a",
        ".git/config",
        "a/.GIT/hooks/x",
        ".git ",
        ".git.",
        "git~1",
        "GIT~1/config",
        ".git::$INDEX_ALLOCATION/config",
        ".g\u200cit/config",
        "\ufeff.git",
        "a\\..\\b",
        "a\\.git\\config",
        "a\nb",
        "a\0b",
        "x" * 5000,
        "a/" + "y" * 256,
        "\udc80",
    ],
)
async def test_dangerous_paths_are_refused(repository: Repository, path: str) -> None:
    with pytest.raises(InvalidPath):
        await commit(repository, [write(path)], "harm")
    assert await repository.branches() == []


_pieces = st.sampled_from(
    [".git", "git~1", ".GiT", ".g\u200dit", "a", "..", ".", " ", ":x", "\\", "-", '"', "ü", "~"]
)


@given(st.lists(st.lists(_pieces, min_size=1, max_size=3).map("".join), min_size=1, max_size=3).map("/".join))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_accepted_paths_are_valid_in_git(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    """With all protections on: for file systems of Linux, macOS and Windows."""
    try:
        check_path(path)
    except InvalidPath:
        return
    folder = tmp_path_factory.mktemp("index")
    git(folder, "init", "-q", "--bare", ".")
    blob = git(folder, "hash-object", "-w", "--stdin", stdin=b"x")
    protect = ("-c", "core.protectNTFS=true", "-c", "core.protectHFS=true")
    git(folder, *protect, "update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    tree = git(folder, "write-tree")
    git(folder, "fsck", "--strict")
    assert tree


@pytest.mark.parametrize(
    "name", ["", "refs/heads/", "-x", "a..b", "a b", "x.lock", "HEAD", "a/.b", "@{1}", "é" * 400]
)
async def test_invalid_branch_names_are_refused(repository: Repository, name: str) -> None:
    with pytest.raises(InvalidBranch):
        await repository.branch(name)
