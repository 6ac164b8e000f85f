"""Diff search: commits that add or remove matching lines.

Diffs are not searched. The files before and after each change are searched, each blob once. If only one side
has matching lines, all were added or all removed; if both have, git's diff decides.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stead.repos.git import GitProcess
from stead.repos.model import Commit
from stead.repos.repository import Repository
from stead.repos.search.lines import MAX_MATCHES, MAX_TEXT, Hit, match_ends, matching_lines
from stead.repos.search.processes import LineSplitter, OutputBuffer, first_phase, run
from stead.repos.search.query import Query
from stead.tasks import Threads

COUNTING = 5.0
"""Seconds to spend on counting results outside the page."""
_FIRST_BATCH, _BATCH = 50, 500
_MAX_CACHED = 64 << 20
_MAX_PER_BLOB = 10_000
_HIT_COST = 100
_REGULAR = ("100644", "100755", "100664")
_NOTHING = "0" * 40
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_DIFF_TREE = ("diff-tree", "-r", "--root", "-M", "--stdin")


@dataclass(frozen=True)
class ChangedLine:
    """An added or removed line. Its number is the line number after or before the change."""

    line_number: int
    line: str
    start_column: int
    end_column: int
    is_addition: bool


@dataclass(frozen=True)
class ChangedFile:
    path: str
    matches: list[ChangedLine]


@dataclass(frozen=True)
class CommitDiff:
    commit: Commit
    files: list[ChangedFile]


@dataclass(frozen=True)
class _Pair:
    """The blobs of a file before and after a change."""

    old: str
    new: str
    path: str


@dataclass(frozen=True)
class _Changed:
    path: str
    lines: list[tuple[str, Hit, bool]]
    """The blob, the matching line, and whether it was added."""


@dataclass(frozen=True)
class _Matched:
    sha: str
    files: list[_Changed]


class Diffs:
    """One diff search; `stopped` if a limit cut it short."""

    def __init__(self, repository: Repository, query: Query, specs: tuple[str, ...]) -> None:
        self.stopped = False
        self.size = 0
        """Approximate bytes of the results."""
        self._repository = repository
        self._query = query
        self._specs = specs
        self._seen: set[str] = set()
        self._hits: dict[str, list[Hit]] = {}
        self._room = _MAX_CACHED

    async def search(self, tip: str, first: int, end: int, until: float) -> tuple[bytes, list[CommitDiff]]:
        """All matching commits, one id per line, and a page of them with their matches."""
        clock = asyncio.get_running_loop()
        shown: list[_Matched] = []
        matched: list[str] = []
        size, enough = _FIRST_BATCH, first_phase(until)
        command = "rev-list", "--no-merges", tip, "--"
        async with self._repository.running(*command) as process:
            while not self.stopped and (batch := await self._next(process, size, enough)):
                for each in await self._find(batch, enough):
                    if first <= len(matched) < end:
                        shown.append(each)
                    matched.append(each.sha)
                if len(matched) > end:
                    enough = min(enough, clock.time() + COUNTING)
                size = min(size * 2, _BATCH)
                self._evict()
        return "".join(f"{sha}\n" for sha in matched).encode(), await self._show(shown, until)

    async def matches_in(self, shas: list[str], until: float) -> list[CommitDiff]:
        """The matches in commits that are known to match."""
        return await self._show(await self._find(shas, until), until)

    async def _next(self, process: GitProcess, size: int, until: float) -> list[str]:
        batch: list[str] = []
        try:
            async with asyncio.timeout_at(until):
                while len(batch) < size and (line := await process.stdout.readline()):
                    batch.append(line.decode().strip())
        except TimeoutError:
            self.stopped = True
        return batch

    def _evict(self) -> None:
        """Evict old entries: blobs recur in neighbouring commits, not in distant ones."""
        if self._room < _MAX_CACHED // 2:
            self._seen.clear()
            self._hits.clear()
            self._room = _MAX_CACHED

    async def _find(self, shas: list[str], until: float) -> list[_Matched]:
        """The matching commits among these. Commits that could not be searched completely are left out."""
        if not shas:
            return []
        changes = await self._changes(shas, until)
        await self._search(changes, until)
        unclear = [
            sha for sha, pairs in changes.items() if any(self._has(pair.old, pair.new) for pair in pairs)
        ]
        patches = await self._patches(unclear, until)
        matched = []
        for sha, pairs in changes.items():
            files = [self._changed(pair, patches) for pair in pairs if self._is_clear(pair, patches)]
            if files := [file for file in files if file.lines]:
                matched.append(_Matched(sha, files))
        return matched

    def _is_clear(self, pair: _Pair, patches: "_Patches | None") -> bool:
        """Whether everything needed to classify a file's lines was searched."""
        seen = pair.old in self._seen and pair.new in self._seen
        return seen and (patches is not None or not self._has(pair.old, pair.new))

    def _has(self, *blobs: str) -> bool:
        return all(blob in self._hits for blob in blobs)

    async def _changes(self, shas: list[str], until: float) -> dict[str, list[_Pair]]:
        gathered = OutputBuffer()
        arguments = [*_DIFF_TREE, "-z", "--raw", "--", *self._specs]
        complete = await run(self._repository, arguments, gathered, until, stdin=_lines(shas))
        changes = await Threads.PARSING.run(_changes, gathered.data)
        if not complete:
            self.stopped = True
            if changes:
                changes.popitem()
        return changes

    async def _search(self, changes: dict[str, list[_Pair]], until: float) -> None:
        """Search the blobs that were not searched yet."""
        self._seen.add(_NOTHING)
        sides = dict.fromkeys(
            side for pairs in changes.values() for pair in pairs for side in (pair.old, pair.new)
        )
        blobs = [sha for sha in sides if sha not in self._seen]
        found, complete = await matching_lines(
            self._repository, self._query, blobs, until, room=self._room, per_blob=_MAX_PER_BLOB
        )
        if not complete:
            # Git searches blobs in order: all before the last reported one are complete.
            self.stopped = True
            last = found.popitem()[0] if found else blobs[0]
            blobs = blobs[: blobs.index(last)]
        self._seen.update(blobs)
        for sha, blob in found.items():
            self.stopped = self.stopped or bool(blob.others)
            self._hits[sha] = blob.hits
            self._room -= sum(len(hit.text) + _HIT_COST for hit in blob.hits)

    async def _patches(self, shas: list[str], until: float) -> "_Patches | None":
        patches = _Patches()
        if not shas:
            return patches
        arguments = [*_DIFF_TREE, "-p", "-U0", "--full-index", "--diff-filter=MRT", "--", *self._specs]
        if await run(self._repository, arguments, patches, until, stdin=_lines(shas)):
            return patches
        self.stopped = True
        return None

    def _changed(self, pair: _Pair, patches: "_Patches | None") -> _Changed:
        old, new = self._hits.get(pair.old, []), self._hits.get(pair.new, [])
        if old and new and patches is not None:
            removed, added = patches.ranges.get((pair.old, pair.new), ([], []))
            old, new = list(_inside(old, removed)), list(_inside(new, added))
        lines = [(pair.old, hit, False) for hit in old] + [(pair.new, hit, True) for hit in new]
        lines.sort(key=lambda each: (each[1].number, each[2]))
        return _Changed(pair.path, lines[:MAX_MATCHES])

    async def _show(self, matched: list[_Matched], until: float) -> list[CommitDiff]:
        room = MAX_TEXT
        kept: list[_Matched] = []
        for each in matched:
            files = []
            for file in each.files:
                room -= len(file.path) + sum(len(hit.text) + _HIT_COST for _, hit, _ in file.lines)
                if room < 0:
                    self.stopped = True
                    break
                files.append(file)
            kept.append(_Matched(each.sha, files))
        self.size = 3 * (MAX_TEXT - max(room, 0))
        wanted = {(blob, hit.number) for each in kept for file in each.files for blob, hit, _ in file.lines}
        ends, complete = await match_ends(self._repository, self._query, wanted, until)
        self.stopped = self.stopped or not complete
        commits = await self._repository.commits([each.sha for each in kept])
        return [
            CommitDiff(commit, [ChangedFile(file.path, self._lines(file, ends)) for file in each.files])
            for commit, each in zip(commits, kept, strict=True)
        ]

    def _lines(self, file: _Changed, ends: dict[tuple[str, int], int]) -> list[ChangedLine]:
        lines = []
        for blob, hit, is_addition in file.lines:
            line, start, end = hit.columns(self._query, ends.get((blob, hit.number)))
            lines.append(ChangedLine(hit.number, line, start, end, is_addition))
        return lines


