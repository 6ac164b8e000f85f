"""What the benchmarks share: an installation of their own, figures, the facts of the host, the table."""

import asyncio
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from internals import engine_of

from stead.guest.execution import ExecResult
from stead.host.authority import Authority
from stead.host.vm import running_machines
from stead.installation import open_installation, open_machines
from stead.installation_parts import Installation
from stead.machines import Machine, Machines, SnapshotState
from stead.settings import Settings, Size
from stead.tasks import finished

Figure = dict[str, float | int]
T = TypeVar("T")


def figure(samples: Iterable[float]) -> Figure:
    ordered = sorted(samples)
    return {
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2),
        "n": len(ordered),
    }


def half_of_host() -> Size:
    """A VM with half of the host's CPUs, at most two: another VM, or the edge, is measured beside it."""
    return Size(min(2, max(1, len(os.sched_getaffinity(0)) // 2)), 1024, 20)


def since(start: float) -> float:
    """Milliseconds since a reading of the performance counter."""
    return (time.perf_counter() - start) * 1000


async def timed(work: Awaitable[object]) -> float:
    """Milliseconds that something takes."""
    start = time.perf_counter()
    await work
    return since(start)


async def succeed(work: Awaitable[ExecResult]) -> ExecResult:
    result = await work
    if not result.ok:
        raise RuntimeError(f"a command failed: {result}")
    return result


def process_cpu(pid: int) -> float:
    """Milliseconds of CPU that a process has used since its start, in all of its threads."""
    return time.clock_gettime(~pid << 3 | 2) * 1000  # its CPU-time clock, as clock_getcpuclockid(3) names it


def proportional_memory(settings: Settings, machines: Iterable[Machine]) -> Figure:
    """MiB of the machines' QEMUs; what several have in common is shared out among them."""
    ids = {machine.id for machine in machines}
    sizes = []
    for pid, name in running_machines(settings).items():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if name in ids and line.startswith("Pss:"):
                sizes.append(int(line.split()[1]) / 1024)
    return figure(sizes)


# The installation


@contextlib.asynccontextmanager
async def installation(size: Size, pool: int) -> AsyncIterator[Installation]:
    """A whole installation in a folder of its own."""
    with own_settings(size, pool) as settings:
        async with removed_at_the_end(settings), open_installation(settings) as opened:
            await opened.machines.template()
            yield opened
            await clear(opened.machines)


@contextlib.asynccontextmanager
async def engine(size: Size, pool: int) -> AsyncIterator[Machines]:
    """The VMs of an installation alone: nothing of Git hosting takes the CPU meanwhile."""
    with own_settings(size, pool) as settings:
        async with removed_at_the_end(settings), open_machines(settings) as machines:
            await machines.template()
            yield machines
            await clear(machines)


@dataclass(frozen=True)
class Served:
    """A server in a process of its own, as users run it."""

    pid: int
    url: str
    key: str
    https_url: str


@contextlib.asynccontextmanager
async def serving(settings: Settings, prefix: Sequence[str] = ()) -> AsyncIterator[Served]:
    """`stead serve` on an installation, with the key that its first start creates.

    `prefix` is a command that becomes the server, such as `nice`.
    """
    environment = {
        **os.environ,
        "STEAD_DATA": str(settings.data),
        "STEAD_CACHE": str(settings.cache_folder),
        "STEAD_CA": str(settings.ca or ""),
        "STEAD_DEFAULT_SIZE": str(settings.default_size),
        "STEAD_POOL": str(settings.pool),
        "STEAD_IDLE_TIMEOUT": "never",
        "STEAD_LISTEN": "127.0.0.1:0",
        "STEAD_HTTPS_LISTEN": "127.0.0.1:0",
        "STEAD_HTTP_LISTEN": "127.0.0.1:0",
        "STEAD_SSH_LISTEN": "127.0.0.1:0",
    }
    process = await asyncio.create_subprocess_exec(
        *prefix,
        Path(sys.executable).parent / "stead",
        *("serve", "--json", "--log-level", "error"),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        said = json.loads(await asyncio.wait_for(process.stdout.readline(), 120))
        key = Path(said["keyFile"]).read_text().strip()
        yield Served(process.pid, said["url"], key, said["httpsUrl"])
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)


def _shared_authority(shared: Settings) -> Path:
    """The folder of a CA that all runs share: templates contain its certificate."""
    if shared.ca is None:
        Authority.open(Settings(data=shared.cache_folder))
    return shared.ca or shared.cache_folder / "ca"


@contextlib.contextmanager
def own_settings(size: Size, pool: int) -> Iterator[Settings]:
    """A data folder of its own, with the shared cache."""
    shared = Settings.load()
    with tempfile.TemporaryDirectory(prefix="stead-bench-", dir="/var/tmp") as folder:
        yield Settings(
            data=Path(folder),
            sealing_key=Path(folder) / "sealing-key",
            cache=shared.cache_folder,
            ca=_shared_authority(shared),
            default_size=size,
            pool=pool,
            idle_timeout=None,
            accelerator=shared.accelerator,
            https_listen="127.0.0.1:0",
            http_listen="127.0.0.1:0",
        )


@contextlib.asynccontextmanager
async def removed_at_the_end(settings: Settings) -> AsyncIterator[None]:
    """Remove everything of an installation at the end, also after an error."""
    try:
        yield
    except BaseException:
        await finished(_remove_remains(settings))
        raise


async def clear(machines: Machines) -> None:
    """Delete every machine and every snapshot."""
    for machine in await machines.list():
        await machines.delete(machine.id, forget=True)
    for snapshot in await machines.snapshots.list():
        if snapshot.state is SnapshotState.READY:
            await machines.snapshots.delete(snapshot.id)


async def _remove_remains(settings: Settings) -> None:
    """Opened anew, an installation knows of all that an interrupted operation left behind."""
    if (settings.data / "stead.db").exists():
        say("nothing more: removing the machines")
        async with open_machines(settings.replace(pool=0)) as machines:
            await clear(machines)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a benchmark. Ctrl-C and SIGTERM end it in good order."""
    # A shell may have had SIGINT ignored for what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        sys.exit(130)


# What is told


def say(words: str) -> None:
    print(f"measuring: {words}", file=sys.stderr, flush=True)


async def host_facts(machines: Machines) -> dict[str, Any]:
    facts = await engine_of(machines).host.platform()
    return {
        "accelerator": facts.accelerator,
        "qemu": ".".join(map(str, facts.version)),
        "cores": os.cpu_count(),
        "host_kernel": platform.release(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "size": str(machines.default_size),
    }


def report(results: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results))
    else:
        show(results)


def show(results: dict[str, Any], indent: str = "") -> None:
    """The results for people, one to a line; a dictionary of dictionaries is a section."""
    for name, value in results.items():
        if isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()):
            print(f"{indent}{name}")
            show(value, indent + "  ")
            continue
        words = " ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        print(f"{indent + name:46} {words}")
