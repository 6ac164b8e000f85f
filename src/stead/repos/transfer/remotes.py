"""Git client for remote repositories: fetch and push through the SSRF guard."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stead.disk_marks import writable
from stead.repos.errors import (
    DiskFull,
    InvalidRevision,
    ReferenceNotFound,
    RepoDamaged,
    RepoError,
    TooLarge,
)
from stead.repos.folders import read_regular
from stead.repos.git import Finished, check_room
from stead.repos.git_messages import GitMessage
from stead.repos.names import SHORT_SHA, is_ref
from stead.repos.repository import Repository
from stead.repos.sizes import folder_size
from stead.repos.ssrf import (
    PinnedTarget,
    RemoteResponse,
    RequestFailed,
    SsrfGuard,
    git_environment,
    git_options,
    shown,
)
from stead.tasks import Threads, cancel_and_wait, in_thread

BRANCHES, TAGS = "refs/heads/", "refs/tags/"
_CHECK_EVERY = 0.25
_ADVERTISED = "/info/refs?service=git-upload-pack"
_ADVERTISEMENT = "application/x-git-upload-pack-advertisement"
_NO_GIT = "no git repository with the smart HTTP protocol"
_MAX_ADVERTISEMENT = 64 << 20
_MAX_TRACE = 64 << 20
_CLIENT = {"User-Agent": "git/2.39 (stead)", "Git-Protocol": "version=2"}
"""Some servers only accept git clients."""

_IGNORED_FSCK_FINDINGS = (
    "badDate",
    "badDateOverflow",
    "badEmail",
    "badName",
    "badTimezone",
    "missingEmail",
    "missingNameBeforeEmail",
    "missingSpaceBeforeDate",
    "missingSpaceBeforeEmail",
    "multipleAuthors",
    "zeroPaddedDate",
    "zeroPaddedFilemode",
)
"""fsck findings of old tools that are harmless in a checkout, and therefore ignored.

Findings about file names, links and submodules are never ignored.
"""


class SourceNotFound(RepoError):
    """No repository, or no file, at this URL."""

    def __init__(self, url: str, why: str = "not found") -> None:
        super().__init__(f"cannot import {url}: {why}")
        self.url = url


class SourceUnauthorized(RepoError):
    """The source requires other credentials."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url} requires other credentials")
        self.url = url


