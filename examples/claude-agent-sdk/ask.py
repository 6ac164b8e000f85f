"""Claude Code in a VM, from Python: `python ask.py "List /etc"`, with ANTHROPIC_API_KEY set."""

import asyncio
import os
import sys

from claude_agent_sdk import ResultMessage, query
from vm_transport import VmTransport

from stead import AsyncStead, AsyncVm

INSTALL = (
    "npm install -g @anthropic-ai/claude-code && mkdir -p ~/.local/bin && ln -sf $(which claude) ~/.local/bin"
)


async def ask(vm: AsyncVm, prompt: str, **options: object) -> str:
    async for message in query(prompt=prompt, transport=VmTransport(vm, **options)):  # type: ignore[arg-type]
        if isinstance(message, ResultMessage):
            return message.result or ""
    raise RuntimeError("the CLI ended without a result")


async def main() -> None:
    async with AsyncStead() as stead, await stead.vms.create(memory="4G") as vm:
        await vm.exec(INSTALL, env={"HOME": "/root"}, check=True)
        print(await ask(vm, sys.argv[1], env={"ANTHROPIC_API_KEY": os.environ["ANTHROPIC_API_KEY"]}))


if __name__ == "__main__":
    asyncio.run(main())
