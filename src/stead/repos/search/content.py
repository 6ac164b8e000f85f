"""Content search: counts matches in all files of a commit, then reads the lines of one page of files."""

import asyncio
import os
import re
from dataclasses import dataclass

from stead.repos.repository import Repository
from stead.repos.search.file_names import NamedFile
from stead.repos.search.lines import BlobHits, match_ends, matching_lines, shown
from stead.repos.search.processes import MAX_SEARCHED, LargeFile, OutputBuffer, run
from stead.repos.search.query import Query

_MAX_LARGE = 500
_NAMING_TIMEOUT = 10.0
_COUNT = re.compile(rb"\0(\d+)\n")


@dataclass(frozen=True)
class Match:
    """A matching line. Columns of its first match count from 0 in UTF-16 units, as in JavaScript."""

    line_number: int
    line: str
    start_column: int
    end_column: int
    context_before: list[str]
    context_after: list[str]


@dataclass(frozen=True)
class FileMatches(NamedFile):
    match_count: int
    """Number of matching lines; `matches` may have fewer."""
    matches: list[Match]

    @property
    def text_size(self) -> int:
        """Approximate bytes of its matches."""
        texts = (text for each in self.matches for text in (*each.context_before, *each.context_after))
        return sum(map(len, texts)) + sum(400 + len(each.line) for each in self.matches)


@dataclass(frozen=True)
class MatchCounts:
    """The output of `git grep -c -z` (`commit:path NUL count LF` per file) and its totals."""

    printed: bytes
    files: int
    matches: int
    stopped: bool

    def page(self, first: int, end: int) -> list[tuple[bytes, int]]:
        """`commit:path` and number of matching lines of a range of files."""
        found = []
        start = 0
        for place, number in enumerate(_COUNT.finditer(self.printed)):
            if place >= end:
                break
            if place >= first:
                found.append((self.printed[start : number.start()], int(number[1])))
            start = number.end()
        return found


class _Counting(OutputBuffer):
    """Counts while git is still running."""

    def __init__(self) -> None:
        super().__init__()
        self.files = self.matches = 0
        self._rest = b""

    def __call__(self, piece: bytes) -> bool:
        data = self._rest + piece
        start = 0
        for number in _COUNT.finditer(data):
            self.files += 1
            self.matches += int(number[1])
            start = number.end()
        self._rest = data[start:]
        return super().__call__(piece)


async def count(
    repository: Repository, commit: str, query: Query, specs: tuple[str, ...], until: float
) -> MatchCounts:
    """Count matches. Files that are too large are excluded in a second run, if there are any."""
    counting = _Counting()
    arguments = ["grep", "-c", "-z", "-I", *query.options, *query.expression, commit, "--", *specs]
    try:
        complete = await run(repository, arguments, counting, until, query=query)
    except LargeFile:
        counting = _Counting()
        large, known = await _large_files(repository, commit, until)
        complete = known and await run(repository, [*arguments, *large], counting, until, query=query)
    return MatchCounts(counting.data, counting.files, counting.matches, not complete)


async def _large_files(repository: Repository, commit: str, until: float) -> tuple[list[str], bool]:
    """Pathspecs that exclude the files that are too large, and whether the list is complete."""
    gathered = OutputBuffer()
    complete = await run(repository, ["ls-tree", "-r", "-l", "-z", "--full-tree", commit], gathered, until)
    large = []
    for line in gathered.data.split(b"\0"):
        facts, _, path = line.partition(b"\t")
        size = facts.rpartition(b" ")[2]
        if size.isdigit() and int(size) >= MAX_SEARCHED:
            large.append(f":(exclude,literal){os.fsdecode(path)}")
    return large, complete and len(large) <= _MAX_LARGE


async def files_with_lines(
    repository: Repository, query: Query, counted: list[tuple[bytes, int]], context: int, until: float
) -> tuple[list[FileMatches], bool]:
    """The matching lines of these files, and whether they are complete."""
    blobs = await _blobs(repository, [name for name, _ in counted])
    found, complete = await matching_lines(
        repository, query, (sha for sha, _ in blobs), until, context=context
    )
    wanted = {(sha, hit.number) for sha, blob in found.items() for hit in blob.hits}
    ends, all_ends = await match_ends(repository, query, wanted, until)
    matches = {sha: _matches(query, sha, blob, ends, context) for sha, blob in found.items()}
    files = [
        FileMatches(name.partition(b":")[2].decode(errors="replace"), size, number, matches.get(sha, []))
        for (name, number), (sha, size) in zip(counted, blobs, strict=False)
    ]
    return files, complete and all_ends and len(blobs) == len(counted)


async def _blobs(repository: Repository, names: list[bytes]) -> list[tuple[str, int]]:
    """The blob and size of each `commit:path`. Paths may be invalid UTF-8.

    This ignores the deadline, so that found files are reported at least by name.
    """
    if not names:
        return []
    gathered = OutputBuffer()
    stdin = b"".join(name + b"\0" for name in names)
    until = asyncio.get_running_loop().time() + _NAMING_TIMEOUT
    await run(repository, ["cat-file", "--batch-check", "-z"], gathered, until, stdin=stdin)
    found = []
    for line in gathered.data.split(b"\n")[:-1]:
        sha, _, size = line.split(b" ")
        found.append((sha.decode(), int(size)))
    return found


def _matches(
    query: Query, sha: str, blob: BlobHits, ends: dict[tuple[str, int], int], context: int
) -> list[Match]:
    known = {hit.number: hit.columns(query, ends.get((sha, hit.number))) for hit in blob.hits}
    texts = {number: shown(text) for number, text in blob.others.items()}
    texts |= {number: line for number, (line, _, _) in known.items()}

    def around(numbers: range) -> list[str]:
        return [texts[number] for number in numbers if number in texts]

    return [
        Match(
            number,
            line,
            start,
            end,
            around(range(number - context, number)),
            around(range(number + 1, number + context + 1)),
        )
        for number, (line, start, end) in known.items()
    ]
