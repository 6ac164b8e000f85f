# Made by scripts/unasync from _async/repo_history.py.
"""Branches, tags and commits of a repository."""

from collections.abc import Generator
from typing import Any

from stead.sdk._sync.repo_part import RepoPart
from stead.sdk._sync.streams import Stream
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
    list_of,
)
from stead.sdk.parsing import serialise
from stead.sdk.requests import LIFECYCLE_TIMEOUT


class Branches(RepoPart):
    """Branches."""

    def list(self) -> list[Branch]:
        answer = self._call("GET", "/git/refs/heads/")
        return [Branch.of(each, "commit") for each in list_of(answer, "branches")]

    def get(self, name: str) -> Branch:
        return Branch.of(self._call("GET", "/git/refs/heads/{}", name), "sha")

    def create(self, name: str, sha: str | None = None) -> Branch:
        """Make a branch at a commit, by default at the newest of the default branch."""
        body = {} if sha is None else {"sha": sha}
        return Branch.of(self._call("POST", "/git/refs/heads/{}", name, json=body), "sha")

    def get_default(self) -> str:
        """The name of the branch that clones begin with."""
        answer = self._call("GET", "/default-branch")
        name = answer.get("defaultBranch") if isinstance(answer, dict) else None
        if not isinstance(name, str):
            raise UnexpectedAnswer("the answer has no usable 'defaultBranch'")
        return name

    def set_default(self, name: str) -> None:
        """Choose the branch that clones begin with."""
        self._call("PUT", "/default-branch", json={"defaultBranch": name})


class Tags(RepoPart):
    """Tags."""

    def list(self) -> list[Tag]:
        answer = self._call("GET", "/git/refs/tags/")
        return [Tag.of(each) for each in list_of(answer, "tags")]

    def get(self, name: str) -> Tag:
        return Tag.of(self._call("GET", "/git/refs/tags/{}", name))


class Commits(RepoPart):
    """Commits: read, and made without a clone."""

    def get(self, sha: str) -> Commit:
        return Commit.of(self._call("GET", "/git/commits/{}", sha))

    def list(
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
        """One page of a branch's commits, newest first; `iterate` has all of them.

        Args:
            branch: else the default branch.
            limit: how many at most; the server takes up to 500.
            order: "asc" for the oldest first.
            since, until: commits that bound the history. `until` is part of it, `since` only when the
                oldest come first.
            offset: how many to pass over; not together with `since` or `until`.
            count_total: also say how many the branch has, which takes longer.
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
        return CommitPage.of(self._call("GET", "/git/commits", query=query))

    def iterate(
        self,
        branch: str | None = None,
        *,
        order: Order = "desc",
        since: str | None = None,
        until: str | None = None,
        page_size: int | None = None,
    ) -> Stream[Commit]:
        """All commits of a branch, or between `since` and `until`, fetched page by page."""
        return Stream(self._pages(branch, order, since, until, page_size))

    def _pages(
        self, branch: str | None, order: Order, since: str | None, until: str | None, limit: int | None
    ) -> Generator[Commit]:
        while True:
            page = self.list(branch, limit=limit, order=order, since=since, until=until, count_total=False)
            yield from page
            if page.next_commit is None or not len(page):
                return
            if order == "asc":
                since = page.next_commit
            else:
                until = page.next_commit

    def create(
        self,
        message: str,
        files: Changes,
        *,
        branch: str | None = None,
        author: Author | None = None,
        expected_sha: str | None = None,
    ) -> Commit:
        """Change files on a branch.

        Args:
            message: why.
            files: new contents by path, None to delete: `{"a.txt": "text", "b.bin": b"...", "old": None}`;
                or a list of `FileChange`.
            branch: else the default branch. One that is not there begins with this commit.
            author: else the server decides.
            expected_sha: only if the branch is at this commit; else `ConflictingParent`.

        Like everything that makes something new, it is not sent twice: if the answer is lost, look at the
        branch.
        """
        body: dict[str, Any] = {"message": message, "files": changes_to_wire(files)}
        options = {"branch": branch, "author": serialise(author), "expectedSha": expected_sha}
        body |= {key: value for key, value in options.items() if value is not None}
        answer = self._call("POST", "/commits", json=body, timeout=LIFECYCLE_TIMEOUT)
        return Commit.of(answer.get("commit") if isinstance(answer, dict) else None)
