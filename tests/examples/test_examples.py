"""The programs in `examples/` against a real server: `make trial-examples`. Models are scripted.

With `STEAD_GUIDES`, a folder with the text of published guides, the classes of these guides run the same
tests. Their text is not ours to copy.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stead import AsyncStead, AsyncVm
from stead.host.authority import CERTIFICATE_FILE
from stead.settings import Settings
from support import ROOT
from support.guides import published
from support.installations import Server
from support.npm import fetch, node, run
from support.waiting import until

LIMIT = 1800.0
"""Seconds of one trial: without KVM, programs in VMs are slow."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT)]

HERE = ROOT / "tests" / "examples"
EXAMPLES = ROOT / "examples"
CLAUDE = "claude-agent-sdk==0.2.182"
API = "http://127.0.0.1:8999"
"""The stand-in of the Messages API, for programs in its VM."""


def _source(name: str) -> Path:
    return EXAMPLES / name if (EXAMPLES / name).exists() else HERE / name


@dataclass(frozen=True)
class Trials:
    """Runs the trial of an example, with packages as its users install them."""

    server: Server
    cache: Path
    folder: Path
    authority: Path

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "FREESTYLE_API_URL": self.server.url,
            "FREESTYLE_API_KEY": self.server.key,
            "STEAD_API_URL": self.server.url,
            "STEAD_API_KEY": self.server.key,
            "HTTPS_PORT": str(self.server.https_port),
            "NODE_EXTRA_CA_CERTS": str(self.authority),
            "MASTRA_TELEMETRY_DISABLED": "1",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            **more,
        }

    async def packages(self, name: str) -> Path:
        """The packages of an example, in the cache."""
        source = _source(name)
        locked = source / "package-lock.json"
        packages = locked if locked.exists() else source / "package.json"
        kept = self.cache / "npm" / hashlib.sha256(packages.read_bytes()).hexdigest()[:16]
        if not kept.exists():
            files = [path for path in (source / "package.json", locked) if path.exists()]
            await fetch(kept, files, LIMIT)
        return kept / "node_modules"

    async def prepared(self, name: str) -> Path:
        """A folder with the example, its packages and its trial."""
        source, packages = _source(name), await self.packages(name)
        folder = self.folder / name
        for each in {source, HERE / name}:
            shutil.copytree(each, folder, ignore=shutil.ignore_patterns("node_modules"), dirs_exist_ok=True)
        shutil.copy(EXAMPLES / "process.ts", self.folder)
        shutil.copy(HERE / "https.mts", folder)
        (folder / "node_modules").symlink_to(packages)
        return folder

    async def node(self, folder: Path, program: str = "trial.mts", **more: str) -> None:
        # The class of a guide has parameters that are properties: stripping the types is not enough.
        flags = [
            "--no-warnings",
            "--experimental-transform-types",
            "--test-reporter=spec",
            "--test-force-exit",
        ]
        ended = await run([str(node()), *flags, program], folder, self.environment(**more), LIMIT)
        print(ended.stdout)
        assert ended.status == 0, f"{ended.stdout}\n{ended.stderr}"

    async def bun(self, folder: Path, program: str) -> None:
        bun = str(folder / "node_modules" / "@oven" / "bun-linux-x64" / "bin" / "bun")
        ended = await run([bun, "test", f"./{program}"], folder, self.environment(), LIMIT)
        print(ended.stdout, ended.stderr)
        assert ended.status == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.fixture
def trials(server: Server, settings: Settings, cache: Path, network: None, tmp_path: Path) -> Trials:
    assert settings.ca is not None
    return Trials(server, cache, tmp_path, settings.ca / CERTIFICATE_FILE)


@pytest_asyncio.fixture
async def vm(server: Server) -> AsyncIterator[AsyncVm]:
    async with (
        AsyncStead(server.key, base_url=server.url) as stead,
        await stead.vms.create() as vm,
    ):
        yield vm


def sandbox_class(module: str) -> str:
    """The file `freestyle-sandbox.ts` of the guide that imports a module. The text of some guides has lost
    type arguments: a type that is no type without them becomes `any`."""
    program = published(rf'```ts title="freestyle-sandbox\.ts"\n((?:(?!```).)*"{module}"(?:(?!```).)*)```')
    lines = program.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("type ") and line.count("<") != line.count(">"):
            lines[at] = f"{line.partition('=')[0]}= any;"
    return "\n".join(lines)


async def with_class_of_the_guide(trials: Trials, example: str, interface: str) -> None:
    program = sandbox_class(interface)
    folder = await trials.prepared(example)
    (folder / "freestyle-sandbox.ts").write_text(program)
    await trials.node(folder, GUIDE="1")


async def test_openai_agents(trials: Trials) -> None:
    await trials.node(await trials.prepared("openai-agents"))


async def test_openai_agents_with_the_class_of_the_guide(trials: Trials) -> None:
    await with_class_of_the_guide(trials, "openai-agents", "@openai/agents/sandbox")


