"""Route files and the gate's decisions, without Caddy."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from stead.edge import gate as gates
from stead.edge.gate import Gate, GateRequest
from stead.edge.pages import Refusal
from stead.edge.routes import AwakeVm, RouteFiles, host_of
from stead.edge.unmapped import UnmappedFiles
from stead.errors import MachineNotFound, StartFailed
from stead.machines.processes import Eviction, EvictionKind
from stead.shares import KeyedLimit
from support.waiting import until

ENDED = Eviction(EvictionKind.ENDED, "the VM was stopped")


@dataclass(frozen=True)
class Mapped:
    machine: str
    port: int = 80
    domain: str = ""
    account: str = ""


@dataclass
class World:
    """VMs, mappings and ports that a test sets."""

    folder: Path
    mappings: dict[str, Mapped] = field(default_factory=dict)
    up: dict[str, AwakeVm] = field(default_factory=dict)
    asleep: set[str] = field(default_factory=set)
    listening: set[tuple[str, int]] = field(default_factory=set)
    wakes: list[str] = field(default_factory=list)
    ended_runs: list[tuple[str, str]] = field(default_factory=list)
    failure: Exception | None = None
    dials: int = 0

    def __post_init__(self) -> None:
        group = os.getgid()
        self.files = RouteFiles(
            self.folder, self, lambda vm, at: self.ended_runs.append((vm, str(at))), group, most=3
        )
        self.unmapped = UnmappedFiles(self.folder.parent / "unmapped", self, group, most=3)
        self.closed = asyncio.Event()
        self.closed.set()
        self.gate = Gate(self, self, self.files, self.unmapped, self.dial, lambda _: self.closed.wait())

    def route(self, hostname: str) -> Mapped | None:
        return self.mappings.get(hostname) or self.mappings.get(f"*.{hostname.partition('.')[2]}")

    def is_up(self, machine: str) -> bool:
        return machine in self.up

    async def wake(self, machine: str) -> AwakeVm:
        if self.failure is not None:
            raise self.failure
        if machine in self.asleep:
            self.wakes.append(machine)
            await asyncio.sleep(0)
            self.asleep.discard(machine)
            self.start(machine)
        if machine not in self.up:
            raise MachineNotFound(machine)
        return self.up[machine]

    async def ended(self, machine: str) -> None: ...

    async def dial(self, address: IPv4Address, port: int) -> None:
        self.dials += 1
        if (str(address), port) not in self.listening:
            raise ConnectionRefusedError

    def start(self, machine: str) -> AwakeVm:
        address = IPv4Address("100.64.0.4") + int(machine)
        self.up[machine] = AwakeVm(address, asyncio.get_running_loop().create_future())
        return self.up[machine]

    def end(self, machine: str) -> None:
        self.up.pop(machine).eviction.set_result(ENDED)

    @property
    def found(self) -> dict[str, list[str]]:
        return {
            each.name: sorted(file.name for file in each.iterdir()) for each in sorted(self.folder.iterdir())
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path / "routes")


async def _code(world: World, host: str, **more: object) -> str | int:
    decision = await world.gate.admit(GateRequest(host, **more))  # type: ignore[arg-type]
    return decision.status if isinstance(decision, Refusal) else decision


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("App.Example.COM", "app.example.com"),
        ("a.example.com.", "a.example.com"),
        ("localhost", "localhost"),
        ("..", None),
        (".", None),
        ("", None),
        ("a..b", None),
        ("a/b", None),
        ("../x", None),
        ("*.example.com", None),
        ("-a.example", None),
        ("a_b.example", None),
        ("x" * 300, None),
        ("a.example\n", None),
        ("ä.example", None),
    ],
)
def test_only_plain_host_names_become_names_of_folders(text: str, host: str | None) -> None:
    assert host_of(text) == host


async def test_an_admitted_name_gets_a_file_until_the_run_of_its_vm_ends(world: World) -> None:
    world.mappings = {"a.dev": Mapped("1"), "b.dev": Mapped("1", 8080), "c.dev": Mapped("2")}
    world.start("1")
    world.start("2")
    world.listening = {("100.64.0.5", 80), ("100.64.0.5", 8080), ("100.64.0.6", 80)}
    assert await _code(world, "A.dev.") == "100.64.0.5:80"
    assert await _code(world, "b.dev") == "100.64.0.5:8080"
    assert await _code(world, "c.dev") == "100.64.0.6:80"
    assert world.found == {
        "a.dev": ["100.64.0.5:80"],
        "b.dev": ["100.64.0.5:8080"],
        "c.dev": ["100.64.0.6:80"],
    }
    world.end("1")
    await asyncio.sleep(0)
    assert world.found == {"c.dev": ["100.64.0.6:80"]}
    assert world.ended_runs == [("1", "100.64.0.5")]


async def test_the_end_of_a_run_is_not_reported_after_the_close(world: World) -> None:
    """VMs may outlive the edge."""
    world.mappings = {"a.dev": Mapped("1"), "b.dev": Mapped("2")}
    world.listening = {("100.64.0.5", 80), ("100.64.0.6", 80)}
    for machine, host in (("1", "a.dev"), ("2", "b.dev")):
        world.start(machine)
        await _code(world, host)
    world.end("1")
    await asyncio.sleep(0)
    assert world.ended_runs == [("1", "100.64.0.5")]
    world.files.close()
    world.end("2")
    await asyncio.sleep(0)
    assert world.ended_runs == [("1", "100.64.0.5")]


async def test_a_file_of_the_next_run_survives_the_end_of_the_run_before(world: World) -> None:
    world.mappings = {"a.dev": Mapped("1")}
    world.listening = {("100.64.0.5", 80)}
    before = world.start("1")
    assert await _code(world, "a.dev") == "100.64.0.5:80"
    world.start("1")
    assert await _code(world, "a.dev") == "100.64.0.5:80"
    before.eviction.set_result(ENDED)
    await asyncio.sleep(0)
    assert world.found == {"a.dev": ["100.64.0.5:80"]}


async def test_a_changed_mapping_loses_its_file_and_others_keep_theirs(world: World) -> None:
    world.mappings = {"a.dev": Mapped("1"), "b.dev": Mapped("1")}
    world.start("1")
    world.start("2")
    world.listening = {("100.64.0.5", 80), ("100.64.0.6", 80)}
    for host in ("a.dev", "b.dev"):
        await _code(world, host)
    world.mappings["a.dev"] = Mapped("2")
    world.files.recheck()
    assert world.found == {"b.dev": ["100.64.0.5:80"]}
    assert await _code(world, "a.dev") == "100.64.0.6:80"
    world.end("1")
    await asyncio.sleep(0)
    assert world.found == {"a.dev": ["100.64.0.6:80"]}


async def test_the_number_of_files_is_bounded(world: World) -> None:
    world.start("1")
    world.listening = {("100.64.0.5", 80)}
    for number in range(5):
        world.mappings[f"{number}.dev"] = Mapped("1")
        await _code(world, f"{number}.dev")
    assert list(world.found) == ["2.dev", "3.dev", "4.dev"]


async def test_many_names_of_one_account_leave_the_files_of_others(world: World) -> None:
    world.start("1")
    world.listening = {("100.64.0.5", 80)}
    world.mappings = {"*.wild.dev": Mapped("1", account="busy"), "quiet.dev": Mapped("1", account="quiet")}
    await _code(world, "quiet.dev")
    for number in range(5):
        await _code(world, f"{number}.wild.dev")
    assert list(world.found) == ["3.wild.dev", "4.wild.dev", "quiet.dev"]


async def test_only_files_of_changed_names_are_looked_at(world: World) -> None:
    world.start("1")
    world.listening = {("100.64.0.5", 80)}
    world.mappings = {"*.wild.dev": Mapped("1"), "a.dev": Mapped("1")}
    for host in ("x.wild.dev", "a.dev"):
        await _code(world, host)
    world.mappings = {}
    world.files.recheck(["b.dev", "*.other.dev", "wild.dev"])
    assert list(world.found) == ["a.dev", "x.wild.dev"]
    world.files.recheck(["*.wild.dev"])
    assert list(world.found) == ["a.dev"]
    world.files.recheck(["a.dev"])
    assert world.found == {}


async def test_names_that_are_not_mapped_are_files_until_they_are(world: World) -> None:
    folder = world.folder.parent / "unmapped"

    def found() -> list[str]:
        return sorted(each.name for each in folder.iterdir())

    for host in ("A.dev", "x.wild.dev", "../etc"):
        assert await _code(world, host, client="192.0.2.1") == 404
    assert found() == ["a.dev", "x.wild.dev"]
    assert await _code(world, "b.dev", client="2001:db8::1") == 404
    assert await _code(world, "c.dev", client="::ffff:192.0.2.1") == 404
    assert found() == ["b.dev", "c.dev", "x.wild.dev"], "the client with the most names has lost its oldest"
    world.mappings = {"*.wild.dev": Mapped("1"), "b.dev": Mapped("1")}
    world.unmapped.recheck(["*.wild.dev"])
    assert found() == ["b.dev", "c.dev"]
    world.unmapped.recheck()
    assert found() == ["c.dev"]


async def test_names_and_vms_that_do_not_exist_are_not_found(world: World) -> None:
    world.mappings = {"a.dev": Mapped("1")}
    assert await _code(world, "b.dev") == 404
    assert await _code(world, "../etc") == 404
    assert await _code(world, "a.dev") == 404
    assert world.found == {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_POLL", 0.001)
    monkeypatch.setattr(gates, "_RUNNING_HOLD", 0.1)


async def test_a_port_of_a_running_vm_is_waited_for_until_the_deadline(world: World, quick: None) -> None:
    world.mappings = {"a.dev": Mapped("1")}
    world.start("1")
    before = asyncio.get_running_loop().time()
    assert await _code(world, "a.dev") == 502
    assert asyncio.get_running_loop().time() - before >= 0.1
    assert world.dials > 1
    assert world.found == {}


async def test_requests_that_wait_for_one_port_share_the_attempts_to_connect(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_POLL", 0.05)
    world.mappings = {"a.dev": Mapped("1"), "b.dev": Mapped("1")}
    world.start("1")
    loop = asyncio.get_running_loop()
    begun = loop.time()
    waiting = [asyncio.create_task(_code(world, host)) for host in ("a.dev", "b.dev") * 30]
    await until(lambda: world.dials >= 3, 60)
    assert world.dials <= 3 + (loop.time() - begun) / 0.05
    world.listening = {("100.64.0.5", 80)}
    assert set(await asyncio.gather(*waiting)) == {"100.64.0.5:80"}


@pytest.mark.parametrize("state", ["up", "asleep"])
async def test_only_so_many_requests_wait(
    world: World, state: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a VM, for those of an account, of an address, and in all; the others are answered at once."""
    monkeypatch.setattr(gates, "_HOLD", 0.1)
    world.gate._held = KeyedLimit(6, 4, per_caller=2)
    world.gate._held_by_client = KeyedLimit(per_key=3)
    owners = {"1": "busy", "2": "busy", "3": "busy", "4": "quiet", "5": "other"}
    world.mappings = {f"{vm}.dev": Mapped(vm, account=account) for vm, account in owners.items()}
    for vm in owners:
        world.start(vm) if state == "up" else world.asleep.add(vm)
    waiting: list[asyncio.Task[str | int]] = []

    async def waits(host: str, client: str) -> bool:
        task = asyncio.create_task(_code(world, host, client=client))
        await asyncio.sleep(0)
        if task.done():
            assert task.result() == 503
            return False
        waiting.append(task)
        return True

    async def many(host: str, client: str = "127.0.0.1", count: int = 3) -> list[bool]:
        return [await waits(host, client) for _ in range(count)]

    assert await many("1.dev") == [True, True, False], "two of a VM"
    assert await many("2.dev", "192.0.2.1") == [True, True, False]
    assert await many("3.dev", "192.0.2.2") == [False] * 3, "four of an account"
    assert await many("4.dev", "192.0.2.1") == [True, False, False], "three of an address"
    assert await many("4.dev", "192.0.2.2") == [True, False, False]
    assert await many("5.dev", "192.0.2.3") == [False] * 3, "six in all"
    assert set(await asyncio.gather(*waiting)) == {502}
    assert (world.gate._held.used, world.gate._held_by_client.used) == (0, 0)


