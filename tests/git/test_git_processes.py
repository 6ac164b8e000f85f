"""Which git processes run to completion when the server is killed or the caller is cancelled."""

import asyncio
from pathlib import Path

import pytest

from stead.launcher import Launch
from stead.repos.git import SETTINGS, Git, subcommand
from support.waiting import until

SERVER_USER = 65534
UPDATE = ("update-ref", "--stdin")
"""Waits for its standard input."""
SEARCHES = [
    ("grep", "-e", "update-ref", "main"),
    ("log", "--grep", "receive-pack"),
    ("--namespace", "pack-refs", "cat-file", "--batch"),
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (UPDATE, "update-ref"),
        (("-c", "a.b=c", "-C", "/x", "--no-pager", "receive-pack", "/r"), "receive-pack"),
        (("--git-dir=/x", "--exec-path", "/y", "symbolic-ref", "HEAD"), "symbolic-ref"),
        (SEARCHES[0], "grep"),
        (SEARCHES[2], "cat-file"),
        (("-c",), ""),
        ((), ""),
    ],
)
def test_subcommand_is_the_first_argument_after_the_global_options(
    arguments: tuple[str, ...], expected: str
) -> None:
    assert subcommand(arguments) == expected


@pytest.mark.parametrize("arguments", SEARCHES)
def test_only_ref_writers_survive_the_server(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Other git commands get the parent-death signal, even if a search names a ref-writing subcommand."""
    git = Git(tmp_path / "config")

    def ends_with_the_server(*arguments: str) -> bool:
        return "--pdeathsig=TERM" in git.command(Launch(["git", *arguments]), SERVER_USER)

    assert ends_with_the_server(*arguments)
    assert not ends_with_the_server(*UPDATE)
    assert not ends_with_the_server("-c", "a.b=c", "receive-pack", "/r")


async def test_only_ref_writers_are_left_running_at_the_next_start(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(SETTINGS)
    git = Git(config)
    await git.run(None, "init", "-q", "--bare", str(tmp_path / "repo"))
    async with asyncio.timeout(60):
        update = await git.start(tmp_path / "repo", *UPDATE)
        reader = await git.start(tmp_path / "repo", "--namespace", "update-ref", "cat-file", "--batch")
        try:
            # A process has its own command line only after exec; both answer when they run.
            reader.stdin.write(b"HEAD\n")
            assert await reader.stdout.readline() == b"HEAD missing\n"
            update.stdin.write(b"start\n")
            assert await update.stdout.readline() == b"start: ok\n"
            left = await git.end_orphans()
            assert [process.pid for process in left] == [update._process.pid]
            await reader.wait()
            assert update.alive
        finally:
            for process in (update, reader):
                await process.end()


async def test_cancellation_waits_for_ref_writers_only(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(SETTINGS)
    git = Git(config)
    repo = tmp_path / "repo"
    await git.run(None, "init", "-q", "--bare", str(repo))
    alias = f"alias.slow=!touch {tmp_path}/started && sleep 60 # update-ref"
    async with asyncio.timeout(60):
        work = asyncio.create_task(git.finish(None, "-c", alias, "slow", "update-ref"))

        await until(lambda: (tmp_path / "started").exists(), 60)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
