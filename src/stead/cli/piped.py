"""`stead vm exec` with standard input that is passed on while the command runs."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stead.cli.connection import run_connected
from stead.cli.interaction import Interaction, Signalled
from stead.cli.output import write_bytes
from stead.cli.remote import CommandResult, RemoteCommand, ended_early, result_of
from stead.sdk.errors import SteadException
from stead.sdk.models import Exited

if TYPE_CHECKING:
    from stead.sdk import AsyncPipedCommand, AsyncStead


def run_piped(
    vm: str, wanted: RemoteCommand, first: bytes, descriptor: int, *, collect: bool
) -> CommandResult:
    """Run a command to its end, which may come before that of its input: `first`, and what is read then."""

    async def work(stead: "AsyncStead") -> CommandResult:
        found = await stead.vms.find(vm)
        started = await found.exec_piped(
            wanted.command,
            cwd=wanted.cwd,
            env=wanted.env or None,
            timeout=wanted.timeout,
            user=wanted.user,
        )
        async with started:
            return await _Piped(started, collect).to_its_end(first, descriptor)

    return run_connected(work)


@dataclass
class _Piped:
    command: "AsyncPipedCommand"
    collect: bool
    ended: Exited | None = None

    async def to_its_end(self, first: bytes, descriptor: int) -> CommandResult:
        interaction = Interaction()
        interaction.read(descriptor, self._feed, first=first)
        output = {"stdout": bytearray(), "stderr": bytearray()}
        try:
            await interaction.run(self._show(output), {})
        except Signalled as signalled:
            return CommandResult(128 + signalled.number, None, False, None)
        if self.ended is None:
            ended_early()
        return result_of(self.ended, output)

    async def _show(self, output: dict[str, bytearray]) -> None:
        async for event in self.command:
            if isinstance(event, Exited):
                self.ended = event
            elif self.collect:
                output[event.stream] += event.data
            else:
                # In a thread, so that input goes on while the reader of a pipe is slow.
                await asyncio.to_thread(write_bytes, event.stream, event.data)

    async def _feed(self, data: bytes) -> None:
        """Write to the command. One that has ended takes no more; why it ended is in its output."""
        try:
            if data:
                await self.command.write(data)
            else:
                await self.command.close_stdin()
        except SteadException:
            pass
