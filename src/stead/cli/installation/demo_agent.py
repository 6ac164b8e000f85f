"""The last steps of `stead demo`: an agent of the OpenAI Agents SDK works in a VM.

Without OPENAI_API_KEY, a scripted model stands in for the real one: no key, no network.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from agents import RunConfig, Runner
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.testing import ScriptedModel, assistant_message, function_call

from stead.agents.openai import SteadSandboxClient, SteadSession
from stead.sdk import AsyncStead

Timed = Callable[[str, str], AbstractContextManager[None]]

_TASK = (
    "Look at the machine you are on. Write a Python script page.py that writes index.html with the first ten "
    "primes, run it, and serve the current folder on port 8000 of all addresses with a systemd service."
)
_SCRIPT = """cat > page.py <<'END'
primes = [n for n in range(2, 30) if all(n % d for d in range(2, n))]
open("index.html", "w").write(f"primes: {primes}\\n")
END
python3 page.py && cat index.html"""
_SERVE = (
    "systemd-run --quiet --unit=page --working-directory=/workspace python3 -m http.server 8000 && "
    "until curl -sf http://127.0.0.1:8000/ >/dev/null; do sleep 0.2; done; echo serving"
)


def _model() -> Any:
    if os.environ.get("OPENAI_API_KEY"):
        return None
    commands = ("uname -sr; nproc", _SCRIPT, _SERVE)
    calls = [
        [function_call("exec_command", {"cmd": cmd, "yield_time_ms": 30000}, call_id=f"call{number}")]
        for number, cmd in enumerate(commands)
    ]
    return ScriptedModel([*calls, [assistant_message("The primes are served on port 8000.")]])


async def show_agent(
    url: str, key: str, timed: Timed, say: Callable[[str], None], fetch: Callable[[str], str]
) -> None:
    """Run an agent, fetch what it serves, fork its session in three, suspend it, and use it again."""
    async with AsyncStead(key, base_url=url) as stead:
        session = await SteadSandboxClient(stead).create()
        forks: list[SteadSession] = []
        try:
            with timed("agent_start", "start a session for an agent"):
                await session.start()
            agent = SandboxAgent(name="demo", model=_model(), instructions="Use the shell. You are root.")
            config = RunConfig(tracing_disabled=True, sandbox=SandboxRunConfig(session=session))
            with timed("agent_run", "the agent writes and serves a page"):
                result = await Runner.run(agent, _TASK, run_config=config)
            say(str(result.final_output))
            with timed("agent_fetch", "fetch it over HTTPS"):
                address = (await session.resolve_exposed_port(8000)).url_for("http")
                page = await asyncio.to_thread(fetch, address)
            say(f"{address} {page.strip()}")
            with timed("agent_fork", "fork the session in three"):
                forks += await session.fork(3)
                pages = [(await fork.exec("curl -s http://127.0.0.1:8000/")).stdout for fork in forks]
            say(f"{len(set(pages))} page in {len(pages)} forks, each with its own server running")
            with timed("agent_resume", "suspend it, and run a command in it"):
                await session.vm.suspend()
                again = (await session.exec("curl -s http://127.0.0.1:8000/")).stdout.decode()
            if again != page or {each.decode() for each in pages} != {page}:
                raise RuntimeError("the page of the agent is not the same in its forks and after the suspend")
        finally:
            for each in [*forks, session]:
                await each.shutdown()