def _lines(shas: list[str]) -> bytes:
    return "".join(f"{sha}\n" for sha in shas).encode()


def _changes(printed: bytes) -> dict[str, list[_Pair]]:
    """Changed files by commit, from `git diff-tree --stdin --raw -z`; symbolic links are skipped."""
    changes: dict[str, list[_Pair]] = {}
    pairs: list[_Pair] = []
    words = iter(printed.split(b"\0")[:-1])
    for word in words:
        if not word.startswith(b":"):
            pairs = changes.setdefault(word.decode(), [])
            continue
        old_mode, new_mode, old, new, letter = word[1:].decode().split(" ")
        path = next(words, b"")
        if letter[0] in "RC":
            path = next(words, b"")
        old = old if old_mode in _REGULAR else _NOTHING
        new = new if new_mode in _REGULAR else _NOTHING
        if old != new:
            pairs.append(_Pair(old, new, path.decode(errors="replace")))
    return changes


def _inside(hits: Sequence[Hit], ranges: Sequence[range]) -> Iterator[Hit]:
    """The hits within the ranges; both are sorted."""
    place = 0
    for hit in hits:
        while place < len(ranges) and ranges[place].stop <= hit.number:
            place += 1
        if place < len(ranges) and hit.number in ranges[place]:
            yield hit


class _Patches:
    """Parses diffs without context: the removed and added lines of a pair of blobs."""

    def __init__(self) -> None:
        self.ranges: dict[tuple[str, str], tuple[list[range], list[range]]] = {}
        self._now: tuple[list[range], list[range]] = [], []
        self._lines = LineSplitter()
        self._left = 0

    def __call__(self, piece: bytes) -> bool:
        for line in self._lines.feed(piece):
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        if self._left:
            # File lines only, without the marker for a missing newline at the end.
            self._left -= not line.startswith(b"\\")
        elif line.startswith(b"index "):
            old, _, new = line.split()[1].decode().partition("..")
            self._now = self.ranges[old, new] = [], []
        elif hunk := _HUNK.match(line):
            old_start, old_count, new_start, new_count = (int(each or 1) for each in hunk.groups())
            self._now[0].append(range(old_start, old_start + old_count))
            self._now[1].append(range(new_start, new_start + new_count))
            self._left = old_count + new_count
