"""Model-based test of refs: operations by API and git, sequential and concurrent.

A model knows the allowed results of each operation. For concurrent operations, the accepted ones must be
possible in some order (linearizable), and each refused one must have had a reason in one of the states.
"""

import asyncio
import itertools
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from stead.repos.maintenance import housekeeping
from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.git_objects import Objects

HEADS, TAGS = "refs/heads/", "refs/tags/"
pytestmark = pytest.mark.heavy

BRANCHES = ("main", "topic", "topic/deep")
REFS = (*(HEADS + name for name in BRANCHES), TAGS + "one", TAGS + "two")
UNKNOWN = "1234567890" * 4


@dataclass(frozen=True)
class State:
    """The commits of all refs, and the default branch."""

    refs: dict[str, str] = field(default_factory=dict)
    default: str = "main"

    def free(self, ref: str) -> bool:
        """No name conflict with another ref."""
        return not any(each.startswith(f"{ref}/") or ref.startswith(f"{each}/") for each in self.refs)

    def after(self, claim: "Claim") -> "State":
        refs = {**self.refs, **{ref: sha for ref, sha in claim.moves.items() if sha is not None}}
        refs = {ref: sha for ref, sha in refs.items() if claim.moves.get(ref, sha) is not None}
        return State(refs, claim.default or self.default)


@dataclass(frozen=True)
class Claim:
    """A requested operation and its result."""

    accepted: bool
    allowed: Callable[[State], bool] = field(repr=False)
    """Whether it must be accepted in this state; otherwise it must be refused."""
    moves: dict[str, str | None] = field(default_factory=dict)
    default: str | None = None
    compares: bool = False
    """It is refused if its refs changed since it started."""
    said: str = ""


def explained(before: State, claims: Sequence[Claim], now: State) -> bool:
    """Whether some sequential order explains the results and the final state."""
    accepted = [claim for claim in claims if claim.accepted]
    refused = [claim for claim in claims if not claim.accepted]
    for order in itertools.permutations(accepted):
        states = [before]
        for claim in order:
            if not claim.allowed(states[-1]):
                break
            states.append(states[-1].after(claim))
        else:
            if states[-1] == now and all(_has_reason(claim, states) for claim in refused):
                return True
    return False


def _has_reason(claim: Claim, states: Sequence[State]) -> bool:
    if not all(claim.allowed(state) for state in states):
        return True
    return claim.compares and any(len({state.refs.get(ref) for state in states}) > 1 for ref in claim.moves)


