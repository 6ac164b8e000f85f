"""Tools for commands in a VM: one that is waited for, and background processes."""

import asyncio
from contextlib import aclosing, suppress
from typing import Annotated

from pydantic import BaseModel, Field

from stead.mcp.calls import Call, destructive, progress, read_only, vm_of
from stead.mcp.excerpts import Excerpt
from stead.mcp.files import LinuxUser
from stead.mcp.vms import VmRef
from stead.sdk import AsyncProcess, Exited, ProcessInfo, ProcessOutput

Environment = Annotated[dict[str, str] | None, Field(description="Environment variables to add.")]
Folder = Annotated[str | None, Field(description="The working directory. Default: the VM's.")]
Command = Annotated[str, Field(min_length=1, description="A command line, which sh runs.")]
ProcessId = Annotated[str, Field(description="The id of a process, as process_start returned it.")]

_OUTPUT_LIMIT = 64 * 1024
"""Bytes of output of a process in one answer."""
_LONGEST_WAIT = 60.0


class CommandEnded(BaseModel):
    """How a command ended, and its output."""

    exit_code: int
    signal: str | None = Field(description="The signal that killed it, if one did.")
    timed_out: bool = Field(description="It was killed because it reached the timeout.")
    seconds: float | None = Field(description="How long it ran.")
    stdout: str
    stdout_left_out: int = Field(description="Characters cut from the middle of stdout.")
    stderr: str
    stderr_left_out: int = Field(description="Characters cut from the middle of stderr.")


class Process(BaseModel):
    """A background process."""

    id: str
    command: list[str]
    running: bool
    exit_code: int | None = Field(description="null while it runs; 128 plus the signal number if killed.")
    terminal: bool
    user: str | None
    output_bytes: int = Field(description="Bytes of output so far: the offset of what comes next.")


class Processes(BaseModel):
    """Background processes of a VM."""

    processes: list[Process]


class OutputPart(BaseModel):
    """Consecutive output on one stream."""

    stream: str = Field(description="stdout or stderr; a terminal has only stdout.")
    text: str


class NewOutput(BaseModel):
    """Output of a process from an offset on."""

    parts: list[OutputPart]
    next_offset: int = Field(description="The offset for the next call.")
    more: bool = Field(description="There is more output already: call again at next_offset.")
    lost_bytes: int = Field(description="Requested bytes that the VM no longer holds; it holds 1 MiB.")
    running: bool
    exit_code: int | None


def _process(info: ProcessInfo) -> Process:
    return Process(
        id=info.id,
        command=list(info.command),
        running=info.running,
        exit_code=info.exit_code,
        terminal=info.pty,
        user=info.user,
        output_bytes=info.offset,
    )


async def _process_of(call: Call, vm: str, process: str) -> AsyncProcess:
    return await (await vm_of(call, vm)).processes.get(process)


async def exec(  # noqa: A001  # the name of the tool
    call: Call,
    vm: VmRef,
    command: Command,
    cwd: Folder = None,
    env: Environment = None,
    stdin: Annotated[str | None, Field(description="Standard input.")] = None,
    timeout_seconds: Annotated[
        float, Field(gt=0, le=3600, description="Kill the command after this time.")
    ] = 120,
    output_limit: Annotated[
        int,
        Field(ge=200, le=200_000, description="Characters of each stream; the middle of more is left out."),
    ] = 20_000,
    user: LinuxUser = None,
) -> CommandEnded:
    """Run a command in a VM and wait until it ends. A non-zero exit code is a result, not an error. After the
    timeout the output so far is returned. Use process_start for servers and for work of more than minutes."""
    found = await vm_of(call, vm, user)
    output = {"stdout": Excerpt(output_limit), "stderr": Excerpt(output_limit)}
    latest = output["stdout"]
    end: Exited | None = None
    async with progress(call, lambda: latest.last_line or "running"):
        events = found.exec_stream(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout_seconds)
        async with aclosing(events):  # a call that is cancelled kills the command
            async for event in events:
                if isinstance(event, Exited):
                    end = event
                else:
                    latest = output[event.stream]
                    latest.add(event.text)
    if end is None:
        raise ConnectionError("the connection ended before the command did: check what it has done")
    stdout, stderr = output["stdout"], output["stderr"]
    return CommandEnded(
        exit_code=end.status_code,
        signal=end.signal,
        timed_out=end.timed_out,
        seconds=end.duration,
        stdout=str(stdout),
        stdout_left_out=stdout.left_out,
        stderr=str(stderr),
        stderr_left_out=stderr.left_out,
    )


