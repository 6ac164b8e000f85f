"""A background process of a VM in the foreground of this terminal: `stead vm exec -it` and `stead vm run`."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stead.cli.connection import run_connected
from stead.cli.interaction import Detached, Interaction, Signalled, write_all
from stead.cli.output import note
from stead.cli.processes import cut_text
from stead.cli.remote import CommandResult, RemoteCommand
from stead.cli.shell import report_outage
from stead.cli.standard_input import standard_input
from stead.cli.terminal import terminal_size, terminal_type
from stead.sdk.errors import SteadApiError
from stead.sdk.models import Exited, OutputCut

if TYPE_CHECKING:
    from stead.sdk import AsyncProcess, AsyncProcessStream, AsyncStead, AsyncVm
    from stead.sdk.sockets import Closed


@dataclass(frozen=True)
class Foreground:
    """How this terminal takes part in a command."""

    tty: bool = False
    stdin: bool = False
    collect: bool = False
    """Collect the output instead of printing it."""
    id: str | None = None
    keep: bool = False
    """When this command is told to end, leave the process running; when the process ends, leave it listed."""


def run_in_foreground(vm: str, command: RemoteCommand, how: Foreground) -> CommandResult:
    """Run a command in a VM to its end. A broken connection does not end it."""

    async def work(stead: "AsyncStead") -> CommandResult:
        return await _Run(await stead.vms.find(vm), command, how).to_its_end()

    return run_connected(work)


@dataclass
class _Run:
    vm: "AsyncVm"
    command: RemoteCommand
    how: Foreground
    interaction: Interaction = field(default_factory=Interaction)
    ended: Exited | None = None
    interrupted: bool = False
    input_closed: bool = False
    output: dict[str, bytearray] = field(
        default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()}
    )

    async def to_its_end(self) -> CommandResult:
        process = await self._start()
        remove = not self.how.keep
        try:
            async with await process.stream(on_disconnect=self._disconnected) as stream:
                if self.how.tty and self.how.stdin:
                    await self.interaction.converse(stream, self._terminal_output(stream))
                else:
                    await self._use_pipes(process, stream)
        except Detached:
            remove = False
            note(f"\ndetached: the command continues. Its output: stead vm logs -f {self.vm.id} {process.id}")
            return CommandResult(0, None, False, None)
        except Signalled as signalled:
            return CommandResult(128 + signalled.number, None, False, None)
        finally:
            if remove:
                await process.remove()
        ended = self.ended or Exited(-1)
        texts = {name: data.decode(errors="replace") for name, data in self.output.items()}
        return CommandResult(ended.status_code, ended.signal, ended.timed_out, None, **texts)

    async def _start(self) -> "AsyncProcess":
        cols, rows = terminal_size()
        terminal = {"TERM": terminal_type()} if self.how.tty else {}
        return await self.vm.processes.start(
            self.command.command,
            id=self.how.id,
            cwd=self.command.cwd,
            env=terminal | self.command.env,
            stdin=self.how.stdin,
            pty=self.how.tty,
            cols=cols,
            rows=rows,
            timeout=self.command.timeout,
            user=self.command.user,
        )

    async def _use_pipes(self, process: "AsyncProcess", stream: "AsyncProcessStream") -> None:
        """Without the local terminal: the first Ctrl-C goes to the command, the second one ends this."""

        def interrupt() -> None:
            if self.interrupted:
                self.interaction.leave(Signalled(signal.SIGINT))
            self.interrupted = True
            self.interaction.start(stream.signal("SIGINT"))

        async def show() -> None:
            async for name, data in self._events(stream):
                if self.how.collect:
                    self.output[name] += data
                else:
                    # In a thread, so that input goes on while the reader of a pipe is slow.
                    target = sys.stdout if name == "stdout" else sys.stderr
                    await asyncio.to_thread(write_all, target.fileno(), data)

        descriptor = standard_input()
        if self.how.stdin and descriptor is not None:
            self.interaction.read(descriptor, lambda data: self._feed(process, data))
        elif self.how.stdin:
            await process.close_stdin()
        await self.interaction.run(show(), {signal.SIGINT: interrupt})

    async def _feed(self, process: "AsyncProcess", data: bytes) -> None:
        """Write to the command. One that has closed its input, or has ended, takes no more."""
        if self.input_closed:
            return
        try:
            await process.write(data, close=not data)
        except SteadApiError:
            self.input_closed = True

    async def _terminal_output(self, stream: "AsyncProcessStream") -> AsyncIterator[bytes]:
        async for _, data in self._events(stream):
            yield data

    async def _events(self, stream: "AsyncProcessStream") -> AsyncIterator[tuple[str, bytes]]:
        async for event in stream:
            if isinstance(event, Exited):
                self.ended = event
            elif isinstance(event, OutputCut):
                note(cut_text(event))
            else:
                yield event.stream, event.data

    async def _disconnected(self, closed: "Closed") -> None:
        if self.how.tty and self.how.stdin:
            await report_outage(self.interaction, self.vm, closed)
        else:
            note(f"{closed.reason or 'the connection was lost'}: connecting again")
