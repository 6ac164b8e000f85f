"""What the examples of the Agents SDK do with sandboxes, in real VMs with scripted models.

Resume, remote snapshots, memory over two sessions, handoffs, agents as tools, conversations of several turns.
"""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Runner, SQLiteSession, function_tool
from agents.sandbox import (
    LocalSnapshotSpec,
    Manifest,
    MemoryGenerateConfig,
    MemoryLayoutConfig,
    RemoteSnapshotSpec,
    SandboxAgent,
)
from agents.sandbox.capabilities import Filesystem, Memory, Shell
from agents.sandbox.entries import BaseEntry, Dir, File
from agents.sandbox.session import Dependencies
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from pydantic import BaseModel

from stead import AsyncStead
from stead.agents.openai import SteadSandboxClient, SteadSandboxSessionState
from support.installations import Server
from support.scripted_models import outputs, patched, sandboxed, shell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BUG = b"def total(subtotal, tax):\n    return subtotal + tax\n"
FIX = """*** Begin Patch
*** Update File: report.py
@@
 def total(subtotal, tax):
-    return subtotal + tax
+    return subtotal * (1 + tax)
*** End Patch
"""
CHECK = "python3 -c 'import report; print(report.total(100, 0.5))'"


def message(text: str) -> list[Any]:
    return [assistant_message(text)]


async def delete_snapshot(server: Server, state: Any) -> None:
    assert isinstance(state, SteadSandboxSessionState) and state.saved_snapshot_id is not None
    async with AsyncStead(server.key, base_url=server.url) as stead:
        await stead.vms.snapshots.delete(state.saved_snapshot_id)


async def test_resume_with_the_state_and_the_conversation(
    client: SteadSandboxClient, server: Server, tmp_path: Path
) -> None:
    """A run, the session closed, and a second run in the resumed session with the history of the first."""
    model = ScriptedModel(
        [
            [shell("echo 1.0 > version")],
            message("built"),
            [shell("cat version")],
            message("tested"),
        ]
    )
    agent = SandboxAgent(name="builder", model=model, capabilities=[Shell()])
    snapshot = LocalSnapshotSpec(base_path=tmp_path)
    session = await client.create(snapshot=snapshot)
    async with session:
        first = await Runner.run(agent, "build it", run_config=sandboxed(session=session))
    frozen = json.dumps(client.serialize_session_state(session.state))
    assert not await session.running()

    resumed = await client.resume(client.deserialize_session_state(json.loads(frozen)))
    async with resumed:
        history: list[Any] = [*first.to_input_list(), {"role": "user", "content": "test it"}]
        second = await Runner.run(agent, history, run_config=sandboxed(session=resumed))
    assert second.final_output == "tested"
    made, read = outputs(model.last_call)
    assert "exited with code 0" in made and "1.0" in read
    await delete_snapshot(server, resumed.state)


class Store:
    """The snapshot client of an application: here a dictionary, else a bucket."""

    def __init__(self) -> None:
        self.saved: dict[str, bytes] = {}

    def upload(self, snapshot_id: str, data: io.IOBase) -> None:
        self.saved[snapshot_id] = data.read()

    def download(self, snapshot_id: str) -> io.IOBase:
        return io.BytesIO(self.saved[snapshot_id])

    def exists(self, snapshot_id: str) -> bool:
        return snapshot_id in self.saved


async def test_remote_snapshot_holds_a_reference(server: Server) -> None:
    store = Store()
    dependencies = Dependencies().bind_value("store", store)
    async with SteadSandboxClient(
        api_key=server.key, base_url=server.url, dependencies=dependencies
    ) as client:
        session = await client.create(snapshot=RemoteSnapshotSpec(client_dependency_key="store"))
        async with session:
            await session.write(Path("check.txt"), io.BytesIO(b"round trip"))
        (saved,) = store.saved.values()
        assert len(saved) < 1000, "the workspace stays on the server"
        resumed = await client.resume(session.state)
        async with resumed:
            assert (await resumed.read(Path("check.txt"))).read() == b"round trip"
        await delete_snapshot(server, resumed.state)