async def process_start(
    call: Call,
    vm: VmRef,
    command: Command,
    id: Annotated[str | None, Field(description="An id of your choice.")] = None,  # noqa: A002
    cwd: Folder = None,
    env: Environment = None,
    terminal: Annotated[
        bool, Field(description="Run it in a terminal, for shells, REPLs and programs with prompts.")
    ] = False,
    cols: Annotated[int, Field(ge=1, le=1000)] = 120,
    rows: Annotated[int, Field(ge=1, le=1000)] = 40,
    user: LinuxUser = None,
) -> Process:
    """Start a command in a VM in the background: a server, a long job, an interactive program. It continues
    when the client leaves, and through vm_suspend. Its standard input is open for process_write."""
    found = await vm_of(call, vm, user)
    process = await found.processes.start(
        command,
        id=id,
        cwd=cwd,
        env=env,
        stdin=not terminal,
        pty=terminal,
        cols=cols if terminal else None,
        rows=rows if terminal else None,
    )
    return _process(process.last_info)


async def process_list(call: Call, vm: VmRef) -> Processes:
    """List the background processes of a VM; ended ones too, up to a day."""
    found = await (await vm_of(call, vm)).processes.list()
    return Processes(processes=[_process(each.last_info) for each in found])


async def process_output(
    call: Call,
    vm: VmRef,
    process: ProcessId,
    offset: Annotated[int, Field(ge=0, description="0, or next_offset of an earlier call.")] = 0,
    wait_seconds: Annotated[
        float, Field(ge=0, le=_LONGEST_WAIT, description="Wait so long for output or the end of the process.")
    ] = 0,
) -> NewOutput:
    """Read the output of a background process from an offset on, in the order in which it was printed."""
    found = await _process_of(call, vm, process)
    page = await found.output(offset=offset)
    if wait_seconds and not page.chunks and (page.process or found.last_info).running:
        async with progress(call, lambda: f"waiting for output of {process}"):
            await _wait_for_output(found, offset, wait_seconds)
        page = await found.output(offset=offset)
    return _new_output(page, page.process or found.last_info, offset)


async def _wait_for_output(process: AsyncProcess, offset: int, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async with await process.stream(offset=offset) as events:
                async for _ in events:
                    return


def _new_output(page: ProcessOutput, info: ProcessInfo, offset: int) -> NewOutput:
    """The beginning of a page, cut between two characters."""
    start = offset if page.cut is None else page.cut.end
    parts: list[tuple[str, bytearray]] = []
    room = _OUTPUT_LIMIT
    for chunk in page.chunks:
        data = chunk.data[:room]
        room -= len(data)
        if parts and parts[-1][0] == chunk.stream:
            parts[-1][1].extend(data)
        elif data:
            parts.append((chunk.stream, bytearray(data)))
    taken = _OUTPUT_LIMIT - room
    end = start + taken
    more = end < page.next_offset
    if more or info.running:
        unfinished = _unfinished(parts[-1][1]) if parts else 0
        if unfinished < taken:  # else the bytes are no text, and waiting would not end
            del parts[-1][1][len(parts[-1][1]) - unfinished :]
            end -= unfinished
    return NewOutput(
        parts=[
            OutputPart(stream=stream, text=data.decode(errors="replace")) for stream, data in parts if data
        ],
        next_offset=end,
        more=more,
        lost_bytes=start - offset,
        running=info.running,
        exit_code=info.exit_code,
    )


def _unfinished(data: bytearray) -> int:
    """How many bytes at the end are the beginning of a UTF-8 character."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < length else 0
        if byte & 0x80 == 0:
            return 0
    return 0


async def process_write(
    call: Call,
    vm: VmRef,
    process: ProcessId,
    text: Annotated[
        str, Field(description="What is typed; end a line with a newline. \\u0003 is Ctrl-C in a terminal.")
    ] = "",
    close: Annotated[bool, Field(description="Close standard input after it.")] = False,
) -> Process:
    """Write to the standard input of a background process, or type into its terminal."""
    found = await _process_of(call, vm, process)
    await found.write(text, close=close)
    return _process(await found.info())


async def process_signal(
    call: Call,
    vm: VmRef,
    process: ProcessId,
    signal: Annotated[str, Field(pattern="^SIG[A-Z0-9]+$", description="For example SIGINT or SIGKILL.")] = (
        "SIGTERM"
    ),
    wait_seconds: Annotated[
        float, Field(ge=0, le=_LONGEST_WAIT, description="Wait so long for its end.")
    ] = 5,
) -> Process:
    """Send a signal to a background process and the processes of its group."""
    found = await _process_of(call, vm, process)
    await found.signal(signal)
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_seconds):
            await found.wait()
    return _process(await found.info())


TOOLS = [
    destructive(exec, "Run a command", open_world=True),
    destructive(process_start, "Start a process", open_world=True),
    read_only(process_list, "List processes"),
    read_only(process_output, "Read the output of a process"),
    destructive(process_write, "Write to a process", open_world=True),
    destructive(process_signal, "Signal a process"),
]
