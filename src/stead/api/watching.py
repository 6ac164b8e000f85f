"""Changes of a machine's files, as they happen."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import StreamingResponse

from stead.api.callers import CurrentCall, Guest
from stead.errors import SteadError
from stead.host.watching import FileEvent

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["guests"])

_QUIET = 20.0
"""After so many seconds without a change an empty line is sent: nobody keeps a silent connection for ever."""
_WAITING = 256
"""Lines that wait for a client who reads slowly; the guest holds back the rest."""

Lines = AsyncIterator[bytes]
_Queue = asyncio.Queue[bytes | None]


async def changes(guest: Guest) -> AsyncIterator[Lines]:
    """Watches for as long as the answer lasts; what hinders it is known before the answer begins."""
    async with guest.machine.watch(guest.user) as events:
        queue: _Queue = asyncio.Queue(_WAITING)
        following = asyncio.create_task(_follow(events, queue))
        try:
            yield _lines(queue)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@router.post("/watch-files", response_class=StreamingResponse)
async def watch_files(changes: Annotated[Lines, Depends(changes)], call: CurrentCall) -> StreamingResponse:
    """Changes of files on the machine's disk in lines of JSON, from now until the client leaves.

    The answer ends when the machine does, or is suspended.
    """
    call.endless = True
    return StreamingResponse(changes, media_type="application/x-ndjson")


async def _follow(events: AsyncGenerator[FileEvent, None], queue: _Queue) -> None:
    with contextlib.suppress(SteadError):
        async for event in events:
            await queue.put(_line(event))
    await queue.put(None)


async def _lines(queue: _Queue) -> AsyncGenerator[bytes, None]:
    while True:
        lines = []
        try:
            async with asyncio.timeout(_QUIET):
                lines.append(await queue.get())
        except TimeoutError:
            lines.append(b"\n")
        while not queue.empty():
            lines.append(queue.get_nowait())
        yield b"".join(line for line in lines if line is not None)
        if None in lines:
            return


def _line(event: FileEvent) -> bytes:
    """In the words of Node's `fs.watch`: `change` for content, `rename` for whatever comes or goes."""
    kind = "change" if event.kind in ("change", "overflow") else "rename"
    line: dict[str, Any] = {
        "eventType": kind,
        "filename": os.fsencode(event.path).decode(errors="replace"),
    }
    if event.kind == "overflow":
        # Nobody knows what changed: anything below the root may have.
        line["overflow"] = True
    return json.dumps(line).encode() + b"\n"