async def test_mastra(trials: Trials) -> None:
    await trials.node(await trials.prepared("mastra"))


async def test_mastra_with_the_class_of_the_guide(trials: Trials) -> None:
    await with_class_of_the_guide(trials, "mastra", "@mastra/core/workspace")


async def test_smithers(trials: Trials) -> None:
    await trials.bun(await trials.prepared("smithers"), "trial.test.tsx")


async def test_smithers_with_the_program_of_the_guide(trials: Trials) -> None:
    """The guide shows how its provider is made and used. It does not show `provider.js`: that is ours."""
    provider = published(
        r"(import \{ freestyle \} from \"freestyle\";\nimport \{ createFreestyleSandboxProvider.*?^\}\);)"
    )
    workflow = published(r"^(<Workflow name=\"freestyle-provider-example\">.*?^</Workflow>)")
    folder = await trials.prepared("smithers")
    lines = [
        "/** @jsxImportSource smithers-orchestrator */",
        'import { outputs, remoteChildWorkflow, Sandbox, smithers, Workflow } from "./guide-parts.tsx";',
        provider,
        f"export default smithers((ctx) => (\n{workflow}\n));\n",
    ]
    (folder / "guide-workflow.tsx").write_text("\n".join(lines))
    await trials.bun(folder, "guide.test.tsx")


@pytest_asyncio.fixture
async def claude_vm(vm: AsyncVm) -> AsyncVm:
    """A VM with the stand-in of the Claude Code CLI."""
    await vm.fs.upload(ROOT / "tests" / "conformance" / "claude_cli.py", "/root/fake/claude")
    await vm.exec("chmod +x /root/fake/claude", check=True)
    return vm


async def _python(trials: Trials, folder: Path, vm: AsyncVm, **more: str) -> None:
    """The trial of the Python transport, with the SDK as its users install it."""
    kept = trials.cache / "pip" / CLAUDE
    if not kept.exists():
        uv = str(Path(sys.executable).parent / "uv")
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target"]
        ended = await run([*command, f"{kept}.new", CLAUDE, "sniffio"], folder, os.environ, LIMIT)
        assert ended.status == 0, ended.stderr
        Path(f"{kept}.new").rename(kept)
    environment = trials.environment(VM_ID=vm.id, PYTHONPATH=str(kept), **more)
    ended = await run([sys.executable, "trial.py"], folder, environment, LIMIT)
    print(ended.stdout)
    assert ended.status == 0, f"{ended.stdout}\n{ended.stderr}"


async def test_claude_agent_sdk_with_a_fake_cli(trials: Trials, claude_vm: AsyncVm) -> None:
    folder = await trials.prepared("claude-agent-sdk")
    await trials.node(folder, VM_ID=claude_vm.id)
    await _python(trials, folder, claude_vm)
    left = await claude_vm.exec(["pgrep", "-f", "/root/fake/[c]laude"])
    assert left.status_code == 1, left.stdout


@pytest_asyncio.fixture
async def real_cli_vm(trials: Trials, claude_vm: AsyncVm) -> AsyncVm:
    """A VM with the CLI of the npm package, and with a stand-in of the Messages API, which the CLI asks."""
    packages = await trials.packages("claude-agent-sdk")
    cli = packages / "@anthropic-ai" / "claude-agent-sdk-linux-x64" / "claude"
    if not cli.exists():
        pytest.skip("the npm registry has no CLI for this platform")
    await claude_vm.fs.upload(cli, "/root/.local/bin/claude")
    swap = "fallocate -l 2G /swap && chmod 600 /swap && mkswap -q /swap && swapon /swap"
    await claude_vm.exec(f"chmod +x /root/.local/bin/claude && {swap}", check=True)
    await claude_vm.fs.upload(HERE / "claude-agent-sdk" / "messages_api.py", "/root/messages_api.py")
    await claude_vm.processes.start(["python3", "/root/messages_api.py"])
    await claude_vm.exec(f"until curl -sf {API}; do sleep 0.5; done", check=True)
    return claude_vm


async def _written_by_claude(vm: AsyncVm) -> str:
    written = await vm.fs.read_text("/root/written-by-claude")
    await vm.fs.remove("/root/written-by-claude")
    return written.strip()


async def test_claude_agent_sdk_with_the_real_cli(trials: Trials, real_cli_vm: AsyncVm) -> None:
    folder, vm = await trials.prepared("claude-agent-sdk"), real_cli_vm
    await trials.node(folder, VM_ID=vm.id, REAL_CLI="1")
    assert await _written_by_claude(vm) == vm.id
    await _python(trials, folder, vm, REAL_CLI="1")
    assert await _written_by_claude(vm) == vm.id