async def test_a_changed_mapping_ends_the_wait_for_a_port(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_POLL", 0.001)
    world.mappings = {"a.dev": Mapped("1"), "b.dev": Mapped("1")}
    world.start("1")
    world.start("2")
    world.listening = {("100.64.0.6", 80)}
    moved, removed = (asyncio.create_task(_code(world, host)) for host in ("a.dev", "b.dev"))
    await asyncio.sleep(0.05)
    assert not moved.done() and not removed.done()
    world.mappings = {"a.dev": Mapped("2")}
    async with asyncio.timeout(60):
        assert (await moved, await removed) == ("100.64.0.6:80", 404)


async def test_a_vm_that_is_suspended_while_a_request_waits_for_its_port_is_woken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_POLL", 0.001)
    world.mappings = {"a.dev": Mapped("1")}
    world.start("1")
    waiting = asyncio.create_task(_code(world, "a.dev"))
    await asyncio.sleep(0.05)
    world.end("1")
    world.asleep = {"1"}
    world.listening = {("100.64.0.5", 80)}
    assert await waiting == "100.64.0.5:80"
    assert world.wakes == ["1"]


async def test_requests_wait_for_the_port_of_a_vm_that_they_woke_with_one_wake(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_POLL", 0.001)
    world.mappings = {"a.dev": Mapped("1"), "b.dev": Mapped("1")}
    world.asleep = {"1"}
    waiting = [asyncio.create_task(_code(world, host)) for host in ("a.dev", "b.dev") * 30]
    await asyncio.sleep(0.05)
    assert world.wakes == ["1"]
    assert not any(task.done() for task in waiting)
    world.listening = {("100.64.0.5", 80)}
    assert set(await asyncio.gather(*waiting)) == {"100.64.0.5:80"}


async def test_a_browser_gets_a_page_that_reloads_when_the_port_takes_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_BROWSER_HOLD", 0.01)
    world.mappings = {"a.dev": Mapped("1")}
    world.asleep = {"1"}
    decision = await world.gate.admit(GateRequest("a.dev", browser=True))
    assert isinstance(decision, Refusal)
    assert (decision.status, decision.reload) == (503, True)
    await world.gate.close()


async def test_reasons_are_logged_under_the_trace_id_of_the_answer(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.mappings = {"a.dev": Mapped("1", domain="a.dev"), "b.dev": Mapped("1", domain="b.dev")}
    world.failure = StartFailed("no memory")

    async def refused(host: str) -> Refusal:
        decision = await world.gate.admit(GateRequest(host, client="127.0.0.1"))
        assert isinstance(decision, Refusal) and decision.trace is not None
        assert decision.status == 503 and "no memory" not in decision.message
        return decision

    first = await refused("a.dev")
    (line,) = (line for line in caplog.messages if str(first.trace) in line)
    assert "no memory" in line and "a.dev" in line
    assert (await refused("a.dev")).trace == first.trace, "one line for equal refusals"
    assert (await refused("b.dev")).trace != first.trace
    for number in range(100):
        world.failure = StartFailed(f"no memory: {number}")
        await refused("a.dev")
    assert 40 < sum("no memory" in line for line in caplog.messages) < 60, "an account has a share of the log"


async def test_only_requests_that_the_vm_has_not_seen_are_sent_again(world: World) -> None:
    world.mappings = {"a.dev": Mapped("1")}
    world.start("1")
    world.listening = {("100.64.0.5", 80)}
    refused = "dial tcp 100.64.0.5:80: connect: connection refused"
    assert await _code(world, "a.dev", error=refused) == "100.64.0.5:80"
    assert await _code(world, "a.dev", error="EOF") == 502


async def test_a_vm_is_not_woken_for_a_request_that_is_not_sent_again(world: World) -> None:
    world.mappings = {"a.dev": Mapped("1")}
    world.asleep.add("1")
    world.listening = {("100.64.0.5", 80)}
    assert await _code(world, "a.dev", error="write: connection reset by peer") == 502
    assert not world.wakes
    assert await _code(world, "a.dev") == "100.64.0.5:80"
    assert world.wakes == ["1"]


def test_pages_escape_what_a_client_sent() -> None:
    body, kind = Refusal(404, "X", "<b>", "<script>").body(as_page=True)
    assert kind.startswith("text/html")
    assert b"<script>" not in body
    assert b"&lt;script&gt;" in body


async def test_a_vm_is_not_woken_before_connections_to_its_last_run_are_closed(world: World) -> None:
    """They have the address of the new ones."""
    world.mappings["a.example"] = Mapped("1")
    world.asleep.add("1")
    world.listening.add(("100.64.0.5", 80))
    world.closed.clear()
    decision = asyncio.create_task(_code(world, "a.example"))
    await asyncio.sleep(0.05)
    assert not world.wakes
    world.closed.set()
    assert await decision == "100.64.0.5:80"
    assert world.wakes == ["1"]
