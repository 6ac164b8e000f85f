"""What checkpoints cost on this host: snapshots, forks, sleeping and waking; beside a plain create."""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any
from unittest.mock import patch

from internals import capture_of, engine_of, pool_of, settings_of, wake_of
from measuring import (
    Figure,
    clear,
    engine,
    figure,
    host_facts,
    proportional_memory,
    report,
    run,
    say,
    since,
    succeed,
    timed,
)

from stead.host.interface import Pause
from stead.host.memory_delta import Delta
from stead.machines import Machine, Machines
from stead.machines.records import Record
from stead.settings import Size

DIRTY_MIB = 100
USES = ((0, ""), (DIRTY_MIB, f"_dirty{DIRTY_MIB}"))
"""How much a machine has written before it is measured, and how its figures are named."""
STORM = 50
SIZES_MIB = (1024, 2048, 4096)
SIZES_DIRTY_MIB = (10, 100)
BARS = {
    "snapshot_pause_ms": 40,
    "fork_pause_ms_dirty100": 40,
    "fork_child_first_exec_over_create": 1.2,
    "fork_child_first_exec_over_create_dirty100": 1.5,
    "fork_10_over_fork": 3,
    "wake_first_exec_over_create": 1.3,
    "wake_first_exec_over_create_dirty100": 1.3,
    "chain_50_ratio": 1.3,
}
Results = dict[str, Any]


@dataclass(frozen=True)
class Amounts:
    """How often things are measured."""

    samples: int
    few: int
    """Samples of what takes long."""
    depth: int


@dataclass
class Samples:
    """What was measured of some snapshots or forks, in milliseconds."""

    pauses: list[Pause] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    """From the call to the answer of the child's first command."""

    @property
    def pause(self) -> Figure:
        return figure(pause.seconds * 1000 for pause in self.pauses)

    @property
    def copied(self) -> Figure:
        return figure(pause.pages * PAGESIZE / (1 << 20) for pause in self.pauses)

    @property
    def rate(self) -> Figure:
        return figure(pause.pages * PAGESIZE / (1 << 20) / pause.seconds for pause in self.pauses)


# Machines to measure with


async def new_machine(machines: Machines, dirty_mib: int = 0, size: Size | None = None) -> Machine:
    """A machine that has had some use, and has written so much memory since it was created."""
    machine = await machines.create(size=size)
    for _ in range(3):
        await succeed(machine.exec("true"))
    if dirty_mib:
        await succeed(machine.exec(f"head -c {dirty_mib}M /dev/urandom > /dev/shm/dirty"))
    return machine


async def touch(machine: Machine) -> None:
    """Write 1 MiB of memory: of what the machine has written already, if it has."""
    await succeed(machine.exec("dd if=/dev/urandom of=/dev/shm/dirty bs=1M count=1 conv=notrunc status=none"))


def last_pause(machines: Machines) -> Pause:
    pause = capture_of(machines).last_pause
    if pause is None:
        raise RuntimeError("no machine has stood still")
    return pause


async def snapshots(machines: Machines, machine: Machine, count: int) -> Samples:
    samples = Samples()
    for _ in range(count):
        await touch(machine)
        start = time.perf_counter()
        snapshot = await machine.snapshot()
        samples.calls.append(since(start))
        samples.pauses.append(last_pause(machines))
        await machines.snapshots.delete(snapshot.id)
    return samples


async def fork_once(machines: Machines, parent: Machine, samples: Samples) -> None:
    await touch(parent)
    start = time.perf_counter()
    (child,) = await parent.fork()
    samples.calls.append(since(start))
    await succeed(child.exec("true"))
    samples.answers.append(since(start))
    samples.pauses.append(last_pause(machines))
    await child.delete()


async def create_once(machines: Machines) -> float:
    """Milliseconds from a create to the answer of the new machine's first command."""
    start = time.perf_counter()
    machine = await machines.create()
    await succeed(machine.exec("true"))
    duration = since(start)
    await machine.delete()
    return duration


def ratio(samples: list[float], reference: list[float]) -> float:
    """Of what was measured in turns, so that whatever else the host does at the time weighs on both."""
    return round(statistics.median(samples) / statistics.median(reference), 2)


@contextlib.contextmanager
def apply_rates() -> Iterator[list[float]]:
    """MiB per second of all memory that is put into new processes within."""
    rates: list[float] = []
    apply_to = Delta.apply_to

    def measured(delta: Delta, *target: Any) -> None:
        start = time.perf_counter()
        apply_to(delta, *target)
        rates.append(delta.size / (1 << 20) / (time.perf_counter() - start))

    with patch.object(Delta, "apply_to", measured):
        yield rates