class SourceInvalid(RepoError):
    """The source cannot be imported."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"cannot import {url}: {why}")
        self.url = url


@dataclass(frozen=True)
class Remote:
    """A remote repository and its refs."""

    target: PinnedTarget
    refs: Mapping[str, str]
    head: str | None
    """Its default branch."""

    @property
    def url(self) -> str:
        return self.target.shown

    def branches(self) -> list[str]:
        return [name.removeprefix(BRANCHES) for name in self.refs if name.startswith(BRANCHES)]


@dataclass(frozen=True)
class RemoteRevision:
    """The requested part of a remote: a ref, or a commit by its full or abbreviated id."""

    ref: str | None = None
    sha: str | None = None

    @property
    def branch(self) -> str | None:
        if self.ref is None or not self.ref.startswith(BRANCHES):
            return None
        return self.ref.removeprefix(BRANCHES)


class Remotes:
    def __init__(
        self,
        guard: SsrfGuard,
        *,
        most_bytes: int,
        timeout: float,
        exceeded: Callable[[], RepoError] | None = None,
    ) -> None:
        """`most_bytes` limits how much a repository may grow; `timeout` is in seconds.

        `exceeded` makes the error if the limit is a quota, or the disk.
        """
        self._guard = guard
        self._most = most_bytes
        self._timeout = timeout
        self._exceeded = exceeded

    async def open(self, repository: Repository, url: str, rev: str | None) -> Remote:
        """Read the refs of a remote: branches, tags, and `rev` if it is a ref."""
        target = await self._find(url)
        patterns = ["HEAD", f"{BRANCHES}*", f"{TAGS}*"]
        if rev is not None and rev.startswith("refs/") and is_ref(rev):
            patterns.append(rev)
        arguments = "ls-remote", "--symref", "--", target.url, *patterns
        finished = await self._git(repository, target, *arguments)
        if finished.status != 0:
            raise RequestFailed(target.shown, last_message(finished, "fatal"))
        head = None
        refs: dict[str, str] = {}
        for line in finished.stdout.decode(errors="replace").splitlines():
            value, _, name = line.partition("\t")
            if value.startswith("ref: "):
                head = value.removeprefix(f"ref: {BRANCHES}") if name == "HEAD" else head
            elif not name.endswith("^{}"):
                refs[name] = value
        return Remote(target, refs, head if head and BRANCHES + head in refs else _guess(refs))

    async def _find(self, url: str) -> PinnedTarget:
        """Follow redirects to the repository's URL, and check that it can be read."""
        if "?" in url or "#" in url:
            raise SourceInvalid(shown(url), "a repository URL cannot have a query")
        async with self._guard.stream_get(
            url.rstrip("/") + _ADVERTISED,
            most_bytes=_MAX_ADVERTISEMENT,
            timeout=self._timeout,
            headers=_CLIENT,
            credentials=True,
        ) as answer:
            check_status(answer, _ADVERTISED)
            target = answer.target
            kind = answer.headers.get("content-type", "").partition(";")[0].strip()
        if kind != _ADVERTISEMENT or not target.path.endswith(_ADVERTISED):
            raise SourceNotFound(shown(url), _NO_GIT)
        return replace(target, path=target.path.removesuffix(_ADVERTISED))

    async def fetch(
        self,
        repository: Repository,
        remote: Remote,
        refspecs: Sequence[str],
        depth: int | None,
        *options: str,
    ) -> None:
        """Fetch refs with their history; objects are checked by fsck."""
        settings = [word for name in _IGNORED_FSCK_FINDINGS for word in ("-c", f"fetch.fsck.{name}=ignore")]
        shallow = [] if depth is None else [f"--depth={depth}"]
        finished = await self._git(
            repository,
            remote.target,
            *settings,
            "fetch",
            "--quiet",
            "--no-write-fetch-head",
            "--no-auto-maintenance",
            "--no-recurse-submodules",
            "--update-shallow",
            *shallow,
            *options,
            "--",
            remote.target.url,
            *refspecs,
        )
        if finished.status == 0:
            return
        if GitMessage.NOT_ADVERTISED.found_in(finished.stderr):
            raise CommitNotAdvertised(refspecs[0])
        if GitMessage.REF_NOT_FOUND.found_in(finished.stderr):
            raise ReferenceNotFound(refspecs[0].partition(":")[0])
        if GitMessage.FSCK_FAILED.found_in(finished.stderr):
            raise SourceInvalid(remote.url, last_message(finished, "error"))
        raise RequestFailed(remote.url, last_message(finished, "fatal"))

    async def push(
        self, repository: Repository, remote: Remote, refspecs: Sequence[str], *options: str
    ) -> dict[str, str | None]:
        """Push refs; returns the reason of rejection per ref, None if it was accepted."""
        finished = await self._git(
            repository, remote.target, "push", "--porcelain", *options, "--", remote.target.url, *refspecs
        )
        rejections: dict[str, str | None] = {}
        for line in finished.stdout.decode(errors="replace").splitlines():
            flag, _, rest = line.partition("\t")
            names, _, summary = rest.partition("\t")
            if len(flag) == 1 and summary:
                rejections[names.rpartition(":")[2]] = printable(summary) if flag == "!" else None
        if finished.status != 0 and not rejections:
            raise RequestFailed(remote.url, last_message(finished, "fatal"))
        return rejections

    async def _git(self, repository: Repository, target: PinnedTarget, *arguments: str) -> Finished:
        """Run git pinned to the checked addresses, with a limit on the repository's growth."""
        before = await Threads.TREES.run(folder_size, repository.path)
        trace = repository.path / "trace"
        env = {**git_environment(target), "GIT_TRACE2_EVENT": str(trace)}
        running = asyncio.create_task(
            repository.finish(
                *git_options(target),
                *arguments,
                env=env,
                timeout=self._timeout + 1,
                most=_MAX_ADVERTISEMENT,
                network=True,
            )
        )
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_CHECK_EVERY)
                grown = await Threads.TREES.run(folder_size, repository.path) - before
                if grown > 0 and not writable(repository.path):
                    raise DiskFull
                if grown > self._most:
                    if self._exceeded is not None:
                        raise self._exceeded()
                    raise TooLarge(f"{target.shown} too large (max {self._most >> 20} MiB)")
        finally:
            await cancel_and_wait(running)
        spoken = await in_thread(_pop_trace, trace, b'"negotiated-version"')
        if running.result().status != 0 or not spoken:
            check_room(running.result(), repository.path)
        if running.result().status == 0 and not spoken:
            # Dumb HTTP: objects would not be checked by fsck in transit.
            raise SourceNotFound(target.shown, _NO_GIT)
        return running.result()


