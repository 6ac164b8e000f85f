"""SSH of a guest: its host keys, and the key by which the gateway logs in."""

import json
from collections.abc import Sequence
from typing import Any

from stead.errors import GuestError
from stead.guest.agent import Agent, parsing
from stead.guest.identity import ssh_host_keys

_MAX_HOST_KEYS = 8
_MAX_HOST_KEY = 16 << 10


async def admit_gateway(agent: Agent, machine: str, public_key: str) -> Sequence[str]:
    """Have the guest's sshd accept the gateway's key instead of an earlier one; returns its public host keys.

    A guest without host keys gets new ones.
    """
    request: dict[str, Any] = {"machine": machine, "authorized_key": public_key}
    found = await _call(agent, request)
    if not found:
        found = await _call(agent, request | {"host_keys": ssh_host_keys(f"root@{machine}")})
    return found


async def _call(agent: Agent, request: dict[str, Any]) -> Sequence[str]:
    answer = await agent.call("POST", "/v1/ssh", body=json.dumps(request).encode())
    with parsing("POST /v1/ssh"):
        keys = [str(text) for text in answer["host_keys"].values()]
    if len(keys) > _MAX_HOST_KEYS or any(len(key) > _MAX_HOST_KEY for key in keys):
        raise GuestError("malformed_answer", "the guest agent sent too many or too long SSH host keys")
    return keys
