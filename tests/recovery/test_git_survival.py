"""Repositories after `kill -9` of the server and of clients."""

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx2
import pytest

from stead.machines import Machines
from stead.repos.committing import Change, commit
from stead.repos.transfer import serving
from stead.settings import Settings
from support.git_client import GitClient
from support.git_hosting import open_hosting, served
from support.git_objects import Objects
from support.git_server import GitServer
from support.git_server import serving as serving_git
from support.installations import other_settings
from support.serve_process import Process, client_of, end, start
from support.waiting import until

pytestmark = pytest.mark.heavy
LARGE = 3 << 20
REFS_AT_ONCE = 100
_LEFT = re.compile(r".*\.lock|\.?tmp[_-].*|fast_import_crash_.*|packed-refs\.new|trace|import")


# kill -9


def _gits(uids: range) -> set[int]:
    """Running processes of the git users, without zombies."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            user = int(text.partition("\nUid:\t")[2].split()[0])
            if user in uids and "\nState:\tZ" not in text:
                found.add(int(status.parent.name))
    return found


def _leftovers(repos: Path) -> list[Path]:
    """Files that only a running writer may have."""
    # Unlike a glob, a walk tolerates folders that disappear.
    inside = [
        Path(above, name)
        for repo in repos.glob("??/*.git")
        for above, folders, files in os.walk(repo)
        for name in (*folders, *files)
    ]
    return [*(repos / "new").iterdir(), *(path for path in inside if _LEFT.fullmatch(path.name))]


class Server:
    """A server that is killed and restarted on the same data."""

    def __init__(self, settings: Settings, git: GitClient) -> None:
        self.settings = settings
        self.git = git
        self.repos = settings.data / "repos"
        self.killed = False
        self.url = self.key = ""
        self._process: Process | None = None
        self._http: httpx2.AsyncClient | None = None

    async def start(self) -> None:
        self._process, said = await start(self.settings)
        self.url, self.key = said["url"], said["key"] or self.key
        if self._http is not None:
            await self._http.aclose()
        self._http = client_of(self.url, self.key)
        self.killed = False

    async def kill(self) -> None:
        assert self._process is not None
        self.killed = True
        await end(self._process, signal.SIGKILL)

    async def end(self) -> None:
        if self._process is not None:
            await end(self._process)
        if self._http is not None:
            await self._http.aclose()

    async def call(self, method: str, path: str, **options: Any) -> httpx2.Response | None:
        """A successful response; None if the server was gone."""
        assert self._http is not None
        try:
            answer = await self._http.request(method, f"/git/v1/repo{path}", **options)
        except httpx2.TransportError:
            assert self.killed
            return None
        assert answer.status_code == 200, answer.text
        return answer

    async def push(self, work: Path, repo: str, *arguments: str) -> bool:
        """Whether git reported success for all refs."""
        login = ("-c", f"http.extraHeader=Authorization: Bearer {self.key}")
        pushed = await self.git.run(*login, "push", f"{self.url}/{repo}", *arguments, cwd=work)
        assert pushed.status == 0 or self.killed, pushed.err
        return pushed.status == 0

    async def refs(self, repo: str) -> dict[str, str]:
        login = ("-c", f"http.extraHeader=Authorization: Bearer {self.key}")
        listed = await self.git(*login, "ls-remote", f"{self.url}/{repo}", "refs/*")
        return {line.split("\t")[1]: line.split("\t")[0] for line in listed.splitlines()}

    def path(self, repo: str) -> Path:
        return self.repos / repo[:2] / f"{repo}.git"

    async def check_whole(self) -> None:
        """fsck passes and there are no leftovers."""
        wrong: list[str] = []

        async def right() -> bool:
            # A repack may be running: git retries.
            wrong[:] = map(str, _leftovers(self.repos))
            for path in self.repos.glob("??/*.git"):
                checked = await self.git.run("--git-dir", str(path), "fsck", "--strict", "--no-dangling")
                wrong.extend([checked.err] if checked.status else [])
            return not wrong

        with contextlib.suppress(TimeoutError):
            await until(right, 60)
        assert wrong == []


class Worker(Protocol):
    async def work(self, server: Server) -> None:
        """Write until the server is gone."""

    async def check(self, server: Server) -> None:
        """Acknowledged writes exist, and interrupted ones can be repeated."""


@dataclass
class LargePushes:
    """One large commit after the other on one branch."""

    objects: Objects
    repo: str
    told: list[str] = field(default_factory=list)
    tried: str = ""

    async def work(self, server: Server) -> None:
        while True:
            self.tried = self.objects.commit(*self.told[-1:], files={"large": os.urandom(LARGE)})
            if not await server.push(self.objects.folder, self.repo, f"{self.tried}:refs/heads/main"):
                return
            self.told.append(self.tried)

    async def check(self, server: Server) -> None:
        now = (await server.refs(self.repo)).get("refs/heads/main")
        assert now in (self.tried, self.told[-1] if self.told else None)
        await server.push(self.objects.folder, self.repo, f"{self.tried}:refs/heads/main")
        self.told.append(self.tried)


@dataclass
class ManyRefs:
    """Many branches in one push, alternating between atomic and not."""

    objects: Objects
    repo: str
    commit: str
    told: set[str] = field(default_factory=set)
    tried: list[str] = field(default_factory=list)
    pushes: int = 0

    @property
    def atomic(self) -> bool:
        return self.pushes % 2 == 0

    @property
    def folder(self) -> str:
        return f"refs/heads/{self.pushes}"

    async def work(self, server: Server) -> None:
        while True:
            self.pushes += 1
            self.tried = [f"{self.folder}/{number:03}" for number in range(REFS_AT_ONCE)]
            if not await self._push(server):
                return
            self.told |= set(self.tried)

    async def _push(self, server: Server) -> bool:
        names = (f"{self.commit}:{name}" for name in self.tried)
        return await server.push(
            self.objects.folder, self.repo, *(["--atomic"] if self.atomic else []), *names
        )

    async def check(self, server: Server) -> None:
        refs = await server.refs(self.repo)
        assert set(refs.values()) <= {self.commit}
        new = refs.keys() - self.told
        assert refs.keys() >= self.told
        assert new <= set(self.tried)
        assert not self.atomic or not new or new >= set(self.tried)
        await self._push(server)
        self.told |= set(self.tried)


@dataclass
class Commits:
    """Sequential API commits, each on top of the previous one."""

    repo: str
    told: list[str] = field(default_factory=list)

    async def work(self, server: Server) -> None:
        while await self._commit(server):
            pass

    async def _commit(self, server: Server) -> bool:
        number = str(len(self.told))
        body: dict[str, Any] = {"message": number, "files": [{"path": number, "content": number * 10_000}]}
        body |= {"expectedSha": self.told[-1]} if self.told else {}
        answer = await server.call("POST", f"/{self.repo}/commits", json=body)
        if answer is not None:
            self.told.append(answer.json()["commit"]["sha"])
        return answer is not None

    async def check(self, server: Server) -> None:
        answer = await server.call("GET", f"/{self.repo}/git/commits?limit=500&order=asc")
        assert answer is not None
        now = [commit["sha"] for commit in answer.json()["commits"]]
        assert now[: len(self.told)] == self.told
        assert len(now) - len(self.told) in (0, 1)
        self.told = now
        await self._commit(server)


@dataclass
class Imports:
    """New repositories from files and from another repository."""

    source: str
    tip: str
    others: set[str]
    """Repositories created elsewhere."""
    text: str = "imported" * 50_000
    told: set[str] = field(default_factory=set)

    async def work(self, server: Server) -> None:
        files = {"files": {"a": self.text}, "type": "files", "commitMessage": "imported"}
        for body in itertools.cycle(({"import": files}, {"source": {"url": self.source}})):
            answer = await server.call("POST", "", json=body)
            if answer is None:
                return
            self.told.add(answer.json()["repoId"])

    async def check(self, server: Server) -> None:
        answer = await server.call("GET", "?limit=100")
        assert answer is not None
        listed = {row["id"]: row["branches"] for row in answer.json()["repositories"]}
        new = listed.keys() - self.others
        assert self.told <= new
        assert len(new - self.told) in (0, 1)
        for repo in new:
            branch = listed[repo]["main"]["target"]
            if branch != self.tip:
                read = await server.call("GET", f"/{repo}/contents/a")
                assert read is not None and read.json()["size"] == len(self.text)
            await server.call("DELETE", f"/{repo}")
        self.told = set()


@dataclass(frozen=True)
class Work:
    pushes: LargePushes
    refs: ManyRefs
    commits: Commits
    imports: Imports

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.pushes, self.refs, self.commits, self.imports


async def _begin(server: Server, source: GitServer) -> Work:
    """Create the repositories of all writers, and one to import."""
    objects = await Objects.make(server.git, "objects")
    tip = objects.commit(files={"large": os.urandom(LARGE)})
    await server.git("push", "-q", str(source.init("source")), f"{tip}:refs/heads/main", cwd=objects.folder)
    repos = []
    for _ in range(3):
        answer = await server.call("POST", "")
        assert answer is not None
        repos.append(answer.json()["repoId"])
    small = objects.commit()
    await server.push(objects.folder, repos[1], f"{small}:refs/heads/main")
    return Work(
        LargePushes(objects, repos[0]),
        ManyRefs(objects, repos[1], small, {"refs/heads/main"}),
        Commits(repos[2]),
        Imports(f"{source.url}/source", tip, set(repos)),
    )


def _found(folder: Path, pattern: str) -> Callable[[], bool]:
    return lambda: any(folder.glob(pattern))


def _answered(count: Callable[[], int]) -> Callable[[], bool]:
    before = count()
    return lambda: count() > before


def _half_changed(server: Server, refs: ManyRefs) -> Callable[[], bool]:
    def changed() -> bool:
        return 2 < len(list((server.path(refs.repo) / refs.folder).glob("*"))) < REFS_AT_ONCE

    return changed


def _passed(when: float) -> Callable[[], bool]:
    return lambda: asyncio.get_running_loop().time() > when


def _moments(server: Server, work: Work) -> Iterator[tuple[str, Callable[[], bool]]]:
    """The conditions at which the server is killed."""
    pushes = server.path(work.pushes.repo)
    yield "a pack arrives", _found(pushes, "objects/tmp_objdir-incoming-*/pack/tmp_pack_*")
    yield "refs change", _half_changed(server, work.refs)
    yield "an import arrives", _found(server.repos, "new/*/objects/pack/tmp_pack_*")
    yield "a push is answered", _answered(lambda: len(work.pushes.told))


def _is_now(moment: Callable[[], bool]) -> bool:
    try:
        return moment()
    except FileNotFoundError:
        # Folders disappear during the walk.
        return False


async def _survive(server: Server, work: Work, moment: Callable[[], bool]) -> None:
    """All write, the server is killed, and after a restart nothing is missing or locked."""
    working = [asyncio.create_task(worker.work(server)) for worker in work.workers]
    try:
        async with asyncio.timeout(60):
            while not _is_now(moment):  # noqa: ASYNC110  # it is over in no time, and nobody tells of it
                await asyncio.sleep(0.001)
    finally:
        await server.kill()
        orphans = _gits(server.settings.git_uids)
        await asyncio.gather(*working)
    await server.start()

    await until(lambda: not orphans & _gits(server.settings.git_uids), 60)
    for worker in work.workers:
        await worker.check(server)
    await server.check_whole()


@contextlib.asynccontextmanager
async def _working(settings: Settings, folder: Path) -> AsyncIterator[tuple[Server, Work]]:
    with other_settings(settings) as other, serving_git(folder) as source:
        home = folder / "home"
        home.mkdir()
        server = Server(other, GitClient(home))
        await server.start()
        try:
            yield server, await _begin(server, source)
        finally:
            await server.end()


async def test_kill_server_during_writes(settings: Settings, machines: Machines, tmp_path: Path) -> None:
    async with _working(settings, tmp_path) as (server, work):
        for what, moment in _moments(server, work):
            print("killed when", what)
            await _survive(server, work, moment)


@pytest.mark.slow
async def test_kill_server_thirty_times(settings: Settings, machines: Machines, tmp_path: Path) -> None:
    chance = random.Random(8)
    loop = asyncio.get_running_loop()
    async with _working(settings, tmp_path) as (server, work):
        for _ in range(30):
            await _survive(server, work, _passed(loop.time() + chance.uniform(0.05, 2)))


async def test_cancelled_commit_leaves_no_lock(tmp_path: Path) -> None:
    """The caller was cancelled: git releases its locks and removes temporary files."""
    async with open_hosting(tmp_path) as hosting:
        repository = await hosting.repository()
        for moment in range(60):
            content = str(moment).encode()
            committing = asyncio.create_task(commit(repository, [Change("file", content)], "change"))
            await asyncio.sleep(moment * 0.0004)
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            assert _leftovers(tmp_path / "repos") == []
        made = await commit(repository, [Change("file", b"last")], "change")
        assert await repository.resolve("main") == made.sha


async def test_received_push_completes_after_client_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push was received completely and refs were being updated: a kill would leave locks."""
    monkeypatch.setattr(serving, "_GRACE", 0.01)
    (tmp_path / "data").mkdir()
    async with served(tmp_path / "data") as repo_server, client_of(repo_server.url, repo_server.key) as http:
        repo = (await http.post("/git/v1/repo")).json()["repoId"]
        objects = await Objects.make(GitClient(tmp_path), "objects")
        commit = objects.commit()
        names = [f"refs/heads/many/{number:04}" for number in range(600)]
        login = f"http.extraHeader=Authorization: Bearer {repo_server.key}"
        pushing = await asyncio.create_subprocess_exec(
            *("git", "-c", login, "push", "-q", f"{repo_server.url}/{repo}"),
            *(f"{commit}:{name}" for name in names),
            cwd=objects.folder,
            env=objects.git.environment(),
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        refs = repo_server.hosting.repos.repository(repo).path / "refs" / "heads" / "many"

        await until(lambda: refs.exists() and any(refs.iterdir()), 60)
        os.killpg(pushing.pid, signal.SIGKILL)
        await pushing.wait()
        assert len(list(refs.iterdir())) < len(names)

        async def done() -> bool:
            return len((await http.get(f"/git/v1/repo/{repo}")).json()["branches"]) == len(names)

        await until(done, 60)
        assert _leftovers(tmp_path / "data" / "repos") == []


async def test_errors_of_damaged_repository_have_no_host_paths(tmp_path: Path) -> None:
    async with served(tmp_path) as repo_server, client_of(repo_server.url, repo_server.key) as http:
        repo = (await http.post("/git/v1/repo")).json()["repoId"]
        path = repo_server.hosting.repos.repository(repo).path
        (path / "objects").rename(tmp_path / "objects")
        answer = await http.get(f"/git/v1/repo/{repo}")
        (tmp_path / "objects").rename(path / "objects")
        assert (answer.status_code, answer.json()["code"]) == (500, "GIT_ERROR")
        assert str(tmp_path) not in answer.text
        assert (await http.get(f"/git/v1/repo/{repo}")).status_code == 200
