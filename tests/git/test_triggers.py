"""Push triggers: which pushes are delivered, how they are signed, and which triggers are refused."""

import asyncio
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from joserfc import jwt
from joserfc.errors import BadSignatureError
from joserfc.jwk import KeySet

from stead.errors import HostError
from stead.repos.committing import Change, commit
from stead.repos.errors import RepoNotFound
from stead.repos.globs import InvalidPattern
from stead.repos.repository import Repository
from stead.repos.ssrf import AddressRefused
from stead.repos.webhooks import triggers as triggers_module
from stead.repos.webhooks.pushes import MAX_CHANGED_FILES, BranchUpdate, branches_of, changed_files
from stead.repos.webhooks.retries import DeliveryState
from stead.repos.webhooks.signing import EdDsaRegistry, WebhookSigner
from stead.repos.webhooks.triggers import (
    MAX_BRANCHES,
    MAX_GLOBS,
    MAX_TRIGGERS,
    InvalidTrigger,
    TriggerLimitExceeded,
    TriggerNotFound,
)
from support.documents import normalised, run_by
from support.npm import Npm
from support.waiting import until
from support.webhooks import INTERNET, LIMIT, SECOND, Endpoint, World, reply, verified

# Signatures


def test_signing_key_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    first, second = WebhookSigner.open(tmp_path, "a"), WebhookSigner.open(tmp_path, "a")
    assert first.jwks() == second.jwks()
    (key,) = first.jwks()["keys"]
    assert {name: key[name] for name in ("kty", "crv", "alg", "use")} == {
        "kty": "OKP",
        "crv": "Ed25519",
        "alg": "EdDSA",
        "use": "sig",
    }
    assert key["kid"]
    assert "d" not in key, "the private half is not published"
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("nonsense")
    with pytest.raises(HostError, match="not a private key"):
        WebhookSigner.open(tmp_path, "a")


async def test_push_sends_signed_webhook(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.url + "/hook?key=1") as (repo, trigger):
        first = await world.push(repo)
        second = await world.push(repo)
        one, two = await endpoint.count(2, "/hook?key=1")
        log = await world.settled(repo, trigger.id)
    assert one.json == {
        "event": "branchUpdate",
        "repoId": repo,
        "branch": "main",
        "commit": first,
        "previousCommit": None,
        "deliveryId": log[0].id,
        "timestamp": one.json["timestamp"],
    }
    assert (two.json["commit"], two.json["previousCommit"]) == (second, first)
    (shown,) = run_by(__file__, "docs/git.md")
    assert normalised(json.dumps(two.json)) == normalised(json.dumps(json.loads(shown.body)))
    assert one.headers["content-type"] == "application/json"
    assert one.headers["user-agent"] == "stead"
    assert [one.headers["x-stead-delivery"], two.headers["x-stead-delivery"]] == [each.id for each in log]
    claims = verified(world.signing, one)
    assert claims["body_sha256"] == hashlib.sha256(one.body).hexdigest()
    assert claims["iss"] == "https://git.example"
    assert (claims["aud"], claims["sub"], claims["jti"]) == (endpoint.url + "/hook?key=1", repo, log[0].id)
    assert claims["iat"] == world.clock.now() // SECOND
    assert 0 < claims["exp"] - claims["iat"] <= 600
    assert [(each.state, each.status, each.response, each.attempts) for each in log] == [
        (DeliveryState.DELIVERED, 200, "thank you", 1)
    ] * 2


async def test_signature_of_another_installation_is_rejected(
    world: World, endpoint: Endpoint, tmp_path: Path
) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, _):
        await world.push(repo)
        (seen,) = await endpoint.count(1)
    (tmp_path / "other").mkdir()
    stranger = WebhookSigner.open(tmp_path / "other", "https://git.example")
    keys = {"keys": [stranger.jwks()["keys"][0] | {"kid": world.signing.jwks()["keys"][0]["kid"]}]}
    with pytest.raises(BadSignatureError):
        jwt.decode(
            seen.headers["x-freestyle-signature"],
            KeySet.import_key_set(keys),  # type: ignore[arg-type]
            registry=EdDsaRegistry(algorithms=["EdDSA"]),
        )


