"""The Claude Agent SDK runs here, the CLI in a VM: a `Transport` for `query()` and `ClaudeSDKClient`."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import anyio
from claude_agent_sdk import CLIConnectionError, ProcessError, Transport

from stead import AsyncVm, Exited, Output
from stead.sdk import AsyncProcess, AsyncProcessStream, OutputCut

PROTOCOL = ["--output-format", "stream-json", "--verbose", "--input-format", "stream-json"]
_LONGEST_MESSAGE = 64 * 1024 * 1024
_CLOSE_TIMEOUT = 30.0


class VmTransport(Transport):
    """A CLI in a VM, as a background process with pipes.

    Args:
        vm: the VM.
        cli: the program in the VM, and its options: those of the SDK's options object are not applied to a
            custom transport.
        env: variables of the CLI, for example ANTHROPIC_API_KEY.
        cwd: its working directory.
    """

    def __init__(
        self,
        vm: AsyncVm,
        cli: Sequence[str] = ("/root/.local/bin/claude", "--permission-prompt-tool", "stdio"),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/root",
    ) -> None:
        self._vm = vm
        self._command = [cli[0], *PROTOCOL, *cli[1:]]
        self._env = {"HOME": "/root", **(env or {})}
        self._cwd = cwd
        self._process: AsyncProcess | None = None
        self._stream: AsyncProcessStream | None = None
        self._stderr = ""

    async def connect(self) -> None:
        self._process = await self._vm.processes.start(
            self._command, cwd=self._cwd, env=self._env, stdin=True
        )
        self._stream = await self._process.stream()

    async def write(self, data: str) -> None:
        if self._stream is None:
            raise CLIConnectionError("the transport is not connected")
        await self._stream.write(data)

    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
        if self._stream is None:
            raise CLIConnectionError("the transport is not connected")
        line = bytearray()
        async for event in self._stream:
            match event:
                case Output(stream="stdout"):
                    first, *others = event.data.split(b"\n")
                    line += first
                    for other in others:
                        if line.strip():
                            yield json.loads(line)
                        line = bytearray(other)
                    if len(line) > _LONGEST_MESSAGE:
                        raise CLIConnectionError(f"a message is longer than {_LONGEST_MESSAGE} bytes")
                case Output():
                    self._stderr = (self._stderr + event.text)[-4096:]
                case OutputCut():
                    raise CLIConnectionError(f"the VM dropped output, bytes {event.start} to {event.end}")
                case Exited(ok=False):
                    raise ProcessError("the CLI failed", exit_code=event.status_code, stderr=self._stderr)

    async def end_input(self) -> None:
        if self._stream is not None:
            await self._stream.close_stdin()

    async def close(self) -> None:
        stream, process = self._stream, self._process
        self._stream = self._process = None
        with anyio.move_on_after(_CLOSE_TIMEOUT):
            if stream is not None:
                await stream.aclose()
            if process is not None:
                await process.remove()

    def is_ready(self) -> bool:
        return self._stream is not None
