"""One account does its worst with VMs and builds; another one is served as before.

Most of these use the API and the engine over VMs in memory; those at the end have real ones.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.builds import setup
from stead.machines import Machine, Machines
from stead.machines.events import Use
from stead.machines.persistence import Sticky
from stead.machines.records import Properties
from stead.store.logs import LogQuery
from support.api_calls import refused
from support.fake_api import FakeApi, fake_api
from support.installations import Server
from support.internals import inside
from support.serve_process import client_of
from support.waiting import until

AT_ONCE = {"x-freestyle-background-after-secs": "0"}


def sleeping_spec(number: int) -> dict[str, Any]:
    """A layer whose set-up takes half an hour."""
    return {"spec": {"snapshot": {"additionalFiles": {"/srv/n": {"content": str(number)}}}}}


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path, max_creations=8, max_builds=8) as opened:
        yield opened


class Builds:
    """Set-ups of the account `ours` that do not end; those of others do at once."""

    def __init__(self, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = 0
        self.most = 0
        self.released = asyncio.Event()

        async def sleep(machine: Any, layer: Any, part: Any, *rest: Any) -> None:
            if part.record.account != api.account:
                return
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.released.wait()
            finally:
                self.running -= 1

        monkeypatch.setattr(setup, "apply", sleep)


async def test_builds_that_do_not_end_stop_no_other_account(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its creates nor its builds; and the account itself can still create VMs."""
    builds = Builds(api, monkeypatch)
    vms = f"{api.url}/v1/vms"
    async with api.http() as attacker, api.http("stranger") as victim:
        answers = await asyncio.gather(
            *(attacker.post(vms, json=sleeping_spec(number), headers=AT_ONCE) for number in range(64))
        )
        assert {each.status_code for each in answers} == {202}
        await until(lambda: builds.running > 0, 60)
        async with asyncio.timeout(60):
            for body in ({}, sleeping_spec(0)):
                assert (await victim.post(vms, json=body)).status_code == 200
            snapshot = await victim.post(f"{vms}/snapshots", json=sleeping_spec(1))
            assert snapshot.status_code == 200
            assert (await attacker.post(vms)).status_code == 200
        assert builds.most == 2, "a quarter of the places"
        builds.released.set()