class World:
    """One repository on a server, its model, and a client with partial knowledge."""

    def __init__(self, repo_server: RepoServer, http: httpx2.AsyncClient, client: Objects, repo: str) -> None:
        self.http = http
        self.client = client
        self.repo = repo
        self.repository = repo_server.hosting.repos.repository(repo)
        self.repos = repo_server.hosting.repos
        self.api = f"/git/v1/repo/{repo}"
        self.remote = f"{repo_server.url}/{repo}"
        self.login = ("-c", f"http.extraHeader=Authorization: Bearer {repo_server.key}")
        self.state = State()
        self.parents: dict[str, tuple[str, ...]] = {}
        self.peeled: dict[str, str] = {}
        """Annotated tags and their commits."""
        self.known: list[str] = []
        """Commits that the client has."""

    # History

    def history(self, *tips: str) -> set[str]:
        found: set[str] = set()
        ahead = [self.peeled.get(tip, tip) for tip in tips]
        while ahead:
            sha = ahead.pop()
            if sha not in found:
                found.add(sha)
                ahead += self.parents[sha]
        return found

    def made(self, *parents: str) -> str:
        sha = self.client.commit(*parents)
        self.parents[sha] = parents
        self.known.append(sha)
        return sha

    def picked(self, place: int) -> str:
        return self.known[place % len(self.known)] if self.known else self.made()

    # Observation

    async def fetch(self) -> None:
        """The client fetches everything."""
        tips = sorted(set(self.state.refs.values()))
        if tips:
            await self.git("fetch", "-q", "--no-tags", "--no-write-fetch-head", self.remote, *tips)
            self.known += sorted(self.history(*tips) - set(self.known))

    async def git(self, *arguments: str) -> str:
        return await self.client.git(*self.login, *arguments, cwd=self.client.folder)

    async def observed(self) -> State:
        """All refs; the API and git must agree."""
        row, listed = await asyncio.gather(
            self.http.get(self.api), self.git("ls-remote", "--symref", self.remote)
        )
        told = row.json()
        refs: dict[str, str] = {}
        default = None
        for line in listed.splitlines():
            value, _, name = line.partition("\t")
            if name == "HEAD":
                default = value.removeprefix(f"ref: {HEADS}") if value.startswith("ref: ") else default
            else:
                refs[name] = value
        branches = {HEADS + name: each["target"] for name, each in told["branches"].items()}
        tags = {TAGS + name: each["target"] for name, each in told["tags"].items()}
        assert branches == {ref: sha for ref, sha in refs.items() if ref.startswith(HEADS)}
        assert tags == {
            ref: refs.get(f"{ref}^{{}}", sha)
            for ref, sha in refs.items()
            if ref.startswith(TAGS) and not ref.endswith("^{}")
        }
        now = State({ref: sha for ref, sha in refs.items() if not ref.endswith("^{}")}, told["defaultBranch"])
        assert default == (now.default if HEADS + now.default in refs else None)
        return now

    async def check_whole(self) -> None:
        """A clone has every reachable commit, and fsck passes."""
        clone = self.client.folder.parent / "clone"
        await self.git("clone", "-q", "--mirror", self.remote, str(clone))
        there = await self.client.git("rev-list", "--all", cwd=clone)
        assert set(there.split()) == self.history(*self.state.refs.values())
        shutil.rmtree(clone)
        await self.repos.quotas.flush()
        await self.repos.housekeeping.join()
        checked = await self.client.git.run("fsck", "--strict", "--no-dangling", cwd=self.repository.path)
        assert checked.status == 0, checked.err
        left = [path for path in self.repository.path.rglob("*") if path.suffix == ".lock"]
        left += self.repository.path.rglob("*tmp_*")
        assert left == []


# Operations


@dataclass(frozen=True)
class CommitByApi:
    branch: str
    expects: str
    """`nothing`, the `right` commit, or a `wrong` one."""

    async def run(self, world: World) -> list[Claim]:
        ref, before = HEADS + self.branch, world.state.refs.get(HEADS + self.branch)
        expected = {"nothing": None, "right": before or UNKNOWN, "wrong": UNKNOWN}[self.expects]
        name = secrets.token_hex(8)
        body: dict[str, Any] = {"message": name, "branch": self.branch}
        body |= {"files": [{"path": name, "content": name}]}
        body |= {} if expected is None else {"expectedSha": expected}
        answer = await world.http.post(f"{world.api}/commits", json=body)
        if answer.status_code == 200:
            told = answer.json()["commit"]
            sha, parents = told["sha"], tuple(parent["sha"] for parent in told["parents"])
            world.parents[sha] = parents
            parent = parents[0] if parents else None

            def follows(state: State) -> bool:
                return (
                    state.free(ref)
                    and state.refs.get(ref) == parent
                    and (expected is None or expected == parent)
                )

            return [Claim(True, follows, {ref: sha})]
        assert answer.json()["code"] in ("CONFLICTING_PARENT", "GIT_INVALID_REQUEST"), answer.text

        def possible(state: State) -> bool:
            return state.free(ref) and (expected is None or state.refs.get(ref) == expected)

        return [Claim(False, possible, said=answer.text)]


@dataclass(frozen=True)
class BranchByApi:
    branch: str
    at: str
    """The `default` branch's commit, an `old` one, or one that is `nowhere`."""
    place: int

    async def run(self, world: World) -> list[Claim]:
        ref = HEADS + self.branch
        acknowledged = sorted(world.history(*world.state.refs.values()))
        start = UNKNOWN
        if self.at == "old" and acknowledged:
            start = acknowledged[self.place % len(acknowledged)]
        body = None if self.at == "default" else {"sha": start}
        answer = await world.http.post(f"{world.api}/git/refs/heads/{self.branch}", json=body)

        def source(state: State) -> str | None:
            if self.at == "default":
                return state.refs.get(HEADS + state.default)
            return start if start != UNKNOWN else None

        if answer.status_code == 200:
            sha = answer.json()["sha"]

            def begins(state: State) -> bool:
                return ref not in state.refs and state.free(ref) and source(state) == sha

            return [Claim(True, begins, {ref: sha})]
        codes = "BRANCH_ALREADY_EXISTS", "GIT_INVALID_REQUEST", "REFERENCE_NOT_FOUND"
        assert answer.json()["code"] in codes, answer.text

        def possible(state: State) -> bool:
            return ref not in state.refs and state.free(ref) and source(state) is not None

        return [Claim(False, possible, said=answer.text)]


