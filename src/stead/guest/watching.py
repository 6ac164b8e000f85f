"""File watch: streams changes of a guest's files."""

import base64
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Literal, get_args

import httpcore2

from stead.errors import GuestUnreachable
from stead.guest.agent import Agent, Answer, parse_object, parsing

Kind = Literal["create", "change", "delete", "moved_from", "moved_to", "overflow"]


@dataclass(frozen=True)
class FileEvent:
    """A change of what is at a path: of the file's content or attributes, or of its being there.

    `overflow` says that changes were lost because they were not read in time; its path is `/`.
    Paths are text with undecodable bytes kept (os.fsencode gives them back).
    """

    kind: Kind
    path: str


@contextlib.asynccontextmanager
async def watch(agent: Agent, user: str | None = None) -> AsyncIterator[AsyncGenerator[FileEvent, None]]:
    """The changes on the guest's disk that a Linux user may see, from the moment that the block is entered.

    The events end with the block. GuestUnreachable is raised from them when the guest is gone or asleep.
    """
    async with (
        agent.stream("GET", "/v1/watch", user=user) as response,
        contextlib.aclosing(_events(response)) as events,
    ):
        yield events


async def _events(answer: Answer) -> AsyncGenerator[FileEvent, None]:
    try:
        async for line in answer.lines():
            yield _event(line)
    except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        raise GuestUnreachable("the file watch in the guest failed") from error
    raise GuestUnreachable("the guest agent ended the file watch")


def _event(line: bytes) -> FileEvent:
    with parsing("GET /v1/watch"):
        event = parse_object(line, "GET /v1/watch")
        kind = event["event"]
        if kind not in get_args(Kind):
            raise ValueError
        return FileEvent(kind, os.fsdecode(base64.b64decode(event.get("path_b64", "Lw=="))))
