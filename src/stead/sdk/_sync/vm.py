# Made by scripts/unasync from _async/vm.py.
"""A handle on one machine."""

import base64
import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from stead.sdk._sync.connection import Connection
from stead.sdk._sync.files import Files
from stead.sdk._sync.logs import Logs
from stead.sdk._sync.services import Services
from stead.sdk._sync.streams import Stream
from stead.sdk._sync.terminals import Terminals
from stead.sdk.errors import NotFound, SteadException, UnexpectedAnswer
from stead.sdk.events import ExecEvents, exited
from stead.sdk.models import Build, CreatedVm, ExecEvent, ExecResult, LogPage, SnapshotRef, VmInfo
from stead.sdk.parsing import parse, parse_list
from stead.sdk.parts import PersistenceLike, persistence_to_wire
from stead.sdk.requests import EXEC_TIMEOUT, GRACE, LIFECYCLE_TIMEOUT, UNSET, Unset, request
from stead.sdk.sizes import Amount, Size, wanted_size


class Vm:
    """A machine. Making a handle asks the server nothing; its methods do.

    A machine that sleeps or is stopped is brought up by whatever needs it running. As a context manager,
    the machine is deleted at the end:

        with stead.vms.create() as vm:
            vm.exec("uname -a")
    """

    def __init__(
        self,
        connection: Connection,
        vm_id: str,
        *,
        name: str | None = None,
        user: str | None = None,
        domains: Sequence[str] = (),
        last_info: VmInfo | None = None,
    ) -> None:
        self.id = vm_id
        self.domains = tuple(domains)
        """The names under which it was published when it was created."""
        self.last_info = last_info
        """What the server said when this handle last asked."""
        self.linux_user = user
        """Who commands run as and files belong to; root if None."""
        self.fs = Files(connection, vm_id, user)
        """Its files."""
        self.systemd = Services(connection, vm_id, user, self.fs)
        """Its services."""
        self.terminals = Terminals(connection, vm_id, user)
        """Its terminals."""
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
        return isinstance(other, Vm) and (self.id, self.linux_user) == (other.id, other.linux_user)

    def __hash__(self) -> int:
        return hash((self.id, self.linux_user))

    def user(self, name: str) -> "Vm":
        """The same machine, used as a Linux user: commands, files, services and terminals."""
        return Vm(
            self._connection,
            self.id,
            name=self._name,
            user=name,
            domains=self.domains,
            last_info=self.last_info,
        )

    def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
        terminal: str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Run a command and wait for its end.

        A string is run by `sh`; a list is a program and its arguments, and `FileNotFound` if there is no such
        program. A command that fails is a result like any other, unless `check` is set: then `CommandFailed`
        is raised. `timeout` is in seconds, and the machine ends the command when it is over: `ExecTimedOut`,
        with the output until then. With `terminal`, its output can be read under that name in `vm.terminals`,
        also while it runs.
        """
        body = {"terminal": terminal, **_exec_body(command, cwd, env, stdin, timeout)}
        answer = self._connection.call(
            request(
                "POST",
                "/v1/vms/{}/exec-await",
                self.id,
                json=body,
                user=user or self.linux_user,
                timeout=(EXEC_TIMEOUT if timeout is None else timeout) + GRACE,
            )
        )
        if not isinstance(answer, dict):
            raise UnexpectedAnswer("the answer to a command is not an object")
        end = exited(answer)
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
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Stream[ExecEvent]:
        """Run a command and yield what it prints as it does, as `Output`, and its end as `Exited`.

        It starts with the first event that is asked for. Closing the stream ends the command. There is no
        limit to the output. A timeout does not raise: `Exited.timed_out` tells.
        """
        body = _exec_body(command, cwd, env, stdin, timeout)
        return Stream(self._exec_events(body, user or self.linux_user, timeout))

    def _exec_events(
        self, body: dict[str, Any], user: str | None, timeout: float | None
    ) -> Generator[ExecEvent]:
        call = request(
            "POST",
            "/v1/vms/{}/exec-stream",
            self.id,
            json=body,
            user=user,
            timeout=None if timeout is None else timeout + GRACE,
        )
        events = ExecEvents()
        with closing(self._connection.stream(call)) as chunks:
            for chunk in chunks:
                for event in events.feed(chunk):
                    yield event
            for event in events.end():
                yield event

    def info(self) -> VmInfo:
        """Its state and what else the server knows of it."""
        self.last_info = parse(VmInfo, self._call("GET", ""))
        return self.last_info

    def rename(self, name: str | None) -> VmInfo:
        """Change its name; None removes it."""
        answer = self._call("PATCH", "", json={"name": name}, idempotent=True)
        self.last_info = parse(VmInfo, answer)
        return self.last_info

    def start(
        self,
        *,
        idle_timeout_seconds: int | Unset | None = UNSET,
        wait_for_ready_signal: bool | None = None,
        ready_signal_timeout_seconds: float | None = None,
        activity_threshold_bytes: int | None = None,
    ) -> None:
        """Boot it, or wake it with everything that was running. Nothing happens if it runs.

        `idle_timeout_seconds` None keeps it running until it is stopped.
        """
        body: dict[str, Any] = {
            "waitForReadySignal": wait_for_ready_signal,
            "readySignalTimeoutSeconds": ready_signal_timeout_seconds,
            "activityThresholdBytes": activity_threshold_bytes,
        }
        body = {key: value for key, value in body.items() if value is not None}
        if idle_timeout_seconds is not UNSET:
            body["idleTimeoutSeconds"] = idle_timeout_seconds
        wait = LIFECYCLE_TIMEOUT + (ready_signal_timeout_seconds or 0)
        self._call("POST", "/start", json=body, timeout=wait)

    def stop(self) -> None:
        """Shut it down. Its disk is kept, its memory is not."""
        self._call("POST", "/stop")

    def suspend(self) -> None:
        """Let it sleep with its memory kept: it goes on where it was when it is next needed."""
        self._call("POST", "/suspend")

    def kill(self) -> None:
        """Cut its power."""
        self._call("POST", "/kill")

    def wait_for_exit(self, *, timeout: float | None = None) -> str:
        """Wait until it has stopped; returns how. `NoAnswerInTime` after `timeout` seconds."""
        answer = self._call("POST", "/await", timeout=timeout, idempotent=True)
        return str(answer.get("exitStatus", ""))

    def delete(self) -> None:
        """Delete it for good."""
        self._call("DELETE", "")

    def snapshot(self, *, name: str | None = None, persistence: PersistenceLike | None = None) -> SnapshotRef:
        """Keep it as it is now, disk and memory. It goes on running."""
        body: dict[str, Any] = {} if name is None else {"name": name}
        if persistence is not None:
            body["persistence"] = persistence_to_wire(persistence)
        return parse(SnapshotRef, self._call("POST", "/snapshot", json=body))

    def fork(
        self, *, count: int = 1, name: str | None = None, persistence: PersistenceLike | None = None
    ) -> list["Vm"]:
        """Create VMs that continue from its current state, running programs included. It keeps running.

        Args:
            count: how many.
            name: the name of the fork; several are called NAME-1, NAME-2 and so on.
            persistence: how long the forks are kept; see `Persistence`.
        """
        body: dict[str, Any] = {"count": count}
        if name is not None:
            body["name"] = name
        if persistence is not None:
            body["persistence"] = persistence_to_wire(persistence)
        answer = self._call("POST", "/fork", json=body)
        forks = parse_list(CreatedVm, answer, "forks")
        return [Vm(self._connection, fork.id, name=fork.name, domains=fork.domains) for fork in forks]

    def resize(
        self,
        size: str | Size | None = None,
        *,
        cpu: int | None = None,
        memory: Amount | None = None,
        disk: Amount | None = None,
        vcpu_count: int | None = None,
        mem_size_gb: float | None = None,
        rootfs_size_gb: float | None = None,
        storage: Amount | None = None,
    ) -> None:
        """Change its size: `resize("4x8Gx40G")`, or parts of it: `resize(memory="8G")`.

        A running VM is rebooted. A disk can only grow.

        Args:
            size: vCPUs x memory x disk.
            cpu: vCPUs, a power of two.
            memory: GiB, or text such as "512M"; a power of two.
            disk: GiB, or text such as "40G".
            vcpu_count, mem_size_gb, rootfs_size_gb, storage: other names of cpu, memory, disk and disk.
        """
        wanted = wanted_size(
            size=size,
            cpu=cpu,
            memory=memory,
            disk=disk,
            vcpu_count=vcpu_count,
            mem_size_gb=mem_size_gb,
            rootfs_size_gb=rootfs_size_gb,
            storage=storage,
        )
        self._call("POST", "/resize", json=wanted.to_wire())

    def build(self) -> Build:
        """The build that made it; `BuildNotFound` if it was not made from a spec."""
        return parse(Build, self._call("GET", "/build"))

    def logs(
        self,
        *,
        service: str | None = None,
        search: str | None = None,
        start_time: datetime | str | None = None,
        end_time: datetime | str | None = None,
        page_size: int | None = None,
        page_token: str | None = None,
    ) -> LogPage:
        """What was logged about it, oldest first; of the last day unless times are given."""
        return Logs(self._connection).list(
            vm_id=self.id,
            vm_service=service,
            search=search,
            start_time=start_time,
            end_time=end_time,
            page_size=page_size,
            page_token=page_token,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.delete()
        except NotFound:
            return
        except SteadException as failure:
            if error is None:
                raise
            error.add_note(f"machine {self.id} could not be deleted either: {failure}")

    def _call(self, method: str, path: str, **options: Any) -> Any:
        options.setdefault("timeout", UNSET if method == "GET" else LIFECYCLE_TIMEOUT)
        return self._connection.call(request(method, f"/v1/vms/{{}}{path}", self.id, **options))


def _exec_body(
    command: str | Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    stdin: str | bytes | None,
    timeout: float | None,
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "command": command if isinstance(command, str) else list(command),
        "timeoutMs": None if timeout is None else max(1, round(timeout * 1000)),
    }
    if cwd is not None:
        body["cwd"] = cwd
    if env is not None:
        body["env"] = dict(env)
    if stdin is not None:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        body["stdin"] = base64.b64encode(data).decode()
    return body
