"""Agents of the OpenAI Agents SDK with scripted models, in real VMs."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import agents
import pytest
import pytest_asyncio
from agents import Runner, RunState, function_tool, sandbox
from agents.sandbox import Manifest, SandboxAgent, entries
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.snapshot import NoopSnapshotSpec
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call

from stead import AsyncStead
from stead.agents import openai
from stead.agents.openai import (
    FunctionFilesystem,
    SteadSandboxClient,
    SteadSandboxClientOptions,
    SteadSession,
)
from support.api_calls import new_account
from support.documents import run_by
from support.installations import Server
from support.scripted_models import command_number, outputs, patched, sandboxed, shell, typed

pytestmark = pytest.mark.timeout(1800)

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


def todo() -> Manifest:
    return Manifest(entries={"notes/todo.md": File(content=b"# todo\n- old item\n")})


@pytest_asyncio.fixture(scope="module")
async def session(client: SteadSandboxClient) -> AsyncIterator[SteadSession]:
    session = await client.create(manifest=todo())
    await session.start()
    yield session
    await session.shutdown()


@pytest.mark.slow
async def test_agent_uses_every_tool_and_its_vm_is_deleted(
    client: SteadSandboxClient, server: Server
) -> None:
    model = ScriptedModel(
        [
            [shell(f"pwd; ls; echo {PIXEL} | base64 -d > pixel.png; echo err >&2; exit 3")],
            [
                shell(
                    "[ -t 0 ] && printf 'name? '; read name; echo got:$name; exit 7",
                    tty=True,
                    yield_time_ms=300,
                )
            ],
            ModelStep.respond(lambda call: [typed(command_number(call), "ada\n")]),
            [patched(PATCH)],
            [function_call("view_image", {"path": "pixel.png"}, call_id="image")],
            [shell("cat src/new.txt notes/todo.md")],
            [assistant_message("all tools worked")],
        ]
    )
    agent = SandboxAgent(name="all", model=model, default_manifest=todo())
    async with AsyncStead(server.key, base_url=server.url) as stead:
        before = {info.id for info in await stead.vms.list()}
        result = await Runner.run(agent, "go", run_config=sandboxed(client=client))
        assert {info.id for info in await stead.vms.list()} == before
    assert result.final_output == "all tools worked"
    model.assert_complete()
    ran, asked, answered, changed, image, read = outputs(model.last_call)
    assert "exited with code 3" in ran and "/workspace\nnotes\nerr\n" in ran
    assert "name? " in asked + answered
    assert "exited with code 7" in answered and "got:ada" in answered
    assert "Created src/new.txt" in changed and "Updated notes/todo.md" in changed
    assert f"data:image/png;base64,{PIXEL}" in str(image)
    assert "alpha" in read and "- new item" in read


async def test_default_run_leaves_a_snapshot_that_expires_and_another_leaves_nothing(
    client: SteadSandboxClient, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with AsyncStead(server.key, base_url=server.url) as stead:
        before = [info.id for info in await stead.vms.list()], len(await stead.vms.snapshots.list())
        for snapshot in (None, NoopSnapshotSpec()):
            model = ScriptedModel([[shell("echo secret > file")], [assistant_message("done")]])
            agent = SandboxAgent(name="writer", model=model, capabilities=[Shell()])
            config = sandboxed(client=client, snapshot=snapshot)
            assert (await Runner.run(agent, "go", run_config=config)).final_output == "done"
            if snapshot is None:
                (kept,) = await stead.vms.snapshots.list(purpose="agent")
                assert kept.expires_at is not None
                await stead.vms.snapshots.delete(kept.id)
        assert ([info.id for info in await stead.vms.list()], len(await stead.vms.snapshots.list())) == before


@pytest.mark.slow
async def test_approval_pauses_the_run_and_another_client_continues_in_the_same_vm(server: Server) -> None:
    @function_tool(needs_approval=True)
    def deploy() -> str:
        return "deployed"

    def agent(model: ScriptedModel) -> SandboxAgent[Any]:
        return SandboxAgent(name="deployer", model=model, tools=[deploy], capabilities=[Shell()])

    options = SteadSandboxClientOptions(key="approval", pause_on_exit=True)
    first = ScriptedModel([[shell("echo built > artifact")], [function_call("deploy", {}, call_id="deploy")]])
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        paused = await Runner.run(agent(first), "go", run_config=sandboxed(client=client, options=options))
    assert len(paused.interruptions) == 1
    saved = json.dumps(paused.to_state().to_json())

    second = ScriptedModel([[shell("cat artifact")], [assistant_message("done")]])
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        state = await RunState.from_json(agent(second), json.loads(saved))
        state.approve(state.get_interruptions()[0])
        result = await Runner.run(agent(second), state, run_config=sandboxed(client=client, options=options))
        assert result.final_output == "done"
        assert "built" in outputs(second.last_call)[-1]
        kept = await client.find("approval")
        assert kept is not None
        await kept.vm.delete()


async def test_program_of_the_page_runs_with_a_scripted_model(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = run_by(__file__, "docs/openai-agents.md")[0]
    _, key = await new_account(server, "openai-page")
    model = ScriptedModel([[shell("uname -s; pwd")], [assistant_message("it runs Linux")]])
    monkeypatch.setattr("agents.sandbox.SandboxAgent", partial(SandboxAgent, model=model))
    monkeypatch.setenv("STEAD_API_URL", server.url)
    monkeypatch.setenv("STEAD_API_KEY", key)
    await asyncio.to_thread(exec, program.body, {"__name__": "__main__"})
    assert capsys.readouterr().out == "it runs Linux\n"
    assert "Linux\n/workspace\n" in outputs(model.last_call)[-1]
    async with AsyncStead(key, base_url=server.url) as stead:
        assert list(await stead.vms.list()) == []
        for saved in await stead.vms.snapshots.list():
            await stead.vms.snapshots.delete(saved.id)


async def test_parts_of_programs_in_the_pages_are_accepted(
    client: SteadSandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, buckets = run_by(__file__, "docs/openai-agents.md")[1:]
    (other,) = run_by(__file__, "docs/coming-from.md")
    monkeypatch.setenv("STEAD_API_KEY", "stead_any")
    known = {
        name: getattr(module, name)
        for module in (agents, sandbox, entries, openai)
        for name in module.__all__
    }
    names = {**known, "client": client, "conversation_id": 7, "key": "id", "secret": "secret"}
    exec(conversation.body, names)
    options = names["config"].sandbox.options
    assert (options.key, options.pause_on_exit) == ("chat-7", True)
    exec(buckets.body, names)
    mounted = names["manifest"].entries["data"]
    assert (mounted.bucket, mounted.read_only) == ("data", True)
    exec(other.body, names)
    async with names["config"].sandbox.client as made:
        assert isinstance(made, SteadSandboxClient)


async def test_function_tool_patches_files_and_reports_errors(session: SteadSession) -> None:
    model = ScriptedModel(
        [
            [function_call("apply_patch", {"patch": PATCH}, call_id="good")],
            [function_call("apply_patch", {"patch": PATCH}, call_id="again")],
            [function_call("apply_patch", {"patch": "nonsense"}, call_id="bad")],
            [shell("cat src/new.txt notes/todo.md")],
            [assistant_message("patched")],
        ]
    )
    agent = SandboxAgent(name="chat", model=model, capabilities=[Shell(), FunctionFilesystem()])
    await Runner.run(agent, "go", run_config=sandboxed(session=session))
    good, again, bad, shown = outputs(model.last_call)
    assert "Created src/new.txt" in good
    assert "apply_patch failed" in again and "already exists" in again
    assert "apply_patch failed" in bad
    assert "alpha" in shown and "- new item" in shown


async def test_vm_that_is_suspended_between_turns_is_woken(session: SteadSession) -> None:
    """The run goes on with the memory of the VM and with its running commands."""

    async def suspended(call: ModelCall) -> Any:
        await session.vm.suspend()
        assert (await session.vm.info()).state == "suspended"
        return [shell("cat /dev/shm/memory; pgrep -xc sleep")]

    model = ScriptedModel(
        [
            [shell("echo kept > /dev/shm/memory; exec sleep 5000", yield_time_ms=300)],
            ModelStep.respond(suspended),
            [assistant_message("done")],
        ]
    )
    agent = SandboxAgent(name="sleeper", model=model, capabilities=[Shell()])
    result = await Runner.run(agent, "go", run_config=sandboxed(session=session))
    assert result.final_output == "done"
    assert "kept\n1\n" in outputs(model.last_call)[-1]


@pytest.mark.slow
async def test_options_are_those_of_the_vm(client: SteadSandboxClient, session: SteadSession) -> None:
    await session.exec("echo installed > /usr/local/tool")
    saved = await session.vm.snapshot()
    options = SteadSandboxClientOptions(snapshot_id=saved.id, idle_timeout_seconds=1234)
    other = await client.create(options=options)
    try:
        await other.start()
        assert (await other.exec("cat /usr/local/tool")).stdout == b"installed\n"
        assert (await other.vm.info()).idle_timeout_seconds == 1234
    finally:
        await other.shutdown()
        await client._backend().stead.vms.snapshots.delete(saved.id)