async def test_node_receiver_verifies_webhooks_with_jwks(
    world: World, endpoint: Endpoint, package: Npm
) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, _):
        sha = await world.push(repo)
        (seen,) = await endpoint.count(1)
    keys = endpoint.plan(
        "/.well-known/jwks.json",
        reply(200, json.dumps(world.signing.jwks()).encode(), **{"Content-Type": "application/json"}),
    )
    environment = {
        "JWKS_URL": keys,
        "SIGNATURE": seen.headers["x-freestyle-signature"],
        "BODY": seen.body.decode(),
        "COMMIT": sha,
    }
    await package.script("webhooks", environment, limit=60)


# Which pushes are delivered


async def test_branch_and_glob_filters_select_triggers(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    rules: dict[str, dict[str, Any]] = {
        "/all": {},
        "/main": {"branches": ["main"]},
        "/releases": {"branches": ["release/*", "hotfix"]},
        "/scripts": {"globs": ["*.js"]},
        "/docs-of-main": {"branches": ["main"], "globs": ["docs/**", "*.md"]},
    }
    pushes = [
        ("main", "a.js", {"/all", "/main", "/scripts"}),
        ("main", "docs/x/a.txt", {"/all", "/main", "/docs-of-main"}),
        ("main", "other.txt", {"/all", "/main"}),
        ("release/1", "src/b.js", {"/all", "/releases", "/scripts"}),
        ("release/1/rc", "README.md", {"/all"}),
        ("hotfix", "README.md", {"/all", "/releases"}),
    ]
    expected: dict[str, list[str]] = {path: [] for path in rules}
    async with world.opened() as triggers:
        for path, rule in rules.items():
            await triggers.create(repo, endpoint.url + path, **rule)
        for branch, file, concerned in pushes:
            if branch == "release/1/rc":
                await world.git(repo, "update-ref", "-d", "refs/heads/release/1")
            sha = await world.push(repo, file, branch=branch)
            for path in concerned:
                expected[path].append(sha)
        for path in rules:
            await endpoint.count(len(expected[path]), path)
    assert {path: [seen.json["commit"] for seen in endpoint.told(path)] for path in rules} == expected


async def test_changed_files_of_a_push(world: World) -> None:
    """New branches are compared with their merge base, updated ones with their old commit."""
    repo = await world.repo()
    repository = world.repos.repository(repo)
    first = await world.write(repo, "a")
    second = await world.write(repo, "b")
    await world.git(repo, "branch", "side", first)
    side = await world.write(repo, "c", branch="side")
    alone = await world.write(repo, "d", branch="alone")

    async def files(branch: str, old: str | None, new: str) -> list[str] | None:
        return await changed_files(repository, BranchUpdate(branch, old, new))

    assert await files("main", None, second) == ["a", "b"]
    assert await files("main", first, second) == ["b"]
    assert await files("side", None, side) == ["c"]
    assert await files("main", second, side) == ["b", "c"], "a force push, with what it takes away"
    assert await files("alone", None, alone) == ["d"]
    assert await files("main", "1" * 40, second) is None, "the commit before is unknown"


async def test_push_with_too_many_files_matches_all_globs(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.url + "/", globs=["*.js"]) as (repo, _):
        changes = [Change(f"file-{number}", b"") for number in range(MAX_CHANGED_FILES + 1)]
        await commit(world.repos.repository(repo), changes, "many")
        await world.triggers.refs_changed(repo)
        await endpoint.count(1)


async def test_deleted_branch_sends_nothing_and_recreated_one_does(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, _):
        sha = await world.push(repo)
        await world.git(repo, "branch", "side", sha)
        await world.triggers.refs_changed(repo)
        await world.git(repo, "branch", "-D", "side")
        await world.triggers.refs_changed(repo)
        await world.git(repo, "branch", "side", sha)
        await world.triggers.refs_changed(repo)
        told = await endpoint.count(3)
    assert [(each.json["branch"], each.json["previousCommit"]) for each in told] == [
        ("main", None),
        ("side", None),
        ("side", None),
    ]


async def test_new_trigger_ignores_earlier_pushes(world: World, endpoint: Endpoint) -> None:
    repo = await world.repo()
    await world.write(repo)
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/first")
        await triggers.refs_changed(repo)
        unobserved = await world.write(repo)
        await triggers.create(repo, endpoint.url + "/second")
        last = await world.push(repo)
        await endpoint.count(2, "/first")
        await endpoint.count(1, "/second")
    assert [each.json["commit"] for each in endpoint.told("/first")] == [unobserved, last]
    assert [each.json["commit"] for each in endpoint.told("/second")] == [last]


async def test_tags_and_other_refs_send_nothing(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, trigger):
        sha = await world.push(repo)
        await world.git(repo, "tag", "v1", sha)
        await world.git(repo, "update-ref", "refs/other/x", sha)
        await world.triggers.refs_changed(repo)
        assert len(await world.settled(repo, trigger.id)) == 1


async def test_pushes_while_stopped_are_delivered_at_start(
    world: World, endpoint: Endpoint, tmp_path: Path
) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, _):
        await world.push(repo)
        await endpoint.count(1)
    clone = tmp_path / "clone"
    place = world.repos.repository(repo).path
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    commands = [
        ["clone", "-q", str(place), str(clone)],
        ["-C", str(clone), *author, "commit", "-qm", "x", "--allow-empty"],
        ["-C", str(clone), "push", "-q", "origin", "HEAD:main", "HEAD:side"],
    ]
    for command in commands:
        git = await asyncio.create_subprocess_exec("git", *command, env={"PATH": os.environ["PATH"]})
        assert await git.wait() == 0
    async with world.opened():
        told = await endpoint.count(3)
    tip = (await world.repos.repository(repo).branch("main")).sha
    assert [(each.json["branch"], each.json["commit"]) for each in told[1:]] == [("main", tip), ("side", tip)]