# The parts


async def create(machines: Machines, amounts: Amounts) -> Results:
    """The reference: a new machine that is restored from the template."""
    return {"create_first_exec_ms": figure([await create_once(machines) for _ in range(amounts.samples)])}


async def create_pooled(machines: Machines, amounts: Amounts) -> Results:
    results = []
    for _ in range(amounts.samples):
        await pool_of(machines).filled(60)
        results.append(await create_once(machines))
    return {"create_pooled_first_exec_ms": figure(results)}


async def snapshot(machines: Machines, amounts: Amounts) -> Results:
    machine = await new_machine(machines, DIRTY_MIB)
    samples = await snapshots(machines, machine, amounts.samples)
    return {
        "snapshot_pause_ms": samples.pause,
        "snapshot_total_ms": figure(samples.calls),
        "snapshot_copied_mb": samples.copied,
        "dirty_mb_s": samples.rate,
    }


async def fork(machines: Machines, amounts: Amounts) -> Results:
    results: Results = {}
    for dirty, suffix in USES:
        parent = await new_machine(machines, dirty)
        samples, creates = Samples(), []
        with apply_rates() as rates:
            for _ in range(amounts.samples):
                creates.append(await create_once(machines))
                await fork_once(machines, parent, samples)
        results |= {
            f"fork_pause_ms{suffix}": samples.pause,
            f"fork_ms{suffix}": figure(samples.calls),
            f"fork_child_first_exec_ms{suffix}": figure(samples.answers),
            f"fork_child_first_exec_over_create{suffix}": ratio(samples.answers, creates),
            f"fork_copied_mb{suffix}": samples.copied,
        }
        await parent.delete()
    # Of the larger memory: with little of it, calls cost more than copying.
    return results | {"apply_mb_s": figure(rates)}


async def fork_10(machines: Machines, amounts: Amounts) -> Results:
    parent = await new_machine(machines)
    results, single = [], Samples()
    for _ in range(amounts.few):
        await fork_once(machines, parent, single)
        await touch(parent)
        start = time.perf_counter()
        children = await parent.fork(10)
        results.append(since(start))
        await asyncio.gather(*(child.delete() for child in children))
    return {"fork_10_ms": figure(results), "fork_10_over_fork": ratio(results, single.calls)}


async def suspend(machines: Machines, amounts: Amounts) -> Results:
    results: Results = {}
    for dirty, suffix in USES:
        machine = await new_machine(machines, dirty)
        asleep, awake, creates = [], [], []
        for _ in range(amounts.samples):
            creates.append(await create_once(machines))
            await touch(machine)
            asleep.append(await timed(machine.suspend()))
            awake.append(await timed(succeed(machine.exec("true"))))
        results |= {
            f"suspend_ms{suffix}": figure(asleep),
            f"wake_first_exec_ms{suffix}": figure(awake),
            f"wake_first_exec_over_create{suffix}": ratio(awake, creates),
        }
        await machine.delete()
    return results


async def wake_storm(machines: Machines, amounts: Amounts) -> Results:
    """Many commands at one sleeping machine, all at once."""
    machine = await new_machine(machines)
    await machine.suspend()
    wake = wake_of(machines).wake
    wakes = 0

    async def counted(*arguments: Any) -> Record:
        nonlocal wakes
        wakes += 1
        return await wake(*arguments)

    start = time.perf_counter()
    with patch.object(wake_of(machines), "wake", counted):
        commands = (machine.exec(f"echo {number}") for number in range(STORM))
        answers = await asyncio.gather(*commands, return_exceptions=True)
    duration = since(start)
    right = sum(
        not isinstance(answer, BaseException) and answer.ok and answer.stdout == b"%d\n" % number
        for number, answer in enumerate(answers)
    )
    return {
        "wake_storm_ok": wakes == 1 and right == STORM,
        "wake_storm_wakes": wakes,
        "wake_storm_right_answers": right,
        "wake_storm_ms": round(duration, 2),
    }


async def footprint(machines: Machines, amounts: Amounts) -> Results:
    results: Results = {}
    for dirty, suffix in USES:
        parent = await new_machine(machines, dirty)
        children, added = [], []
        for _ in range(amounts.few):
            before = disk_used(settings_of(machines).data)
            (child,) = await parent.fork()
            await succeed(child.exec("true"))
            added.append((disk_used(settings_of(machines).data) - before) / (1 << 20))
            children.append(child)
        await asyncio.sleep(5)
        results |= {
            f"disk_mb_per_fork{suffix}": figure(added),
            f"mem_mb_per_fork{suffix}": proportional_memory(settings_of(machines), children),
        }
        await clear(machines)
    return results


