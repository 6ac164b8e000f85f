"""Runs that survive the death of the client's process and restarts of the server."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import Runner, SQLiteSession
from agents.sandbox import Manifest, SandboxAgent
from agents.sandbox.capabilities import Filesystem, Shell
from agents.sandbox.entries import File
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message

from stead import AsyncStead
from stead.agents.openai import SteadSandboxClient, SteadSandboxClientOptions
from stead.host.image import BaseImage
from stead.settings import Settings
from support import ROOT
from support.installations import Server, other_settings
from support.scripted_models import command_number, outputs, patched, sandboxed, shell, typed
from support.serve_process import Process, end, start
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FIRST_PROCESS = """
import asyncio, sys
from agents import Runner, RunConfig, SQLiteSession
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.snapshot import NoopSnapshotSpec
from agents.testing import ScriptedModel, function_call
from stead.agents.openai import SteadSandboxClient, SteadSandboxClientOptions

def shell(call_id, cmd, wait):
    return [function_call("exec_command", {"cmd": cmd, "yield_time_ms": wait}, call_id=call_id)]

async def main(url, key, history):
    counts = "echo changed > plan; echo one; while [ ! -e go ]; do sleep 0.2; done; echo two; exit 5"
    model = ScriptedModel([shell("long", counts, 1000), shell("hangs", "touch begun; sleep 1000", 30000)])
    manifest = Manifest(entries={"plan": File(content=b"as planned")})
    agent = SandboxAgent(name="worker", model=model, default_manifest=manifest, capabilities=[Shell()])
    sandbox = SandboxRunConfig(
        client=SteadSandboxClient(api_key=key, base_url=url),
        options=SteadSandboxClientOptions(key="job-7", pause_on_exit=True),
        snapshot=NoopSnapshotSpec(),
    )
    config = RunConfig(tracing_disabled=True, sandbox=sandbox)
    await Runner.run(agent, "count", session=SQLiteSession("job-7", history), run_config=config)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_continues_the_run_of_one_that_was_killed(
    server: Server, tmp_path: Path
) -> None:
    """All that is left are the key of the VM and the history of the conversation in a file."""
    history = str(tmp_path / "history.db")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FIRST_PROCESS, server.url, server.key, history, cwd=ROOT
    )
    try:
        async with AsyncStead(server.key, base_url=server.url) as stead:

            async def begun() -> bool:
                assert process.returncode is None
                ready = [
                    info.id
                    for info in await stead.vms.list()
                    if info.name == "job-7" and info.state == "running"
                ]
                return bool(ready) and await stead.vms.ref(ready[0]).fs.exists("/workspace/begun")

            await until(begun, 600)
    finally:
        process.kill()
    assert await process.wait() == -signal.SIGKILL

    number = 0

    def released(call: ModelCall) -> Any:
        """The history has the output of the first command; the second was never answered."""
        nonlocal number
        number = command_number(call)
        return [shell("touch go; cat plan")]

    model = ScriptedModel(
        [
            ModelStep.respond(released),
            ModelStep.respond(lambda _: [typed(number)]),
            [assistant_message("counted")],
        ]
    )
    manifest = Manifest(entries={"plan": File(content=b"as planned")})
    agent = SandboxAgent(name="worker", model=model, default_manifest=manifest, capabilities=[Shell()])
    options = SteadSandboxClientOptions(key="job-7", pause_on_exit=True)
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        result = await Runner.run(
            agent,
            "go on",
            session=SQLiteSession("job-7", history),
            run_config=sandboxed(client=client, options=options),
        )
        kept = await client.find("job-7")
        assert kept is not None
        await kept.vm.delete()
    assert result.final_output == "counted"
    *_, plan, polled = outputs(model.last_call)
    assert "changed" in plan, "the manifest must not be applied again over the work of the agent"
    assert "two\n" in polled and "exited with code 5" in polled


class RestartingServer:
    """`stead serve`, which can be ended and started again at the same address."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.url = self.key = ""

    async def __aenter__(self) -> "RestartingServer":
        self._process, said = await start(self._settings)
        self.url, self.key = said["url"], said["key"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._tasks)
        assert self._process is not None
        await end(self._process)

    async def end(self, how: signal.Signals) -> None:
        """End it now; it starts again while its clients try to reach it."""
        await asyncio.gather(*self._tasks)
        assert self._process is not None
        await end(self._process, how)
        self._tasks.append(asyncio.create_task(self._start()))

    async def _start(self) -> None:
        await asyncio.sleep(1)
        self._process, _ = await start(self._settings, STEAD_LISTEN=self.url.removeprefix("http://"))


PATCH = """*** Begin Patch
*** Update File: log.txt
@@
-before
+after
*** End Patch
"""


async def test_run_goes_on_when_the_server_is_restarted(settings: Settings, image: BaseImage) -> None:
    with other_settings(settings) as other:
        async with (
            RestartingServer(other) as server,
            SteadSandboxClient(api_key=server.key, base_url=server.url) as client,
        ):

            def after(how: signal.Signals, answer: Any) -> ModelStep:
                """The server is down when the tool call of this step is made."""

                async def respond(call: ModelCall) -> Any:
                    await server.end(how)
                    return answer(call)

                return ModelStep.respond(respond)

            number = 0

            def poll(call: ModelCall) -> Any:
                nonlocal number
                number = number or command_number(call)
                return [typed(number)]

            waits = "touch /dev/shm/on; echo started; while [ -e /dev/shm/on ]; do sleep 0.5; done; exit 6"
            model = ScriptedModel(
                [
                    [shell(waits, yield_time_ms=500)],
                    after(signal.SIGTERM, poll),
                    after(signal.SIGKILL, lambda _: [patched(PATCH)]),
                    after(signal.SIGTERM, lambda _: [shell("rm /dev/shm/on; cat log.txt")]),
                    ModelStep.respond(poll),
                    [assistant_message("survived")],
                ]
            )
            manifest = Manifest(entries={"log.txt": File(content=b"before\n")})
            agent = SandboxAgent(
                name="survivor",
                model=model,
                default_manifest=manifest,
                capabilities=[Shell(), Filesystem()],
            )
            result = await Runner.run(agent, "go", run_config=sandboxed(client=client))
            assert result.final_output == "survived"
            started, polled, changed, shown, ended = outputs(model.last_call)
            assert "started" in started + polled and "Updated log.txt" in changed and "after" in shown
            assert "exited with code 6" in ended
