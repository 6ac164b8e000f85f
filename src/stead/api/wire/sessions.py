"""Wire models of terminals (PTY sessions), background processes and tickets."""

import base64
import signal
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from stead.api.wire import Time, Wire
from stead.api.wire.guests import MAX_TIMEOUT_MS
from stead.api.wire.numbers import Count, Rounded
from stead.guest.execution import shell
from stead.guest.sessions import OutputPage, Session

_SHELL = ("/bin/sh", "-c")


def exit_status(exit_code: int | None, signal_name: str | None) -> int:
    """The exit code; 128 plus the signal's number for a program that was killed by a signal, as in shells."""
    if exit_code is not None:
        return exit_code
    try:
        return 128 + signal.Signals[signal_name or ""].value
    except KeyError:
        return 255


def exit_code_of(session: Session) -> int | None:
    return exit_status(session.exit_code, session.signal) if session.exited else None


class PtySession(Wire):
    """A terminal. `user` is null for root; times are in milliseconds since the epoch."""

    session_id: str
    running: bool
    cols: int
    rows: int
    created_at_ms: int
    attached_count: int
    exit_code: int | None
    exited_at_ms: int | None
    exec: str | None
    user: str | None
    suspended: bool
    title: str

    @classmethod
    def of(cls, session: Session, *, suspended: bool = False) -> "PtySession":
        return cls(
            session_id=session.id,
            running=not (session.exited or suspended),
            cols=session.cols,
            rows=session.rows,
            created_at_ms=round(session.created_at * 1000),
            attached_count=0 if suspended else session.attached,
            exit_code=exit_code_of(session),
            exited_at_ms=None if session.exited_at is None else round(session.exited_at * 1000),
            exec=session.argv[2] if session.argv[:2] == _SHELL and len(session.argv) == 3 else None,
            user=None if session.user == "root" else session.user,
            suspended=suspended,
            title=session.title,
        )


class PtySessionList(Wire):
    sessions: list[PtySession]


class ClosedPtySession(Wire):
    session_id: str
    exit_code: int | None


class NewProcess(Wire):
    """A program to start in the background."""

    command: str | list[str] = Field(description="A string for `sh -c`, or a program and its arguments.")
    id: str | None = Field(default=None, description="Id; by default `proc-1`, `proc-2` and so on.")
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    pty: bool = Field(
        default=False,
        description="Run it in a pseudo-terminal instead of with pipes; its TERM is xterm-256color.",
    )
    cols: Count = 80
    rows: Count = 24
    stdin: bool = Field(default=False, description="Keep standard input open for writing; default: empty.")
    timeout_ms: Rounded | None = Field(
        default=None, gt=0, le=MAX_TIMEOUT_MS, description="Kill the program after this many milliseconds."
    )

    @property
    def argv(self) -> list[str]:
        if isinstance(self.command, str):
            return shell(self.command) if self.command else []
        return self.command


class Process(Wire):
    """A background process. Output is held from offset `start` on; `offset` is its length so far."""

    id: str
    user: str
    pid: int
    command: list[str]
    pty: bool
    cols: int | None
    rows: int | None
    status: Literal["running", "exited"]
    exit_code: int | None
    signal: str | None
    timed_out: bool
    created_at: Time
    exited_at: Time | None
    offset: int
    start: int

    @classmethod
    def of(cls, session: Session) -> "Process":
        return cls(
            id=session.id,
            user=session.user,
            pid=session.pid,
            command=list(session.argv),
            pty=session.pty,
            cols=session.cols if session.pty else None,
            rows=session.rows if session.pty else None,
            status="exited" if session.exited else "running",
            exit_code=exit_code_of(session),
            signal=session.signal,
            timed_out=session.timed_out,
            created_at=session.created_at,
            exited_at=session.exited_at,
            offset=session.offset,
            start=session.start,
        )


class ProcessList(Wire):
    processes: list[Process]


class SignalRequest(Wire):
    signal: str = Field(pattern="^SIG[A-Z0-9+-]{1,12}$", description="Such as SIGTERM.")


class ProcessChunk(Wire):
    stream: Literal["stdout", "stderr"]
    offset: int
    data: str = Field(description="base64")


class CutOutput(Wire):
    """Output between these offsets is no longer held."""

    start: int = Field(alias="from")
    end: int = Field(alias="to")


class ProcessOutput(Wire):
    chunks: list[ProcessChunk]
    next_offset: int
    cut: CutOutput | None
    process: Process

    @classmethod
    def of(cls, page: OutputPage) -> "ProcessOutput":
        chunks = [
            ProcessChunk(stream=each.stream, offset=each.offset, data=base64.b64encode(each.data).decode())
            for each in page.chunks
        ]
        cut = None if page.cut is None else CutOutput.model_validate({"from": page.cut[0], "to": page.cut[1]})
        return cls(chunks=chunks, next_offset=page.next_offset, cut=cut, process=Process.of(page.session))


class NewTicket(Wire):
    """What a ticket opens: a new terminal, a terminal or process by its id, or a port."""

    kind: Literal["pty", "process", "forward"] = "pty"
    session_id: str | None = Field(
        default=None, description="Terminal to attach to (default: a new one), or process."
    )
    port: Count | None = Field(default=None, ge=1, le=65535, description="Port to connect to.")

    @model_validator(mode="after")
    def _complete(self) -> "NewTicket":
        if self.kind == "process" and self.session_id is None:
            raise ValueError("sessionId is missing: it names the process")
        if self.kind == "forward" and self.port is None:
            raise ValueError("port is missing")
        return self


class TicketModel(Wire):
    ticket: str
    expires_at: Time
    path: str = Field(description="Path of the WebSocket; add `?ticket=...`.")
