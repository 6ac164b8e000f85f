"""A stand-in for the VM of an agent's session: commands run on this computer, and requests are counted."""

import asyncio
import io
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from pathlib import Path
from typing import Any, cast

from stead import AsyncStead, AsyncVm, Exited, Output, SteadException
from stead.agents.openai.backend import Backend
from stead.sdk import ExecEvent
from stead.sdk._async.streams import AsyncStream


class LocalFiles:
    def __init__(self, vm: "LocalVm") -> None:
        self._vm = vm

    async def upload_archive(self, data: AsyncIterable[bytes], remote: str) -> None:
        self._vm.count("upload")
        content = b"".join([chunk async for chunk in data])
        Path(remote).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(remote, filter="fully_trusted")


class LocalVm:
    """The part of a VM that files and the manifest need."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failures: list[SteadException] = []
        """Raised by the next requests, before they have an effect."""
        self.fs = LocalFiles(self)

    def count(self, what: str) -> None:
        self.calls.append(what)
        if self.failures:
            raise self.failures.pop(0)

    def exec_stream(self, command: Sequence[str], **options: Any) -> AsyncStream[ExecEvent]:
        return AsyncStream(self._events(command, **options))

    async def _events(
        self, command: Sequence[str], *, stdin: bytes | None = None, cwd: str = "/", **_: Any
    ) -> AsyncGenerator[ExecEvent]:
        self.count(command[4] if command[:2] == ["sh", "-c"] and len(command) > 4 else command[0])
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
        )
        stdout, stderr = await process.communicate(stdin or b"")
        yield Output("stdout", stdout, "")
        yield Output("stderr", stderr, "")
        yield Exited(process.returncode or 0)


class LocalBackend(Backend):
    """Sessions whose VM is a `LocalVm`."""

    def __init__(self, vm: LocalVm) -> None:
        super().__init__(cast(AsyncStead, None))
        object.__setattr__(self, "local", vm)

    def vm(self, vm_id: str) -> AsyncVm:
        return cast(AsyncVm, self.__dict__["local"])

    async def exists(self, vm_id: str) -> bool:
        return True
