"""The programs in `examples/` against a real server: `make trial-examples`. Models are scripted.

With `STEAD_GUIDES`, a folder with the text of published guides, the classes of these guides run the same
tests. Their text is not ours to copy.
"""

import asyncio
import hashlib
import json
import os
import re
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
from support.installations import Server
from support.npm import fetch, node, run
from support.waiting import until

LIMIT = 1800.0
"""Seconds of one trial: without KVM, programs in VMs are slow."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT)]

HERE = ROOT / "tests" / "examples"
EXAMPLES = ROOT / "examples"
CLAUDE = "claude-agent-sdk==0.2.182"


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

    async def prepared(self, name: str) -> Path:
        """A folder with the example, its packages and its trial."""
        source = EXAMPLES / name if (EXAMPLES / name).exists() else HERE / name
        locked = source / "package-lock.json"
        packages = locked if locked.exists() else source / "package.json"
        kept = self.cache / "npm" / hashlib.sha256(packages.read_bytes()).hexdigest()[:16]
        if not kept.exists():
            files = [path for path in (source / "package.json", locked) if path.exists()]
            await fetch(kept, files, LIMIT)
        folder = self.folder / name
        for each in {source, HERE / name}:
            shutil.copytree(each, folder, ignore=shutil.ignore_patterns("node_modules"), dirs_exist_ok=True)
        shutil.copy(EXAMPLES / "process.ts", self.folder)
        shutil.copy(HERE / "https.mts", folder)
        (folder / "node_modules").symlink_to(kept / "node_modules")
        return folder

    async def node(self, folder: Path, **more: str) -> None:
        # The class of a guide has parameters that are properties: stripping the types is not enough.
        flags = [
            "--no-warnings",
            "--experimental-transform-types",
            "--test-reporter=spec",
            "--test-force-exit",
        ]
        ended = await run([str(node()), *flags, "trial.mts"], folder, self.environment(**more), LIMIT)
        print(ended.stdout)
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


def guide(pattern: str) -> str:
    """The first text of the guides that matches a pattern; its first group."""
    folder = os.environ.get("STEAD_GUIDES")
    if not folder:
        pytest.skip("needs the text of the guides: set STEAD_GUIDES to a folder with it")
    for path in sorted(Path(folder).glob("*.txt")):
        if found := re.search(pattern, path.read_text(), re.MULTILINE | re.DOTALL):
            return found[1]
    pytest.skip(f"no guide in {folder} has this program")


def sandbox_class(module: str) -> str:
    """The file `freestyle-sandbox.ts` of the guide that imports a module. The text of some guides has lost
    type arguments: a type that is no type without them becomes `any`."""
    program = guide(rf'```ts title="freestyle-sandbox\.ts"\n((?:(?!```).)*"{module}"(?:(?!```).)*)```')
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
    folder = await trials.prepared("smithers")
    more = {}
    if os.environ.get("STEAD_GUIDES"):
        program = guide(
            r"(import \{ freestyle \} from \"freestyle\";\nimport \{ createFreestyleSandboxProvider.*?^\}\);)"
        )
        (folder / "guide-provider.ts").write_text(f"{program}\nexport {{ freestyleProvider }};\n")
        more = {"GUIDE": "1"}
    bun = str(folder / "node_modules" / "@oven" / "bun-linux-x64" / "bin" / "bun")
    ended = await run([bun, "test", "./trial.test.tsx"], folder, trials.environment(**more), LIMIT)
    print(ended.stdout, ended.stderr)
    assert ended.status == 0, f"{ended.stdout}\n{ended.stderr}"


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


async def test_claude_agent_sdk_with_the_real_cli(trials: Trials, claude_vm: AsyncVm) -> None:
    """The CLI of the npm package, which asks a stand-in of the Messages API in the same VM."""
    folder = await trials.prepared("claude-agent-sdk")
    cli = folder / "node_modules" / "@anthropic-ai" / "claude-agent-sdk-linux-x64" / "claude"
    if not cli.exists():
        pytest.skip("the npm registry has no CLI for this platform")
    await claude_vm.fs.upload(cli, "/root/.local/bin/claude")
    swap = "fallocate -l 2G /swap && chmod 600 /swap && mkswap -q /swap && swapon /swap"
    await claude_vm.exec(f"chmod +x /root/.local/bin/claude && {swap}", check=True)
    await claude_vm.fs.upload(folder / "messages_api.py", "/root/messages_api.py")
    await claude_vm.processes.start(["python3", "/root/messages_api.py"])
    await trials.node(folder, VM_ID=claude_vm.id, REAL_CLI="1")
    written = await claude_vm.fs.read_text("/root/written-by-claude")
    assert written.strip() == claude_vm.id
    await claude_vm.fs.remove("/root/written-by-claude")
    await _python(trials, folder, claude_vm, REAL_CLI="1")
    assert (await claude_vm.fs.read_text("/root/written-by-claude")).strip() == claude_vm.id


async def test_mcp_inspector(trials: Trials, vm: AsyncVm) -> None:
    """The inspector's command line: its check of the schemas, calls over stdio and over HTTP."""
    folder = await trials.prepared("mcp-inspector")
    package = folder / "node_modules" / "@modelcontextprotocol" / "inspector"
    inspector = [str(node()), str(package / "clients" / "launcher" / "build" / "index.js"), "--cli"]
    stead = str(Path(sys.executable).parent / "stead")
    server = trials.server
    credentials = ["-e", f"STEAD_API_URL={server.url}", "-e", f"STEAD_API_KEY={server.key}"]

    async def ask(target: list[str], *call: str) -> Any:
        options = ["--connect-timeout", "300000", *call]
        ended = await run([*inspector, *target, *options], folder, os.environ, LIMIT)
        assert ended.status == 0, f"{ended.stdout}\n{ended.stderr}"
        return json.loads(ended.stdout)

    listed = await ask([*credentials, stead, "mcp"], "--method", "tools/list", "--strict")
    assert len(listed["tools"]) > 20
    command = [
        "--method",
        "tools/call",
        "--tool-name",
        "exec",
        "--tool-arg",
        f"vm={vm.id}",
        "command=uname -s",
    ]
    assert (await ask([*credentials, stead, "mcp"], *command))["structuredContent"]["stdout"] == "Linux\n"

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "STEAD_API_URL": server.url}
    process = await asyncio.create_subprocess_exec(stead, "mcp", "--http", address, env=environment)
    try:
        await until(lambda: _listens(address), 120)
        target = [f"http://{address}/mcp", "--header", f"Authorization: Bearer {server.key}"]
        assert (await ask(target, *command))["structuredContent"]["stdout"] == "Linux\n"
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
