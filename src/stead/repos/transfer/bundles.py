"""Bundles: a clone of a repository at a fixed point in time, packed for transfer into a VM."""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from stead.identity.callers import Caller
from stead.logs import get_logger
from stead.repos.access import RepoAccess
from stead.repos.errors import RepoDamaged, RepoNotFound
from stead.repos.folders import read_regular
from stead.repos.git import GitProcess
from stead.repos.places import GitCaller, Work
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.tasks import in_background

PUBLISHED = "https://git.freestyle.sh"
"""Host name in the clone URLs of published examples. Inside VMs it leads to this server."""
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PORTS = {"http": 80, "https": 443}
_REFS = "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads/", "refs/tags/"
_MAX_REFS = 64 << 20
"""Bytes of ref names and ids."""
_PACK = "pack-objects", "--revs", "--stdout", "--delta-base-offset", "--quiet"
_PIECE = 256 << 10

log = get_logger("stead.repos")


@dataclass(frozen=True)
class Bundle:
    """The refs that `git clone` would fetch: all branches and tags at one point in time.

    `branch` or `commit` is checked out; if both are None, the default branch.
    """

    account: str
    """The account that requested it."""
    repo: str
    url: str
    """The URL to clone from, inside VMs."""
    head: str
    """The default branch, which may not exist."""
    refs: bytes
    """One line per branch and tag: id, space, full name."""
    shallow: bytes
    """One line per commit whose parents are missing (shallow)."""
    branch: str | None = None
    commit: str | None = None

    @property
    def digest(self) -> str:
        """A digest that is equal for equal clones."""
        texts = (self.url, self.head, self.branch or "", self.commit or "")
        whole = hashlib.sha256()
        for part in (*(text.encode() for text in texts), self.refs, self.shallow):
            whole.update(len(part).to_bytes(8, "big") + part)
        return whole.hexdigest()

    @property
    def tips(self) -> bytes:
        """The ids of the tips that reach all objects, one per line."""
        shas = dict.fromkeys(line[:40] for line in self.refs.splitlines())
        if self.commit is not None:
            shas[self.commit.encode()] = None
        return b"".join(sha + b"\n" for sha in shas)


class Bundles:
    """Resolves repository names and packs repositories."""

    def __init__(self, repos: Repos, access: RepoAccess, root: str, guest_root: str) -> None:
        """`root` is the clone URL prefix before the repository's id, `guest_root` the one inside VMs."""
        self._repos = repos
        self._access = access
        self._roots = root, guest_root, PUBLISHED
        self._guest_root = guest_root

    async def find(self, account: str, name: str, rev: str | None = None) -> Bundle | None:
        """The bundle of a repository now; None if `name` (a name, id or URL) is not a repository of this
        server.

        `rev` is a branch, a tag or a commit. Private repositories of other accounts are treated as missing.
        """
        repo = next((found for root in self._roots if (found := _id_in(name, root))), None)
        if repo is None:
            return None
        repository = await self._readable(account, repo)
        with _there(repository):
            return await _fixed(repository, account, f"{self._guest_root}/{repo}", rev)

    @contextlib.asynccontextmanager
    async def packed(self, bundle: Bundle) -> AsyncIterator[AsyncIterator[bytes]]:
        """Stream the pack of a bundle; the git process ends with the block.

        The pack has the pinned refs, whatever was pushed since. Errors are raised while it is read.
        """
        repository = await self._readable(bundle.account, bundle.repo)
        async with (
            repository.holding(Work.TRANSFER) as held,
            held.running(*_PACK) as process,
            in_background(process.errors()) as errors,
        ):
            yield _pieces(repository, process, bundle.tips, errors)

    async def _readable(self, account: str, repo: str) -> Repository:
        info = await self._repos.get(repo)
        if await self._access.level(Caller(account), info) is None:
            raise RepoNotFound(repo)
        return self._repos.opened(info, GitCaller(account))


def is_id(name: str) -> bool:
    """Whether a name has the form of a repository id."""
    return _ID.fullmatch(name.lower()) is not None


async def _fixed(repository: Repository, account: str, url: str, rev: str | None) -> Bundle:
    head = repository.default_branch
    boundary = b""
    with contextlib.suppress(FileNotFoundError):
        boundary = read_regular(repository.path / "shallow", _MAX_REFS)
    refs = await repository.run(*_REFS, most=_MAX_REFS)
    branch = commit = None
    if rev is not None:
        branch = rev.removeprefix("refs/heads/")
        if f" refs/heads/{branch}\n".encode() not in refs:
            branch, commit = None, await repository.resolve(rev)
    return Bundle(account, repository.id, url, head, refs, boundary, branch, commit)


@contextlib.contextmanager
def _there(repository: Repository) -> Iterator[None]:
    """Converts errors caused by a concurrent deletion to RepoNotFound."""
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
            log.warning("bundle failed", repo=repository.id, stderr=(await errors).strip())
            raise RepoDamaged(f"repository {repository.id} changed during the bundle or is damaged")


def _id_in(name: str, root: str) -> str | None:
    """The repository id in an id or a URL below `root`, ignoring credentials in the URL."""
    last = name
    if "://" in name:
        url, base = urlsplit(name), urlsplit(root)
        folder, _, last = url.path.rstrip("/").removesuffix(".git").rpartition("/")
        if _place(url) != _place(base) or folder != base.path.rstrip("/") or url.query or url.fragment:
            return None
    return last.lower() if is_id(last) else None


def _place(url: SplitResult) -> tuple[str, str | None, int | None]:
    return url.scheme, url.hostname, url.port or _PORTS.get(url.scheme)
