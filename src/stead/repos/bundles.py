"""Repositories on their way into machines: what a clone has, fixed at one moment, and the pack of it."""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from stead.identity.callers import Caller
from stead.logs import get_logger
from stead.repos.access import Access
from stead.repos.errors import RepoDamaged, RepoNotFound
from stead.repos.git import GitProcess
from stead.repos.repos import Repos
from stead.repos.repository import Repository

PUBLISHED = "https://git.freestyle.sh"
"""Where published examples have their repositories. What is not found here may well be there."""
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PORTS = {"http": 80, "https": 443}
_REFS = "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads/", "refs/tags/"
_MAX_REFS = 64 << 20
"""Bytes of names and ids."""
_PACK = "pack-objects", "--revs", "--stdout", "--delta-base-offset", "--quiet"
_PIECE = 256 << 10

log = get_logger("stead.repos")


@dataclass(frozen=True)
class Bundle:
    """What a plain `git clone` gets: all branches and tags, where they were at one moment.

    `branch` or `commit` is what is checked out; the default branch if it is neither.
    """

    account: str
    """Whom it is for."""
    repo: str
    url: str
    """Where it is cloned from by those who reach this Stead."""
    head: str
    """The default branch, which need not be there."""
    refs: bytes
    """A line for each branch and tag: the id, a space and the full name."""
    shallow: bytes
    """A line for each commit whose parents are not there."""
    branch: str | None = None
    commit: str | None = None

    @property
    def digest(self) -> str:
        """Equal when the clones are equal."""
        texts = (self.url, self.head, self.branch or "", self.commit or "")
        whole = hashlib.sha256()
        for part in (*(text.encode() for text in texts), self.refs, self.shallow):
            whole.update(len(part).to_bytes(8, "big") + part)
        return whole.hexdigest()

    @property
    def tips(self) -> bytes:
        """The objects from which all of it can be reached, a line for each."""
        shas = dict.fromkeys(line[:40] for line in self.refs.splitlines())
        if self.commit is not None:
            shas[self.commit.encode()] = None
        return b"".join(sha + b"\n" for sha in shas)


class Bundles:
    """Finds repositories by what users call them, and packs them."""

    def __init__(self, repos: Repos, access: Access, root: str) -> None:
        """`root` is what stands before a repository's id in the address that it is cloned from."""
        self._repos = repos
        self._access = access
        self._root = root

    async def find(self, account: str, name: str, rev: str | None = None) -> Bundle | None:
        """What a clone would be now; None when a name, an id or a URL, is not that of a repository here.

        `rev` is a branch, a tag or a commit. Somebody else's repository is not there, unless it is public.
        """
        named = _id_in(name, self._root)
        repo = named or _id_in(name, PUBLISHED)
        if repo is None:
            return None
        try:
            repository = await self._readable(account, repo)
        except RepoNotFound:
            if named is None:
                return None
            raise
        with _there(repository):
            return await _fixed(repository, account, f"{self._root}/{repo}", rev)

    @contextlib.asynccontextmanager
    async def packed(self, bundle: Bundle) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pack of a bundle, made while it is read, for as long as the block lasts; then git is gone.

        It has what was fixed, whatever was pushed since. What is wrong with it is raised while it is read.
        """
        repository = await self._readable(bundle.account, bundle.repo)
        async with repository.git.running(repository.path, *_PACK) as process:
            errors = asyncio.create_task(process.errors())
            try:
                yield _pieces(repository, process, bundle.tips, errors)
            finally:
                errors.cancel()
                await asyncio.gather(errors, return_exceptions=True)

    async def _readable(self, account: str, repo: str) -> Repository:
        info = await self._repos.get(repo)
        if await self._access.level(Caller(account), info) is None:
            raise RepoNotFound(repo)
        return self._repos.repository(repo)


def is_id(name: str) -> bool:
    """Whether a name has the form of a repository's id."""
    return _ID.fullmatch(name.lower()) is not None


async def _fixed(repository: Repository, account: str, url: str, rev: str | None) -> Bundle:
    head = repository.default_branch
    shallow = repository.path / "shallow"
    boundary = shallow.read_bytes() if shallow.exists() else b""
    refs = await repository.git.run(repository.path, *_REFS, most=_MAX_REFS)
    branch = commit = None
    if rev is not None:
        branch = rev.removeprefix("refs/heads/")
        if f" refs/heads/{branch}\n".encode() not in refs:
            branch, commit = None, await repository.resolve(rev)
    return Bundle(account, repository.id, url, head, refs, boundary, branch, commit)


@contextlib.contextmanager
def _there(repository: Repository) -> Iterator[None]:
    """Around what cannot work when the repository is removed meanwhile: then that is what is told."""
    try:
        yield
    except (RepoDamaged, FileNotFoundError):
        if repository.path.exists():
            raise
        raise RepoNotFound(repository.id) from None


async def _pieces(
    repository: Repository, process: GitProcess, tips: bytes, errors: "asyncio.Task[str]"
) -> AsyncGenerator[bytes, None]:
    with _there(repository):
        await process.feed(tips)
        while piece := await process.stdout.read(_PIECE):
            yield piece
        if await process.wait():
            log.warning("bundle failed", repo=repository.id, said=(await errors).strip())
            raise RepoDamaged(f"repository {repository.id} changed during the bundle or is damaged")


def _id_in(name: str, root: str) -> str | None:
    """The id of a repository, from itself or its address below a root, whatever credentials are in that."""
    last = name
    if "://" in name:
        url, base = urlsplit(name), urlsplit(root)
        folder, _, last = url.path.rstrip("/").removesuffix(".git").rpartition("/")
        if _place(url) != _place(base) or folder != base.path.rstrip("/") or url.query or url.fragment:
            return None
    return last.lower() if is_id(last) else None


def _place(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or _PORTS.get(url.scheme)
