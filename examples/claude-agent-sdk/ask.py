"""Claude Code in a VM, from Python: `python ask.py "List /etc"`, with ANTHROPIC_API_KEY set."""

import asyncio
import os
import sys

from claude_agent_sdk import ResultMessage, query
from vm_transport import VmTransport

from stead import AsyncStead

INSTALL = "npm install --global --prefix /root/.local @anthropic-ai/claude-code"


async def ask(prompt: str, transport: VmTransport) -> str:
    async for message in query(prompt=prompt, transport=transport):
        if isinstance(message, ResultMessage):
            return message.result or ""
    raise RuntimeError("the CLI ended without a result")


async def main() -> None:
    async with AsyncStead() as stead, await stead.vms.create() as vm:
        await vm.exec(INSTALL, env={"HOME": "/root"}, check=True, timeout=600)
        env = {"ANTHROPIC_API_KEY": os.environ["ANTHROPIC_API_KEY"]}
        print(await ask(sys.argv[1], VmTransport(vm, env=env)))


if __name__ == "__main__":
    asyncio.run(main())
