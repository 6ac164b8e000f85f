"""Runs git processes: environment, configuration, resource limits, user and cleanup."""

import asyncio
import contextlib
import io
import os
import signal
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stead import tasks
from stead.errors import HostError
from stead.landlock import CERTIFICATES, NAMES, NULL, PROGRAMS, RANDOM, FileAccess
from stead.launcher import Launch
from stead.logs import get_logger
from stead.processes import EXPENDABLE, ProcessId, command_lines, environments, kill, set_oom_score
from stead.repos.confinement import Confinement
from stead.repos.errors import DiskFull, RepoDamaged, TooLarge
from stead.repos.git_messages import GitMessage
from stead.repos.git_network import EmptyNetwork
from stead.repos.prefork import PreforkPool
from stead.shares import MemoryReservation, Reserve, unlimited

TIMEOUT = 60.0
MAX_OUTPUT = 256 << 20
_MAX_ERRORS = 64 << 10
_PIPE = 1 << 20
_END_GRACE = 2.0
MAX_MEMORY = 2 << 30
"""Memory limit in bytes: objects that are small on disk can need any amount of memory."""
_MAX_ALLOCATED = "1g"
"""Limit of one allocation: git loads files whole to diff them, by default up to half of this."""
_REF_WRITERS = {"receive-pack", "update-ref", "symbolic-ref", "pack-refs"}
"""Subcommands that change refs: they run to completion even if the server is killed; others end with it."""
_OPTIONS_WITH_VALUE = {"-c", "-C", "--git-dir", "--work-tree", "--namespace", "--exec-path", "--config-env"}
"""Global git options whose value may be the next argument."""
_WRAPPERS = {"nsenter", "setpriv", "prlimit", "perl"}
_MAX_POOLS = 16
"""Pools of launchers: one of each kind for the eight users whose repositories were used last."""
_FULL_BELOW = 1 << 20
"""Free bytes: below this a git failure without a reason is reported as a full disk."""

_CONFIG = {
    # Check all received objects before they are accepted.
    "transfer.fsckObjects": "true",
    "fetch.fsckObjects": "true",
    "receive.fsckObjects": "true",
    # Sync to disk before a push is acknowledged.
    "core.fsync": "committed,reference",
    "core.fsyncMethod": "batch",
    # Stream large files instead of loading them.
    "core.bigFileThreshold": "16m",
    "pack.windowMemory": "64m",
    "pack.threads": "2",
    "core.hooksPath": "/dev/null",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.alternateRefsCommand": "true",
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.logAllRefUpdates": "false",
    "core.multiPackIndex": "true",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "receive.autogc": "false",
    "receive.denyDeleteCurrent": "ignore",
    "receive.denyCurrentBranch": "ignore",
    "receive.advertisePushOptions": "false",
    # Keep the pack of a push: unpacking takes many times as long.
    "transfer.unpackLimit": "1",
    "fastimport.unpackLimit": "0",
    "transfer.advertiseSID": "false",
    "uploadpack.allowFilter": "true",
    "uploadpack.allowReachableSHA1InWant": "true",
    "uploadpack.allowTipSHA1InWant": "true",
    "http.followRedirects": "false",
    "http.lowSpeedLimit": "1",
    "http.lowSpeedTime": "60",
    "protocol.allow": "never",
    "protocol.http.allow": "always",
    "protocol.https.allow": "always",
    "credential.helper": "",
    "safe.directory": "*",
    "init.defaultBranch": "main",
    "user.name": "Stead",
    "user.email": "git@stead.invalid",
}


log = get_logger("stead.repos")


def _settings() -> str:
    lines = []
    for name, value in _CONFIG.items():
        section, _, key = name.partition(".")
        subsection, _, last = key.rpartition(".")
        title = f'[{section} "{subsection}"]' if subsection else f"[{section}]"
        lines.append(f"{title}\n\t{last} = {value}\n")
    return "".join(lines)


