"""The Python transport with the stand-in of the CLI, or with REAL_CLI set with the real one."""

import asyncio
import json
import os
from typing import Any

from ask import ask
from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    PermissionResultAllow,
    ProcessError,
    ResultMessage,
    ToolPermissionContext,
)
from vm_transport import VmTransport

from stead import AsyncStead, AsyncVm

FAKE = ("/root/fake/claude",)


async def long_prompt_tool_and_answer(vm: AsyncVm) -> None:
    prompt = f"what is here? {'é漢🙂' * 20_000} that is all"
    asked: list[tuple[str, dict[str, Any]]] = []

    async def allow(
        name: str, arguments: dict[str, Any], context: ToolPermissionContext
    ) -> PermissionResultAllow:
        asked.append((name, arguments))
        return PermissionResultAllow(updated_input=arguments)

    transport = VmTransport(vm, FAKE, env={"ANTHROPIC_API_KEY": "it's a key"})
    async with ClaudeSDKClient(ClaudeAgentOptions(can_use_tool=allow), transport) as client:
        assert transport.is_ready()
        await client.query(prompt)
        answers = [message async for message in client.receive_response()]
    assert not transport.is_ready()
    result = answers[-1]
    assert isinstance(result, ResultMessage) and result.result is not None
    facts = json.loads(result.result)
    assert asked == [("Bash", {"command": "hostname"})], asked
    assert facts["length"] == len(prompt) and facts["end"] == prompt[-40:]
    assert (facts["host"], facts["key"], facts["folder"]) == (vm.id, "it's a key", "/root")
    assert facts["long"] == "漢é🙂x" * 50_000
    assert not [each for each in await vm.processes.list() if each.last_info.running]


async def missing_program(vm: AsyncVm) -> None:
    try:
        await ask("hello", VmTransport(vm, ("/root/nowhere/claude",)))
    except ProcessError as error:
        assert error.exit_code == 127, error
    else:
        raise AssertionError("a program that does not exist has answered")


async def real(vm: AsyncVm) -> None:
    env = {"ANTHROPIC_API_KEY": "sk-ant-stand-in", "ANTHROPIC_BASE_URL": "http://127.0.0.1:8999"}
    env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    cli = ("/root/.local/bin/claude", "--allowedTools", "Bash")
    answer = await ask("Write the name of this host to a file.", VmTransport(vm, cli, env=env))
    assert answer == "it is written", answer


async def main() -> None:
    async with AsyncStead() as stead:
        vm = await stead.vms.get(os.environ["VM_ID"])
        steps = [real] if os.environ.get("REAL_CLI") else [long_prompt_tool_and_answer, missing_program]
        for step in steps:
            await step(vm)
            print("ok", step.__name__, flush=True)


asyncio.run(main())
