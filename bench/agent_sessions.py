"""Sessions of the OpenAI Agents SDK: round trips of a start and a patch, times to run, resume and fork.

The same program runs with the SDK's own client for this computer (unix_local), for scale.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from agents.editor import ApplyPatchOperation
from agents.sandbox import Manifest, SandboxPathGrant
from agents.sandbox.entries import BaseEntry, File, LocalDir
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import BaseSandboxSession
from agents.sandbox.snapshot import LocalSnapshotSpec
from measuring import (
    figure,
    host_facts,
    own_settings,
    removed_at_the_end,
    report,
    run,
    say,
    serving,
    since,
    timed,
)

from stead import AsyncStead
from stead.agents.openai import SteadSandboxClient, SteadSandboxClientOptions, SteadSession
from stead.installation import open_machines
from stead.settings import Size

BARS = {"start_execs": 3, "apply_patch_calls": 2, "exec_overhead_ms": 3.0}
"""The most that each may be."""


class Counted(httpx2.AsyncClient):
    """Counts the requests of the client; WebSockets are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    async def send(self, *arguments: Any, **options: Any) -> httpx2.Response:
        self.requests += 1
        return await super().send(*arguments, **options)


def tree(folder: Path, files: int) -> Manifest:
    """10 files of the manifest's own, and a local folder."""
    source = folder / f"folder{files}"
    for number in range(files):
        place = source / f"sub{number % 10}" / f"file{number}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"content {number}\n" * 20)
    entries: dict[str | Path, BaseEntry] = {f"note{n}.txt": File(content=b"note\n") for n in range(10)}
    entries["folder"] = LocalDir(src=source)
    return Manifest(entries=entries, extra_path_grants=(SandboxPathGrant(path=str(folder)),))


def update() -> ApplyPatchOperation:
    return ApplyPatchOperation(type="update_file", path="note1.txt", diff="-note\n+changed\n")


async def execs(session: BaseSandboxSession, samples: int) -> list[float]:
    return [await timed(session.exec("true", shell=False)) for _ in range(samples)]


async def local(folder: Path, samples: int) -> dict[str, Any]:
    """The same program with the client of the Agents SDK for this computer."""
    client = UnixLocalSandboxClient()
    grants = tree(folder, 20)
    session = await client.create(
        manifest=grants.model_copy(update={"root": str(folder / "root")}), options=None
    )
    results: dict[str, Any] = {"start_ms": round(await timed(session.start()), 1)}
    results["apply_patch_ms"] = round(await timed(session.apply_patch(update())), 1)
    results["exec_ms"] = figure(await execs(session, samples))
    await session.aclose()
    await client.delete(session)
    seeded = tree(folder, 1500).model_copy(update={"root": str(folder / "seeded")})
    session = await client.create(manifest=seeded, options=None)
    results["seed_1500_files_s"] = round(await timed(session.start()) / 1000, 2)
    await session.aclose()
    await client.delete(session)
    return results


async def stead_sessions(stead: AsyncStead, http: Counted, folder: Path, samples: int) -> dict[str, Any]:
    client = SteadSandboxClient(stead)
    snapshots = LocalSnapshotSpec(base_path=folder / "snapshots")
    results: dict[str, Any] = {}
    session = await client.create(manifest=tree(folder, 20), snapshot=snapshots)
    await session.vm.exec("true", check=True)
    before = http.requests
    say("the start of a session with 10 files and a folder of 20")
    results["start_ms"] = round(await timed(session.start()), 1)
    results["start_execs"] = http.requests - before
    before = http.requests
    results["apply_patch_ms"] = round(await timed(session.apply_patch(update())), 1)
    results["apply_patch_calls"] = http.requests - before
    say("commands through the session and through the SDK, in turns")
    ours, plain = [], []
    for _ in range(samples):
        plain.append(await timed(session.vm.exec(["true"])))
        ours += await execs(session, 1)
    results |= {"exec_ms": figure(ours), "sdk_exec_ms": figure(plain)}
    # Of pairs, because other work on the host makes single commands slower than this difference.
    differences = sorted(mine - theirs for mine, theirs in zip(ours, plain, strict=True))
    results["exec_overhead_ms"] = round(differences[samples // 2], 2)
    say("three forks")
    start = time.perf_counter()
    forks = await session.fork(3)
    for fork in forks:
        await fork.exec("true", shell=False)
    results["fork_3_ms"] = round(since(start), 1)
    for fork in forks:
        await fork.shutdown()
    say("resume: asleep, and from a snapshot")
    await session.stop()
    state = client.serialize_session_state(session.state)
    await session.vm.suspend()
    session, results["resume_asleep_ms"] = await resumed(client, state)
    await session.shutdown()
    session, results["resume_snapshot_ms"] = await resumed(client, state)
    await session.shutdown()
    say("a folder of 1,500 files")
    options = SteadSandboxClientOptions()
    session = await client.create(manifest=tree(folder, 1500), options=options)
    results["seed_1500_files_s"] = round(await timed(session.start()) / 1000, 2)
    await session.shutdown()
    return results


async def resumed(client: SteadSandboxClient, state: dict[str, Any]) -> tuple[SteadSession, float]:
    """A session from its state, as another process reads it, and the milliseconds until its first command."""
    start = time.perf_counter()
    session = await client.resume(client.deserialize_session_state(json.loads(json.dumps(state))))
    await session.start()
    await session.exec("true", shell=False)
    return session, round(since(start), 1)


async def measure(size: Size, samples: int) -> dict[str, Any]:
    with own_settings(size, pool=0) as settings, TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        async with removed_at_the_end(settings):
            async with open_machines(settings) as machines:
                await machines.template()
                facts = await host_facts(machines)
            async with (
                serving(settings) as server,
                Counted() as http,
                AsyncStead(server.key, base_url=server.url, http_client=http) as stead,
            ):
                results = await stead_sessions(stead, http, folder, samples)
                for snapshot in await stead.vms.snapshots.list():
                    await stead.vms.snapshots.delete(snapshot.id)
            say("the same on this computer")
            results["unix_local"] = await local(folder, samples)
    bars = {
        name: {"value": results[name], "most": most, "kept": results[name] <= most}
        for name, most in BARS.items()
    }
    return {"host": facts, **results, "bars": bars}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", default="2x1Gx20G", help="size of the VM")
    parser.add_argument("--samples", type=int, default=100, help="commands to measure")
    arguments = parser.parse_args()
    results = run(measure(Size.parse(arguments.size), arguments.samples))
    report(results, as_json=arguments.json)


if __name__ == "__main__":
    main()
