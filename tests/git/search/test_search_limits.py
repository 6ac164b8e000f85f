"""The cache and the limits of searches."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import pytest_asyncio

from stead.repos.errors import RepoBusy
from stead.repos.repository import Repository
from stead.repos.search.cache import SearchCache
from stead.repos.search.content import files_with_lines
from stead.repos.search.query import InvalidRegex, Query
from stead.repos.search.search import Search
from support.git_hosting import RepoHosting
from support.git_repos import git
from support.git_search import put
from support.waiting import until

# Cache


async def test_results_are_cached_by_commit(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "needle\n"}, "needle one")
    content = await search.content(repository, "needle")
    files = await search.files(repository, "a")
    commits = await search.commits(repository, "needle")
    diffs = await search.diffs(repository, "needle")
    assert content is await search.content(repository, "needle", "main")
    assert files is await search.files(repository, "a")
    assert commits is await search.commits(repository, "needle")
    assert diffs is await search.diffs(repository, "needle")
    await put(repository, {"a": None, "b a": "a needle more\n"}, "needle two")
    newer = await search.content(repository, "needle")
    assert [(file.path, file.matches[0].line) for file in newer.files] == [("b a", "a needle more")]
    assert [file.path for file in (await search.files(repository, "a")).files] == ["b a"]
    assert (await search.commits(repository, "needle")).total_commits == 2
    assert (await search.diffs(repository, "needle")).total_commits == 2
    git(repository, "update-ref", "refs/heads/main", commits.commits[0].sha)
    assert await search.content(repository, "needle") == content


async def test_cache_key_has_all_parameters(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "1\nNeedle\n2\n", "b": "needles\nx\n"})
    counts = [
        (await search.content(repository, "needle")).total_files,
        (await search.content(repository, "needle", case_sensitive=True)).total_files,
        (await search.content(repository, "needle", whole_word=True)).total_files,
        (await search.content(repository, "needle.", regex=True)).total_files,
        (await search.content(repository, "needle.")).total_files,
        (await search.content(repository, "needle", path_pattern="b")).total_files,
        len((await search.content(repository, "needle", max_results=1)).files),
        len((await search.content(repository, "needle", context=0)).files[0].matches[0].context_before),
    ]
    assert counts == [2, 1, 1, 1, 0, 1, 1, 0]


async def test_deleting_repository_clears_its_cache(hosting: RepoHosting, search: Search) -> None:
    one, two = await hosting.repository(), await hosting.repository()
    for each in (one, two):
        await put(each, {"a": "needle\n"})
        await search.content(each, "needle")
    kept = search.cache.size
    search.drop_repo(one.id)
    assert 0 < search.cache.size < kept
    again = await search.content(two, "needle")
    assert again is await search.content(two, "needle")
    search.drop_repo(two.id)
    assert search.cache.size == 0


def test_cache_evicts_least_recently_used() -> None:
    cache = SearchCache(10_000)
    for name in "abcd":
        cache.put(("r", name), name, 1_900)
    cache.get(("r", "a"))
    cache.put(("r", "e"), "e", 1_900)
    assert [name for name in "abcde" if cache.get(("r", name))] == ["a", "c", "d", "e"]
    cache.put(("r", "huge"), "x", 9_000)
    assert cache.get(("r", "huge")) is None
    cache.put(("r", "a"), "new", 100)
    assert cache.get(("r", "a")) == "new"
    assert cache.size <= 10_000


# Limits
SLOW = "(a+)+$"
"""Takes about 250,000 steps on each line of `slow.txt`: below git's limit for one line."""


@pytest_asyncio.fixture
async def slow(repository: Repository) -> Repository:
    lines = ("a" * 17 + "b\n") * 3000
    files = {f"slow{n:02}.txt": lines + str(n) for n in range(30)}
    await put(repository, {"0.txt": "aaa\n", **files}, "\n".join(["a" * 17 + "b"] * 3000))
    return repository


def _searching() -> list[str]:
    """Command lines of git search processes below this process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            line = (status.parent / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
        words = {Path(word).name for word in line.split()}
        if parent == os.getpid() and "git" in words and "cat-file" not in words:
            found.append(line)
    return found


async def test_search_time_limit_leaves_no_process(slow: Repository) -> None:
    """Matches found so far are returned."""
    search = Search(timeout=1.0)
    for look in (search.content, search.diffs, search.commits):
        found = await look(slow, SLOW, regex=True)
        assert found.stopped, look.__name__
        assert _searching() == []
    content = await search.content(slow, SLOW, regex=True)
    assert [file.path for file in content.files] in ([], ["0.txt"])
    assert content.has_more is bool(content.files)
    assert (await Search(timeout=20).content(slow, "aaab", max_results=1)).total_files == 30


async def test_late_matches_are_reported_by_name(slow: Repository) -> None:
    commit = await slow.resolve(None)
    counted = [(f"{commit}:0.txt".encode(), 1)]
    files, _ = await files_with_lines(slow, Query("content", "aaa"), counted, 0, time.monotonic() - 1)
    assert [(file.path, file.match_count) for file in files] == [("0.txt", 1)]


async def test_cancelled_search_leaves_no_process(slow: Repository) -> None:
    task = asyncio.create_task(Search().content(slow, SLOW, regex=True))

    await until(lambda: bool(_searching()), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _searching() == []


async def test_search_concurrency_limit(slow: Repository) -> None:
    search = Search(timeout=1.0, at_once=1)
    answers = await asyncio.gather(
        *(search.content(slow, SLOW + "()" * n, regex=True) for n in range(10)), return_exceptions=True
    )
    assert [type(each) for each in answers].count(RepoBusy) >= 1

    async def finds_all() -> bool:
        return (await search.files(slow, "0.txt")).total_files == 4

    await until(finds_all, 60)


async def test_catastrophic_regex_is_refused(repository: Repository, search: Search) -> None:
    await put(repository, {"a" * 60 + "b": "a" * 60 + "b\n"}, "a" * 60 + "b")
    for look in (search.content, search.files, search.commits, search.diffs):
        async with asyncio.timeout(60):
            with pytest.raises(InvalidRegex, match="steps"):
                await look(repository, SLOW, regex=True)
        assert _searching() == []


def test_query_is_one_git_argument() -> None:
    """It always follows -e."""
    for text in ("-O", "--", "a b", "(?!x)"):
        for regex in (False, True):
            words = Query("content", text, regex=regex).expression
            assert words.count("-e") == 1
            assert text in words[words.index("-e") + 1]
