"""One repository: refs, revisions and commits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stead.repos.errors import (
    BranchExists,
    BranchNotFound,
    CommitNotFound,
    InvalidBranch,
    InvalidRevision,
    ReferenceNotFound,
    RepoDamaged,
    TagNotFound,
)
from stead.repos.git import Git, GitFailed, check_room
from stead.repos.git_messages import GitMessage
from stead.repos.model import Branch, Commit, Tag, parse_commit, parse_tag
from stead.repos.names import SHORT_SHA, check_branch, check_sha, is_ref
from stead.repos.objects import CatFilePool, ObjectInfo

MAX_REFS = 100_000
_HEAD = "ref: refs/heads/"
ZERO_SHA = "0" * 40


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
    def __init__(self, repo_id: str, path: Path, git: Git, cat_files: CatFilePool) -> None:
        self.id = repo_id
        self.path = path
        self.git = git
        self.cat_files = cat_files

    @property
    def default_branch(self) -> str:
        head = (self.path / "HEAD").read_text().strip()
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
        await self.git.run(self.path, "symbolic-ref", "HEAD", f"refs/heads/{branch}")

    async def any_branch(self) -> bool:
        return bool(await self.git.run(self.path, "for-each-ref", "--count=1", "refs/heads/"))

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
        async with self.cat_files.lease(self.path) as reader:
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
        async with self.cat_files.lease(self.path) as reader:
            return (await reader.infos([name]))[0]

    async def content(self, name: str) -> tuple[ObjectInfo, bytes] | None:
        async with self.cat_files.lease(self.path) as reader:
            return (await reader.contents([name]))[0]

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
        finished = await self.git.finish(self.path, "update-ref", ref, sha, expected or ZERO_SHA)
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
        finished = await self.git.finish(self.path, "update-ref", "-z", "--stdin", stdin=commands.encode())
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
        found = await self.content(f"refs/tags/{short}")
        if found is None:
            raise TagNotFound(short)
        info, data = found
        return parse_tag(short, info.sha, data) if info.kind == "tag" else Tag(short, info.sha, info.sha)

    async def tag_object(self, sha: str) -> Tag:
        """An annotated tag by the sha of its tag object."""
        wanted = check_sha(sha)
        found = await self.content(wanted)
        if found is None or found[0].kind != "tag":
            raise TagNotFound(sha)
        return parse_tag("", wanted, found[1])

    async def refs(self, *prefixes: str) -> Refs:
        """Branches and tags by name."""
        fields = "%(refname)", "%(objectname)", "%(objecttype)"
        wanted = prefixes or ("refs/heads/", "refs/tags/")
        printed = await self.git.run(
            self.path,
            "for-each-ref",
            f"--count={MAX_REFS}",
            f"--format={'%00'.join(fields)}",
            *wanted,
        )
        refs = Refs([], [])
        annotated: list[tuple[int, str, str]] = []
        for line in printed.split(b"\n"):
            if not line:
                continue
            name, sha, kind = line.decode(errors="replace").split("\0")
            if name.startswith("refs/heads/"):
                refs.branches.append(Branch(name.removeprefix("refs/heads/"), sha))
                continue
            if kind == "tag":
                annotated.append((len(refs.tags), name.removeprefix("refs/tags/"), sha))
            refs.tags.append(Tag(name.removeprefix("refs/tags/"), sha, sha))
        if annotated:
            async with self.cat_files.lease(self.path) as reader:
                found = await reader.contents([sha for _, _, sha in annotated])
            for (place, name, sha), each in zip(annotated, found, strict=True):
                if each is not None:
                    refs.tags[place] = parse_tag(name, sha, each[1])
        return refs

    # Commits

    async def commit(self, sha: str) -> Commit:
        return (await self.commits([check_sha(sha)]))[0]

    async def commits(self, shas: list[str]) -> list[Commit]:
        async with self.cat_files.lease(self.path) as reader:
            found = await reader.contents(shas)
        commits = []
        for sha, each in zip(shas, found, strict=True):
            if each is None or each[0].kind != "commit":
                raise CommitNotFound(sha)
            commits.append(parse_commit(sha, each[1]))
        return commits
