"""A handle on one VM."""

import functools
import shlex
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.files import AsyncFiles
from stead.sdk._async.logs import AsyncLogs
from stead.sdk._async.services import AsyncServices
from stead.sdk._async.streams import AsyncStream
from stead.sdk._async.terminals import AsyncTerminals
from stead.sdk.arguments import checks_arguments, seconds
from stead.sdk.creation import to_wire
from stead.sdk.errors import NoAnswerInTime, NotFound, SteadException, UnexpectedAnswer, WaitTimedOut
from stead.sdk.events import ExecEvents, parse_exit
from stead.sdk.exceptions import InvalidArgument
from stead.sdk.exec_options import ExecOptions, exec_body
from stead.sdk.lifetimes import Ttl, lifetime_to_wire
from stead.sdk.log_options import LogPaging
from stead.sdk.models import (
    Build,
    CreatedVm,
    ExecEvent,
    ExecResult,
    LogPage,
    PortUrl,
    SnapshotPurpose,
    SnapshotRef,
    VmInfo,
)
from stead.sdk.parsing import parse, parse_list, parse_object
from stead.sdk.requests import EXEC_TIMEOUT, GRACE, LIFECYCLE_TIMEOUT, UNSET, check_linux_user, request
from stead.sdk.sizes import Size, SizeParts, wanted_size
from stead.sdk.spec_parts import PersistenceLike
from stead.sdk.vm_options import StartOptions

if TYPE_CHECKING:
    from stead.sdk._async.piped_exec import AsyncPipedCommand
    from stead.sdk._async.processes import AsyncProcess, AsyncProcesses
    from stead.sdk._async.pty import AsyncPty
    from stead.sdk.forwarding import AsyncForward


