"""The messages in the page about the agent's protocol, sent to the agent of a real VM."""

import base64
import json
import os
import secrets
import time
from typing import Any

from stead.guest.agent import Agent
from stead.guest.frames import Frames
from stead.machines import Machine
from support.documents import run_by
from support.guests import sh


async def post(agent: Agent, target: str, message: object) -> dict[str, Any]:
    return await agent.call("POST", target, body=json.dumps(message).encode())


async def test_messages_of_the_page_are_those_of_the_agent(shared: Machine) -> None:
    messages = [json.loads(block.body) for block in run_by(__file__, "docs/internals/agent.md")]
    identity, identified, command, session, started = messages
    async with shared.using() as agent:
        await _exec(agent, command)
        answer = await post(agent, "/v1/sessions", session)
        assert set(answer) == set(started)
        assert (answer["kind"], answer["argv"], answer["pty"]) == ("terminal", session["argv"], True)
        done = await agent.call("GET", f"/v1/sessions/{answer['id']}/wait?timeout_ms=60000", timeout=120)
        assert set(done) == set(started) and (done["exit_code"], done["signal"]) == (0, None)
        await agent.call("DELETE", f"/v1/sessions/{answer['id']}")

        # Its own names and address again; the rest is as the page has it.
        own = {
            "machine": shared.id,
            "hostname": await sh(shared, "hostname"),
            "machine_id": await sh(shared, "cat /etc/machine-id"),
            "network": identity["network"] | {"address": str((await shared.info()).address)},
            "nonce": secrets.token_hex(16),
            "time_ns": time.time_ns(),
            "entropy": base64.b64encode(os.urandom(64)).decode(),
        }
        answer = await post(agent, "/v1/identity", identity | own)
        assert set(answer) == set(identified)
        assert set(answer["ssh_host_keys"]) == set(identified["ssh_host_keys"])
        for name in ("machine", "hostname", "machine_id", "nonce"):
            assert answer[name] == own[name]


async def _exec(agent: Agent, command: dict[str, Any]) -> None:
    body = json.dumps(command).encode()
    printed, kinds = b"", []
    async with agent.stream("POST", "/v1/exec", body=body) as answer:
        frames = Frames(answer.chunks(), "POST /v1/exec", 1 << 20)
        while (frame := await frames.next()) is not None:
            kinds.append(frame[0])
            printed += frame[1] if frame[0] == 1 else b""
    assert (kinds[0], kinds[-1], printed) == (0, 3, b"hello\nV\n")
    recorded = await agent.call("GET", "/v1/terminals")
    assert [each["name"] for each in recorded["terminals"]] == [command["terminal"]]