async def test_claude_agent_sdk_with_the_bridge_of_the_guide(trials: Trials, real_cli_vm: AsyncVm) -> None:
    """It passes only the key to the CLI: the address of the stand-in is in the CLI's settings."""
    bridge = published(r"^```ts\n((?:(?!```).)*^function spawnInVm\((?:(?!```).)*)```")
    folder, vm = await trials.prepared("claude-agent-sdk"), real_cli_vm
    (folder / "guide-bridge.ts").write_text(f"{bridge}\nexport {{ spawnInVm }};\n")
    await vm.fs.write_text("/root/.claude/settings.json", json.dumps({"env": {"ANTHROPIC_BASE_URL": API}}))
    await trials.node(folder, "guide.mts", VM_ID=vm.id)
    assert await _written_by_claude(vm) == vm.id


@dataclass(frozen=True)
class Inspector:
    """The command line of the MCP inspector, which knows one server."""

    folder: Path
    target: tuple[str, ...]

    async def ask(self, *method: str, status: int = 0) -> Any:
        package = self.folder / "node_modules" / "@modelcontextprotocol" / "inspector"
        program = [str(node()), str(package / "clients" / "launcher" / "build" / "index.js"), "--cli"]
        command = [*program, *self.target, "--connect-timeout", "300000", "--method", *method]
        ended = await run(command, self.folder, {}, LIMIT)
        assert ended.status == status, f"{ended.stdout}\n{ended.stderr}"
        return json.loads(ended.stdout)

    async def tools(self) -> set[str]:
        """The names of the tools, whose schemas must be ones that all clients understand."""
        return {tool["name"] for tool in (await self.ask("tools/list", "--strict"))["tools"]}

    async def call(self, tool: str, **arguments: str) -> Any:
        given = json.dumps(arguments)
        return (await self.ask("tools/call", "--tool-name", tool, "--tool-args-json", given))[
            "structuredContent"
        ]

    async def refused(self, tool: str, **arguments: str) -> str:
        given = json.dumps(arguments)
        answer = await self.ask("tools/call", "--tool-name", tool, "--tool-args-json", given, status=5)
        text: str = answer["content"][0]["text"]
        return text


STEAD = str(Path(sys.executable).parent / "stead")
TOOLS = {"vm_create", "vm_fork", "exec", "process_start", "file_read", "repo_commit", "port_url"}


async def test_mcp_inspector_over_stdio(trials: Trials, vm: AsyncVm) -> None:
    server = trials.server
    credentials = ("-e", f"STEAD_API_URL={server.url}", "-e", f"STEAD_API_KEY={server.key}")
    inspector = Inspector(await trials.prepared("mcp-inspector"), (*credentials, STEAD, "mcp"))
    assert await inspector.tools() > TOOLS
    assert (await inspector.call("exec", vm=vm.id, command="uname -s"))["stdout"] == "Linux\n"
    assert "VM_NOT_FOUND" in await inspector.refused("exec", vm="0" * 20, command="true")


async def test_mcp_inspector_over_http_with_a_scoped_token(trials: Trials, vm: AsyncVm) -> None:
    """The token of an identity uses and sees what the identity was granted, and nothing else."""
    folder, server = await trials.prepared("mcp-inspector"), trials.server
    async with (
        AsyncStead(server.key, base_url=server.url) as stead,
        await stead.vms.create() as other,
        _mcp_over_http(server) as url,
    ):
        repo, other_repo = await stead.git.repos.create(), await stead.git.repos.create()
        identity = await stead.identities.create(name="inspector")
        await identity.permissions.vms.grant(vm.id)
        await identity.permissions.git.grant(repo.id, permission="read")
        token = (await identity.tokens.create()).token

        scoped = Inspector(folder, (url, "--header", f"Authorization: Bearer {token}"))
        assert await scoped.tools() > TOOLS
        assert (await scoped.call("exec", vm=vm.id, command="uname -s"))["stdout"] == "Linux\n"
        assert [each["id"] for each in (await scoped.call("vm_list"))["vms"]] == [vm.id]
        seen = (await scoped.call("repo_list"))["repositories"]
        assert [each["id"] for each in seen] == [repo.id]
        assert "VM_NOT_FOUND" in await scoped.refused("exec", vm=other.id, command="true")
        assert "NOT_FOUND" in await scoped.refused("repo_read", repo=other_repo.id)
        assert "FORBIDDEN" in await scoped.refused("vm_create")

        owner = Inspector(folder, (url, "--header", f"Authorization: Bearer {server.key}"))
        assert {vm.id, other.id} <= {each["id"] for each in (await owner.call("vm_list"))["vms"]}
        await identity.delete()
        await repo.delete()
        await other_repo.delete()


@contextlib.asynccontextmanager
async def _mcp_over_http(server: Server) -> AsyncIterator[str]:
    """`stead mcp --http`, which has no key of its own; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"PATH": os.environ["PATH"], "STEAD_API_URL": server.url}
    process = await asyncio.create_subprocess_exec(STEAD, "mcp", "--http", address, env=environment)
    try:
        await until(lambda: _listens(address), 120)
        yield f"http://{address}/mcp"
    finally:
        process.terminate()
        await process.wait()


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True