class CommitNotAdvertised(ReferenceNotFound):
    """The server does not offer this commit: fetch all refs instead."""


def _guess(refs: Mapping[str, str]) -> str | None:
    """The likely default branch of a remote that does not name one."""
    names = [name.removeprefix(BRANCHES) for name in refs if name.startswith(BRANCHES)]
    same = [name for name in names if refs[BRANCHES + name] == refs.get("HEAD")]
    if "HEAD" in refs and not same:
        return None
    among = same or names
    return next((name for name in ("main", "master") if name in among), among[0] if among else None)


def find_revision(remote: Remote, rev: str | None) -> RemoteRevision:
    """Resolve a branch, tag, ref or commit name on a remote; default: the default branch."""
    if rev is None or rev == "HEAD":
        if remote.head is not None:
            return RemoteRevision(ref=BRANCHES + remote.head)
        if "HEAD" in remote.refs:
            return RemoteRevision(sha=remote.refs["HEAD"])
        raise ReferenceNotFound("HEAD")
    for ref in (BRANCHES + rev, TAGS + rev, rev):
        if ref in remote.refs and ref.startswith("refs/"):
            return RemoteRevision(ref=ref)
    if SHORT_SHA.fullmatch(rev.lower()):
        tips = {sha for sha in remote.refs.values() if sha.startswith(rev.lower())}
        return RemoteRevision(sha=tips.pop() if len(tips) == 1 else rev.lower())
    raise ReferenceNotFound(rev) if is_ref(rev) else InvalidRevision(rev)


def check_status(answer: RemoteResponse, suffix: str = "") -> None:
    url = answer.target.shown.removesuffix(suffix.partition("?")[0])
    if answer.status in (401, 403):
        raise SourceUnauthorized(url)
    if answer.status in (404, 410):
        raise SourceNotFound(url)
    if answer.status != 200:
        raise RequestFailed(url, f"status {answer.status}")


def last_message(finished: Finished, kind: str) -> str:
    """The last line of git's errors of this kind; text from the remote server is untrusted."""
    lines = [line for line in finished.stderr.splitlines() if line.strip()]
    chosen = [line for line in lines if line.startswith(f"{kind}:")] or lines or ["git gave no message"]
    return printable(chosen[-1].removeprefix(f"{kind}: "))


def printable(text: str) -> str:
    return "".join(sign for sign in text if sign.isprintable())[:500]


def _pop_trace(trace: Path, word: bytes) -> bool:
    """Whether a word is in a file; the file is removed."""
    try:
        return word in read_regular(trace, _MAX_TRACE)
    except (FileNotFoundError, RepoDamaged):
        return False
    finally:
        trace.unlink(missing_ok=True)
