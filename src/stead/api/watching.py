"""File watching: changes in a VM as a stream of JSON lines."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import StreamingResponse

from stead.api.callers import CurrentCall, Guest
from stead.api.guests import error_event
from stead.errors import SteadError
from stead.guest.watching import FileEvent
from stead.tasks import in_background

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["guests"])

_QUIET = 20.0
"""Keep-alive: an empty line after this many seconds without a change, so that proxies keep the connection."""
_WAITING = 256
"""Back-pressure: lines buffered for a slow client; the guest holds back the rest."""

Lines = AsyncIterator[bytes]
_Queue = asyncio.Queue[bytes | None]


async def changes(guest: Guest) -> AsyncIterator[Lines]:
    """Watches for as long as the response lasts. A watch that cannot start is an error answer."""
    async with guest.machine.watch(guest.user) as events:
        queue: _Queue = asyncio.Queue(_WAITING)
        async with in_background(_follow(events, queue)):
            yield _lines(queue)


@router.post("/watch-files", response_class=StreamingResponse)
async def watch_files(changes: Annotated[Lines, Depends(changes)], call: CurrentCall) -> StreamingResponse:
    """Stream changes of files on the VM's disk as JSON lines, until the client disconnects.

    The stream ends when the VM stops or is suspended; if the server stops, the last line is an `error` event.
    Empty lines are keep-alives.
    """
    call.streaming(error_event, endless=True)
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
    """Event names as in Node's `fs.watch`: `change` for content, `rename` for created and removed files."""
    kind = "change" if event.kind in ("change", "overflow") else "rename"
    line: dict[str, Any] = {
        "eventType": kind,
        "filename": os.fsencode(event.path).decode(errors="replace"),
    }
    if event.kind == "overflow":
        # The kernel's queue overflowed and events were lost: anything below the root may have changed.
        line["overflow"] = True
    return json.dumps(line).encode() + b"\n"
