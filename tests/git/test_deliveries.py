"""Webhook deliveries: at least once and in order, despite failures and restarts."""

import asyncio
import hashlib
import itertools
import json
import random
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from stead.repos.ssrf import SsrfGuard
from stead.repos.webhooks import triggers as triggers_module
from stead.repos.webhooks.retries import DELAYS, JITTER, MAX_ATTEMPTS, DeliveryState
from stead.repos.webhooks.triggers import DeliveryNotFound, TriggerLimitExceeded, TriggerNotFound
from stead.store import triggers as tables
from support.waiting import until
from support.webhooks import INTERNET, LIMIT, OK, SECOND, Endpoint, Play, World, reply, verified

# Order and retries


async def test_failed_delivery_is_retried_with_backoff_and_then_fails(
    world: World, endpoint: Endpoint
) -> None:
    url = endpoint.plan("/", *[reply(500, b"no")] * MAX_ATTEMPTS)
    async with world.triggered(url) as (repo, trigger):
        await world.push(repo)
        second = await world.push(repo)
        for attempt, delay in enumerate(DELAYS, 1):
            now = world.clock.now() / 1e9
            first, waiting = await world.settled(repo, trigger.id)
            assert (first.state, first.attempts) == (DeliveryState.PENDING, attempt)
            assert (first.status, first.error, first.response) == (500, "the endpoint answered 500", "no")
            assert first.next_at is not None
            assert delay - 0.001 <= first.next_at - now <= delay * (1 + JITTER) + 0.001
            assert waiting.attempts == 0, "the next one waits for the one before"
            assert len(endpoint.seen) == attempt
            world.clock.go_to(int(first.next_at * SECOND) + 1000)
            await endpoint.count(attempt + 1)
        first, waiting = await world.settled(repo, trigger.id)
        assert (first.state, first.attempts, first.next_at) == (DeliveryState.FAILED, MAX_ATTEMPTS, None)
        await endpoint.count(MAX_ATTEMPTS + 1)
    assert len({seen.body for seen in endpoint.seen[:-1]}) == 1
    assert endpoint.seen[-1].json["commit"] == second
    for seen in (endpoint.seen[0], endpoint.seen[-2]):
        assert verified(world.signing, seen)["body_sha256"] == hashlib.sha256(seen.body).hexdigest()
    times = [verified(world.signing, seen)["iat"] for seen in endpoint.seen]
    assert times[-1] - times[0] > sum(DELAYS), "every attempt has a signature of its own"


async def test_deliveries_are_ordered_despite_failures(world: World, endpoint: Endpoint) -> None:
    endpoint.plan("/", reply(503), OK, reply(500), reply(404), OK)
    async with world.triggered(endpoint.url + "/") as (repo, trigger):
        pushed = [await world.push(repo) for _ in range(5)]

        async def done() -> bool:
            world.clock.pass_by(20)
            return all(each.state is DeliveryState.DELIVERED for each in await world.log(repo, trigger.id))

        await until(done, LIMIT)
    told = [seen.json["commit"] for seen in endpoint.seen]
    assert told == [pushed[0]] * 2 + [pushed[1]] * 3 + pushed[2:]