async def test_creates_of_one_account_leave_places_for_others(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guests of one account do not answer."""
    dial, begun, released = api.world.dial, list[str](), asyncio.Event()
    ours = api.account

    async def dial_later(vm_slot: Any) -> Any:
        info = await api.installation.machines.info(vm_slot.machine)
        if info.account == ours:
            begun.append(info.id)
            await released.wait()
        return await dial(vm_slot)

    monkeypatch.setattr(api.world, "dial", dial_later)
    vms = f"{api.url}/v1/vms"
    async with api.http() as attacker, api.http("stranger") as victim:
        flood = [asyncio.create_task(attacker.post(vms)) for _ in range(10)]
        await until(lambda: len(begun) >= 2, 60)
        async with asyncio.timeout(60):
            for _ in range(3):
                assert (await victim.post(vms)).status_code == 200
        assert not any(each.done() for each in flood)
        released.set()
        assert {each.status_code for each in await asyncio.gather(*flood)} == {200}


async def test_a_full_disk_takes_nothing_from_an_account_that_uses_little(api: FakeApi) -> None:
    """The attacker fills the disk with persistent VMs, then creates, starts and has strangers wake them."""
    machines, victim = api.installation.machines, await api.installation.accounts.by_name("strangers")
    kept = await machines.create(Properties(account=victim.id, persistence=Sticky(0)))
    await kept.stop()
    large = [await machines.create(Properties(account=api.account)) for _ in range(4)]
    for machine in large:
        process = api.world.of(machine.id)
        process.layers[0].data.update({str(number): "x" for number in range(100)})
        await machine.stop()
    api.world.full_at = 1
    async with api.http() as attacker:
        for method, path in (("POST", ""), ("POST", f"/{large[0].id}/start"), ("POST", f"/{api.vm}/fork")):
            answer = await attacker.request(method, f"{api.url}/v1/vms{path}")
            refused(answer, 503, "NO_LOCAL_STORAGE_CAPACITY")
    for use in (Use.DOMAIN, Use.NETWORK):
        with pytest.raises(Exception, match="full"):
            await machines.ensure_up(large[1].id, use)
    assert (await kept.info()).id == kept.id


async def test_identities_and_tokens_are_limited(api: FakeApi) -> None:
    await api.installation.accounts.set_limits(api.account, {"identities": 4, "tokens": 3})
    identities = f"{api.url}/identity/v1/identities"
    async with api.http() as http, api.http("stranger") as others:
        answers = [await http.post(identities) for _ in range(4)]
        made = [each.json()["id"] for each in answers if each.status_code == 200]
        # Two exist already.
        assert len(made) == 2
        body = refused(answers[-1], 403, "LIMIT_EXCEEDED")
        assert (body["limit"], body["current"]) == (4, 4)
        tokens = [await http.post(f"{identities}/{made[0]}/tokens") for _ in range(4)]
        assert [each.status_code for each in tokens] == [200, 403, 403, 403]
        refused(tokens[-1], 403, "LIMIT_EXCEEDED")
        assert (await others.post(identities)).status_code == 200


async def test_log_lines_of_one_account_do_not_drop_those_of_others(api: FakeApi) -> None:
    logbook = api.installation.logbook
    for number in range(20_000):
        await logbook.write("noisy", f"line {number}")
    await logbook.write("quiet", "important")
    found = await logbook.find(LogQuery("quiet", 0, 2**62))
    assert [line.message for line in found] == ["important"]


# Real VMs


@dataclass(frozen=True)
class TwoAccounts:
    """An attacker and a victim, with a client of each."""

    attacker: httpx2.AsyncClient
    victim: httpx2.AsyncClient
    attacking: str
    """The attacker's account."""


@pytest_asyncio.fixture
async def two_accounts(server: Server) -> AsyncIterator[TwoAccounts]:
    """What they made is deleted."""
    names = [f"{role}-{secrets.token_hex(4)}" for role in ("attacker", "victim")]
    accounts = [await server.installation.accounts.create(name) for name in names]
    keys = [(await server.installation.accounts.create_key(each.id))[1] for each in accounts]
    async with client_of(server.url, keys[0]) as attacker, client_of(server.url, keys[1]) as victim:
        yield TwoAccounts(attacker, victim, accounts[0].id)
    machines = server.installation.machines
    for account in accounts:
        for info in await machines.list(account.id):
            await machines.delete(info.id, forget=True)
        for snapshot in await machines.snapshots.list(account.id):
            await machines.snapshots.delete(snapshot.id)


async def test_sleeping_builds_of_one_account_leave_the_server_to_another(
    server: Server,
    two_accounts: TwoAccounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one place for the builds of an account, its specs wait for each other, and others for none."""
    attacker, victim = two_accounts.attacker, two_accounts.victim
    monkeypatch.setattr(server.installation.builder._places, "_per_key", 1)
    service = {"name": "wait", "mode": "oneshot", "exec": ["/bin/sh -c 'sleep 1800'"]}
    requests = []
    for number in range(4):
        files = {"/srv/n": {"content": str(number)}}
        spec = {"snapshot": {"additionalFiles": files, "systemd": {"services": [service]}}}
        answer = await attacker.post("/v1/vms", json={"spec": spec}, headers=AT_ONCE)
        assert answer.status_code == 202, answer.text
        requests.append(answer.json()["requestId"])
    await until(lambda: server.installation.builder._places.waiting == 3, 300)
    created = await victim.post("/v1/vms", json={})
    assert created.status_code == 200, created.text
    built = await victim.post(
        "/v1/vms/snapshots", json={"spec": {"additionalFiles": {"/srv/x": {"content": "x"}}}}
    )
    assert built.status_code == 200, built.text
    for request in requests:
        await attacker.delete(f"/auth/v1/background-requests/{request}")


async def test_a_size_beyond_a_limit_builds_no_template(server: Server, two_accounts: TwoAccounts) -> None:
    limits = {"vcpus": 2, "memory_gib": 1, "disk_gib": 20}
    await server.installation.accounts.set_limits(two_accounts.attacking, limits)
    folder = server.installation.settings.cache_folder / "templates"
    before = {path.name for path in folder.iterdir()}
    sizes = ({"vcpuCount": 4}, {"memSizeGb": 2}, {"rootfsSizeGb": 33}, {"memSizeGb": 512})
    answers = await asyncio.gather(*(two_accounts.attacker.post("/v1/vms", json=size) for size in sizes))
    assert {each.status_code for each in answers} == {403}
    assert {path.name for path in folder.iterdir()} == before


async def test_a_vm_ends_before_the_server_when_memory_runs_out(machine: Machine, machines: Machines) -> None:
    live = inside(machines).processes.running(machine.id)
    assert live is not None
    score = int(Path(f"/proc/{live.vm.process.pid}/oom_score_adj").read_text())
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert score > own
