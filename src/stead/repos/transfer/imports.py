"""Imports: fill new repositories with the history of another one, or with files as one commit.

The repository is not visible while it is filled. If the import fails, it is discarded.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from stead.errors import InvalidRequest
from stead.repos.committing import Change, commit
from stead.repos.errors import InvalidChange, ReferenceNotFound, RepoError, TooLarge
from stead.repos.fast_import import Author
from stead.repos.names import SHA, check_branch, check_directory
from stead.repos.quotas import QuotaReservation
from stead.repos.repos import Fill
from stead.repos.repository import MAX_REFS, Repository
from stead.repos.ssrf import RequestFailed, SsrfGuard, shown
from stead.repos.transfer.archive_import import ArchiveTree, one_commit, run_fast_import
from stead.repos.transfer.archives import ArchiveInvalid, ArchiveLimits, Kind, members, reading
from stead.repos.transfer.remotes import (
    BRANCHES,
    TAGS,
    CommitNotAdvertised,
    Remote,
    RemoteRevision,
    Remotes,
    SourceInvalid,
    check_status,
    find_revision,
    last_message,
)
from stead.tasks import in_thread

MAX_BYTES = 4 << 30
TIMEOUT = 280.0
"""Seconds for a whole import: clients give up after 300."""
_OVERHEAD = 1 << 20
_TEMPORARY = "refs/stead/source"
_WANTED = f"{_TEMPORARY}/wanted"


class SubdirNotFound(RepoError):
    def __init__(self, source: str, folder: str) -> None:
        super().__init__(f"no folder {folder} in {source}")
        self.source = source
        self.folder = folder


class Imports:
    def __init__(
        self,
        guard: SsrfGuard,
        *,
        most_bytes: int = MAX_BYTES,
        timeout: float = TIMEOUT,
        bounds: ArchiveLimits | None = None,
    ) -> None:
        """`most_bytes` limits a repository's size; archives have their own limits too."""
        self._guard = guard
        self._most = most_bytes
        self._timeout = timeout
        self._bounds = bounds or ArchiveLimits()

    # History

    def source(
        self,
        url: str,
        *,
        rev: str | None = None,
        depth: int | None = None,
        all_branches: bool = False,
        default_branch: str | None = None,
    ) -> Fill:
        """Import the history of another repository: of its default branch, of `rev`, or of all branches.

        A branch keeps its name unless a default branch is given. A tag is kept, and the default branch points
        to its commit; likewise for a commit. With `depth` the repository is shallow. An abbreviated commit id
        requires a full fetch.
        """
        if depth is not None and depth < 1:
            raise InvalidRequest(f"depth must be at least 1, not {depth}")
        asked = None if default_branch is None else check_branch(default_branch)

        async def fill(repository: Repository, quota: QuotaReservation) -> None:
            remotes = self._remotes(quota)
            async with self._deadline(url):
                remote = await remotes.open(repository, url, rev)
                if not remote.refs and rev is None:
                    return
                wanted = find_revision(remote, rev)
                if all_branches:
                    branch = await self._fetch_all(remotes, repository, remote, wanted, asked, depth)
                else:
                    branch = asked or wanted.branch or remote.head or repository.default_branch
                    await self._fetch_one(remotes, repository, remote, wanted, branch, depth)
                await repository.run("symbolic-ref", "HEAD", BRANCHES + check_branch(branch))

        return fill

    def _remotes(self, quota: QuotaReservation) -> Remotes:
        return remotes_with_quota(self._guard, quota, self._most, self._timeout)

    async def _fetch_one(
        self,
        remotes: Remotes,
        repository: Repository,
        remote: Remote,
        wanted: RemoteRevision,
        branch: str,
        depth: int | None,
    ) -> None:
        """Fetch one line of history into this branch."""
        into = BRANCHES + branch
        if wanted.ref is not None and wanted.ref.startswith(TAGS):
            await remotes.fetch(repository, remote, [f"{wanted.ref}:{wanted.ref}"], depth)
            await self._set_ref(repository, into, wanted.ref)
        elif wanted.ref is not None:
            await remotes.fetch(repository, remote, [f"{wanted.ref}:{into}"], depth)
        elif await self._fetch_commit(remotes, repository, remote, wanted.sha or "", into, depth):
            await self._drop_temporary_refs(repository)

    async def _fetch_all(
        self,
        remotes: Remotes,
        repository: Repository,
        remote: Remote,
        wanted: RemoteRevision,
        asked: str | None,
        depth: int | None,
    ) -> str:
        """Fetch all branches and tags; returns the default branch."""
        if len(remote.refs) > MAX_REFS:
            raise TooLarge(f"{remote.url} has too many branches and tags (max {MAX_REFS})")
        known = remote.branches()
        if wanted.branch is None and (asked is None or asked in known):
            raise InvalidRequest("to import all branches, rev must name the branch that becomes the default")
        refspecs = [f"{BRANCHES}*:{BRANCHES}*", f"{TAGS}*:{TAGS}*"]
        await remotes.fetch(repository, remote, refspecs, depth)
        branch = asked or wanted.branch or ""
        if branch not in known:
            await self._set_ref(repository, BRANCHES + branch, wanted.ref or wanted.sha or "")
        return branch

    async def _fetch_commit(
        self,
        remotes: Remotes,
        repository: Repository,
        remote: Remote,
        sha: str,
        into: str,
        depth: int | None,
    ) -> bool:
        """Fetch a commit; returns whether temporary refs had to be fetched."""
        if SHA.fullmatch(sha):
            try:
                await remotes.fetch(repository, remote, [f"{sha}:{into}"], depth)
                return False
            except CommitNotAdvertised:
                # Old servers only serve advertised commits: fetch all refs and search there.
                pass
        refspecs = [f"{BRANCHES}*:{_TEMPORARY}/heads/*", f"{TAGS}*:{_TEMPORARY}/tags/*"]
        await remotes.fetch(repository, remote, refspecs, None, "--no-tags")
        await self._set_ref(repository, into, sha)
        return True

    async def _set_ref(self, repository: Repository, ref: str, rev: str) -> None:
        await repository.run("update-ref", ref, await repository.resolve(rev))

    async def _drop_temporary_refs(self, repository: Repository) -> None:
        """Delete the temporary refs and objects that only they need."""
        await repository.cat_files.stop(repository.path)
        git, path = repository.git, repository.path
        form = "--format=delete %(refname)"
        deletions = await git.run(path, "for-each-ref", form, _TEMPORARY)
        await git.run(path, "update-ref", "--stdin", stdin=deletions)
        await git.run(path, "repack", "-a", "-d", "-n", "-q", timeout=self._timeout)
        await git.run(path, "prune", "--expire=now", timeout=self._timeout)

    # Files

    def files(self, files: Mapping[str, str], message: str, author: Author | None = None) -> Fill:
        """Import texts by path."""

        async def fill(repository: Repository, _: QuotaReservation) -> None:
            try:
                changes = [Change(path, text.encode()) for path, text in files.items()]
            except UnicodeEncodeError as error:
                path = next(path for path, text in files.items() if text == error.object)
                raise InvalidChange(path, "content is not valid UTF-8") from None
            await commit(repository, changes, message, author=author)
            await self._fsck(repository, "this import")

        return fill

    def archive(
        self,
        kind: Kind,
        url: str,
        message: str,
        *,
        folder: str | None = None,
        author: Author | None = None,
    ) -> Fill:
        """Import a tar or zip archive, or one folder of it.

        Symbolic links and executable bits are kept; `.git` folders are skipped.
        """
        subfolder = check_directory(folder or "")

        async def fill(repository: Repository, quota: QuotaReservation) -> None:
            async with self._deadline(url):
                archive = repository.path / "import"
                name = await self._download(url, archive, quota)
                tree = ArchiveTree(subfolder)
                script = self._script(kind, archive, tree, repository, name, message, author or Author())
                try:
                    await run_fast_import(repository, script)
                except ArchiveInvalid as error:
                    raise SourceInvalid(name, str(error)) from error
                await in_thread(archive.unlink)
                await self._fsck(repository, name)

        return fill

    def _script(
        self,
        kind: Kind,
        archive: Path,
        tree: ArchiveTree,
        repository: Repository,
        name: str,
        message: str,
        author: Author,
    ) -> Iterator[bytes]:
        with reading(kind):
            yield from tree.blobs(members(kind, archive, self._bounds))
        if not tree.folder_found:
            raise SubdirNotFound(name, tree.folder)
        yield from one_commit(repository.default_branch, message, author, tree.lines())

    def tree(
        self,
        url: str,
        message: str,
        *,
        rev: str | None = None,
        folder: str | None = None,
        author: Author | None = None,
    ) -> Fill:
        """Import one revision of another repository, or one folder of it, without history."""
        subfolder = check_directory(folder or "")

        async def fill(repository: Repository, quota: QuotaReservation) -> None:
            remotes = self._remotes(quota)
            async with self._deadline(url):
                remote = await remotes.open(repository, url, rev)
                if not remote.refs:
                    raise ReferenceNotFound(rev or "HEAD")
                wanted = find_revision(remote, rev)
                if wanted.ref is not None:
                    await remotes.fetch(repository, remote, [f"{wanted.ref}:{_WANTED}"], 1, "--no-tags")
                else:
                    await self._fetch_commit(remotes, repository, remote, wanted.sha or "", _WANTED, 1)
                sha = await repository.resolve(_WANTED)
                name = f"{sha}:{subfolder}" if subfolder else f"{sha}^{{tree}}"
                found = await repository.info(name)
                if found is None or found.kind != "tree":
                    raise SubdirNotFound(remote.url, subfolder)
                lines = [f'M 040000 {found.sha} ""\n'.encode()]
                branch = repository.default_branch
                await run_fast_import(repository, one_commit(branch, message, author or Author(), lines))
                await self._drop_temporary_refs(repository)

        return fill

    async def _download(self, url: str, path: Path, quota: QuotaReservation) -> str:
        """Download a file; returns its name."""
        most = _download_limit(quota, self._most)
        with _over_quota(quota, self._most):
            async with self._guard.for_account(quota.account).stream_get(
                url, most_bytes=most, timeout=self._timeout, credentials=True
            ) as answer:
                check_status(answer)
                with await in_thread(path.open, "xb") as file:
                    async for piece in answer.pieces:
                        quota.check_disk()
                        file.write(piece)
                return answer.target.shown

    async def _fsck(self, repository: Repository, source: str) -> None:
        """Run fsck with the same checks as for a push."""
        options = "--strict", "--no-dangling", "--no-progress"
        finished = await repository.finish("fsck", *options, timeout=self._timeout)
        if finished.status != 0:
            raise SourceInvalid(source, last_message(finished, "error"))

    @contextlib.asynccontextmanager
    async def _deadline(self, url: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise RequestFailed(shown(url), f"timed out after {self._timeout:g} s") from None


def remotes_with_quota(guard: SsrfGuard, quota: QuotaReservation, most: int, timeout: float) -> Remotes:
    """A git client limited to the quota of a write."""
    room = _download_limit(quota, most)
    exceeded = quota.exceeded if room < most else None
    bound = guard.for_account(quota.account)
    return Remotes(bound, most_bytes=room, timeout=timeout, exceeded=exceeded)


def _download_limit(quota: QuotaReservation, most: int) -> int:
    """The download limit with the remaining quota and disk; the result is checked again later."""
    quota.check_disk()
    room = most if quota.room is None else quota.room + _OVERHEAD
    return min(most, room, quota.disk_room)


@contextlib.contextmanager
def _over_quota(quota: QuotaReservation, most: int) -> Iterator[None]:
    """Converts TooLarge to QuotaExceeded or DiskFull if that was the limit."""
    limited = _download_limit(quota, most) < most
    try:
        yield
    except TooLarge as error:
        if limited:
            raise quota.exceeded() from error
        raise