async def test_failed_detection_does_not_fail_the_push_and_is_retried(
    world: World, endpoint: Endpoint
) -> None:
    repo = await world.repo()
    place = world.repos.repository(repo).path
    async with world.opened() as triggers:
        await triggers.create(repo, endpoint.url + "/")
        sha = await world.write(repo)
        await world.repos.cat_files.stop(place)
        place.rename(place.with_suffix(".away"))
        await triggers.refs_changed(repo)
        place.with_suffix(".away").rename(place)
        assert endpoint.seen == []
        (told,) = await world.later(endpoint.told)
    assert told.json["commit"] == sha


@pytest.mark.parametrize(
    ("what", "sleeping"),
    [("INSERT ON deliveries", 1), ("INSERT ON observed_refs", 1), ("UPDATE ON deliveries", 2)],
)
async def test_database_write_failure_loses_no_delivery(
    world: World, endpoint: Endpoint, what: str, sleeping: int
) -> None:
    """Changes and deliveries are recorded in one transaction."""
    repo = await world.repo()
    await world.write(repo)
    async with world.opened() as triggers:
        trigger = await triggers.create(repo, endpoint.url + "/")
        refuse = f"CREATE TRIGGER refuse BEFORE {what} BEGIN SELECT RAISE(ABORT, 'full'); END"
        await world.database.execute(sa.text(refuse))
        sha = await world.push(repo)

        await until(lambda: world.clock.sleeping == sleeping, LIMIT)
        await world.database.execute(sa.text("DROP TRIGGER refuse"))
        assert endpoint.seen == []
        (told,) = await world.later(endpoint.told)
        assert [each.state for each in await world.settled(repo, trigger.id)] == [DeliveryState.DELIVERED]
    assert told.json["commit"] == sha


