"""Agents of the OpenAI Agents SDK with scripted models, in real VMs."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agents import RunConfig, Runner, RunState, function_tool
from agents.sandbox import Manifest, MemoryGenerateConfig, MemoryReadConfig, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import (
    Capabilities,
    Filesystem,
    LocalDirLazySkillSource,
    Memory,
    Shell,
    Skills,
)
from agents.sandbox.entries import File, LocalDir
from agents.sandbox.workspace_paths import SandboxPathGrant
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCustomToolCall

from stead import AsyncStead
from stead.agents.openai import (
    FunctionFilesystem,
    SteadSandboxClient,
    SteadSandboxClientOptions,
    SteadSession,
)
from support.installations import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PATCH = """*** Begin Patch
*** Add File: src/new.txt
+alpha
*** Update File: notes/todo.md
@@
 # todo
-- old item
+- new item
*** End Patch
"""


@pytest_asyncio.fixture(scope="module")
async def client(server: Server) -> AsyncIterator[SteadSandboxClient]:
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def session(client: SteadSandboxClient) -> AsyncIterator[SteadSession]:
    session = await client.create(
        manifest=Manifest(entries={"notes/todo.md": File(content=b"# todo\n- old item\n")})
    )
    await session.start()
    yield session
    await session.shutdown()


def outputs(call: ModelCall) -> list[Any]:
    """The outputs of the tools that a model saw."""
    items = call.input if isinstance(call.input, list) else []
    return [
        item["output"]
        for item in items
        if isinstance(item, dict) and str(item.get("type")).endswith("_output")
    ]


def shell(call_id: str, cmd: str, **arguments: Any) -> Any:
    return function_call("exec_command", {"cmd": cmd, **arguments}, call_id=call_id)


def run_config(**sandbox: Any) -> RunConfig:
    return RunConfig(tracing_disabled=True, sandbox=SandboxRunConfig(**sandbox))


async def test_scripted_agent_uses_every_tool_and_its_vm_is_deleted(
    client: SteadSandboxClient, server: Server
) -> None:
    def poll(call: ModelCall) -> Any:
        number = re.search(r"session ID (\d+)", outputs(call)[-1])
        assert number is not None, outputs(call)
        return [
            function_call(
                "write_stdin",
                {"session_id": int(number[1]), "chars": "ada\n", "yield_time_ms": 20000},
                call_id="typed",
            )
        ]

    patch = ResponseCustomToolCall(type="custom_tool_call", call_id="patch", name="apply_patch", input=PATCH)
    model = ScriptedModel(
        [
            [shell("ran", f"pwd; ls; echo {PIXEL} | base64 -d > pixel.png; echo err >&2; exit 3")],
            [
                shell(
                    "asked",
                    "[ -t 0 ] && printf 'name? '; read name; echo got:$name; exit 7",
                    tty=True,
                    yield_time_ms=300,
                )
            ],
            ModelStep.respond(poll),
            [patch],
            [function_call("view_image", {"path": "pixel.png"}, call_id="image")],
            [shell("read", "cat src/new.txt notes/todo.md")],
            [assistant_message("all tools worked")],
        ]
    )
    manifest = Manifest(entries={"notes/todo.md": File(content=b"# todo\n- old item\n")})
    agent = SandboxAgent(name="all", model=model, default_manifest=manifest)
    async with AsyncStead(server.key, base_url=server.url) as stead:
        before = {info.id for info in await stead.vms.list()}
        result = await Runner.run(agent, "go", run_config=run_config(client=client))
        assert {info.id for info in await stead.vms.list()} == before
        for found in await stead.vms.snapshots.list():
            if found.name and found.name.startswith("agent-"):
                await stead.vms.snapshots.delete(found.id)
    assert result.final_output == "all tools worked"
    model.assert_complete()
    assert model.last_call is not None
    ran, asked, typed, patched, image, read = outputs(model.last_call)
    assert "exited with code 3" in ran and "/workspace\nnotes\nerr\n" in ran
    assert "name? " in asked and "exited with code 7" in typed and "got:ada" in typed
    assert "Created src/new.txt" in patched and "Updated notes/todo.md" in patched
    assert f"data:image/png;base64,{PIXEL}" in str(image)
    assert "alpha" in read and "- new item" in read


async def test_approval_pauses_the_run_and_another_client_continues_in_the_same_vm(server: Server) -> None:
    @function_tool(needs_approval=True)
    def deploy() -> str:
        return "deployed"

    def agent(model: ScriptedModel) -> SandboxAgent[Any]:
        return SandboxAgent(name="deployer", model=model, tools=[deploy], capabilities=[Shell()])

    options = SteadSandboxClientOptions(key="approval", pause_on_exit=True)
    first = ScriptedModel(
        [[shell("made", "echo built > artifact")], [function_call("deploy", {}, call_id="deploy")]]
    )
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        paused = await Runner.run(agent(first), "go", run_config=run_config(client=client, options=options))
    assert len(paused.interruptions) == 1
    saved = json.dumps(paused.to_state().to_json())

    second = ScriptedModel([[shell("used", "cat artifact")], [assistant_message("done")]])
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        state = await RunState.from_json(agent(second), json.loads(saved))
        state.approve(state.get_interruptions()[0])
        result = await Runner.run(agent(second), state, run_config=run_config(client=client, options=options))
        assert result.final_output == "done"
        assert second.last_call is not None and "built" in outputs(second.last_call)[-1]
        kept = await client.find("approval")
        assert kept is not None
        await kept.vm.delete()


async def test_skills_are_staged_and_loaded_on_demand(session: SteadSession, tmp_path: Path) -> None:
    for name in ("greeting", "farewell"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "SKILL.md").write_text(
            f"---\nname: {name}\ndescription: says {name}\n---\nSay {name}.\n"
        )
    grants = (SandboxPathGrant(path=str(tmp_path)),)
    session.state.manifest.extra_path_grants = grants
    model = ScriptedModel(
        [
            [function_call("load_skill", {"skill_name": "greeting"}, call_id="load")],
            [shell("shown", "cat .agents/greeting/SKILL.md; ls .agents")],
            [assistant_message("loaded")],
        ]
    )
    lazy = Skills(lazy_from=LocalDirLazySkillSource(source=LocalDir(src=tmp_path)))
    agent = SandboxAgent(name="lazy", model=model, capabilities=[Shell(), lazy])
    await Runner.run(agent, "go", run_config=run_config(session=session))
    assert model.last_call is not None
    shown = outputs(model.last_call)[-1]
    assert "Say greeting." in shown and "farewell" not in shown
    assert "says farewell" in str(model.calls[0].system_instructions)

    staged = ScriptedModel([[shell("shown", "cat .staged/farewell/SKILL.md")], [assistant_message("read")]])
    eager = Skills(from_=LocalDir(src=tmp_path), skills_path=".staged")
    agent = SandboxAgent(name="eager", model=staged, capabilities=[Shell(), eager])
    await Runner.run(agent, "go", run_config=run_config(session=session))
    assert staged.last_call is not None and "Say farewell." in outputs(staged.last_call)[-1]


async def test_function_tool_patches_files_and_reports_errors(session: SteadSession) -> None:
    model = ScriptedModel(
        [
            [function_call("apply_patch", {"patch": PATCH}, call_id="good")],
            [function_call("apply_patch", {"patch": PATCH}, call_id="again")],
            [function_call("apply_patch", {"patch": "nonsense"}, call_id="bad")],
            [shell("shown", "cat src/new.txt notes/todo.md")],
            [assistant_message("patched")],
        ]
    )
    agent = SandboxAgent(name="chat", model=model, capabilities=[Shell(), FunctionFilesystem()])
    await Runner.run(agent, "go", run_config=run_config(session=session))
    assert model.last_call is not None
    good, again, bad, shown = outputs(model.last_call)
    assert "Created src/new.txt" in good
    assert "apply_patch failed" in again and "already exists" in again
    assert "apply_patch failed" in bad
    assert "alpha" in shown and "- new item" in shown


async def test_memory_of_one_run_is_read_by_the_next(client: SteadSandboxClient) -> None:
    extracted = {
        "rollout_slug": "colour",
        "rollout_summary": "The user likes blue.",
        "raw_memory": "likes blue",
    }
    summary = "mkdir -p memories && echo 'The user likes blue.' > memories/memory_summary.md"
    generate = MemoryGenerateConfig(
        phase_one_model=ScriptedModel([[assistant_message(json.dumps(extracted))]]),
        phase_two_model=ScriptedModel([[shell("kept", summary)], [assistant_message("consolidated")]]),
    )
    options = SteadSandboxClientOptions(key="memory", pause_on_exit=True)
    first = SandboxAgent(
        name="writer",
        model=ScriptedModel([[assistant_message("noted")]]),
        capabilities=[Shell(), Filesystem(), Memory(read=None, generate=generate)],
    )
    await Runner.run(first, "my colour is blue", run_config=run_config(client=client, options=options))
    model = ScriptedModel([[assistant_message("blue")]])
    second = SandboxAgent(
        name="reader",
        model=model,
        capabilities=[*Capabilities.default(), Memory(read=MemoryReadConfig(), generate=None)],
    )
    await Runner.run(second, "which colour?", run_config=run_config(client=client, options=options))
    assert "The user likes blue." in str(model.calls[0].system_instructions)
    kept = await client.find("memory")
    assert kept is not None
    await kept.vm.delete()
