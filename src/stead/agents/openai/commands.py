"""Commands that outlive a tool call: background processes of the VM, polled and written to by number.

The processes and their output are in the VM. This client attaches for the time of one call and remembers only
how much output was reported, in the session's state: another client continues with the same numbers.
"""

import asyncio
import codecs
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    truncate_text_by_tokens,
)

from stead.agents.openai.guest import OUTAGE, is_outage, repeated
from stead.sdk import (
    AlreadyExists,
    AsyncProcess,
    AsyncVm,
    Output,
    OutputCut,
    SessionNotFound,
    SteadException,
)

COLUMNS, ROWS = 120, 30
_PREFIX = "agent-"
_LOST = b"\n[the process no longer exists: the VM was restarted, or it was removed]\n"


@dataclass
class _Read:
    """What one call read of a process."""

    offset: int
    data: bytearray
    exit_code: int | None = None


class SessionCommands:
    """The commands of one session. `offsets` maps each number to the output reported so far, by last use."""

    def __init__(self, offsets: MutableMapping[int, int]) -> None:
        self.offsets = offsets
        self._ended: set[int] = set()
        self._removals: set[asyncio.Task[None]] = set()

    async def start(
        self,
        vm: AsyncVm,
        command: Sequence[str],
        *,
        tty: bool,
        cwd: str,
        env: Mapping[str, str],
        user: str | None,
        timeout: float | None,
    ) -> tuple[int, AsyncProcess]:
        """Start a command, with `tty` directly on its own terminal. A lost answer does not start it twice."""
        options = {"TERM": "xterm", **env} if tty else dict(env)
        while True:
            number = allocate_pty_process_id(self._ended.union(self.offsets))
            sent = False

            async def once(name: str = f"{_PREFIX}{number}") -> AsyncProcess | None:
                nonlocal sent
                try:
                    return await vm.processes.start(
                        list(command),
                        id=name,
                        cwd=cwd,
                        env=options,
                        pty=tty,
                        cols=COLUMNS if tty else None,
                        rows=ROWS if tty else None,
                        timeout=timeout,
                        user=user,
                    )
                except AlreadyExists:
                    # By an earlier attempt, or by another client under the same number.
                    return await vm.processes.get(name) if sent else None
                except SteadException:
                    sent = True
                    raise

            process = await repeated(once, harmless=True)
            if process is not None:
                break
        self.offsets[number] = 0
        await self._prune(vm)
        return number, process

    async def find(self, vm: AsyncVm, number: int) -> AsyncProcess | None:
        """A command that this or another client started; None if there is none."""
        if number in self._ended:
            return None
        with suppress(SessionNotFound):
            return await repeated(lambda: vm.processes.get(f"{_PREFIX}{number}"))
        self.offsets.pop(number, None)
        return None

    async def update(
        self,
        number: int,
        process: AsyncProcess,
        *,
        seconds: float,
        max_output_tokens: int | None,
        chars: str = "",
    ) -> PtyExecUpdate:
        """Type `chars`, and return the new output when the command ends or `seconds` have passed."""
        read = _Read(self.offsets.pop(number, 0), bytearray())
        self.offsets[number] = read.offset
        await self._read(process, read, chars.encode(), time.monotonic() + seconds)
        ended = read.exit_code is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(bytes(read.data), final=ended)
        # An incomplete character at the end is read again by the next call.
        self.offsets[number] = read.offset - len(decoder.getstate()[0])
        if ended:
            del self.offsets[number]
            self._ended.add(number)
            self._remove(process)
        shown, tokens = truncate_text_by_tokens(text, max_output_tokens)
        return PtyExecUpdate(None if ended else number, shown.encode(), read.exit_code, tokens)

    async def terminate(self, vm: AsyncVm) -> None:
        """Kill all commands of the session and forget them."""
        numbers = list(self.offsets)
        self.offsets.clear()
        await asyncio.gather(*(self._remove_number(vm, number) for number in numbers))
        await self.settle()

    async def settle(self) -> None:
        """Wait for requests in the background."""
        while self._removals:
            await asyncio.gather(*self._removals, return_exceptions=True)

    async def _read(self, process: AsyncProcess, read: _Read, typed: bytes, deadline: float) -> None:
        """Read to the deadline or the end. The stream reconnects by itself; after its last attempt, we do."""
        outage = time.monotonic()
        while True:
            try:
                async with asyncio.timeout_at(_loop_time(deadline)):
                    async with await process.stream(offset=read.offset) as stream:
                        if typed:
                            await stream.write(typed)
                            typed = b""
                        async for event in stream:
                            outage = time.monotonic()
                            read.offset = stream.offset
                            if isinstance(event, Output):
                                read.data += event.data
                            elif isinstance(event, OutputCut):
                                read.data += (
                                    f"\n[{event.end - event.start} bytes of output are lost]\n".encode()
                                )
                            else:
                                read.exit_code = event.status_code
                return
            except TimeoutError:
                return
            except SessionNotFound:
                read.data += _LOST
                read.exit_code = -1
                return
            except SteadException as error:
                if not is_outage(error) or time.monotonic() - outage > OUTAGE:
                    raise
            await asyncio.sleep(0.5)

    async def _prune(self, vm: AsyncVm) -> None:
        """Kill the command that was used longest ago if there are too many."""
        while len(self.offsets) > PTY_PROCESSES_MAX:
            number = next(iter(self.offsets))
            del self.offsets[number]
            await self._remove_number(vm, number)

    async def _remove_number(self, vm: AsyncVm, number: int) -> None:
        with suppress(SteadException):
            await (await vm.processes.get(f"{_PREFIX}{number}")).remove()

    def _remove(self, process: AsyncProcess) -> None:
        """Remove an ended process in the background: its output has been read."""

        async def remove() -> None:
            with suppress(SteadException):
                await process.remove()

        task = asyncio.create_task(remove())
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)


def _loop_time(deadline: float) -> float:
    return asyncio.get_running_loop().time() + deadline - time.monotonic()
