"""One repository: git in it, refs, revisions and commits."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stead.repos.errors import (
    BranchExists,
    BranchNotFound,
    CommitNotFound,
    InvalidBranch,
    InvalidRevision,
    ReferenceNotFound,
    RepoDamaged,
    TagNotFound,
    TooLarge,
)
from stead.repos.folders import read_regular
from stead.repos.git import (
    MAX_MEMORY,
    MAX_OUTPUT,
    TIMEOUT,
    Finished,
    Git,
    GitFailed,
    GitProcess,
    check_room,
    subcommand,
)
from stead.repos.git_messages import GitMessage
from stead.repos.model import Branch, Commit, Tag, parse_commit, parse_tag
from stead.repos.names import SHORT_SHA, check_branch, check_sha, is_ref
from stead.repos.objects import MAX_OBJECT, CatFile, CatFilePool, ObjectInfo
from stead.repos.places import PlaceHolder, Work
from stead.shares import Reserve, unlimited
from stead.tasks import Threads

MAX_REFS = 100_000
_SMALL_TEXT = 64 << 10
"""Bytes of refs or objects that are parsed on the event loop, in about a millisecond."""
_MAX_TEXT = 16 << 20
"""Bytes of commits or tag objects that are read at once."""
_PARSED = 3
"""Bytes of parsed refs for each byte of their text, at the most."""
_HEAD = "ref: refs/heads/"
_MAX_HEAD = 4096
"""Bytes of the file that names the default branch."""
ZERO_SHA = "0" * 40
T = TypeVar("T")


@dataclass(frozen=True)
class RefChange:
    """A ref by its full name, its new and its expected old commit; None is a missing ref.

    Without `guarded` the old commit is not checked.
    """

    ref: str
    new: str | None
    old: str | None = None
    guarded: bool = True

    @property
    def command(self) -> str:
        """The command for `git update-ref -z --stdin`."""
        old = (self.old or ZERO_SHA) if self.guarded else ""
        return f"delete {self.ref}\0{old}" if self.new is None else f"update {self.ref}\0{self.new}\0{old}"


@dataclass(frozen=True)
class Refs:
    branches: list[Branch]
    tags: list[Tag]


class Repository:
    """A repository as one caller uses it: git waits for a place of that caller.

    Without a caller it waits for none: background work has limits of its own. Memory for what is read is
    reserved for the caller, by `reserve`.
    """

    def __init__(
        self,
        repo_id: str,
        path: Path,
        git: Git,
        cat_files: CatFilePool,
        holder: PlaceHolder | None = None,
        reserve: Reserve = unlimited,
    ) -> None:
        self.id = repo_id
        self.path = path
        self.git = git
        self.cat_files = cat_files
        self.reserve = reserve
        self._holder = holder

    # Git

    @property
    def share(self) -> object:
        """The key under which work for this caller is counted."""
        return None if self._holder is None else self._holder.user.key

    def counted_elsewhere(self) -> "Repository":
        """The repository for work that counts in another limit."""
        return Repository(self.id, self.path, self.git, self.cat_files, reserve=self.reserve)

    @contextlib.asynccontextmanager
    async def holding(self, work: Work = Work.CALL) -> "AsyncIterator[Repository]":
        """Hold a place during the block, for all git processes of the repository that it yields."""
        if self._holder is None:
            yield self
            return
        async with self._holder.hold(work):
            yield self.counted_elsewhere()

    @contextlib.asynccontextmanager
    async def reader(self) -> AsyncIterator[CatFile]:
        """A process that reads objects."""
        async with self.holding(), self.cat_files.lease(self.path) as reader:
            yield reader

    @contextlib.asynccontextmanager
    async def running(
        self, *arguments: str, memory: int = MAX_MEMORY, timeout: float | None = None
    ) -> AsyncIterator[GitProcess]:
        """See `Git.running`. TooLarge if the block takes longer than `timeout` seconds."""
        limit = asyncio.timeout(timeout)
        try:
            async with (
                self.holding(),
                self.git.running(self.path, *arguments, memory=memory) as process,
                limit,
            ):
                yield process
        except TimeoutError:
            if not limit.expired():
                raise
            raise TooLarge(f"git {subcommand(arguments)} timed out after {timeout:g} s") from None

    async def finish(
        self,
        *arguments: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        most: int = MAX_OUTPUT,
        network: bool = False,
    ) -> Finished:
        """See `Git.finish`."""
        async with self.holding():
            return await self.git.finish(
                self.path,
                *arguments,
                stdin=stdin,
                env=env,
                timeout=timeout,
                most=most,
                network=network,
                reserve=self.reserve,
            )

    async def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float = TIMEOUT,
        most: int = MAX_OUTPUT,
    ) -> bytes:
        """See `Git.run`."""
        async with self.holding():
            return await self.git.run(
                self.path,
                *arguments,
                stdin=stdin,
                env=env,
                timeout=timeout,
                most=most,
                reserve=self.reserve,
            )

    @property
    def default_branch(self) -> str:
        head = read_regular(self.path / "HEAD", _MAX_HEAD).decode(errors="replace").strip()
        if not head.startswith(_HEAD):
            raise RepoDamaged(f"repository {self.id} has no default branch")
        return head.removeprefix(_HEAD)

    async def set_default_branch(self, name: str) -> None:
        """Set the default branch. It must exist, unless the repository is empty."""
        branch = check_branch(name)
        # Read the branches once: the first branch may be pushed concurrently.
        names = {each.name for each in await self.branches()}
        if names and branch not in names:
            raise BranchNotFound(branch)
        await self.run("symbolic-ref", "HEAD", f"refs/heads/{branch}")

    async def any_branch(self) -> bool:
        return bool(await self.run("for-each-ref", "--count=1", "refs/heads/"))

    # Revisions

    async def resolve(self, rev: str | None) -> str:
        """Resolve a branch, tag or abbreviated commit id to a commit; default: the default branch."""
        wanted = rev or "HEAD"
        names = [wanted] if wanted == "HEAD" else []
        if is_ref(wanted):
            names += [wanted] if wanted.startswith("refs/") else []
            names += [f"refs/heads/{wanted}", f"refs/tags/{wanted}"]
        sha = wanted.lower() if SHORT_SHA.fullmatch(wanted.lower()) else None
        if not names and sha is None:
            raise InvalidRevision(wanted)
        async with self.reader() as reader:
            found = await reader.infos([f"{name}^{{commit}}" for name in names])
            if sha is not None and not any(found):
                # Git reports ambiguous abbreviations only for a plain request without a type.
                full = (await reader.infos([sha]))[0]
                found = await reader.infos([f"{full.sha}^{{commit}}"]) if full is not None else []
        for info in found:
            if info is not None:
                return info.sha
        raise ReferenceNotFound(rev or self.default_branch)

    async def sha(self, ref: str) -> str | None:
        info = await self.info(ref)
        return None if info is None else info.sha

    async def info(self, name: str) -> ObjectInfo | None:
        """Type and size of an object; None if it does not exist."""
        async with self.reader() as reader:
            return (await reader.infos([name]))[0]

    async def content(self, name: str, most: int = MAX_OBJECT) -> tuple[ObjectInfo, bytes] | None:
        async with self.reader() as reader:
            return (await reader.contents([name], most, self.reserve))[0]

    # Refs

    async def branches(self) -> list[Branch]:
        return (await self.refs("refs/heads/")).branches

    async def branch(self, name: str) -> Branch:
        short = check_branch(name)
        sha = await self.sha(f"refs/heads/{short}")
        if sha is None:
            raise BranchNotFound(short)
        return Branch(short, sha)

    async def create_branch(self, name: str, sha: str | None = None) -> Branch:
        """Create a branch at a commit; default: the head of the default branch."""
        branch = check_branch(name)
        start = await self.resolve(sha)
        if not await self.move(branch, start, None):
            raise BranchExists(branch)
        return Branch(branch, start)

    async def move(self, branch: str, sha: str, expected: str | None) -> bool:
        """Compare-and-swap a branch to a commit; returns whether it was at `expected`.

        With `expected=None` the branch must not exist.
        """
        ref = f"refs/heads/{branch}"
        finished = await self.finish("update-ref", ref, sha, expected or ZERO_SHA)
        if finished.status == 0:
            return True
        if GitMessage.REF_MOVED.found_in(finished.stderr):
            return False
        if GitMessage.NAME_CONFLICT.found_in(finished.stderr):
            raise InvalidBranch(f"cannot create branch {branch}: its name conflicts with another branch")
        check_room(finished, self.path)
        raise GitFailed("update-ref", finished)

    async def change(self, changes: Sequence[RefChange]) -> bool:
        """Apply all ref changes in one transaction; returns False if a ref was not at its expected commit."""
        commands = "".join(f"{each.command}\0" for each in changes)
        finished = await self.finish("update-ref", "-z", "--stdin", stdin=commands.encode())
        if finished.status == 0:
            return True
        check_room(finished, self.path)
        if any(each.found_in(finished.stderr) for each in (GitMessage.REF_MOVED, GitMessage.REF_LOCKED)):
            return False
        raise GitFailed("update-ref", finished)

    async def tags(self) -> list[Tag]:
        return (await self.refs("refs/tags/")).tags

    async def tag(self, name: str) -> Tag:
        short = name.removeprefix("refs/tags/")
        if not is_ref(short):
            raise TagNotFound(name)
        name = f"refs/tags/{short}"
        info = await self.info(name)
        if info is not None and info.kind != "tag":
            return Tag(short, info.sha, info.sha)
        found = None if info is None else await self.content(info.sha, _MAX_TEXT)
        if found is None:
            raise TagNotFound(short)
        return parse_tag(short, found[0].sha, found[1])

    async def tag_object(self, sha: str) -> Tag:
        """An annotated tag by the sha of its tag object."""
        wanted = check_sha(sha)
        info = await self.info(wanted)
        found = None
        if info is not None and info.kind == "tag":
            found = await self.content(wanted, _MAX_TEXT)
        if found is None:
            raise TagNotFound(sha)
        return parse_tag("", wanted, found[1])

    async def refs(self, *prefixes: str) -> Refs:
        """Branches and tags by name."""
        fields = "%(refname)", "%(objectname)", "%(objecttype)"
        wanted = prefixes or ("refs/heads/", "refs/tags/")
        printed = await self.run(
            "for-each-ref",
            f"--count={MAX_REFS}",
            f"--format={'%00'.join(fields)}",
            *wanted,
        )
        if len(printed) <= _SMALL_TEXT:
            found = _parse_refs(printed)
        else:
            await self.reserve(_PARSED * len(printed))
            found = await Threads.PARSING.run(_parse_refs, printed)
        if found.annotated:
            await self._read_tags(found)
        return found.refs

    async def _read_tags(self, found: "_ParsedRefs") -> None:
        """Replace annotated tags by what their objects say."""
        shas = [tag.sha for _, tag in found.annotated]
        async with self.reader() as reader:
            contents = await reader.contents(shas, reserve=self.reserve)

        def parse() -> None:
            for (place, tag), each in zip(found.annotated, contents, strict=True):
                if each is not None:
                    found.refs.tags[place] = parse_tag(tag.name, tag.sha, each[1])

        await _parsed(parse, contents)

    # Commits

    async def commit(self, sha: str) -> Commit:
        return (await self.commits([check_sha(sha)]))[0]

    async def commits(self, shas: list[str]) -> list[Commit]:
        async with self.reader() as reader:
            found = await reader.contents(shas, _MAX_TEXT, self.reserve)
        return await _parsed(lambda: _parse_commits(shas, found), found)


_Contents = Sequence[tuple[ObjectInfo, bytes] | None]


async def _parsed(parse: Callable[[], T], contents: _Contents) -> T:
    """Parse the contents of objects, large ones in a thread."""
    small = sum(each[0].size for each in contents if each is not None) <= _SMALL_TEXT
    return parse() if small else await Threads.PARSING.run(parse)


@dataclass(frozen=True)
class _ParsedRefs:
    refs: Refs
    annotated: list[tuple[int, Tag]]
    """Annotated tags, with their places among the tags."""


def _parse_refs(printed: bytes) -> _ParsedRefs:
    """The output of git for-each-ref."""
    parsed = _ParsedRefs(Refs([], []), [])
    branches, tags = parsed.refs.branches, parsed.refs.tags
    for line in printed.split(b"\n"):
        if not line:
            continue
        name, sha, kind = line.decode(errors="replace").split("\0")
        if name.startswith("refs/heads/"):
            branches.append(Branch(name.removeprefix("refs/heads/"), sha))
            continue
        tag = Tag(name.removeprefix("refs/tags/"), sha, sha)
        if kind == "tag":
            parsed.annotated.append((len(tags), tag))
        tags.append(tag)
    return parsed


def _parse_commits(shas: Sequence[str], found: _Contents) -> list[Commit]:
    commits = []
    for sha, each in zip(shas, found, strict=True):
        if each is None or each[0].kind != "commit":
            raise CommitNotFound(sha)
        commits.append(parse_commit(sha, each[1]))
    return commits
