"""What one account can take from another: B's calls while A does its worst, beside B's calls alone.

For each load B is measured alone, under the load and alone again, in turns through all calls. A ratio is the
figure under the load divided by the mean of the two without it: `LOAD.CALL.p50_ratio`, `LOAD.CALL.p99_ratio`;
`n` is the number of calls under the load. A call that is lost, refused or answered wrongly counts as the
longest time that a call may take. `bars_met` needs every load and every call (`complete`). Runs as root.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from hostile_loads import LOADS, SILENT_RESOLVER, Scene
from measuring import (
    Figure,
    Served,
    clear,
    figure,
    half_of_host,
    host_facts,
    own_settings,
    report,
    run,
    say,
    serving,
    since,
)
from terminals import SHELL, SHELL_SCRIPT
from victim_calls import LIMIT, PAGE_PORT, WEIGHTS, WITH_VMS, Calls, Victim, http

from git import git, make
from stead import AsyncStead
from stead.host.authority import Authority
from stead.host.resources import measure as resources
from stead.identity.accounts import Accounts
from stead.installation import open_machines
from stead.sdk import AsyncVm
from stead.settings import Settings, Size
from stead.store.installation_id import open_database_of

BARS = {"p50": 2.0, "p99": 5.0}
HEALTH_BAR = 100.0
"""Milliseconds of /healthz."""
_PHASE, _SHORTEST_PHASE = 55.0, 15.0
"""Seconds after which the rest of the samples of a phase is left out; each call has at least one."""
_OVERHEAD = 10.0
"""Seconds for the begin of a load, or to settle down after it, when the time of phases is planned."""
_WARM_UP = 3
"""Rounds of calls that are not counted."""
_ROUND = 0.4
"""Seconds from one round of calls to the next, at least: refusals come at once, and a load lasts longer."""
_BEGIN, _END = 240.0, 90.0
"""Seconds in which the process of a load must begin, and end."""
_CALM = 3
"""Seconds in a row in which /healthz must be fast before B is measured alone again."""
_ATTEMPTS = 3
_HEALTH_EVERY = 0.1
_DISK_GIB = 4
_VMS = 2
"""VMs that A has beside those that its loads make."""
_PAGE = (
    "import http.server\n"
    "class Page(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.send_header('Content-Length', '2'); self.end_headers()\n"
    "        self.wfile.write(b'ok')\n"
    f"http.server.ThreadingHTTPServer(('0.0.0.0', {PAGE_PORT}), Page).serve_forever()\n"
)


@dataclass
class Phase:
    """Samples of B's calls in milliseconds, and of /healthz beside them."""

    times: dict[str, list[float]] = field(default_factory=dict)
    lost: dict[str, list[str]] = field(default_factory=dict)
    health: list[float] = field(default_factory=list)
    unhealthy: int = 0


def ratios(before: Phase, during: Phase, after: Phase) -> dict[str, Any]:
    """The figures of each call under a load, and what they are divided by without it."""
    results: dict[str, Any] = {}
    for call, times in during.times.items():
        found, alone = figure(times), [figure(phase.times[call]) for phase in (before, after)]
        results[call] = {}
        for part in BARS:
            base = sum(each[part] for each in alone) / len(alone)
            results[call] |= {
                f"{part}_ratio": round(found[part] / max(base, 0.01), 2),
                f"{part}_ms": found[part],
                f"{part}_alone_ms": round(base, 2),
            }
        lost = len(during.lost.get(call, [])) + len(after.lost.get(call, []))
        counted = min(each["n"] for each in alone)
        results[call] |= {"n": found["n"], "n_alone": counted, "lost": lost}
    return results


def health_of(phase: Phase) -> dict[str, float | int]:
    found: Figure = figure(phase.health) if phase.health else {"p50": 0.0, "p99": 0.0, "n": 0}
    most = round(max(phase.health, default=0.0), 2)
    return {**found, "max": most, "lost": phase.unhealthy}