@dataclass(frozen=True)
class DefaultByApi:
    branch: str

    async def run(self, world: World) -> list[Claim]:
        answer = await world.http.put(f"{world.api}/default-branch", json={"defaultBranch": self.branch})

        def possible(state: State) -> bool:
            return HEADS + self.branch in state.refs or not any(ref.startswith(HEADS) for ref in state.refs)

        if answer.status_code == 200:
            return [Claim(True, possible, default=self.branch)]
        assert answer.json()["code"] == "BRANCH_NOT_FOUND", answer.text
        return [Claim(False, possible, said=answer.text)]


@dataclass(frozen=True)
class Update:
    """One ref of a push."""

    ref: str
    to: str
    """The `next` commit, another `root`, a `known` one, a `tag` object; or `gone` for deletion."""
    how: str
    """`plain`, `force`, `lease` (force with the right lease) or `stale` (with a wrong one)."""
    place: int

    def target(self, world: World) -> str | None:
        tip = world.state.refs.get(self.ref)
        if self.to == "gone" and tip is not None:
            return None
        if self.to == "next" and tip is not None and world.peeled.get(tip, tip) in world.known:
            return world.made(world.peeled.get(tip, tip))
        if self.to == "tag" and self.ref.startswith(TAGS):
            sha = world.client.tag(commit := world.picked(self.place))
            world.peeled[sha] = commit
            return sha
        return world.made() if self.to == "root" else world.picked(self.place)


@dataclass(frozen=True)
class Push:
    updates: tuple[Update, ...]
    atomic: bool

    async def run(self, world: World) -> list[Claim]:
        targets = {update.ref: update.target(world) for update in self.updates}
        options, names = ["--atomic"] if self.atomic else [], []
        for update in self.updates:
            target = targets[update.ref] or ""
            names.append(f"{'+' if update.how == 'force' else ''}{target}:{update.ref}")
            if update.how in ("lease", "stale"):
                options.append(f"--force-with-lease={update.ref}:{self._leased(world, update) or ''}")
        pushed = await world.client.git.run(
            *world.login, "push", "--porcelain", *options, world.remote, *names, cwd=world.client.folder
        )
        said = f"{pushed.out}{pushed.err}"
        flags = dict(_flags(pushed.out))
        # For an atomic push that fails, git does not always report every ref.
        told = {ref: flags.get(ref, "!") != "!" for ref in targets}
        assert (pushed.status == 0) == all(told.values()), said
        allowed = {update.ref: self._rule(world, update, targets[update.ref]) for update in self.updates}
        if self.atomic:
            assert pushed.status == 0 or set(flags.values()) <= {"!", "="}, said
            return [
                Claim(
                    all(told.values()),
                    lambda state: all(rule(state) for rule in allowed.values()),
                    dict(targets),
                    compares=True,
                    said=said,
                )
            ]
        return [
            Claim(told[ref], allowed[ref], {ref: target}, compares=True, said=said)
            for ref, target in targets.items()
        ]

    def _leased(self, world: World, update: Update) -> str | None:
        return UNKNOWN if update.how == "stale" else world.state.refs.get(update.ref)

    def _rule(self, world: World, update: Update, target: str | None) -> Callable[[State], bool]:
        """What git's client and server allow."""
        ref, how = update.ref, update.how
        known, leased = set(world.known), self._leased(world, update)

        def allowed(state: State) -> bool:
            now = state.refs.get(ref)
            if target is not None and now == target:
                return True
            if how in ("lease", "stale") and now != leased:
                return False
            if now is None:
                return target is not None and state.free(ref)
            if how != "plain" or target is None:
                return True
            if ref.startswith(TAGS):
                return False
            return now in known and now in world.history(target)

        return allowed


def _flags(printed: str) -> Iterator[tuple[str, str]]:
    """Git's report per ref of a push: `!` is refused, `=` is up to date, others are done."""
    for line in printed.splitlines():
        flag, _, rest = line.partition("\t")
        if len(flag) == 1 and rest:
            yield rest.partition("\t")[0].rpartition(":")[2], flag