def memory_generation(note: str, folder: str = "memories") -> MemoryGenerateConfig:
    """Models of both phases that write a note to the summary."""
    extracted = {"rollout_slug": "note", "rollout_summary": note, "raw_memory": note}
    return MemoryGenerateConfig(
        phase_one_model=ScriptedModel([message(json.dumps(extracted))] * 2),
        phase_two_model=ScriptedModel(
            [[shell(f"echo '{note}' > {folder}/memory_summary.md")], message("consolidated")] * 2
        ),
    )


async def test_memory_of_a_session_is_read_after_its_snapshot_is_restored(
    client: SteadSandboxClient, server: Server, tmp_path: Path
) -> None:
    model = ScriptedModel(
        [
            [patched(FIX)],
            [shell(CHECK)],
            message("fixed"),
            [shell("ls sessions | wc -l; cat memories/raw_memories.md")],
            message("test added"),
        ]
    )
    note = "The total multiplies the tax rate."
    agent = SandboxAgent(
        name="fixer",
        model=model,
        capabilities=[Memory(generate=memory_generation(note)), Filesystem(), Shell()],
    )
    manifest = Manifest(entries={"report.py": File(content=BUG)})
    session = await client.create(manifest=manifest, snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with session:
        await Runner.run(agent, "fix the total", run_config=sandboxed(session=session))
    assert note not in str(model.calls[0].system_instructions)
    _, checked = outputs(model.calls[2])
    assert "150.0" in checked

    resumed = await client.resume(session.state)
    async with resumed:
        await Runner.run(agent, "add a test", run_config=sandboxed(session=resumed))
    model.assert_complete()
    assert note in str(model.calls[3].system_instructions)
    (found,) = outputs(model.last_call)
    assert note in found and "\n1\n" in found
    await delete_snapshot(server, resumed.state)


async def test_agent_hands_off_to_one_with_a_vm_and_that_to_a_third(client: SteadSandboxClient) -> None:
    writer = Agent(name="Writer", model=ScriptedModel([message("note: training is missing")]))
    reviewing = ScriptedModel(
        [
            [shell("cat checklist.md")],
            [function_call("transfer_to_writer", {}, call_id="to-writer")],
        ]
    )
    reviewer = SandboxAgent(
        name="Reviewer",
        model=reviewing,
        default_manifest=Manifest(entries={"checklist.md": File(content=b"- training is missing\n")}),
        handoffs=[writer],
        capabilities=[Shell()],
    )
    intake = Agent(
        name="Intake",
        model=ScriptedModel([[function_call("transfer_to_reviewer", {}, call_id="to-reviewer")]]),
        handoffs=[reviewer],
    )
    result = await Runner.run(intake, "review the packet", run_config=sandboxed(client=client))
    assert result.final_output == "note: training is missing" and result.last_agent.name == "Writer"
    assert "training is missing" in outputs(reviewing.last_call)[-1]


class Review(BaseModel):
    discount: int
    evidence: str


async def test_agents_with_vms_of_their_own_are_tools_of_another(
    client: SteadSandboxClient, server: Server
) -> None:
    """Both run at the same time, each sees only its own files, and no VM is left."""

    def reviewer(name: str, discount: int) -> tuple[SandboxAgent[Any], ScriptedModel]:
        def review(call: ModelCall) -> Any:
            return message(Review(discount=discount, evidence=outputs(call)[-1]).model_dump_json())

        model = ScriptedModel([[shell("cat *.md; ls | wc -l")], ModelStep.respond(review)])
        agent = SandboxAgent(
            name=name,
            model=model,
            default_manifest=Manifest(entries={f"{name}.md": File(content=f"facts of {name}\n".encode())}),
            capabilities=[Shell()],
            output_type=Review,
        )
        return agent, model

    @function_tool
    def approver(discount: int) -> str:
        return "director" if discount > 10 else "account executive"

    async def as_json(result: Any) -> str:
        return str(result.final_output.model_dump_json())

    (pricing, prices), (rollout, risks) = reviewer("pricing", 15), reviewer("rollout", 0)
    tools = [
        each.as_tool(
            tool_name=f"review_{each.name}",
            tool_description=f"Review {each.name}.",
            custom_output_extractor=as_json,
            run_config=sandboxed(client=client),
        )
        for each in (pricing, rollout)
    ]

    def approve(call: ModelCall) -> Any:
        found = json.loads(outputs(call)[0])
        return [function_call("approver", {"discount": found["discount"]}, call_id="approver")]

    model = ScriptedModel(
        [
            [
                function_call("review_pricing", {"input": "prices?"}, call_id="pricing"),
                function_call("review_rollout", {"input": "risks?"}, call_id="rollout"),
            ],
            ModelStep.respond(approve),
            message("ask the director"),
        ]
    )
    async with AsyncStead(server.key, base_url=server.url) as stead:
        before = {info.id for info in await stead.vms.list()}
        coordinator = Agent(name="Coordinator", model=model, tools=[*tools, approver])
        result = await Runner.run(coordinator, "review the deal", run_config=sandboxed())
        assert {info.id for info in await stead.vms.list()} == before
    assert result.final_output == "ask the director"
    assert outputs(model.last_call)[-1] == "director"
    for seen, name in ((prices, "pricing"), (risks, "rollout")):
        assert f"facts of {name}\n1\n" in outputs(seen.last_call)[-1]


async def test_agents_share_a_session_for_several_turns_with_memories_of_their_own(
    client: SteadSandboxClient,
) -> None:
    """Two turns of one conversation and one of another, in one VM; each agent has its own memory folder."""
    layouts = {
        name: MemoryLayoutConfig(memories_dir=f"memories/{name}", sessions_dir=f"sessions/{name}")
        for name in ("sales", "code")
    }

    def agent(name: str, model: ScriptedModel) -> SandboxAgent[Any]:
        generate = memory_generation(f"lesson of {name}", f"memories/{name}")
        memory = Memory(layout=layouts[name], generate=generate)
        return SandboxAgent(name=name, model=model, capabilities=[memory, Filesystem(), Shell()])

    selling = ScriptedModel(
        [
            [shell("cat data/leads.csv")],
            message("healthcare looks good"),
            [shell("echo 'healthcare' > hypothesis.md")],
            message("written"),
        ]
    )
    fixing = ScriptedModel([[patched(FIX)], [shell(CHECK)], message("fixed")])
    sales, code = agent("sales", selling), agent("code", fixing)
    manifest = Manifest(
        entries={
            "data": Dir(children={"leads.csv": File(content=b"healthcare,240\nretail,75\n")}),
            "report.py": File(content=BUG),
        }
    )
    session = await client.create(manifest=manifest)
    await session.start()
    try:
        config = sandboxed(session=session)
        talk = SQLiteSession("sales")
        await Runner.run(sales, "find a segment", session=talk, run_config=config)
        await Runner.run(sales, "write a hypothesis", session=talk, run_config=config)
        await Runner.run(code, "fix the total", session=SQLiteSession("code"), run_config=config)
        assert "healthcare looks good" in str(selling.last_call)
        assert "150.0" in outputs(fixing.last_call)[-1]
        await session.run_pre_stop_hooks()
        found = await session.exec(
            "cat hypothesis.md memories/*/memory_summary.md; cat sessions/sales/* | wc -l"
        )
        assert found.stdout == b"healthcare\nlesson of code\nlesson of sales\n2\n"
    finally:
        await session.shutdown()


async def test_two_runs_share_a_session_in_folders_of_their_own(client: SteadSandboxClient) -> None:
    names = ("red", "blue")
    tasks: dict[str | Path, BaseEntry] = {
        name: Dir(children={"notes.md": File(content=b"status=pending\n")}) for name in names
    }
    patch = "*** Begin Patch\n*** Update File: notes.md\n@@\n-status=pending\n+status=done\n*** End Patch\n"
    models = {
        name: ScriptedModel([[shell(f"pwd; echo {name} > colour")], [patched(patch)], message(name)])
        for name in names
    }
    agents = {
        name: SandboxAgent(name=name, model=models[name], capabilities=[Shell(), Filesystem()])
        for name in names
    }
    session = await client.create(manifest=Manifest(entries={"tasks": Dir(children=tasks)}))
    await session.start()
    try:
        results = await asyncio.gather(
            *(
                Runner.run(agents[name], "go", run_config=sandboxed(session=session, cwd=f"tasks/{name}"))
                for name in names
            )
        )
        assert [result.final_output for result in results] == list(names)
        for name in names:
            assert f"/workspace/tasks/{name}\n" in outputs(models[name].calls[1])[0]
        found = await session.exec("cat tasks/*/colour tasks/*/notes.md")
        assert found.stdout == b"blue\nred\nstatus=done\nstatus=done\n"
    finally:
        await session.shutdown()