def summary(loads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The worst of all pairs of a load and a call, and whether the bars are met."""
    pairs = [load[call] for load in loads.values() for call in WEIGHTS if call in load]
    results: dict[str, Any] = {
        f"worst_{part}_ratio": max((pair[f"{part}_ratio"] for pair in pairs), default=0.0) for part in BARS
    }
    health = [load["healthz_ms"] for load in loads.values()]
    results["healthz_max_ms"] = max((each["max"] for each in health), default=0.0)
    results["lost"] = sum(pair["lost"] for pair in pairs) + sum(each["lost"] for each in health)
    results["complete"] = set(loads) == set(LOADS) and len(pairs) == len(LOADS) * len(WEIGHTS)
    results["bars_met"] = (
        results["complete"]
        and all(results[f"worst_{part}_ratio"] <= bar for part, bar in BARS.items())
        and results["healthz_max_ms"] < HEALTH_BAR
        and results["lost"] == 0
    )
    return results


def times_in_round(weight: float, rounds: int, number: int) -> int:
    """How often a call is made in a round: `weight` times on average, and at least once in the first."""
    count = max(1, round(weight * rounds))
    return -(-count * (number + 1) // rounds) + (-count * number // rounds)


class NotBegun(Exception):
    """A load that the server did not get, or not to its end, so that nothing can be said about it."""


class Budget:
    """Shares the time that is left among the phases that are left."""

    def __init__(self, minutes: float) -> None:
        self._started = time.monotonic()
        self._end = self._started + minutes * 60
        self.phases = 1

    @property
    def elapsed(self) -> float:
        """Minutes since the start."""
        return (time.monotonic() - self._started) / 60

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def phase(self) -> float:
        """Seconds of the next phase."""
        each = (self._end - time.monotonic()) / max(1, self.phases) - _OVERHEAD
        self.phases -= 1
        return min(_PHASE, max(_SHORTEST_PHASE, each))


class Bench:
    """A server with the two accounts, and the phases of the measurement."""

    def __init__(
        self, victim: Victim, scene: Scene, calls: Sequence[str], rounds: int, budget: Budget
    ) -> None:
        self._victim = victim
        self._scene = scene
        self._calls = calls
        self._rounds = rounds
        self._budget = budget

    async def warm_up(self) -> None:
        """The first calls of a server take longer: without them the figures of B alone would be worse."""
        self._progress("calls that are not counted")
        self._budget.phases += 1
        await self.phase(_WARM_UP)

    async def phase(self, rounds: int | None = None) -> Phase:
        """All calls in turns, with /healthz beside them."""
        rounds = rounds or self._rounds
        phase = Phase(times={call: [] for call in self._calls})
        watching = asyncio.create_task(self._watch_health(phase))
        calls = Calls(self._victim)
        try:
            end = time.monotonic() + self._budget.phase()
            for number in range(rounds):
                following = time.monotonic() + _ROUND
                for call in self._calls:
                    # Slow calls are not in every round, but over the whole phase.
                    for _ in range(times_in_round(WEIGHTS[call], rounds, number)):
                        if phase.times[call] and time.monotonic() > end:
                            break
                        await self._sample(phase, call, getattr(calls, call))
                if time.monotonic() > end:
                    break
                await asyncio.sleep(max(0.0, following - time.monotonic()))
            return phase
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await calls.close()

    async def _sample(self, phase: Phase, name: str, call: Callable[[], Coroutine[Any, Any, float]]) -> None:
        try:
            async with asyncio.timeout(LIMIT):
                phase.times[name].append(await call())
        except Exception as error:
            phase.times[name].append(LIMIT * 1000)
            phase.lost.setdefault(name, []).append(f"{type(error).__name__}: {error}"[:300])

    async def _watch_health(self, phase: Phase) -> None:
        """In turns through the edge and at the plain port."""
        async with self._victim.client() as client:
            for number in itertools.count():
                start = time.perf_counter()
                try:
                    async with asyncio.timeout(LIMIT):
                        if number % 2:
                            await http(self._victim.served, "GET", "/healthz")
                        else:
                            await self._victim.ask(client, "GET", "/healthz")
                except (OSError, RuntimeError, TimeoutError, httpx2.HTTPError):
                    phase.unhealthy += 1
                phase.health.append(since(start))
                await asyncio.sleep(_HEALTH_EVERY)

    @contextlib.asynccontextmanager
    async def loaded(self, name: str) -> AsyncIterator[dict[str, int]]:
        """Run a load during the block, which is entered when it has begun; yields what became of it."""
        outcomes: dict[str, int] = {}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "ignore", Path(__file__).with_name("hostile_loads.py"), name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(self._scene)).encode() + b"\n")
            await process.stdin.drain()
            try:
                async with asyncio.timeout(_BEGIN):
                    begun = await process.stdout.readline()
            except TimeoutError:
                raise NotBegun(f"it had not begun after {_BEGIN:g} s") from None
            if begun != b"begun\n":
                raise NotBegun("its process has ended")
            yield outcomes
            if process.returncode is not None:
                raise NotBegun("its process has ended while B was measured")
        finally:
            if process.returncode is None:
                process.terminate()
            with contextlib.suppress(TimeoutError, ValueError):
                async with asyncio.timeout(_END):
                    outcomes.update(json.loads(await process.stdout.readline() or b"{}"))
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def alone(self) -> Phase:
        """B without a load. What a load left behind may last for a while, so lost calls are tried again."""
        for attempt in range(_ATTEMPTS):
            await self._settled()
            self._progress("B alone")
            phase = await self.phase()
            if not phase.lost or self._budget.is_over:
                break
            say(f"lost without a load, attempt {attempt + 1} of {_ATTEMPTS}: {phase.lost}")
        return phase

    async def _settled(self) -> None:
        """Wait until /healthz is fast, but for no more than a minute."""
        calm = 0
        for _ in range(60):
            probe = Phase()
            watching = asyncio.create_task(self._watch_health(probe))
            await asyncio.sleep(1)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            good = not probe.unhealthy and max(probe.health, default=HEALTH_BAR) < HEALTH_BAR
            calm = calm + 1 if good else 0
            if calm >= _CALM:
                return

    def _progress(self, words: str) -> None:
        say(f"{self._budget.elapsed:.1f} min: {words}")

    async def measure(self, loads: Sequence[str], left_out: dict[str, str]) -> dict[str, dict[str, Any]]:
        """The figures of each load. One that does not begin is left out, with the reason."""
        results: dict[str, dict[str, Any]] = {}
        self._budget.phases = 2 * len(loads) + 1
        await self.warm_up()
        before = await self.alone()
        for number, name in enumerate(loads):
            if self._budget.is_over:
                left_out[name] = "the time was over (--minutes)"
                self._progress(f"{name} is left out: {left_out[name]}")
                continue
            # Attempts that were repeated do not count.
            self._budget.phases = 2 * (len(loads) - number)
            self._progress(f"load {number + 1} of {len(loads)}: {name} begins")
            try:
                async with self.loaded(name) as outcomes:
                    self._progress(f"B while A does its worst: {name}")
                    during = await self.phase()
            except NotBegun as error:
                left_out[name] = str(error)
                self._progress(f"{name} is left out: {error}")
                continue
            after = await self.alone()
            results[name] = {
                **ratios(before, during, after),
                "healthz_ms": health_of(during),
                "load": dict(outcomes),
            }
            for call, errors in during.lost.items():
                say(f"{name}: {len(errors)} of {call} lost, such as {errors[0]}")
            say(json.dumps({name: results[name]}))
            before = after
        return results


# The two accounts


async def accounts(settings: Settings) -> tuple[str, str]:
    """Keys of A and B."""
    database = await open_database_of(settings.data)
    try:
        opened = Accounts(database, settings.account_limits(resources(settings)))
        return tuple([(await opened.create_key((await opened.create(name)).id))[1] for name in "ab"])  # type: ignore[return-value]
    finally:
        await database.dispose()


async def hosted(served: Served, work: Path, files: int, commits: int) -> tuple[str, str]:
    """A repository on the server with a history; its id and its last commit."""
    repo = json.loads(await http(served, "POST", "/git/v1/repo", {}))["repoId"]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        place = await asyncio.to_thread(make, Path(folder) / "made.git", files, commits)
        head = await asyncio.to_thread(git, "rev-parse", "main", cwd=place)
        url = f"{served.url}/{repo}"
        await asyncio.to_thread(git, "push", "-q", "--mirror", url, cwd=place, key=served.key)
    return str(repo), head.decode().strip()


async def with_page(vm: AsyncVm) -> str:
    """A web page and a shell in a VM; returns the page's host name."""
    await vm.fs.write_text("/root/page.py", _PAGE)
    await vm.fs.write_text(SHELL, SHELL_SCRIPT)
    start = "systemd-run --quiet --unit=page python3 /root/page.py"
    listening = f"until curl -sf http://127.0.0.1:{PAGE_PORT}/; do sleep 0.1; done"
    await vm.exec(f"chmod +x {SHELL}; {start}; {listening}", check=True, timeout=120)
    return (await vm.url(PAGE_PORT)).removeprefix("https://").partition(":")[0].rstrip("/")


@contextlib.asynccontextmanager
async def prepared(settings: Settings, served: Served, options: argparse.Namespace) -> AsyncIterator[Bench]:
    """Both accounts with their repositories and, if a load or a call needs them, VMs."""
    budget = Budget(options.minutes)
    say("accounts, repositories and VMs")
    key_a, key_b = await accounts(settings)
    a, b = (dataclasses.replace(served, key=key) for key in (key_a, key_b))
    ca = Authority.open(settings).certificate.decode()
    with_vms = any(LOADS[name].needs_vms for name in options.only) or WITH_VMS.intersection(options.calls)
    repos = [(await hosted(a, settings.data, *size))[0] for size in ((1, 1), (1, 1), (5000, 1))]
    repo, head = await hosted(b, settings.data, 200, 20)
    vms: list[str] = []
    page = vm = ""
    async with (
        AsyncStead(key_a, base_url=served.url) as stead_a,
        AsyncStead(key_b, base_url=served.url) as stead_b,
    ):
        if with_vms:
            vms = [(await stead_a.vms.create()).id for _ in range(_VMS)]
            created = await stead_b.vms.create()
            vm, page = created.id, await with_page(created)
        https = int(served.https_url.rpartition(":")[2])
        gateway = await stead_a.ssh_gateway()
    scene = Scene(
        url=served.url,
        https_port=https,
        ssh_port=gateway.port,
        api_name=settings.api_names[0],
        ca=ca,
        data=str(settings.data),
        key=key_a,
        vms=tuple(vms),
        repos=tuple(repos),
        builds=options.builds,
        floods=options.vms,
    )
    trusted = settings.data / "bench-ca.crt"
    trusted.write_text(ca)
    victim = Victim(
        served=b,
        https_port=https,
        api_name=scene.api_name,
        ca=trusted,
        trusting=ssl.create_default_context(cadata=ca),
        vm=vm,
        page=page,
        repo=repo,
        head=head,
    )
    yield Bench(victim, scene, options.calls, options.samples, budget)


def with_own_resolver(folder: Path) -> Sequence[str]:
    """A command prefix: the server and what it starts see a name server of this benchmark."""
    conf = folder / "resolv.conf"
    conf.write_text(f"nameserver {SILENT_RESOLVER}\n")
    # Only the mount of the root file system becomes private: namespaces in /run/netns stay visible outside.
    script = f'mount --make-private / && mount --bind {conf} /etc/resolv.conf && exec "$@"'
    return ("unshare", "--mount", "--propagation", "unchanged", "sh", "-c", script, "sh")


@contextlib.contextmanager
def small_disk(folder: Path, gib: int) -> Iterator[bool]:
    """Mount a file system of this size at a folder; False if this host allows no loop device."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp", prefix="stead-bench-disk-") as image:
        image.truncate(gib << 30)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", "-i", "8192", image.name], capture_output=True)
        mounted = made.returncode == 0 and (
            subprocess.run(["mount", "-o", "loop", image.name, folder], capture_output=True).returncode == 0
        )
        if mounted:
            folder.chmod(0o711)
        try:
            yield mounted
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", folder], check=True)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with own_settings(options.size, pool=options.pool) as plain, contextlib.ExitStack() as stack:
        settings = plain
        left_out: dict[str, str] = {}
        if "full_disk" in options.only:
            plain.data.chmod(0o711)
            disk = plain.data / "disk"
            disk.mkdir(mode=0o711)
            if stack.enter_context(small_disk(disk, _DISK_GIB)):
                settings = plain.replace(data=disk)
            else:
                left_out["full_disk"] = "this host allows no loop device"
                options.only = [name for name in options.only if name != "full_disk"]
        async with open_machines(settings) as machines:
            facts = await host_facts(machines)
        try:
            async with (
                serving(settings, with_own_resolver(plain.data)) as served,
                prepared(settings, served, options) as bench,
            ):
                loads = await bench.measure(options.only, left_out)
        finally:
            async with open_machines(settings.replace(pool=0)) as machines:
                await clear(machines)
        return {"host": facts, **summary(loads), **loads, "left_out": left_out}


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {name!r}: there are {', '.join(known)}")
        return [name for name in known if name in wanted]

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=Size.parse, default=half_of_host(), help="size of each VM")
    parser.add_argument("--pool", type=int, default=1, help="VMs that are kept ready for creates")
    weights = ", ".join(f"{call} {weight:g}" for call, weight in WEIGHTS.items())
    parser.add_argument(
        "--samples", type=int, default=40, help=f"rounds of calls in a phase; calls in a round: {weights}"
    )
    parser.add_argument(
        "--minutes", type=float, default=42.0, help="time of all phases, which are shortened to keep it"
    )
    parser.add_argument(
        "--only", type=names(list(LOADS)), default=list(LOADS), metavar="LOAD,...", help=", ".join(LOADS)
    )
    parser.add_argument(
        "--calls",
        type=names(list(WEIGHTS)),
        default=list(WEIGHTS),
        metavar="CALL,...",
        help=", ".join(WEIGHTS),
    )
    parser.add_argument("--vms", type=int, default=10, help="VMs that flood in `wake_floods`")
    parser.add_argument("--builds", type=int, default=64, help="builds of `sleeping_builds`")
    options = parser.parse_args()
    report(run(measure(options)), as_json=options.json)


if __name__ == "__main__":
    main()
