"""The terminals of a VM as text, recorded when it is suspended: a list of them does not wake the VM."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable
from stead.guest.agent import Agent
from stead.guest.sessions import MAX_TERMINALS, Session, find

_MAX_TEXT = 128 << 10
"""Bytes of the text of one VM: the guest chooses titles and commands."""
_TIMEOUT = scaled(5.0)


async def list_terminals(agent: Agent) -> str | None:
    """The running terminals of a guest as JSON; None when it does not answer, or they take too much."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            found = [each for each in await find(agent, "terminal") if not each.exited]
    except (GuestError, GuestUnreachable, TimeoutError):
        return None
    if len(found) > MAX_TERMINALS:
        return None
    text = json.dumps([asdict(each) for each in found])
    return text if len(text) <= _MAX_TEXT else None


def parse_terminals(text: str | None) -> Sequence[Session] | None:
    """The terminals that were recorded; None when they are not known, or were recorded by another version."""
    if text is None:
        return None
    try:
        return [Session(**{**entry, "argv": tuple(entry["argv"])}) for entry in json.loads(text)]
    except (TypeError, KeyError):
        return None