async def test_every_changed_branch_is_delivered_once(world: World, endpoint: Endpoint) -> None:
    async with world.triggered(endpoint.url + "/") as (repo, trigger):
        names = [f"branch-{number}" for number in range(12)]
        pushed = await asyncio.gather(*(world.push(repo, branch=name) for name in names))
        told = await endpoint.count(len(names))
        await world.settled(repo, trigger.id)
    assert sorted((each.json["branch"], each.json["commit"]) for each in told) == sorted(
        zip(names, pushed, strict=True)
    )


async def test_repository_without_triggers_is_not_read(
    world: World, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = await world.repo()
    read: list[str] = []

    async def recorded(repository: Repository) -> dict[str, str]:
        read.append(repository.id)
        return await branches_of(repository)

    async with world.opened() as triggers:
        monkeypatch.setattr(triggers_module, "branches_of", recorded)
        await world.push(repo)
        assert read == []
        await triggers.create(repo, endpoint.url + "/")
        await world.push(repo)
        assert read == [repo] * 2, "by the create and by the push"


# Validation


async def test_triggers_belong_to_their_repository(world: World, endpoint: Endpoint) -> None:
    repo, other = await world.repo(), await world.repo()
    async with world.opened() as triggers:
        one = await triggers.create(repo, endpoint.url, branches=["main"], globs=["*.js", "a/**"])
        world.clock.pass_by(1)
        two = await triggers.create(repo, endpoint.url)
        assert (one.event, one.branches, one.globs, one.endpoint) == (
            "push",
            ("main",),
            ("*.js", "a/**"),
            endpoint.url,
        )
        assert await triggers.list(repo) == [one, two]
        assert await triggers.get(repo, one.id) == one
        for call in (triggers.get, triggers.delete):
            with pytest.raises(TriggerNotFound):
                await call(other, one.id)
            with pytest.raises(TriggerNotFound):
                await call(repo, "nothing")
        await triggers.delete(repo, one.id)
        assert await triggers.list(repo) == [two]
        with pytest.raises(RepoNotFound):
            await triggers.create("nothing", endpoint.url)


@pytest.mark.parametrize(
    "endpoint", ["", "hello", "ftp://example.com/", "http://", "http://a b/", "http://x:99999/", "//x/"]
)
async def test_invalid_endpoint_urls_are_refused(world: World, endpoint: str) -> None:
    repo = await world.repo()
    async with world.opened() as triggers:
        with pytest.raises(AddressRefused):
            await triggers.create(repo, endpoint)
        assert await triggers.list(repo) == []


async def test_private_endpoints_and_impossible_rules_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = await world.repo()
    async with world.opened(guard=INTERNET) as triggers:
        for near in ("http://127.0.0.1/", "http://[::1]/", "http://localhost:3000/", "http://10.0.0.1/"):
            with pytest.raises(AddressRefused):
                await triggers.create(repo, near)
        public = "http://nobody.invalid/"
        with pytest.raises(InvalidTrigger, match="event"):
            await triggers.create(repo, public, event="pull")
        with pytest.raises(InvalidTrigger, match="branches"):
            await triggers.create(repo, public, branches=["a"] * (MAX_BRANCHES + 1))
        with pytest.raises(InvalidTrigger, match="globs"):
            await triggers.create(repo, public, globs=["a"] * (MAX_GLOBS + 1))
        with pytest.raises(InvalidTrigger, match="patterns"):
            await triggers.create(repo, public, globs=["{a,b}{a,b}{a,b}{a,b}", "{a,b}{a,b}{a,b}{a,b}"] * 2)
        with pytest.raises(InvalidPattern):
            await triggers.create(repo, public, branches=["a b"])
        monkeypatch.setattr(triggers_module, "MAX_TRIGGERS", 2)
        assert MAX_TRIGGERS == 50
        for _ in range(2):
            await triggers.create(repo, public)
        with pytest.raises(TriggerLimitExceeded):
            await triggers.create(repo, public)
