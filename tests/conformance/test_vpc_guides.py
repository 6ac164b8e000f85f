"""The parts of published guides about VPCs, with the npm package on a laptop: Copilot and OpenClaw.

`make trial-guides` runs them. `STEAD_GUIDES` is a folder with their text, which is not ours to copy. There
are no models: the Copilot CLI asks a scripted one, and the gateway of OpenClaw is a stand-in.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.copilot import packages
from support.guides import published
from support.npm import SCRIPTS
from support.npm_laptop import NpmLaptop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPTED = (
    'model: "scripted", provider: { type: "openai", baseUrl: "http://127.0.0.1:8999/v1", apiKey: "none" }'
)


def page(name: str) -> str:
    return published(rf"^Source: \S+/guides/{name}$\n(.*?)\n---\n")


def samples(text: str, folder: Path) -> Iterator[str]:
    """The samples of a page as statements of one module; one with the name of a file is saved to it."""
    for language, more, body in _BLOCK.findall(text):
        named = re.search('title="(.+?)"', more)
        if named:
            (folder / named[1]).write_text(body)
        elif language == "ts":
            # Without KVM, Node.js in a VM does not start in 5 s on a busy host.
            yield body.replace("timeoutMs: 5_000", "timeoutMs: 60_000")
        elif "wg-quick" in body or "node client.mjs" in body:
            lines = [line for line in body.splitlines() if not line.startswith(("npm install", "#"))]
            yield "".join(f"shell({json.dumps(line)});\n" for line in lines)


def module(*parts: str) -> str:
    head = 'import { execFileSync } from "node:child_process";\n'
    head += 'const shell = (line) => execFileSync("sh", ["-ec", line], { stdio: "inherit" });\n'
    return head + "\n".join(parts)


async def follow(npm_laptop: NpmLaptop, folder: Path, program: str, **more: str) -> str:
    (folder / "guide.mts").write_text(program)
    return await npm_laptop.run(str(npm_laptop.npm.node22), "--no-warnings", "guide.mts", cwd=folder, **more)


async def test_copilot_cli_driven_over_the_vpn_and_from_another_vm(
    npm_laptop: NpmLaptop, cache: Path
) -> None:
    """The whole guide with the real CLI. Its terminal is left, so that the program ends."""
    folder = await packages(npm_laptop.folder, cache)
    (folder / "node_modules" / "freestyle").symlink_to(npm_laptop.npm.folder / "node_modules" / "freestyle")
    parts = list(samples(page("run-github-copilot-in-a-sandbox"), folder))
    client = (folder / "client.mjs").read_text()
    assert "{ onPermissionRequest: approveAll }" in client
    client = client.replace(
        "onPermissionRequest: approveAll", f"onPermissionRequest: approveAll, {_SCRIPTED}"
    )
    (folder / "client.mjs").write_text(client)
    (at,) = [number for number, part in enumerate(parts) if "copilot-agent" in part]
    model = json.dumps((SCRIPTS / "copilot" / "model_api.py").read_text())
    parts[at] += f'await agent.fs.writeTextFile("/root/model_api.py", {model});\n'
    parts[at] += 'await agent.exec("systemd-run --quiet --unit=model python3 /root/model_api.py");\n'
    parts[at] += 'console.log("agent is", (await agent.exec("hostname")).stdout.trim());\n'
    (at,) = [number for number, part in enumerate(parts) if "journalctl -u copilot -f" in part]
    parts[at] += "session.detach();\n"
    said = await follow(npm_laptop, folder, module(*parts), COPILOT_GITHUB_TOKEN="github_pat_none")
    (host,) = re.findall(r"^agent is (\S+)$", said, re.MULTILINE)
    assert len(re.findall(rf"^{host}$", said, re.MULTILINE)) == 2, said


async def test_openclaw_gateway_is_private_on_a_vpc(npm_laptop: NpmLaptop) -> None:
    """The part of the guide about VPCs, from a snapshot, with the service of the part before."""
    text = page("run-openclaw-in-a-sandbox")
    start, _, private = text.partition("## Keep It Private on a VPC")
    (service,) = re.findall(
        r'^(await vm\.fs\.writeTextFile\("/etc/openclaw\.env".*?)^```$', start, re.M | re.S
    )
    (check,) = [part for part in samples(start, npm_laptop.folder) if part.startswith("const check")]
    create, connect, browse = samples(private, npm_laptop.folder)
    command = json.dumps((SCRIPTS / "openclaw.py").read_text())
    builder = f"""
import {{ freestyle }} from "freestyle";
const {{ vm: builder }} = await freestyle.vms.create({{ name: "openclaw-builder" }});
const place = (await builder.exec("echo $(npm prefix -g)/bin/openclaw")).stdout.trim();
await builder.fs.writeTextFile(place, {command});
await builder.exec(`chmod +x ${{place}}`);
const {{ snapshotId }} = await builder.snapshot();
await builder.delete();
"""
    up, down = browse.splitlines()
    fetch = "curl -sS -m 60 'http://192.168.10.10:18789/?token=a-long-random-token'"
    folder = npm_laptop.folder / "openclaw"
    folder.mkdir()
    (folder / "node_modules").symlink_to(npm_laptop.npm.folder / "node_modules")
    program = module(builder, create, service, check, connect, up, f"shell({json.dumps(fetch)});", down)
    said = await follow(npm_laptop, folder, program, OPENAI_API_KEY="sk-none")
    assert '["http://192.168.10.10:18789"]' in said
    assert (folder / "freestyle-vpc.conf").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(folder)