def disk_used(folder: Path) -> int:
    used = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


async def chain(machines: Machines, amounts: Amounts) -> Results:
    """A fork of a fork of a fork: each parent is deleted once its child runs."""
    machine = await new_machine(machines)
    answers, pauses = [], []
    for _ in range(amounts.depth):
        start = time.perf_counter()
        (child,) = await machine.fork()
        await succeed(child.exec("true"))
        answers.append(since(start))
        pauses.append(last_pause(machines))
        await machine.delete()
        machine = child
    first, last = statistics.median(answers[:5]), statistics.median(answers[-5:])
    layers = await engine_of(machines).layers.chain((await machine.info()).layer)
    return {
        f"chain_{amounts.depth}_first_exec_ms": figure(answers),
        f"chain_{amounts.depth}_first_ms": round(first, 2),
        f"chain_{amounts.depth}_last_ms": round(last, 2),
        f"chain_{amounts.depth}_ratio": round(last / first, 2),
        f"chain_{amounts.depth}_layers": len(layers),
        f"chain_{amounts.depth}_copied_mb": Samples(pauses).copied,
    }


async def by_size(machines: Machines, amounts: Amounts) -> Results:
    """Pauses of machines of several sizes that have written the same."""
    results: Results = {}
    for memory in SIZES_MIB:
        size = replace(machines.default_size, memory_mib=memory)
        await machines.template(size)
        for dirty in SIZES_DIRTY_MIB:
            machine = await new_machine(machines, dirty, size)
            taken = await snapshots(machines, machine, amounts.few)
            forked = Samples()
            for _ in range(amounts.few):
                await fork_once(machines, machine, forked)
            results[f"{memory}M_dirty{dirty}"] = {
                "snapshot_pause_ms": taken.pause["p50"],
                "fork_pause_ms": forked.pause["p50"],
                "copied_mb": forked.copied["p50"],
            }
            await machine.delete()
    return {"by_size": results}


Part = Callable[[Machines, Amounts], Awaitable[Results]]
POOLED: dict[str, Part] = {"create_pooled": create_pooled}
PARTS: dict[str, Part] = {
    "create": create,
    "snapshot": snapshot,
    "fork": fork,
    "fork_10": fork_10,
    "suspend": suspend,
    "wake_storm": wake_storm,
    "footprint": footprint,
    "chain": chain,
    "by_size": by_size,
}


# All together


async def measure(size: Size, pool: int, amounts: Amounts, only: set[str]) -> Results:
    results: Results = {}
    for parts, target in ((PARTS, 0), (POOLED, pool)):
        chosen = {name: part for name, part in parts.items() if name in only}
        if not chosen:
            continue
        say("image and template")
        async with engine(size, target) as machines:
            results = await host_facts(machines) | {"pool": pool} | results
            # The first of a size is slower: something is prepared for all that follow.
            await (await new_machine(machines)).delete()
            for name, part in chosen.items():
                say(name)
                try:
                    results |= await part(machines, amounts)
                except Exception as error:
                    print(f"{name} failed: {error!r}", file=sys.stderr)
                    results.setdefault("failed", {})[name] = repr(error)
                await clear(machines)
    return results | {"bars": bars(results)}


def bars(results: Results) -> Results:
    """What was measured beside what is hoped for; what was not measured is left out."""
    found = {}
    for name, bar in BARS.items():
        if name in results:
            value = results[name]["p50"] if isinstance(results[name], dict) else results[name]
            found[name] = {"value": value, "bar": bar, "met": value <= bar}
    return found


def parts(text: str) -> set[str]:
    names = set(text.split(","))
    if unknown := names - {*PARTS, *POOLED}:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}")
    return names


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--size", default="2x1Gx20G", help="machine size (default %(default)s)")
    parser.add_argument("--pool", type=positive, default=2, help="pool of the pooled creates (default 2)")
    parser.add_argument(
        "--samples", type=positive, default=20, help="samples of each figure (default %(default)s)"
    )
    parser.add_argument(
        "--few", type=positive, default=5, help="samples of what takes long (default %(default)s)"
    )
    parser.add_argument("--depth", type=positive, default=50, help="forks of forks (default %(default)s)")
    parser.add_argument(
        "--only",
        type=parts,
        metavar="NAME[,NAME]",
        default={*PARTS, *POOLED},
        help=f"measure these parts alone: {', '.join((*PARTS, *POOLED))}",
    )
    arguments = parser.parse_args()
    amounts = Amounts(arguments.samples, arguments.few, arguments.depth)
    results = run(measure(Size.parse(arguments.size), arguments.pool, amounts, arguments.only))
    report(results, as_json=arguments.json)


if __name__ == "__main__":
    main()
