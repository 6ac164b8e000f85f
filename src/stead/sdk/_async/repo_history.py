"""Branches, tags and commits of a repository."""

import builtins
from collections.abc import AsyncGenerator
from typing import Any

from stead.sdk._async.repo_part import AsyncRepoPart
from stead.sdk._async.streams import AsyncStream
from stead.sdk.arguments import checks_arguments
from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.git_models import (
    Author,
    Branch,
    Changes,
    Commit,
    CommitPage,
    Order,
    Tag,
    changes_to_wire,
    objects_at,
)
from stead.sdk.parsing import serialise
from stead.sdk.requests import LIFECYCLE_TIMEOUT


@checks_arguments
class AsyncBranches(AsyncRepoPart):
    """The branches of a repository."""

    async def list(self) -> builtins.list[Branch]:
        """All branches."""
        answer = await self._call("GET", "/git/refs/heads/")
        return [Branch.from_wire(each, "commit") for each in objects_at(answer, "branches")]

    async def get(self, name: str) -> Branch:
        """A branch by its name; `BranchNotFound` if there is none."""
        return Branch.from_wire(await self._call("GET", "/git/refs/heads/{}", name), "sha")

    async def create(self, name: str, sha: str | None = None) -> Branch:
        """Create a branch at a commit; at the head of the default branch if `sha` is None."""
        body = {} if sha is None else {"sha": sha}
        return Branch.from_wire(await self._call("POST", "/git/refs/heads/{}", name, json=body), "sha")

    async def get_default(self) -> str:
        """The name of the default branch, which clones check out."""
        answer = await self._call("GET", "/default-branch")
        name = answer.get("defaultBranch") if isinstance(answer, dict) else None
        if not isinstance(name, str):
            raise UnexpectedAnswer("the answer has no valid 'defaultBranch'")
        return name

    async def set_default(self, name: str) -> None:
        """Set the default branch, which clones check out."""
        await self._call("PUT", "/default-branch", json={"defaultBranch": name})


@checks_arguments
class AsyncTags(AsyncRepoPart):
    """The tags of a repository."""

    async def list(self) -> builtins.list[Tag]:
        """All tags."""
        answer = await self._call("GET", "/git/refs/tags/")
        return [Tag.from_wire(each) for each in objects_at(answer, "tags")]

    async def get(self, name: str) -> Tag:
        """A tag by its name; `TagNotFound` if there is none."""
        return Tag.from_wire(await self._call("GET", "/git/refs/tags/{}", name))


@checks_arguments
class AsyncCommits(AsyncRepoPart):
    """Read commits, and create them without a clone."""

    async def get(self, sha: str) -> Commit:
        """A commit by its id; `CommitNotFound` if there is none."""
        return Commit.from_wire(await self._call("GET", "/git/commits/{}", sha))

    async def list(
        self,
        branch: str | None = None,
        *,
        limit: int | None = None,
        order: Order | None = None,
        since: str | None = None,
        until: str | None = None,
        offset: int | None = None,
        count_total: bool = True,
    ) -> CommitPage:
        """One page of a branch's commits, newest first; `iterate` yields all of them.

        Args:
            branch: the default branch if None.
            limit: the maximum number, up to 500.
            order: "asc" for the oldest first.
            since, until: commits that limit the history. `until` is included; `since` is included only with
                order "asc".
            offset: the number of commits to skip; not together with `since` or `until`.
            count_total: also count all commits of the branch, which takes longer.
        """
        query = {
            "branch": branch,
            "limit": limit,
            "order": order,
            "since": since,
            "until": until,
            "offset": offset,
            "disableTotalCount": None if count_total else True,
        }
        return CommitPage.from_wire(await self._call("GET", "/git/commits", query=query))

    def iterate(
        self,
        branch: str | None = None,
        *,
        order: Order = "desc",
        since: str | None = None,
        until: str | None = None,
        page_size: int | None = None,
    ) -> AsyncStream[Commit]:
        """Yield all commits of a branch, or those between `since` and `until`, page by page."""
        return AsyncStream(self._pages(branch, order, since, until, page_size))

    async def _pages(
        self, branch: str | None, order: Order, since: str | None, until: str | None, limit: int | None
    ) -> AsyncGenerator[Commit]:
        while True:
            page = await self.list(
                branch, limit=limit, order=order, since=since, until=until, count_total=False
            )
            for commit in page:
                yield commit
            if page.next_commit is None or not len(page):
                return
            if order == "asc":
                since = page.next_commit
            else:
                until = page.next_commit

    async def create(
        self,
        message: str,
        files: Changes,
        *,
        branch: str | None = None,
        author: Author | None = None,
        expected_sha: str | None = None,
    ) -> Commit:
        """Create a commit on a branch.

        Args:
            message: the commit message.
            files: new contents by path, None to delete: `{"a.txt": "text", "b.bin": b"...", "old": None}`;
                or a list of `FileChange`.
            branch: the default branch if None. A branch that does not exist is created.
            author: the server's default author if None.
            expected_sha: raise `ConflictingParent` unless the branch is at this commit.

        The request is never repeated: if the answer is lost, check the branch.
        """
        body: dict[str, Any] = {"message": message, "files": changes_to_wire(files)}
        options = {"branch": branch, "author": serialise(author), "expectedSha": expected_sha}
        body |= {key: value for key, value in options.items() if value is not None}
        answer = await self._call("POST", "/commits", json=body, timeout=LIFECYCLE_TIMEOUT)
        return Commit.from_wire(answer.get("commit") if isinstance(answer, dict) else None)
