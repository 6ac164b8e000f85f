"""What the engine costs on this host: creates, commands, files, memory; beside QEMU's own floor."""

import argparse
import asyncio
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from internals import engine_of, pool_of, settings_of
from measuring import (
    Figure,
    engine,
    figure,
    host_facts,
    process_cpu,
    proportional_memory,
    report,
    run,
    say,
    since,
    succeed,
    timed,
)

from stead.guest.execution import ExecResult
from stead.host.interface import HostPlatform
from stead.host.vm import QemuVm, Spawner, VmFiles
from stead.machines import Machine, Machines
from stead.processes import kill
from stead.settings import Size


def floor_arguments(facts: HostPlatform, qmp: int) -> list[str]:
    """The least QEMU that answers QMP: what no machine can start faster than."""
    return [
        "qemu-system-x86_64",
        *("-no-user-config", "-nodefaults", "-display", "none", "-S"),
        *("-machine", facts.machine, "-m", "64M"),
        *("-accel", "kvm" if facts.accelerator == "kvm" else "tcg,thread=multi"),
        *("-chardev", f"socket,id=qmp,fd={qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
    ]


async def qmp_floor(facts: HostPlatform, uid: int, samples: int) -> Figure:
    """QEMU's own start, from exec to the monitor's greeting: nothing of ours, no guest."""
    spawner = Spawner()
    results = []
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        files = VmFiles(Path(folder), Path(folder))
        for _ in range(samples):
            start = time.perf_counter()
            process = await spawner.spawn(
                lambda qmp: floor_arguments(facts, qmp), files, uid=uid, kvm=facts.accelerator == "kvm"
            )
            with socket.socket(socket.AF_UNIX) as monitor:
                monitor.connect(str(files.qmp))
                await asyncio.to_thread(monitor.recv, 4096)
            results.append(since(start))
            await kill(process)
    spawner.close()
    return figure(results)


async def creates(
    machines: Machines, samples: int, ready: Callable[[], Awaitable[object]]
) -> tuple[Figure, Figure]:
    """Create until running, and until the first command's answer."""
    running, answered = [], []
    for _ in range(samples):
        await ready()
        start = time.perf_counter()
        machine = await machines.create()
        running.append(since(start))
        await succeed(machine.exec("true"))
        answered.append(since(start))
        await machine.delete()
    return figure(running), figure(answered)


async def clone_costs(machines: Machines, samples: int) -> dict[str, dict[str, Figure]]:
    """What a restored clone costs its QEMU: until it runs with its identity, and until its first answer."""
    costs: dict[str, dict[str, list[float]]] = {"clone_cpu_ms": {}, "clone_blocks": {}}
    for _ in range(samples):
        machine = await machines.create()
        await note_cost(machines, machine, "running", costs)
        await succeed(machine.exec("true"))
        await note_cost(machines, machine, "first_exec", costs)
        await machine.delete()
    return {
        name: {at: figure(found) for at, found in points.items()} for name, points in costs.items() if points
    }


async def note_cost(
    machines: Machines, machine: Machine, at: str, costs: dict[str, dict[str, list[float]]]
) -> None:
    """CPU time of a VM's QEMU since its start and, under emulation, the blocks of code it has translated."""
    live = engine_of(machines).processes.get(machine.id)
    if live is None or not isinstance(live.vm, QemuVm):
        raise RuntimeError(f"{machine.id} has no QEMU")
    costs["clone_cpu_ms"].setdefault(at, []).append(process_cpu(live.vm.process.pid))
    if (await engine_of(machines).host.platform()).accelerator == "tcg":
        told = await live.vm.execute("human-monitor-command", **{"command-line": "info jit"})
        blocks = re.search(r"^TB count +(\d+)", told, re.MULTILINE)
        if blocks is None:
            raise RuntimeError(f"`info jit` does not tell the number of blocks: {told}")
        costs["clone_blocks"].setdefault(at, []).append(int(blocks[1]))


async def cold_boots(machine: Machine, samples: int) -> Figure:
    results = []
    for _ in range(samples):
        await machine.stop()

        async def boot() -> None:
            await machine.start()
            await machine.exec("systemctl is-system-running --wait")

        results.append(await timed(boot()))
    return figure(results)


async def commands(machine: Machine, samples: int) -> tuple[Figure, Figure]:
    """Host-side time of `true`, and that minus what the guest itself measured."""
    for _ in range(3):
        await machine.exec("true")
    whole, overhead = [], []
    for _ in range(samples):
        start = time.perf_counter()
        result = await succeed(machine.exec("true"))
        whole.append(since(start))
        overhead.append(whole[-1] - result.duration * 1000)
    return figure(whole), figure(overhead)


async def burst(machines: Machines, count: int) -> tuple[int, Figure]:
    async def one() -> tuple[float, Machine]:
        start = time.perf_counter()
        machine = await machines.create()
        return since(start), machine

    results = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    made = [result for result in results if not isinstance(result, BaseException)]
    for failure in results:
        if isinstance(failure, BaseException):
            print(f"a create of the burst failed: {failure!r}", file=sys.stderr)
    answers = await asyncio.gather(*(machine.exec("true") for _, machine in made), return_exceptions=True)
    ok = sum(isinstance(answer, ExecResult) and answer.ok for answer in answers)
    await asyncio.gather(*(machine.delete() for _, machine in made))
    return ok, figure([duration for duration, _ in made])


async def idle_memory(machines: Machines, count: int) -> Figure:
    """Proportional memory of clones that were created and left alone."""
    owned = [await machines.create() for _ in range(count)]
    await asyncio.sleep(5)
    memory = proportional_memory(settings_of(machines), owned)
    for machine in owned:
        await machine.delete()
    return memory


async def files(machine: Machine, size_mib: int) -> tuple[float, float]:
    block = os.urandom(1 << 20)

    async def content() -> AsyncIterator[bytes]:
        for _ in range(size_mib):
            yield block

    up = await timed(machine.files().write("/var/tmp/bench", content(), size=size_mib << 20))

    async def download() -> None:
        received = 0
        async for chunk in machine.files().stream("/var/tmp/bench"):
            received += len(chunk)
        if received != size_mib << 20:
            raise RuntimeError(f"{received} bytes came back of {size_mib} MiB")

    down = await timed(download())
    await machine.files().remove("/var/tmp/bench")
    return round(size_mib / up * 1000, 1), round(size_mib / down * 1000, 1)


async def measure(size: Size, samples: int, boots: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    say("image and template")
    async with engine(size, pool=2) as machines:
        results |= await host_facts(machines)
        results["pool"] = settings_of(machines).pool
        await pool_of(machines).filled(120)
        say("QEMU's floor")
        results["qmp_floor_ms"] = await qmp_floor(
            await engine_of(machines).host.platform(), settings_of(machines).disk_uid, samples
        )
        say("creates from the pool")
        running, answered = await creates(machines, samples, lambda: pool_of(machines).filled(60))
        results |= {"create_running_ms": running, "create_first_exec_ms": answered}
        say("idle memory")
        results["pss_idle_clone_mb"] = await idle_memory(machines, 4)
        say("a burst of 20")
        await pool_of(machines).filled(60)
        ok, spread = await burst(machines, 20)
        results |= {"burst_20_ok": ok, "burst_20_p50_ms": spread["p50"], "burst_20_ms": spread}
    async with engine(size, pool=0) as machines:
        say("creates without the pool")
        running, answered = await creates(machines, samples, lambda: asyncio.sleep(0))
        results |= {"create_running_unpooled_ms": running, "create_first_exec_unpooled_ms": answered}
        say("CPU and translated blocks of a clone")
        results |= await clone_costs(machines, samples)
        machine = await machines.create()
        say("commands")
        whole, overhead = await commands(machine, samples * 2)
        results |= {"exec_true_ms": whole, "exec_overhead_ms": overhead}
        say("files")
        results["file_up_mb_s"], results["file_down_mb_s"] = await files(machine, 256)
        say("cold boots")
        results["cold_boot_ms"] = await cold_boots(machine, boots)
        await machine.delete()
    floor, cold = results["qmp_floor_ms"]["p50"], results["cold_boot_ms"]["p50"]
    results["create_running_over_floor"] = round(results["create_running_ms"]["p50"] / floor, 2)
    results["cold_boot_over_first_exec"] = round(cold / results["create_first_exec_ms"]["p50"], 1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--size", default="2x1Gx20G", help="machine size (default %(default)s)")
    parser.add_argument(
        "--samples", type=int, default=20, help="samples of each figure (default %(default)s)"
    )
    parser.add_argument("--boots", type=int, default=3, help="cold boots (default %(default)s)")
    arguments = parser.parse_args()

    results = run(measure(Size.parse(arguments.size), arguments.samples, arguments.boots))
    report(results, as_json=arguments.json)


if __name__ == "__main__":
    main()