SETTINGS = _settings()
"""The complete git configuration, written to a file: no configuration of users or of the host applies."""


@dataclass(frozen=True)
class Finished:
    status: int
    stdout: bytes
    stderr: str


class GitProcess:
    """A running git process with pipes. The caller must end it."""

    def __init__(self, process: Process) -> None:
        if process.stdin is None or process.stdout is None:
            raise HostError("git was started without pipes")
        self.stdin: StreamWriter = process.stdin
        self.stdout: StreamReader = process.stdout
        self.stderr: StreamReader | None = process.stderr
        self._process = process

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        return await self._process.wait()

    async def feed(self, data: bytes) -> None:
        """Write all input and close stdin; git may exit without reading it."""
        with contextlib.suppress(ConnectionError):
            self.stdin.write(data)
            await self.stdin.drain()
        await self.close_input()

    async def close_input(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.stdin.close()
            await self.stdin.wait_closed()

    async def read(self, most: int, reserve: Reserve = unlimited) -> bytes:
        """The output to its end, in memory that is reserved as it grows."""
        # BytesIO gives its bytes away without a copy.
        output, memory = io.BytesIO(), MemoryReservation(reserve)
        while part := await self.stdout.read(_PIPE):
            if output.tell() + len(part) > most:
                raise TooLarge(f"output of git too large (max {most >> 20} MiB)")
            await memory.add(len(part))
            output.write(part)
        return output.getvalue()

    async def errors(self) -> str:
        """The standard error output, limited to its last part."""
        output = b""
        while self.stderr is not None and (part := await self.stderr.read(_MAX_ERRORS)):
            output = (output + part)[-_MAX_ERRORS:]
        return output.decode(errors="replace")

    async def succeed(self, command: str) -> None:
        """Wait for the exit, after all output was read; it must be a success."""
        stderr = await self.errors()
        if status := await self.wait():
            finished = Finished(status, b"", stderr)
            check_memory(finished)
            raise GitFailed(command, finished)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process group, if it still runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def end(self) -> None:
        """Terminate the process group, with SIGTERM first and then SIGKILL; a cancelled caller waits too."""
        try:
            if self.alive:
                await tasks.finished(self._terminate())
        finally:
            # asyncio closes the pipes only here.
            self._process._transport.close()  # type: ignore[attr-defined]

    async def _terminate(self) -> None:
        # On SIGTERM git removes its lock files and temporary files.
        for how in (signal.SIGTERM, signal.SIGKILL):
            if self.alive:
                self.signal(how)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_END_GRACE):
                        await asyncio.shield(self._process.wait())


class GitFailed(RepoDamaged):
    """Git exited with an unexpected error."""

    def __init__(self, command: str, finished: Finished) -> None:
        lines = [line for line in finished.stderr.strip().splitlines() if line]
        last = ([line for line in lines if line.startswith(("fatal:", "error:"))] or lines)[-1:]
        super().__init__(
            f"git {command} failed with exit code {finished.status}: {' '.join(last) or 'no message'}"
        )
        self.finished = finished


def is_full(path: Path) -> bool:
    """Whether the disk of this path is full."""
    with contextlib.suppress(FileNotFoundError):
        disk = os.statvfs(path)
        return disk.f_bavail * disk.f_frsize < _FULL_BELOW or bool(disk.f_files and not disk.f_favail)
    return False


def check_room(finished: Finished, repo: Path | None) -> None:
    """Raise DiskFull if git failed for lack of disk space, also if it does not say so."""
    if GitMessage.DISK_FULL.found_in(finished.stderr) or (repo is not None and is_full(repo)):
        log.warning("disk full", status=finished.status, stderr=finished.stderr.strip()[-500:])
        raise DiskFull


def check_memory(finished: Finished) -> None:
    """Raise TooLarge if git failed for lack of memory."""
    if GitMessage.OUT_OF_MEMORY.found_in(finished.stderr):
        raise TooLarge("too large: git ran out of memory")