def never_ending(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 202 Whatever\r\nContent-Length: 100000000000\r\n\r\n" + b"x" * 10_000)


@pytest.mark.parametrize(
    ("play", "status", "said"),
    [
        (
            reply(302, location="http://127.0.0.1:1/x"),
            302,
            "a redirect to http://127.0.0.1:1/x: webhooks do not",
        ),
        (reply(304), 304, "a redirect: webhooks do not follow redirects"),
        (reply(410), 410, "answered 410"),
        (lambda writer: None, None, "request to"),
        (lambda writer: writer.write(b"hello\r\n\r\n"), None, "request to"),
    ],
    ids=["redirect", "not modified", "gone", "closed", "no HTTP"],
)
async def test_non_2xx_response_is_a_failed_attempt(
    world: World, endpoint: Endpoint, play: Play, status: int | None, said: str
) -> None:
    async with world.triggered(endpoint.plan("/", play)) as (repo, trigger):
        await world.push(repo)
        (delivery,) = await world.settled(repo, trigger.id)
        assert (delivery.state, delivery.attempts, delivery.status) == (DeliveryState.PENDING, 1, status)
        assert delivery.error is not None
        assert said in delivery.error
        assert len(endpoint.seen) == 1
        world.clock.pass_by(10)
        await endpoint.count(2)
        (delivery,) = await world.settled(repo, trigger.id)
    assert (delivery.state, delivery.attempts, delivery.status, delivery.error) == (
        DeliveryState.DELIVERED,
        2,
        200,
        None,
    )


@pytest.mark.parametrize(
    "play", [reply(204), never_ending, reply(200, b"\0\xff" * 50_000)], ids=["empty", "endless", "large"]
)
async def test_any_2xx_response_is_delivered(world: World, endpoint: Endpoint, play: Play) -> None:
    async with world.triggered(endpoint.plan("/", play)) as (repo, trigger):
        await world.push(repo)
        await endpoint.count(1)
        (delivery,) = await world.settled(repo, trigger.id)
    assert delivery.state is DeliveryState.DELIVERED
    assert len(delivery.response or "") <= 1000


async def test_hanging_or_missing_endpoint_is_a_failed_attempt(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    # One time limit for each: to find that a name does not exist may take long on a busy host.
    for url, limit, said in (
        (endpoint.hold("/"), 0.2, "0.2 s"),
        ("http://127.0.0.1:1/", 60, "request to"),
        ("http://nobody.invalid/", 60, "cannot resolve"),
    ):
        async with world.opened(timeout=limit) as triggers:
            trigger = await triggers.create(repo, url)
            await world.push(repo)
            (delivery,) = await world.settled(repo, trigger.id)
            assert delivery.error is not None and said in delivery.error
            await triggers.delete(repo, trigger.id)


async def test_endpoint_refused_by_ssrf_guard_is_a_failed_attempt(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, trigger):
        pass
    async with world.opened(guard=INTERNET):
        await world.push(repo)
        (delivery,) = await world.settled(repo, trigger.id)
        assert delivery.error is not None
        assert "not a public address" in delivery.error
    assert endpoint.seen == []


async def test_name_of_this_installation_that_is_not_mapped_is_a_failed_attempt(world: World) -> None:
    """Its trigger is accepted: the name may be mapped later."""

    class Zone:
        def in_zone(self, hostname: str) -> bool:
            return hostname.endswith(".style.dev")

        def route(self, hostname: str) -> None:
            return None

    repo = await world.repo()
    async with world.opened(guard=SsrfGuard(own_names=Zone())) as triggers:
        trigger = await triggers.create(repo, "https://hook.style.dev/")
        await world.push(repo)
        (delivery,) = await world.settled(repo, trigger.id)
    assert delivery.error is not None
    assert "hook.style.dev is not mapped to a VM" in delivery.error


async def test_hanging_endpoint_does_not_delay_others(world: World, endpoint: Endpoint) -> None:
    slow, fast = await world.repo(), await world.repo()
    async with world.opened(grace=0) as triggers:
        for number in range(8):
            await triggers.create(slow, endpoint.hold(f"/slow-{number}"))
        other = endpoint.url.replace("127.0.0.1", "beside.test")
        beside = await triggers.create(slow, other + "/beside")
        await triggers.create(fast, other + "/fast")
        await world.push(slow)
        await world.push(fast)
        await endpoint.count(1, "/fast")
        await endpoint.count(1, "/beside")
        assert (await world.settled(slow, beside.id))[0].state is DeliveryState.DELIVERED

        await until(lambda: sum(seen.path.startswith("/slow") for seen in endpoint.seen) >= 4, LIMIT)
    slow_ones = [seen for seen in endpoint.seen if seen.path.startswith("/slow")]
    assert len(slow_ones) == 4, "for one account, so many are sent to one host at once"


# Restarts


async def test_interrupted_delivery_is_sent_again(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    async with world.opened(grace=0) as triggers:
        trigger = await triggers.create(repo, endpoint.hold("/"))
        await world.push(repo)
        await world.push(repo)
        await endpoint.count(1)
        assert (await world.log(repo, trigger.id))[0].state is DeliveryState.SENDING
    endpoint.held["/"].set()
    async with world.opened():
        await endpoint.count(3)
        log = await world.settled(repo, trigger.id)
    assert [seen.headers["x-stead-delivery"] for seen in endpoint.seen] == [log[0].id, log[0].id, log[1].id]
    assert [(each.state, each.attempts) for each in log] == [(DeliveryState.DELIVERED, 1)] * 2


async def test_shutdown_waits_for_deliveries_in_flight(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.hold("/")) as (repo, trigger):
        await world.push(repo)
        await endpoint.count(1)
        asyncio.get_running_loop().call_later(0.1, endpoint.held["/"].set)
    assert (await world.log(repo, trigger.id))[0].state is DeliveryState.DELIVERED
    assert len(endpoint.seen) == 1


async def test_restart_keeps_the_retry_schedule(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.plan("/", *[reply(500)] * 3)) as (repo, trigger):
        await world.push(repo)
        for number in (1, 2):
            await endpoint.count(number)
            (before,) = await world.settled(repo, trigger.id)
            world.clock.go_to(int((before.next_at or 0) * SECOND) + 1000)
        await endpoint.count(3)
        (before,) = await world.settled(repo, trigger.id)
    async with world.opened():
        assert await world.settled(repo, trigger.id) == [before]
        world.clock.pass_by(59)
        assert await world.settled(repo, trigger.id) == [before]
        assert len(endpoint.seen) == 3
        world.clock.pass_by(20)
        await endpoint.count(4)


async def test_delivery_survives_kill_9(world: World, endpoint: Endpoint, tmp_path: Path) -> None:
    """A process is killed while it sends; no other process has detected the push."""
    async with world.triggered(endpoint.hold("/")) as (repo, trigger):
        pass
    await world.write(repo)
    program = textwrap.dedent(
        """
        import asyncio, sys
        from ipaddress import IPv4Network
        from pathlib import Path
        from stead.limits import UNLIMITED
        from stead.repos.ssrf import SsrfGuard
        from stead.repos.repos import Repos
        from stead.repos.webhooks.signing import WebhookSigner
        from stead.repos.webhooks.triggers import Triggers
        from stead.store.database import open_database

        async def unlimited(account):
            return UNLIMITED

        async def main(folder):
            database = await open_database(folder / "stead.db")
            guard = SsrfGuard([IPv4Network("127.0.0.0/8")])
            async with Repos.open(database, folder / "repos", unlimited) as repos:
                async with Triggers.open(database, repos, WebhookSigner.open(folder, "x"), guard):
                    await asyncio.sleep(60)

        asyncio.run(main(Path(sys.argv[1])))
        """
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path))
    try:
        await endpoint.count(1)
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    endpoint.held["/"].set()
    async with world.opened():
        await endpoint.count(2)
        (delivery,) = await world.settled(repo, trigger.id)
    assert delivery.state is DeliveryState.DELIVERED
    assert [seen.headers["x-stead-delivery"] for seen in endpoint.seen] == [delivery.id] * 2
    assert endpoint.seen[0].body == endpoint.seen[1].body


@pytest.mark.parametrize("seed", range(3))
async def test_deliveries_converge_to_the_state_of_every_branch(
    world: World, endpoint: Endpoint, seed: int
) -> None:
    """Commits, deletions, failures and crashes in random order."""
    chance = random.Random(seed)
    endpoint.plan("/", *(reply(500) if chance.random() < 0.4 else OK for _ in range(40)))
    names = ["main", "one", "two"]
    async with world.triggered(endpoint.url + "/") as (repo, trigger):
        pass
    for _ in range(5):
        for _ in range(chance.randrange(3)):
            await world.write(repo, branch=chance.choice(names))
        async with world.opened(grace=0):
            for _ in range(chance.randrange(1, 5)):
                name = chance.choice(names)
                if chance.random() < 0.2:
                    await world.git(repo, "update-ref", "-d", f"refs/heads/{name}")
                else:
                    await world.write(repo, branch=name)
                if chance.random() < 0.7:
                    await world.triggers.refs_changed(repo)
                world.clock.pass_by(chance.choice([0, 0, 7, 20]))
    async with world.opened():
        await world.triggers.refs_changed(repo)

        async def done() -> bool:
            world.clock.pass_by(120)
            return all(each.state is DeliveryState.DELIVERED for each in await world.log(repo, trigger.id))

        await until(done, LIMIT)
        log = [json.loads(each.body) for each in await world.log(repo, trigger.id)]
    told = [seen.json for seen in endpoint.seen]
    tips = {branch.name: branch.sha for branch in await world.repos.repository(repo).branches()}
    for name, sha in tips.items():
        assert [each["commit"] for each in told if each["branch"] == name][-1] == sha
    assert [body for body, _ in itertools.groupby(told)] == log, "in order, each until it arrived"
    for each in names:
        commits = [body["commit"] for body in log if body["branch"] == each]
        assert len(commits) == len(set(commits)), "no commit is delivered twice unless a delivery is repeated"


# Delivery log and retention


async def test_delivery_log_pages_and_redelivers(world: World, endpoint: Endpoint) -> None:
    repo, other = await world.repo(), await world.repo()
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        stranger = await triggers.create(other, endpoint.url + "/other")
        pushed = [await world.push(repo) for _ in range(5)]
        await endpoint.count(5)
        log = await world.settled(repo, trigger.id)
        page = await triggers.deliveries(repo, trigger.id, limit=2, offset=1)
        assert (page.total, page.offset) == (5, 1)
        assert page.items == log[3:1:-1]
        assert [json.loads(each.body)["commit"] for each in log] == pushed
        again = await triggers.redeliver(repo, trigger.id, log[1].id)
        assert again.redelivery_of == log[1].id
        told = await endpoint.count(6)
        assert told[5].body == told[1].body
        assert told[5].headers["x-stead-delivery"] == again.id
        assert verified(world.signing, told[5])["body_sha256"] == hashlib.sha256(told[1].body).hexdigest()
        once_more = await triggers.redeliver(repo, trigger.id, again.id)
        assert once_more.redelivery_of == log[1].id
        for wrong in ((repo, stranger.id, log[0].id), (other, trigger.id, log[0].id)):
            with pytest.raises(TriggerNotFound):
                await triggers.redeliver(*wrong)
        with pytest.raises(DeliveryNotFound):
            await triggers.redeliver(other, stranger.id, log[0].id)
        with pytest.raises(TriggerNotFound):
            await triggers.deliveries(other, trigger.id, limit=1)
        await endpoint.count(7)


async def test_retention_removes_only_finished_deliveries(
    world: World, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers_module, "MAX_KEPT", 3)
    endpoint.plan("/", *[OK] * 6, *[reply(500)] * 2)
    async with world.triggered(endpoint.url + "/") as (repo, trigger):
        for number in range(1, 7):
            await world.push(repo)
            await endpoint.count(number)
            await world.settled(repo, trigger.id)
        waiting = [await world.push(repo) for _ in range(6)]
        log = await world.settled(repo, trigger.id)
        assert [each.state for each in log] == [DeliveryState.DELIVERED] * 3 + [DeliveryState.PENDING] * 6
        assert [json.loads(each.body)["commit"] for each in log[3:]] == waiting
    world.clock.pass_by(31 * 24 * 3600)
    async with world.opened():

        async def only_new() -> bool:
            return [each.state for each in await world.log(repo, trigger.id)][:1] != [DeliveryState.DELIVERED]

        await until(only_new, LIMIT)


async def test_dropped_deliveries_are_recorded(
    world: World, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers_module, "MAX_WAITING", 3)
    repo = await world.repo()
    async with world.opened(grace=0) as triggers:
        trigger = await triggers.create(repo, endpoint.hold("/"))
        beside = await triggers.create(repo, endpoint.url + "/beside", branches=["b-0"])
        for number in range(5):
            await world.write(repo, branch=f"b-{number}")
        await triggers.refs_changed(repo)
        log = await world.log(repo, trigger.id)
        assert [json.loads(each.body)["branch"] for each in log] == ["b-0", "b-1", "b-2", "b-3"]
        assert [each.state for each in log[1:]] == [
            DeliveryState.PENDING,
            DeliveryState.PENDING,
            DeliveryState.FAILED,
        ]
        assert log[-1].error is not None
        assert "not sent" in log[-1].error
        with pytest.raises(TriggerLimitExceeded):
            await triggers.redeliver(repo, trigger.id, log[-1].id)
        assert len(await world.log(repo, beside.id)) == 1


async def test_deleting_repository_or_trigger_removes_deliveries(world: World, endpoint: Endpoint) -> None:
    repo, kept = await world.repo(), await world.repo()
    async with world.opened() as triggers:
        for path in ("/a", "/b"):
            await triggers.create(repo, endpoint.plan(path, *[reply(500)] * 3))
        staying = await triggers.create(kept, endpoint.url + "/kept")
        await world.push(repo)
        await world.push(kept)
        await endpoint.count(1, "/a")
        await endpoint.count(1, "/b")
        first, second = await triggers.list(repo)
        await world.settled(repo, first.id)
        await world.settled(repo, second.id)
        await triggers.delete(repo, first.id)
        assert (await world.rows(tables.triggers), await world.rows(tables.deliveries)) == (2, 2)
        assert await world.rows(tables.observed_refs) == 2
        await triggers.delete(repo, second.id)
        assert await world.rows(tables.observed_refs) == 1, "refs without triggers are not recorded"
        await triggers.create(repo, endpoint.plan("/c", *[reply(500)] * 3))
        await world.push(repo)
        await endpoint.count(1, "/c")
        await world.repos.delete(repo)
        await triggers.refs_changed(repo)
        world.clock.pass_by(24 * 3600)
        assert await triggers.list(repo) == []
        assert [each.id for each in await triggers.list(kept)] == [staying.id]
        await world.push(kept)
        await endpoint.count(2, "/kept")
        assert (await world.rows(tables.triggers), await world.rows(tables.deliveries)) == (1, 2)
        assert await world.rows(tables.observed_refs) == 1
    assert [len(endpoint.told(path)) for path in ("/a", "/b", "/c")] == [1, 1, 1]