@dataclass(frozen=True)
class JoinPacks:
    """A concurrent repack."""

    async def run(self, world: World) -> list[Claim]:
        world.repos.housekeeping.schedule(world.repository)
        await world.repos.housekeeping.join()
        return []


Operation = CommitByApi | BranchByApi | DefaultByApi | Push | JoinPacks


@dataclass(frozen=True)
class Step:
    """Concurrent operations; the client may fetch before."""

    fetch: bool
    operations: tuple[Operation, ...]


# Random histories


def _apart(updates: Sequence[Update]) -> bool:
    """The updates of one push are independent of each other."""
    return all(
        not first.ref.startswith(f"{second.ref}/") for first, second in itertools.permutations(updates, 2)
    )


_places = st.integers(0, 5)
_branches = st.sampled_from(BRANCHES)
_updates = st.builds(
    Update,
    st.sampled_from(REFS),
    st.sampled_from(("next", "root", "known", "tag", "gone")),
    st.sampled_from(("plain", "force", "lease", "stale")),
    _places,
)
_pushes = st.builds(
    Push,
    st.lists(_updates, min_size=1, max_size=3, unique_by=lambda update: update.ref).filter(_apart).map(tuple),
    st.booleans(),
)
_commits = st.builds(CommitByApi, _branches, st.sampled_from(("nothing", "right", "wrong")))
_operations = st.one_of(
    _pushes,
    _commits,
    _pushes,
    _commits,
    st.builds(BranchByApi, _branches, st.sampled_from(("default", "old", "nowhere")), _places),
    st.builds(DefaultByApi, _branches),
    st.just(JoinPacks()),
)
_steps = st.builds(
    Step,
    st.booleans(),
    st.one_of(
        st.tuples(_operations),
        st.lists(_operations, min_size=2, max_size=3).map(tuple),
    ),
)


@pytest_asyncio.fixture(scope="module")
async def repo_server() -> AsyncIterator[RepoServer]:
    # In memory: durability is not tested here.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with served(Path(folder)) as repo_server:
            yield repo_server


@pytest_asyncio.fixture(scope="module")
async def http(repo_server: RepoServer) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {repo_server.key}"}
    async with httpx2.AsyncClient(base_url=repo_server.url, headers=headers, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def client() -> AsyncIterator[Objects]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield await Objects.make(GitClient(Path(folder)), "repository")


@pytest.fixture(scope="module", autouse=True)
def _packs_are_joined_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(housekeeping, "MAX_PACKS", 0)
        yield


async def _play(
    repo_server: RepoServer, http: httpx2.AsyncClient, client: Objects, steps: Sequence[Step]
) -> None:
    repo = (await http.post("/git/v1/repo", json={})).json()["repoId"]
    world = World(repo_server, http, client, repo)
    for step in steps:
        note(str(step))
        if step.fetch:
            await world.fetch()
        claims = list(itertools.chain(*await asyncio.gather(*(each.run(world) for each in step.operations))))
        now = await world.observed()
        assert explained(world.state, claims, now), (world.state, claims, now)
        world.state = now
        for sha in itertools.chain(*(claim.moves.values() for claim in claims if claim.accepted)):
            if sha is not None and sha in now.refs.values():
                commit = world.peeled.get(sha, sha)
                assert (await http.get(f"{world.api}/git/commits/{commit}")).status_code == 200
    await world.check_whole()
    await http.delete(world.api)


_SETTINGS = settings(
    deadline=None,
    phases=(Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@settings(_SETTINGS, max_examples=14)
@given(st.lists(_steps, min_size=1, max_size=8))
async def test_refs_match_the_model(
    repo_server: RepoServer, http: httpx2.AsyncClient, client: Objects, steps: list[Step]
) -> None:
    await _play(repo_server, http, client, steps)


@pytest.mark.slow
@settings(_SETTINGS, max_examples=150)
@given(st.lists(_steps, min_size=5, max_size=20))
async def test_refs_match_the_model_in_long_runs(
    repo_server: RepoServer, http: httpx2.AsyncClient, client: Objects, steps: list[Step]
) -> None:
    await _play(repo_server, http, client, steps)
