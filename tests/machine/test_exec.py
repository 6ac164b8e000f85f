"""Commands in a real machine: how they start, what they are given, and every way they end."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio

from stead.errors import GuestError, InvalidRequest
from stead.guest import sessions
from stead.guest.execution import Ended, Output, shell
from stead.machines import Machine, Machines
from support.waiting import until

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EVERY_BYTE = bytes(range(256))


async def say(machine: Machine, command: str | Sequence[str], **options: Any) -> str:
    """What a command prints, which must succeed."""
    result = await machine.exec(command, **{"timeout": 60, **options})
    assert result.ok, (result.exit_code, result.signal, result.stderr)
    return result.stdout.decode()


async def running(machine: Machine, pattern: str) -> list[str]:
    """The processes whose whole command line matches."""
    return (await machine.exec(["pgrep", "-x", "-f", pattern], timeout=60)).stdout.decode().split()


async def gone(machine: Machine, pattern: str) -> None:
    """Wait until no process matches."""

    async def ended() -> bool:
        return not await running(machine, pattern)

    await until(ended, 60)


@pytest_asyncio.fixture(scope="module")
async def alice(shared: Machine) -> str:
    await say(shared, "useradd --create-home --groups sudo,video alice")
    return "alice"


# How it starts


async def test_a_string_runs_in_a_shell_and_a_list_without_one(shared: Machine) -> None:
    assert await say(shared, "echo $((6 * 7)) | tr 4 5") == "52\n"
    assert await say(shared, ["echo", "$((6 * 7))", "| tr", "*", ""]) == "$((6 * 7)) | tr * \n"
    assert await say(shared, ["cat", "/proc/self/comm"]) == "cat\n", "no shell in between"


async def test_shell_commands_of_up_to_a_mebibyte(shared: Machine, alice: str) -> None:
    """A file in a heredoc. `$0`, `$#`, standard input, line numbers and exit code are as of a short one."""
    content = "".join(f"{number} 'ü$(x)' \\\n" for number in range(60_000))
    assert 900_000 < len(content.encode()) < 1 << 20
    end = 'sha256sum /tmp/long; cat; echo "$0 $#"; no-such-program; exit 7'
    long = f"cat > /tmp/long <<'END'\n{content}END\n{end}"
    result = await shared.exec(long, user=alice, stdin=b"given\n")
    expected = f"{hashlib.sha256(content.encode()).hexdigest()}  /tmp/long\ngiven\n/bin/sh 0\n"
    assert (result.exit_code, result.stdout.decode()) == (7, expected)
    assert result.stderr.decode() == "/bin/sh: 60003: eval: no-such-program: not found\n"
    async with shared.using() as agent:
        wanted = sessions.SessionRequest("process", argv=shell(long), user=alice)
        started = await sessions.start(agent, wanted)
        done = await sessions.wait(agent, started.id, 60, alice)
        await sessions.close(agent, started.id, alice)
    assert done.exit_code == 7
    await shared.files().remove("/tmp/long")
    with pytest.raises(InvalidRequest, match=r"of 1048577 bytes \(max 1048576\): write it to a file"):
        await shared.exec("#" * ((1 << 20) + 1))


async def test_working_directory(shared: Machine, alice: str) -> None:
    assert await say(shared, ["pwd"]) == "/\n"
    assert await say(shared, "pwd", cwd="/usr/share") == "/usr/share\n"
    for cwd, user, code in (
        ("/no/such/folder", None, "not_found"),
        ("/etc/passwd", None, "not_directory"),
        ("/root", alice, "permission_denied"),
        ("relative", None, "invalid_request"),
    ):
        with pytest.raises(GuestError) as refused:
            await shared.exec("true", cwd=cwd, user=user)
        assert refused.value.code == code
        assert code == "invalid_request" or cwd in str(refused.value)


async def environment(
    machine: Machine,
    command: str | Sequence[str] = ("env", "-0"),
    env: Mapping[str, str] | None = None,
    user: str | None = None,
) -> dict[str, str]:
    listed = (await say(machine, command, env=env, user=user)).removesuffix("\0").split("\0")
    return dict(line.split("=", 1) for line in listed)


def of_account(name: str, home: str, shell: str) -> dict[str, str]:
    path = f"{home}/.local/bin:{STANDARD_PATH}"
    names = {"HOME": home, "USER": name, "LOGNAME": name, "SHELL": shell}
    return names | {"LANG": "C.UTF-8", "PATH": path}


async def test_the_environment_follows_the_account(shared: Machine, alice: str) -> None:
    """What /etc/environment adds is left out here: a host with certificates of its own puts them there."""
    before = await shared.exec("cat /etc/environment")
    await say(shared, ": > /etc/environment")
    root = of_account("root", "/root", "/bin/bash")
    assert await environment(shared) == root
    assert await environment(shared, "exec env -0") == root | {"PWD": "/"}
    uid = (await say(shared, ["id", "-u", alice])).strip()
    for user in (alice, uid):
        assert await environment(shared, user=user) == of_account("alice", "/home/alice", "/bin/sh")
    await say(shared, "touch ~/mine && test -O /home/alice/mine", user=alice)
    await shared.files().write("/etc/environment", before.stdout)


async def test_explicit_environment_overrides_the_account(shared: Machine) -> None:
    given = {"EMPTY": "", "LINES": "one\ntwo = 2\n", "GREETING": "grüß dich", "HOME": "/home", "LANG": "C"}
    assert await environment(shared, env=given) == await environment(shared) | given
    assert (await environment(shared, env={"PATH": "/bin"}))["PATH"] == "/bin"
    lookup = await shared.exec(["env"], env={"PATH": "/opt"})
    assert lookup.exit_code == 127, "a program is looked up on the PATH it is given"


async def test_etc_environment_is_the_same_in_commands_and_logins(shared: Machine) -> None:
    before = await shared.exec("cat /etc/environment")
    lines = (
        "# comment",
        "",
        "PLAIN=one",
        "export EXPORTED=two",
        'QUOTED="three words here"',
        "SINGLE='four words'",
        "EQUALS=a=b",
        "  INDENTED=five",
        "REMARK=six # not a part of it",
        'ODD="seven" # the quote stays',
        "TRAILING=eight  ",
        'MIXED="it\'s"',
        "EMPTY=",
        "BAD-NAME=1",
        "not an assignment",
        "LANG=C",
    )
    await shared.files().write("/etc/environment", "\n".join(lines).encode())
    try:
        names = (
            "ODD",
            "EMPTY",
            "LANG",
            "PLAIN",
            "EXPORTED",
            "QUOTED",
            "SINGLE",
            "EQUALS",
            "INDENTED",
            "REMARK",
            "MIXED",
        )
        login = await environment(shared, ["su", "--login", "--shell", "/bin/sh", "-c", "env -0", "root"])
        command = await environment(shared)
        assert {name: command[name] for name in names} == {name: login[name] for name in names}
        assert (command["QUOTED"], command["REMARK"].strip(), command["MIXED"]) == (
            "three words here",
            "six",
            "it's",
        )
        assert "BAD-NAME" not in command
        # The one difference: pam_env keeps blanks at the end of a line, which are invisible and never meant.
        assert (command["TRAILING"], login["TRAILING"]) == ("eight", "eight  ")
        assert (await environment(shared, env={"PLAIN": "mine"}))["PLAIN"] == "mine"
    finally:
        await shared.files().write("/etc/environment", before.stdout)


@pytest.mark.parametrize("variable", ["NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
async def test_certificates_reach_commands_services_and_logins(shared: Machine, variable: str) -> None:
    show = f"echo ${variable}"
    found = {
        await say(shared, show),
        await say(shared, ["systemd-run", "--quiet", "--wait", "--pipe", "/bin/sh", "-c", show]),
        await say(shared, ["su", "--login", "-c", show, "root"]),
    }
    assert found == {"/etc/ssl/certs/ca-certificates.crt\n"}


async def test_exit_codes_126_and_127_of_a_shell_and_of_a_list(
    shared: Machine,
) -> None:
    await shared.files().write("/root/orphan", b"#!/no/interpreter\n", mode=0o755)
    for program, code in (
        ("no-such-program", 127),
        ("/usr/bin/no-such-program", 127),
        ("/etc/passwd/below", 127),
        ("/root/orphan", 127),
        ("/etc/passwd", 126),
        ("/usr", 126),
    ):
        shell, listed = await shared.exec(program), await shared.exec([program, "argument"])
        assert (shell.exit_code, listed.exit_code) == (code, code), program
        assert listed.signal is None and not listed.timed_out and listed.stdout == b""
        assert listed.stderr.startswith(f"stead: {program}: ".encode()), listed.stderr
        assert listed.stderr.count(b"\n") == 1
    assert (await shared.exec(["no-such-program"])).stderr == b"stead: no-such-program: command not found\n"


async def test_a_program_that_cannot_start_does_not_wait_for_stdin(shared: Machine) -> None:
    async def unfinished() -> AsyncIterator[bytes]:
        yield b"begin\n"
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        assert (await shared.exec(["no-such-program"], stdin=unfinished())).exit_code == 127
        assert (await shared.exec(["no-such-program"], stdin=bytes(1 << 20))).exit_code == 127


async def test_invalid_requests_do_not_reach_the_guest(machines: Machines) -> None:
    nowhere = Machine(machines, "no-such-machine")
    for command in ("", [], [""], "echo a\0b", ["echo", "a\0b"]):
        with pytest.raises(InvalidRequest):
            await nowhere.exec(command)
    for options in (
        {"cwd": "/a\0b"},
        {"env": {"A": "a\0b"}},
        {"env": {"A=B": ""}},
        {"env": {"": "a"}},
        {"timeout": 0},
        {"timeout": -1},
    ):
        with pytest.raises(InvalidRequest):
            await nowhere.exec("true", **options)


async def test_arguments_need_not_be_utf_8(shared: Machine) -> None:
    """File names are bytes: one that a listing gave can be used in a command, a folder or a variable."""
    odd = os.fsdecode(b"/tmp/\xff caf\xe9 \xf0\x9f\x8e\x88")
    await shared.files().write(f"{odd}/file", b"found")
    try:
        assert (await shared.exec(["cat", f"{odd}/file"])).stdout == b"found"
        assert (await shared.exec(f"cat '{odd}/file'")).stdout == b"found"
        result = await shared.exec('cat file; printf %s "$NAME"', cwd=odd, env={"NAME": odd})
        assert result.stdout == b"found" + os.fsencode(odd)
    finally:
        await shared.files().remove(odd, recursive=True)


async def test_commands_of_linux_users_have_their_groups(shared: Machine, alice: str) -> None:
    uid = (await say(shared, ["id", "-u", alice])).strip()
    for user in (alice, uid):
        who = await say(shared, "id -un; id -Gn; cat /proc/self/status", user=user)
        assert who.splitlines()[:2] == ["alice", "alice sudo video"]
        assert "CapEff:\t0000000000000000" in who
    assert not (await shared.exec("cat /etc/shadow", user=alice)).ok
    assert await say(shared, "id -un; id -Gn") == "root\nroot\n"
    for user in ("nobody-of-that-name", "54321", "ülrich"):
        with pytest.raises(GuestError, match=user) as refused:
            await shared.exec("true", user=user)
        assert refused.value.code == "user_not_found"
    for user in ("", "two\nlines"):
        with pytest.raises(InvalidRequest, match="invalid Linux user name"):
            await shared.exec("true", user=user)


# What it is given to read


async def test_small_stdin_is_sent_inline(shared: Machine) -> None:
    assert (await shared.exec("cat", stdin=EVERY_BYTE)).stdout == EVERY_BYTE


async def test_closed_or_absent_stdin_does_not_hang(shared: Machine) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        for chunk in list[bytes]():
            yield chunk

    for stdin in (None, b"", nothing()):
        async with asyncio.timeout(60):
            result = await shared.exec("cat; read line; echo end", stdin=stdin)
        assert result.stdout == b"end\n"


async def test_large_stdin_is_streamed_while_output_is_read(shared: Machine) -> None:
    data = os.urandom(5 << 20)
    async with asyncio.timeout(60):
        result = await shared.exec("tee /dev/stderr", stdin=data)
    assert result.ok
    assert result.stdout == data
    assert result.stderr == data
    assert not result.stdout_truncated


async def test_interactive_stdin_and_stdout(shared: Machine) -> None:
    """Each line is sent only when the one before has come back: nothing waits for the end of anything."""
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    said = [b"one\n", b"two\n", b"three\n"]

    async def speak() -> AsyncIterator[bytes]:
        for line in said:
            yield line
            assert await heard.get() == line

    events: list[Output | Ended] = []
    async with asyncio.timeout(60):
        async for event in shared.stream("cat; echo over >&2", stdin=speak()):
            events.append(event)
            if isinstance(event, Output):
                heard.put_nowait(event.data)
    assert events[:4] == [*(Output("stdout", line) for line in said), Output("stderr", b"over\n")]
    ended = events[4]
    assert isinstance(ended, Ended)
    assert (ended.exit_code, ended.signal, ended.timed_out) == (0, None, False)


async def test_stdin_that_is_never_read_does_not_hang(shared: Machine) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"yes\n" * 1000

    async with asyncio.timeout(60):
        ignored = await shared.exec("sleep 0.3; exit 3", stdin=bytes(5 << 20))
        assert ignored.exit_code == 3
        assert (await shared.exec("head -n 1", stdin=endless())).stdout == b"yes\n"


async def test_a_failing_stdin_source_kills_the_command(shared: Machine) -> None:
    """Half a script must not be taken for a whole one: the command is ended and the caller sees why."""

    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise LookupError("the source broke")

    async with asyncio.timeout(60):
        with pytest.raises(LookupError, match="the source broke"):
            await shared.exec("cat > /tmp/part && mv /tmp/part /tmp/complete", stdin=broken())
    await gone(shared, "cat")
    assert not (await shared.exec("rm -f /tmp/part; ls /tmp/complete")).ok


# What it prints


async def test_stdout_and_stderr_are_separate_and_binary_safe(shared: Machine) -> None:
    result = await shared.exec("echo out; echo err >&2; cat", stdin=EVERY_BYTE)
    assert result.stdout == b"out\n" + EVERY_BYTE
    assert result.stderr == b"err\n"


async def test_output_is_truncated_at_its_limit(shared: Machine) -> None:
    command = "head -c 3000000 /dev/zero; echo all of it >&2; exit 4"
    result = await shared.exec(command, output_limit=1_000_000)
    assert (len(result.stdout), result.stdout_truncated) == (1_000_000, True)
    assert (result.stderr, result.stderr_truncated) == (b"all of it\n", False)
    assert result.exit_code == 4, "the command went on to its end"
    exact = await shared.exec("echo 12345", output_limit=6)
    assert (exact.stdout, exact.stdout_truncated) == (b"12345\n", False)


async def test_long_lines_and_many_lines(shared: Machine) -> None:
    line = await shared.exec("head -c 8000000 /dev/zero | tr '\\0' x", timeout=60)
    assert line.stdout == b"x" * 8_000_000
    lines = await shared.exec("seq 100000", timeout=60)
    assert lines.stdout.split() == [b"%d" % number for number in range(1, 100_001)]


# How it ends


async def test_exit_codes_and_signals(shared: Machine) -> None:
    for code in (0, 7, 255):
        result = await shared.exec(f"exit {code}")
        assert (result.exit_code, result.signal, result.ok) == (code, None, code == 0)
    for name in ("SEGV", "KILL"):
        result = await shared.exec(f"kill -{name} $$")
        assert (result.exit_code, result.signal, result.ok) == (None, f"SIG{name}", False)
        assert result.out_of_memory is None
        assert not result.timed_out


async def test_a_timeout_kills_the_process_group_and_returns_the_output(shared: Machine) -> None:
    result = await shared.exec(
        "echo begun; echo so far >&2; sleep 1001 & sh -c 'sleep 1001 & wait' & wait", timeout=3
    )
    assert (result.stdout, result.stderr) == (b"begun\n", b"so far\n")
    assert (result.timed_out, result.exit_code, result.signal) == (True, None, "SIGTERM")
    assert 3 <= result.duration < 60
    assert await running(shared, "sleep 1001") == []


async def test_a_timeout_sends_sigterm_then_sigkill(shared: Machine) -> None:
    stubborn = await shared.exec("trap '' TERM; echo begun; sleep 1002 & while :; do wait; done", timeout=3)
    assert (stubborn.timed_out, stubborn.signal, stubborn.stdout) == (True, "SIGKILL", b"begun\n")
    assert stubborn.out_of_memory is None
    await gone(shared, "sleep 1002")
    polite = await shared.exec("trap 'echo bye; exit 9' TERM; sleep 1003 & wait", timeout=3)
    assert (polite.timed_out, polite.exit_code, polite.stdout) == (True, 9, b"bye\n")
    await gone(shared, "sleep 1003")


async def test_a_background_child_does_not_block_the_call_or_lose_its_pipe(shared: Machine) -> None:
    """The child prints far more than a pipe holds after the call is over, and must live to tell."""
    child = "(read line < /tmp/go; seq 100000; seq 100000 >&2; echo survived > /tmp/told) & echo started"
    await say(shared, "mkfifo /tmp/go /tmp/told")
    async with asyncio.timeout(60):
        result = await shared.exec(child)
    assert (result.stdout, result.stderr) == (b"started\n", b"")
    assert await say(shared, "echo now > /tmp/go; timeout 30 cat /tmp/told") == "survived\n"
    await say(shared, "rm /tmp/go /tmp/told")


async def test_64_concurrent_commands(shared: Machine) -> None:
    """All of them run at the same time: each waits for a file that only the last one makes."""
    command = 'echo $N > /tmp/at-once.$N; while [ ! -e /tmp/at-once.63 ]; do sleep 1; done; printf %s "$N"'
    async with asyncio.timeout(90):
        results = await asyncio.gather(*(shared.exec(command, env={"N": str(n)}) for n in range(64)))
    assert [result.stdout for result in results] == [str(n).encode() for n in range(64)]
    assert await say(shared, "ls /tmp/at-once.* | wc -l; rm /tmp/at-once.*") == "64\n"


async def test_cancelling_kills_the_command(shared: Machine) -> None:
    """At whatever moment a caller is cancelled or leaves its stream, nothing goes on in the guest."""
    waiting = asyncio.create_task(shared.exec("sleep 1004 & sleep 1004"))

    async def both() -> bool:
        return len(await running(shared, "sleep 1004")) == 2

    await until(both, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await gone(shared, "sleep 1004")

    events = shared.stream("echo begun; sleep 1004; echo over")
    async with contextlib.aclosing(events):
        assert await anext(events) == Output("stdout", b"begun\n")
    await gone(shared, "sleep 1004")

    for delay in (0.002, 0.01, 0.03, 0.06, 0.12):
        task = asyncio.create_task(shared.exec(["sleep", "1005"]))
        await asyncio.wait([task], timeout=delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await gone(shared, "sleep 1005")


async def test_cancelling_does_not_close_stdin_first(shared: Machine) -> None:
    """A command that acts on the end of its input must not see one because its caller went away."""

    async def unfinished() -> AsyncIterator[bytes]:
        yield b"begin\n"
        await asyncio.Event().wait()

    for number in range(5):
        command = f"read line; echo $line; read line; : > /tmp/finished.{number}"
        events = shared.stream(command, stdin=unfinished())
        async with asyncio.timeout(60), contextlib.aclosing(events):
            assert await anext(events) == Output("stdout", b"begin\n")
    await gone(shared, "/bin/sh -c read line.*")
    assert not (await shared.exec("ls /tmp/finished.*")).ok


# What is there to run


async def test_installed_tools(shared: Machine) -> None:
    for tool in ("python3", "git", "rg", "curl", "tar", "sudo"):
        assert any(character.isdigit() for character in await say(shared, [tool, "--version"]))
    assert "rclone v" in await say(shared, ["rclone", "version"])
    assert "fusermount3" in await say(shared, ["fusermount3", "--version"])
    await say(shared, "test -c /dev/fuse")


async def test_npm_works_with_any_environment(shared: Machine) -> None:
    versions = await asyncio.gather(
        say(shared, "npm --version"),
        say(shared, "exec env -i /bin/sh -c 'npm --version'"),
        say(shared, ["systemd-run", "--quiet", "--wait", "--pipe", "npm", "--version"]),
    )
    assert versions[0].split(".")[0].isdigit()
    assert len(set(versions)) == 1
