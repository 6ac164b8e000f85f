"""Pre-forked launchers: they run exactly the requested command."""

import asyncio
import contextlib
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from stead.launcher import Launch
from stead.repos.prefork import READY, PreforkPool
from support.git_hosting import open_hosting
from support.process_tree import own_command_lines
from support.waiting import until

LIMIT = 20.0
KNOWN = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
NOBODY = 65534


@pytest_asyncio.fixture
async def launchers() -> AsyncIterator[PreforkPool]:
    """Launchers of the current user: `env` stands for the command that switches users."""
    made = PreforkPool(lambda: ["env"], KNOWN, 1 << 20)
    async with asyncio.timeout(LIMIT):
        await filled(made)
        yield made
        await made.close()
    assert not made._ready


async def filled(launchers: PreforkPool) -> None:
    launchers._refill()

    await until(lambda: len(launchers._ready) == READY, LIMIT)


async def ran(
    launchers: PreforkPool,
    command: Sequence[str],
    environment: Mapping[str, str] = KNOWN,
    stdin: bytes = b"",
    quiet: bool = False,
) -> tuple[int, bytes, bytes]:
    process = launchers.launch(Launch(command, environment, quiet=quiet))
    assert process is not None
    return await ended(process, stdin)


async def ended(process: Process, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    out, err = await process.communicate(stdin)
    assert process.returncode is not None
    process._transport.close()  # type: ignore[attr-defined]
    return process.returncode, out, err


async def test_arguments_are_passed_unchanged(launchers: PreforkPool) -> None:
    odd = [
        "it's",
        'a "b"',
        "$HOME",
        "`id`",
        "$(id)",
        "\\n",
        "",
        "*",
        "; id",
        "-x",
        "#",
        "a=b",
        "~",
        "\t",
        "!",
    ]
    status, out, err = await ran(launchers, ["printf", "%s|", *odd])
    assert (status, err) == (0, b"")
    assert out.decode().split("|")[:-1] == odd


async def test_environment_is_passed_unchanged(launchers: PreforkPool) -> None:
    wanted = KNOWN | {"GIT_PROTOCOL": "version=2", "SECRET": "it's $HOME; x", "EMPTY": ""}
    _, out, _ = await ran(launchers, ["env", "-0"], wanted)
    assert dict(line.split("=", 1) for line in out.decode().split("\0")[:-1]) == wanted


async def test_input_is_passed_unchanged(launchers: PreforkPool) -> None:
    sent = os.urandom(1 << 20) + b"\n\0last"
    status, out, _ = await ran(launchers, ["cat"], stdin=sent)
    assert status == 0 and out == sent


async def test_exit_code_and_errors_are_passed_on(launchers: PreforkPool) -> None:
    assert await ran(launchers, ["sh", "-c", "echo no >&2; exit 7"]) == (7, b"", b"no\n")
    assert await ran(launchers, ["sh", "-c", "echo no >&2; exit 7"], quiet=True) == (7, b"", b"")
    status, _, err = await ran(launchers, ["there-is-no-such-command"])
    assert (status, err) == (
        127,
        b"launcher: cannot run there-is-no-such-command: No such file or directory\n",
    )


@pytest.mark.parametrize("argument", ["two\nlines", "é", "\udcff", "x" * 100_000])
async def test_any_argument_is_passed(launchers: PreforkPool, argument: str) -> None:
    assert await ran(launchers, ["printf", "%s", argument]) == (0, os.fsencode(argument), b"")
    shown = await ran(launchers, ["printenv", "X"], KNOWN | {"X": argument})
    assert shown == (0, os.fsencode(argument) + b"\n", b"")


async def test_nul_cannot_add_words_to_an_order(launchers: PreforkPool) -> None:
    for launch in (Launch(["echo", "a\0b"]), Launch(["true"], {"X": "\0--\0id"})):
        with pytest.raises(ValueError, match="null byte"):
            launchers.launch(launch)
    assert len(launchers._ready) == READY


async def test_launcher_that_is_cut_off_in_its_order_runs_nothing(launchers: PreforkPool) -> None:
    process = launchers._ready.popleft()
    assert process.stdin is not None
    order = Launch(["echo", "ran"]).order()
    assert await ended(process, order[:-1]) == (1, b"", b"")


async def test_pool_is_refilled_and_dead_launchers_are_skipped(launchers: PreforkPool) -> None:
    for process in list(launchers._ready)[:-1]:
        process.kill()
        await process.wait()
    assert await ran(launchers, ["echo", "alive"]) == (0, b"alive\n", b"")
    assert launchers.launch(Launch(["true"], KNOWN)) is None
    await filled(launchers)
    for _ in range(READY):
        assert await ran(launchers, ["echo", "alive"]) == (0, b"alive\n", b"")


async def test_launcher_exits_when_its_stdin_closes(launchers: PreforkPool) -> None:
    process = launchers._ready.popleft()
    assert await ended(process) == (1, b"", b"")


async def test_launched_git_has_the_same_user_and_limits(open_folder: Path) -> None:
    """The same user, capabilities and limits."""
    async with open_hosting(open_folder, range(NOBODY - 1, NOBODY + 1), landlocked=False) as hosting:
        repository = await hosting.repository()
        git = hosting.repos.git
        told = []
        facts = "-c", "alias.facts=!cat /proc/self/status /proc/self/limits; pwd", "facts"
        names = ("Uid", "Gid", "Groups", "NoNewPrivs", "CapEff", "CapPrm", "CapBnd", "CapInh", "Max", "/")
        for _ in range(2):
            process = await git.start(repository.path, *facts, memory=64 << 20, file=3 << 20)
            try:
                lines = (await process.read(1 << 20)).decode().splitlines()
            finally:
                await process.end()
            told.append([line for line in lines if line.startswith(names)])
            await filled(git._launchers[NOBODY, False])
        assert told[0] == told[1] and f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}" in told[0]
        limits = {line[:14].strip(): line.split()[3] for line in told[0] if line.startswith("Max")}
        assert (limits["Max data size"], limits["Max file size"]) == (str(64 << 20), str(3 << 20))
        assert launchers_of(NOBODY)
    assert not launchers_of(NOBODY)


def launchers_of(uid: int) -> list[int]:
    """Launchers of a user that this process has started."""
    found = []
    for pid, line in own_command_lines().items():
        with contextlib.suppress(FileNotFoundError):  # one of another test that has just ended
            if b"sysread(STDIN" in line and Path(f"/proc/{pid}").stat().st_uid == uid:
                found.append(pid)
    return found
