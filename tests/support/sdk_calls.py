"""Calls of the SDK and their answers, for a scripted server."""

import base64
import json
from typing import Any

from support.scripted_server import Reply

VM = "abcdefghij0123456789"


async def first(stream: Any) -> Any:
    """The first event of a stream; closes the stream."""
    if hasattr(stream, "__aiter__"):
        async with stream:
            return await anext(stream)
    with stream:
        return next(stream)


def read(stead: Any) -> Any:
    return stead.vms.get(VM)


def make(stead: Any) -> Any:
    return stead.vms.create()


def delete(stead: Any) -> Any:
    return stead.vms.delete(VM)


INFO = Reply(content={"id": VM, "state": "running"})
CREATED = Reply(content={"id": VM, "domains": []})
BUSY = Reply(503, {"code": "SERVICE_UNAVAILABLE", "message": "busy"})


def line(kind: str, **facts: Any) -> bytes:
    return json.dumps({"type": kind, **facts}).encode() + b"\n"


def said(kind: str, data: bytes) -> bytes:
    return line(kind, data=base64.b64encode(data).decode())