def subcommand(arguments: Sequence[str]) -> str:
    """The git subcommand in these arguments to git: the first one after the global options."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-"):
            return word
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
    return ""


def _git_arguments(command_line: Sequence[str]) -> Sequence[str]:
    """The arguments to git in a process's command line, with or without the wrappers that start git."""
    program, *arguments = command_line or [""]
    name = Path(program).name
    if name in _WRAPPERS and "--" in arguments:
        return _git_arguments(arguments[arguments.index("--") + 1 :])
    if name.startswith("git-"):
        return [name.removeprefix("git-"), *arguments]
    return arguments if name == "git" else []


def _writes_refs(arguments: Sequence[str]) -> bool:
    return subcommand(arguments) in _REF_WRITERS


class Git:
    """Starts git processes with a fixed environment."""

    def __init__(self, config: Path, confined: Confinement | None = None) -> None:
        """Confined, git runs as the user that owns a repository, in an empty network; root is needed.

        Otherwise it runs as the current user, in its network.
        """
        self._config = config
        self._confined = confined
        self._network = EmptyNetwork.open() if confined is not None else None
        self._landlock = 0 if confined is None else confined.landlock
        common = FileAccess(PROGRAMS, RANDOM, [NULL])
        self._common_rules = tuple(common.rules(self._landlock))
        self._launchers: dict[tuple[int, bool], PreforkPool] = {}
        """By user, and whether processes outlive the server; the order is that of their last use."""
        self._closing = tasks.TaskSet()

    async def close(self) -> None:
        for launchers in self._launchers.values():
            await launchers.close()
        await self._closing.join()
        if self._network is not None:
            self._network.close()
            self._network = None

    async def end_orphans(self) -> list[ProcessId]:
        """Kill git processes of a previous server; return those that write refs, which keep running."""
        mark = f"GIT_CONFIG_GLOBAL={self._config}".encode()
        pids = {pid for pid, environment in environments() if mark in environment}
        left = []
        for pid, arguments in command_lines():
            if pid in pids and (orphan := ProcessId.of(pid)) is not None:
                if _writes_refs(_git_arguments([os.fsdecode(argument) for argument in arguments])):
                    left.append(orphan)
                else:
                    await kill(orphan)
        return left

    def environment(self, repo: Path | None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        own = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/nonexistent",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(self._config),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_ADVICE": "0",
            "GIT_ALLOC_LIMIT": _MAX_ALLOCATED,
        }
        if repo is not None:
            own["GIT_DIR"] = str(repo)
        return own | dict(extra or {})

    def command(self, launch: Launch, uid: int | None = None, *, network: bool = False) -> list[str]:
        """The command line of git, as a user if git is confined."""
        confine = []
        if uid is not None:
            confine = self._confine(uid, _writes_refs(launch.command[1:]), network=network)
        return [*confine, *launch.arguments]

    def _rules(self, repo: Path | None, folder: Path | None, *, network: bool) -> Sequence[str]:
        """What git may do with files: it changes its repository, and reads programs and its configuration."""
        read = [self._config] if folder is None else [self._config, folder]
        if network:
            read += [*CERTIFICATES, *NAMES]
        own = FileAccess((), read, [] if repo is None else [repo])
        return [*self._common_rules, *own.allowed(self._landlock)]

    def _confine(self, uid: int, lasting: bool, *, network: bool = False) -> list[str]:
        """The command prefix that leaves the host's network, unless `network`, and switches to a user.

        `lasting` processes outlive the server.
        """
        enter = [] if self._confined is None else list(self._confined.enter_group(uid))
        if self._network is not None and not network:
            enter += self._network.enter
        drop = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]
        return [*enter, "setpriv", *drop, *([] if lasting else ["--pdeathsig=TERM"]), "--"]

    def _uid_of(self, repo: Path | None) -> int | None:
        """The user of git in a repository: its owner, which only root can change."""
        if self._confined is None:
            return None
        try:
            owner = None if repo is None else repo.lstat().st_uid
        except OSError:
            owner = None  # git says what is wrong
        if owner is None:
            return self._confined.nobody
        if owner not in self._confined.of_accounts:
            raise RepoDamaged(
                f"the owner of repository {repo.stem if repo else ''}, user {owner}, is not a user of git"
                " for an account: the log of the server's last start says why"
            )
        return owner

    def _launchers_of(self, uid: int, lasting: bool) -> PreforkPool:
        pool = self._launchers.pop((uid, lasting), None)
        if pool is None:
            pool = PreforkPool(
                lambda: self._confine(uid, lasting), self.environment(None), _PIPE, self._common_rules
            )
        self._launchers[uid, lasting] = pool
        if len(self._launchers) > _MAX_POOLS:
            oldest = self._launchers.pop(next(iter(self._launchers)))
            self._closing.start(oldest.close(), "stop unused launchers of git")
        return pool

    async def start(
        self,
        repo: Path | None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        quiet: bool = False,
        memory: int = MAX_MEMORY,
        file: int | None = None,
        network: bool = False,
    ) -> GitProcess:
        """Start git; the caller must end it. With `quiet` its error output is discarded.

        `memory` and `file` are limits in bytes of memory and of a single file, also for its child processes.
        Other servers are reachable with `network` only.
        """
        uid = self._uid_of(repo)
        launch = Launch(
            ["git", *arguments],
            self.environment(repo, env),
            folder=cwd or Path("/"),
            quiet=quiet,
            memory=memory,
            file=file,
            rules=self._rules(repo, cwd, network=network),
        )
        if uid is not None and not network:
            process = self._launchers_of(uid, _writes_refs(arguments)).launch(launch)
            if process is not None:
                return GitProcess(process)
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command(launch, uid, network=network),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=launch.environment,
                cwd="/",
                start_new_session=True,
                limit=_PIPE,
            )
        except FileNotFoundError as error:
            raise HostError(f"{error.filename} is not installed on this host: run `stead doctor`") from error
        set_oom_score(process.pid, EXPENDABLE)
        return GitProcess(process)

    @contextlib.asynccontextmanager
    async def running(
        self,
        repo: Path | None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        memory: int = MAX_MEMORY,
    ) -> AsyncIterator[GitProcess]:
        """A running git process with pipes, which ends with the block."""
        process = await self.start(repo, *arguments, env=env, memory=memory)
        try:
            yield process
        finally:
            await process.end()

    async def finish(
        self,
        repo: Path | None,
        *arguments: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        most: int = MAX_OUTPUT,
        network: bool = False,
        reserve: Reserve = unlimited,
    ) -> Finished:
        """Run git to its exit, with any exit code. Output above `most` bytes raises TooLarge.

        `reserve` is asked for the memory of large output.

        On cancellation git is terminated, unless it writes refs: then cancellation waits for its exit. A
        terminated git could leave a ref lock behind, which would block all later updates.
        """

        async def work() -> Finished:
            process = await self.start(repo, *arguments, env=env, network=network)
            try:
                async with asyncio.timeout(timeout):
                    _, stdout, stderr = await asyncio.gather(
                        process.feed(stdin), process.read(most, reserve), process.errors()
                    )
                    return Finished(await process.wait(), stdout, stderr)
            except TimeoutError:
                raise TooLarge(f"git {subcommand(arguments)} timed out after {timeout:g} s") from None
            finally:
                await process.end()

        return await (tasks.finished(work()) if _writes_refs(arguments) else work())

    async def run(
        self,
        repo: Path | None,
        *arguments: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        most: int = MAX_OUTPUT,
        reserve: Reserve = unlimited,
    ) -> bytes:
        """The output of git, which must succeed."""
        finished = await self.finish(
            repo, *arguments, stdin=stdin, env=env, timeout=timeout, most=most, reserve=reserve
        )
        if finished.status:
            check_room(finished, repo)
            check_memory(finished)
            raise GitFailed(subcommand(arguments), finished)
        return finished.stdout
