"""Capabilities of sandbox agents, and repositories of manifests, in real VMs with scripted models."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agents import Runner
from agents.sandbox import Manifest, MemoryGenerateConfig, MemoryReadConfig, SandboxAgent
from agents.sandbox.capabilities import (
    Capabilities,
    Compaction,
    Filesystem,
    LocalDirLazySkillSource,
    Memory,
    Shell,
    Skills,
    StaticCompactionPolicy,
)
from agents.sandbox.entries import GitRepo, LocalDir
from agents.sandbox.workspace_paths import SandboxPathGrant
from agents.testing import ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCompactionItem

from stead import AsyncStead
from stead.agents.openai import SteadSandboxClient, SteadSandboxClientOptions, SteadSession
from stead.sdk import FilesImport
from support.installations import Server
from support.scripted_models import outputs, sandboxed, shell

pytestmark = pytest.mark.timeout(1800)

GIT = "git.freestyle.sh"
"""The name of the server's own Git inside VMs."""


def skill(name: str) -> str:
    return f"---\nname: {name}\ndescription: says {name}\n---\nSay {name}.\n"


@dataclass(frozen=True)
class Repositories:
    """Ids of two repositories of the server."""

    public: str
    private: str


@pytest_asyncio.fixture(scope="module")
async def repositories(server: Server) -> AsyncIterator[Repositories]:
    async with AsyncStead(server.key, base_url=server.url) as stead:
        made = [
            await stead.git.repos.create(
                public=name == "welcome",
                import_=FilesImport(files={f"skills/{name}/SKILL.md": skill(name)}, commit_message="add"),
            )
            for name in ("welcome", "goodbye")
        ]
        yield Repositories(*(repo.id for repo in made))
        for repo in made:
            await repo.delete()


@pytest.fixture(scope="module")
def skills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skills")
    for name in ("greeting", "farewell"):
        (folder / name).mkdir()
        (folder / name / "SKILL.md").write_text(skill(name))
    return folder


@pytest_asyncio.fixture(scope="module")
async def session(
    client: SteadSandboxClient, repositories: Repositories, skills: Path
) -> AsyncIterator[SteadSession]:
    manifest = Manifest(
        entries={"cloned": GitRepo(host=GIT, repo=repositories.public, ref="main", subpath="skills/welcome")},
        extra_path_grants=(SandboxPathGrant(path=str(skills)),),
    )
    options = SteadSandboxClientOptions(git_access=repositories.private)
    session = await client.create(manifest=manifest, options=options)
    await session.start()
    yield session
    await session.shutdown()


async def test_repository_of_the_manifest_is_cloned(session: SteadSession) -> None:
    assert (await session.read(Path("cloned/SKILL.md"))).read() == skill("welcome").encode()
    assert [entry.path for entry in await session.ls("cloned")] == ["/workspace/cloned/SKILL.md"]


async def test_skills_are_loaded_on_demand(session: SteadSession, skills: Path) -> None:
    model = ScriptedModel(
        [
            [function_call("load_skill", {"skill_name": "greeting"}, call_id="load")],
            [shell("cat .agents/greeting/SKILL.md; ls .agents")],
            [function_call("load_skill", {"skill_name": "greeting"}, call_id="again")],
            [assistant_message("loaded")],
        ]
    )
    lazy = Skills(lazy_from=LocalDirLazySkillSource(source=LocalDir(src=skills)))
    agent = SandboxAgent(name="lazy", model=model, capabilities=[Shell(), lazy])
    await Runner.run(agent, "go", run_config=sandboxed(session=session))
    _, shown, again = outputs(model.last_call)
    assert "Say greeting." in shown and "farewell" not in shown
    assert "already_loaded" in str(again)
    assert "says farewell" in str(model.calls[0].system_instructions)


async def test_skills_of_a_local_folder_and_of_a_repository_are_staged(
    session: SteadSession, skills: Path, repositories: Repositories
) -> None:
    sources = {
        "farewell": Skills(from_=LocalDir(src=skills), skills_path=".local-skills"),
        "goodbye": Skills(
            from_=GitRepo(host=GIT, repo=repositories.private, ref="main", subpath="skills"),
            skills_path=".git-skills",
        ),
    }
    for name, source in sources.items():
        model = ScriptedModel(
            [[shell(f"cat {source.skills_path}/{name}/SKILL.md")], [assistant_message("read")]]
        )
        agent = SandboxAgent(name="eager", model=model, capabilities=[Shell(), source])
        await Runner.run(agent, "go", run_config=sandboxed(session=session))
        assert f"says {name}" in str(model.calls[0].system_instructions)
        assert f"Say {name}." in outputs(model.last_call)[-1]


async def test_context_before_a_compaction_is_left_out(session: SteadSession) -> None:
    summary = ResponseCompactionItem(id="c-1", type="compaction", encrypted_content="summary")
    model = ScriptedModel(
        [
            [shell("echo early")],
            [summary, assistant_message("compacted")],
            [assistant_message("continued")],
        ]
    )
    compaction = Compaction(policy=StaticCompactionPolicy(threshold=1000))
    agent = SandboxAgent(name="compact", model=model, capabilities=[Shell(), compaction])
    first = await Runner.run(agent, "go", run_config=sandboxed(session=session))
    assert model.calls[0].model_settings.extra_args == {
        "context_management": [{"type": "compaction", "compact_threshold": 1000}]
    }
    assert "early" in outputs(model.calls[1])[0]
    history: list[Any] = [*first.to_input_list(), {"role": "user", "content": "continue"}]
    await Runner.run(agent, history, run_config=sandboxed(session=session))
    seen = model.calls[2].input
    assert seen[0]["type"] == "compaction" and seen[0]["encrypted_content"] == "summary"
    assert "early" not in str(seen) and seen[-1]["content"] == "continue"


@pytest.mark.slow
async def test_memory_of_one_run_is_read_by_the_next(client: SteadSandboxClient) -> None:
    """The first run generates memory when it ends, in both phases; the second has it in its instructions."""
    extracted = {
        "rollout_slug": "colour",
        "rollout_summary": "The user likes blue.",
        "raw_memory": "likes blue",
    }
    consolidate = "cat memories/raw_memories.md && echo 'The user likes blue.' > memories/memory_summary.md"
    second_phase = ScriptedModel([[shell(consolidate)], [assistant_message("consolidated")]])
    generate = MemoryGenerateConfig(
        phase_one_model=ScriptedModel([[assistant_message(json.dumps(extracted))]]),
        phase_two_model=second_phase,
    )
    options = SteadSandboxClientOptions(key="memory", pause_on_exit=True)
    first = SandboxAgent(
        name="writer",
        model=ScriptedModel([[assistant_message("noted")]]),
        capabilities=[Shell(), Filesystem(), Memory(read=None, generate=generate)],
    )
    await Runner.run(first, "my colour is blue", run_config=sandboxed(client=client, options=options))
    second_phase.assert_complete()
    assert "likes blue" in outputs(second_phase.last_call)[-1]
    model = ScriptedModel([[assistant_message("blue")]])
    second = SandboxAgent(
        name="reader",
        model=model,
        capabilities=[*Capabilities.default(), Memory(read=MemoryReadConfig(), generate=None)],
    )
    await Runner.run(second, "which colour?", run_config=sandboxed(client=client, options=options))
    assert "The user likes blue." in str(model.calls[0].system_instructions)
    kept = await client.find("memory")
    assert kept is not None
    await kept.vm.delete()