@checks_arguments
class AsyncVm:
    """A handle on a VM. Creating a handle sends no request; its methods do.

    Methods that need a running VM wake a suspended one and start a stopped one. As a context manager, the
    VM is deleted at the end:

        async with await stead.vms.create() as vm:
            await vm.exec("uname -a")
    """

    def __init__(
        self,
        connection: AsyncConnection,
        vm_id: str,
        *,
        name: str | None = None,
        user: str | None = None,
        domains: Sequence[str] = (),
        last_info: VmInfo | None = None,
        created: bool | None = None,
    ) -> None:
        self.id = vm_id
        self.created = created
        """False if it existed when it was to be created with `if_missing`; None if this is not known."""
        self.domains = tuple(domains)
        """The host names that route to it, as create or fork returned them."""
        self.last_info = last_info
        """The result of the last `info()` of this handle; None if there is none."""
        self.linux_user = user
        """The Linux user that runs commands and owns files; root if None."""
        self.fs = AsyncFiles(connection, vm_id, user)
        """Files."""
        self.systemd = AsyncServices(connection, vm_id, user, self.fs)
        """systemd services."""
        self.terminals = AsyncTerminals(connection, vm_id, user)
        """The recorded output of commands that ran under a name."""
        self._connection = connection
        self._name = name

    @property
    def name(self) -> str | None:
        """Its name as far as this handle knows it: from create, fork, find, `info()` or `rename()`."""
        return self._name if self.last_info is None else self.last_info.name

    def __repr__(self) -> str:
        user = f", user={self.linux_user!r}" if self.linux_user else ""
        return f"{type(self).__name__}({self.id!r}{user})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncVm) and (self.id, self.linux_user) == (other.id, other.linux_user)

    def __hash__(self) -> int:
        return hash((self.id, self.linux_user))

    def user(self, name: str) -> "AsyncVm":
        """A handle on the same VM that runs commands and accesses files as a Linux user."""
        check_linux_user(name)
        return AsyncVm(
            self._connection,
            self.id,
            name=self._name,
            user=name,
            domains=self.domains,
            last_info=self.last_info,
        )

    @functools.cached_property
    def pty(self) -> "AsyncPty":
        """Interactive terminals. Loaded on first use."""
        from stead.sdk._async.pty import AsyncPty

        return AsyncPty(self._connection, self.id, self.linux_user)

    @functools.cached_property
    def processes(self) -> "AsyncProcesses":
        """Background processes. Loaded on first use."""
        from stead.sdk._async.processes import AsyncProcesses

        return AsyncProcesses(self._connection, self.id, self.linux_user)

    def forward(
        self,
        port: int,
        *,
        local: int | None = None,
        on_error: Callable[[SteadException], object] | None = None,
    ) -> "AsyncForward":
        """Forward a local port to a port in the VM while a `with` block runs.

        Args:
            port: the port in the VM; a server that listens on its loopback address is reached too.
            local: the port on 127.0.0.1: the same number if None, a free one if 0.
            on_error: called with the error of a connection that failed, for example because nothing listens
                in the VM. The client of that connection sees a reset.
        """
        from stead.sdk.forwarding import AsyncForward

        return AsyncForward(self._connection.settings, self.id, self.linux_user, port, local, on_error)

    async def url(self, port: int) -> str:
        """A URL at which a server on this port of the VM is reached over HTTPS.

        It has a name of the server's first preview zone: one that is mapped to the port, else a new one. The
        server in the VM must listen on all addresses, not only on 127.0.0.1.
        """
        answer = await self._connection.call(request("PUT", "/v1/vms/{}/urls/{}", self.id, str(port)))
        return parse(PortUrl, answer).url

    @overload
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        terminal: str | None = None,
        check: bool = False,
        detach: Literal[False] = False,
        **options: Unpack[ExecOptions],
    ) -> ExecResult: ...

    @overload
    async def exec(
        self, command: str | Sequence[str], *, detach: Literal[True], **options: Unpack[ExecOptions]
    ) -> "AsyncProcess": ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        terminal: str | None = None,
        check: bool = False,
        detach: bool = False,
        **options: Unpack[ExecOptions],
    ) -> "ExecResult | AsyncProcess":
        """Run a command, wait until it ends, and return its output and exit code.

        Args:
            command: text, which `sh` runs, or a list of a program and its arguments. The exit code is 127 if
                the program does not exist and 126 if it cannot be executed.
            cwd: the working directory.
            env: environment variables to add.
            stdin: standard input.
            timeout: seconds after which the VM kills the command; raises `ExecTimedOut`, which has the output
                so far.
            user: the Linux user; the handle's user if None.
            terminal: a name under which `vm.terminals` has the output, also while the command runs.
            check: raise `CommandFailed` if the exit code is not 0. Otherwise a failure is a normal result.
            detach: leave it running and return a handle on the process; see `vm.processes`.

        The command is never repeated: if the connection breaks, `ServerUnreachable` is raised with
        `retryable` False, because the command may have started.
        """
        stdin, timeout, user = options.get("stdin"), options.get("timeout"), options.get("user")
        if detach:
            if terminal is not None or check:
                raise InvalidArgument("detach=True takes neither terminal nor check")
            process = await self.processes.start(
                command,
                cwd=options.get("cwd"),
                env=options.get("env"),
                stdin=stdin is not None,
                timeout=timeout,
                user=user,
            )
            if stdin is not None:
                await process.write(stdin, close=True)
            return process
        answer = await self._connection.call(
            request(
                "POST",
                "/v1/vms/{}/exec-await",
                self.id,
                json={"terminal": terminal, **exec_body(command, options)},
                user=self.linux_user if user is None else user,
                timeout=(EXEC_TIMEOUT if timeout is None else timeout) + GRACE,
            )
        )
        if not isinstance(answer, dict):
            raise UnexpectedAnswer("the answer to exec is not a JSON object")
        end = parse_exit(answer)
        result = ExecResult(
            status_code=end.status_code,
            stdout=str(answer.get("stdout") or ""),
            stderr=str(answer.get("stderr") or ""),
            signal=end.signal,
            duration=end.duration,
            stdout_truncated=answer.get("stdoutTruncated") is True,
            stderr_truncated=answer.get("stderrTruncated") is True,
            command=command if isinstance(command, str) else shlex.join(command),
        )
        return result.check() if check else result

    def exec_stream(
        self, command: str | Sequence[str], **options: Unpack[ExecOptions]
    ) -> AsyncStream[ExecEvent]:
        """Run a command and yield its output while it runs, as `Output`, then its end as `Exited`.

        The command starts when you request the first event. Closing the stream kills the command. The output
        is not limited. After a timeout, `Exited.timed_out` is True; no error is raised. If the server stops
        or the VM is lost, the stream raises the matching error.
        """
        return AsyncStream(self._exec_events(command, options))

    async def _exec_events(
        self, command: str | Sequence[str], options: ExecOptions
    ) -> AsyncGenerator[ExecEvent]:
        timeout, user = options.get("timeout"), options.get("user")
        opening = request(
            "POST",
            "/v1/vms/{}/exec-stream",
            self.id,
            json=exec_body(command, options),
            user=self.linux_user if user is None else user,
            timeout=None if timeout is None else timeout + GRACE,
        )
        events = ExecEvents()
        async with aclosing(self._connection.stream(opening)) as chunks:
            async for chunk in chunks:
                for event in events.feed(chunk):
                    yield event
            for event in events.end():
                yield event

    async def exec_piped(
        self, command: str | Sequence[str], **options: Unpack[ExecOptions]
    ) -> "AsyncPipedCommand":
        """Start a command whose standard input you write while it runs; the options are those of `exec`.

            async with await vm.exec_piped("sort") as sort:
                await sort.write("2\\n1\\n")
                await sort.close_stdin()
                async for event in sort:
                    print(event)

        Closing it kills the command. Unlike a process of `vm.processes`, it ends with its client, keeps the
        VM awake, and waits for a client that does not read its output.
        """
        from stead.sdk._async.piped_exec import AsyncPipedCommand
        from stead.sdk._async.reconnecting import open_socket

        if options.get("stdin") is not None:
            raise InvalidArgument("exec_piped takes no stdin: write to the command that it returns")
        user = options.get("user")
        user = self.linux_user if user is None else user
        opening = request("GET", "/v1/vms/{}/exec", self.id, user=user, idempotent=True)
        started = AsyncPipedCommand(await open_socket(self._connection, opening, pings=False))
        await started.begin(exec_body(command, options))
        return started

    async def info(self) -> VmInfo:
        """Its state, name, size, address and other properties."""
        self.last_info = parse(VmInfo, await self._call("GET", ""))
        return self.last_info

    async def rename(self, name: str | None) -> VmInfo:
        """Change its name; None removes it."""
        answer = await self._call("PATCH", "", json={"name": name}, idempotent=True)
        self.last_info = parse(VmInfo, answer)
        return self.last_info

    async def start(self, **options: Unpack[StartOptions]) -> None:
        """Boot it if it is stopped, or wake it, running programs included, if it is suspended.

        Does nothing if it is running. `idle_timeout_seconds` changes after how much time without network
        traffic it is suspended; None for never.
        """
        wait = LIFECYCLE_TIMEOUT + (options.get("ready_signal_timeout_seconds") or 0)
        await self._call("POST", "/start", json=to_wire(options), timeout=wait)

    async def stop(self) -> None:
        """Shut it down. The disk is kept, the memory is lost."""
        await self._call("POST", "/stop")

    async def suspend(self) -> None:
        """Suspend it: save its memory and stop it. The next use wakes it with its programs running."""
        await self._call("POST", "/suspend")

    async def kill(self) -> None:
        """Power it off without a shutdown."""
        await self._call("POST", "/kill")

    async def wait_for_exit(self, *, timeout: float | None = None) -> str:
        """Wait until it no longer runs; returns why. Raises `WaitTimedOut` after `timeout` seconds."""
        if timeout is not None:
            seconds("timeout", timeout)
        try:
            answer = await self._call("POST", "/await", timeout=timeout, idempotent=True)
        except NoAnswerInTime:
            # A server that is gone raises its own error here.
            state = (await self.info()).state
            raise WaitTimedOut(f"VM {self.id} is still {state} after {timeout:g} seconds") from None
        return str(parse_object(answer).get("exitStatus", ""))

    async def delete(self) -> None:
        """Delete it. This cannot be undone."""
        await self._call("DELETE", "")

    async def snapshot(
        self,
        *,
        name: str | None = None,
        persistence: PersistenceLike | None = None,
        ttl: Ttl | None = None,
        expires_at: datetime | None = None,
        purpose: SnapshotPurpose | None = None,
        idempotency_key: str | None = None,
    ) -> SnapshotRef:
        """Save its current state, disk and memory, as a snapshot. It keeps running.

        A call that is repeated with the same `idempotency_key` within 24 h returns the same snapshot.

        Args:
            name: a label.
            persistence: "persistent", "sticky", or a `Persistence`.
            ttl: seconds, or a timedelta, after which the server deletes the snapshot; by default never.
            expires_at: when the server deletes it, instead of `ttl`.
            purpose: "agent" if it is saved to resume the session of an agent; `stead snapshot list` shows
                these apart.
        """
        body = {
            **to_wire({"name": name, "purpose": purpose, "persistence": persistence}),
            **lifetime_to_wire(ttl, UNSET if expires_at is None else expires_at),
        }
        call = self._call("POST", "/snapshot", json=body, idempotency_key=idempotency_key)
        return parse(SnapshotRef, await call)

    async def fork(
        self,
        *,
        count: int = 1,
        name: str | None = None,
        persistence: PersistenceLike | None = None,
        idempotency_key: str | None = None,
    ) -> list["AsyncVm"]:
        """Create VMs that continue from its current state, running programs included. It keeps running.

        Args:
            count: how many.
            name: the name of the fork; several are called NAME-1, NAME-2 and so on.
            persistence: how long the forks are kept; see `Persistence`.
            idempotency_key: a call that is repeated with it within 24 h returns the same forks.
        """
        body = to_wire({"count": count, "name": name, "persistence": persistence})
        answer = await self._call("POST", "/fork", json=body, idempotency_key=idempotency_key)
        forks = parse_list(CreatedVm, answer, "forks")
        return [AsyncVm(self._connection, fork.id, name=fork.name, domains=fork.domains) for fork in forks]

    async def resize(self, size: str | Size | None = None, **parts: Unpack[SizeParts]) -> None:
        """Change its size: `resize("4x8Gx40G")`, or parts of it: `resize(memory="8G")`.

        A running VM is rebooted. A disk can only grow.

        Args:
            size: vCPUs x memory x disk.
            parts: `cpu`, `memory` and `disk`, instead of the whole: see `SizeParts`.
        """
        await self._call("POST", "/resize", json=wanted_size(size, parts).to_wire())

    async def build(self) -> Build:
        """The build that created it; `BuildNotFound` if it was not created from a spec."""
        return parse(Build, await self._call("GET", "/build"))

    async def logs(self, *, service: str | None = None, **options: Unpack[LogPaging]) -> LogPage:
        """Log lines about it, oldest first, of the last day unless you give times.

        `service` selects the lines of one systemd service. If there are more lines, `next_page_token` of the
        result is the `page_token` of the next page.
        """
        return await AsyncLogs(self._connection).list(vm_id=self.id, vm_service=service, **options)

    async def console(self) -> str:
        """The end of its serial console: what its kernel printed, up to 64 KiB. This does not wake it.

        Of a VM that does not run, the console of the last run that crashed, or "".
        """
        return str(parse_object(await self._call("GET", "/console")).get("console", ""))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.delete()
        except NotFound:
            return
        except SteadException as failure:
            if error is None:
                raise
            error.add_note(f"VM {self.id} was not deleted: {failure}")

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        options.setdefault("timeout", UNSET if method == "GET" else LIFECYCLE_TIMEOUT)
        return await self._connection.call(request(method, f"/v1/vms/{{}}{path}", self.id, **options))
