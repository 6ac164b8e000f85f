"""Parses the matching lines of `git grep`, and locates the match in each line.

Columns count UTF-16 units as in JavaScript: `line.slice(start, end)` is the match. A long line is cut around
its match, and its columns refer to the shown part.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from stead.repos.repository import Repository
from stead.repos.search.processes import MAX_SEARCHED, LargeFile, LineSplitter, run
from stead.repos.search.query import Query

MAX_LINE = 2000
"""Maximum bytes of a line in a result."""
MAX_MATCHES = 1000
"""Maximum matching lines per file in a result."""
MAX_TEXT = 8 << 20
"""Maximum bytes of all lines in a result."""
_BEFORE = 500
_LINE_COST = 64
_SHA = 40
_BLOBS = 5000
"""Objects per git command, whose length is limited."""


@dataclass(frozen=True)
class Hit:
    """A matching line, or its shown part from a byte offset on."""

    number: int
    text: bytes
    shown_from: int
    start: int

    def columns(self, query: Query, end: int | None) -> tuple[str, int, int]:
        """The shown line, and the start and end of its match."""
        start = min(self.start - self.shown_from, len(self.text))
        before = self.text[:start].decode(errors="replace")
        if query.exact_length is not None:
            matched = self.text[start:].decode(errors="replace")[: query.exact_length]
        else:
            end = self.start if end is None else end
            matched = self.text[start : max(end - self.shown_from, start)].decode(errors="replace")
        line = shown(self.text)
        length = _units(line)
        first = min(_units(before), length)
        return line, first, min(first + _units(matched), length)


@dataclass
class BlobHits:
    hits: list[Hit] = field(default_factory=list)
    others: dict[int, bytes] = field(default_factory=dict)
    """Context lines by number."""


def shown(text: bytes) -> str:
    return text.removesuffix(b"\r").decode(errors="replace")


def _units(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def _cut(text: bytes, start: int) -> tuple[bytes, int]:
    """The part of a long line around an offset, cut between characters, and where it starts."""
    if len(text) <= MAX_LINE:
        return text, 0
    begin = max(0, min(start - _BEFORE, len(text) - MAX_LINE))
    while begin < start and begin < len(text) and text[begin] & 0xC0 == 0x80:
        begin += 1
    end = min(begin + MAX_LINE, len(text))
    while begin < end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[begin:end], begin


class _Reading:
    """Parses the output of `git grep -n --column` on blobs.

    The format is `sha:line:column:text` for matching lines and `sha-line-text` for context lines.
    """

    def __init__(self, room: int, per_blob: int) -> None:
        self.blobs: dict[str, BlobHits] = {}
        self.room = room
        self._per_blob = per_blob
        self._lines = LineSplitter()

    def __call__(self, piece: bytes) -> bool:
        for line in self._lines.feed(piece):
            if len(line) > _SHA:
                self._take(line)
            if self.room < 0:
                return False
        return True

    def _take(self, line: bytes) -> None:
        sha = line[:_SHA].decode()
        blob = self.blobs.get(sha)
        if blob is None:
            blob = self.blobs[sha] = BlobHits()
        if line[_SHA : _SHA + 1] == b":":
            _, number, column, text = line.split(b":", 3)
            if len(blob.hits) < self._per_blob:
                start = int(column) - 1
                text, begin = _cut(text, start)
                blob.hits.append(Hit(int(number), text, begin, start))
            else:
                text = text[:MAX_LINE]
                blob.others[int(number)] = text
        else:
            _, number, text = line.split(b"-", 2)
            text, _ = _cut(text, 0)
            blob.others[int(number)] = text
        self.room -= len(text) + _LINE_COST


async def matching_lines(
    repository: Repository,
    query: Query,
    shas: Iterable[str],
    until: float,
    *,
    context: int = 0,
    room: int = MAX_TEXT,
    per_blob: int = MAX_MATCHES,
) -> tuple[dict[str, BlobHits], bool]:
    """The matching lines of these blobs, and whether they are complete; blobs without matches are left out.

    So are blobs that are too large.
    """
    wanted = list(dict.fromkeys(shas))
    # Request one more than needed: with --max-count, git prints wrong context after the last match.
    bounds = ["-m", str(per_blob + 1 + context), *([f"-C{context}"] if context else [])]
    arguments = ["grep", "-I", "-n", "--column", *bounds, *query.options, *query.expression]

    async def search_blobs(blobs: list[str], reading: _Reading) -> tuple[dict[str, BlobHits], bool]:
        for first in range(0, len(blobs), _BLOBS):
            some = [*arguments, *blobs[first : first + _BLOBS]]
            if not await run(repository, some, reading, until, query=query):
                return reading.blobs, False
        return reading.blobs, True

    try:
        return await search_blobs(wanted, _Reading(room, per_blob))
    except LargeFile:
        async with repository.reader() as reader:
            infos = await reader.infos(wanted)
        small = [info.sha for info in infos if info is not None and info.size < MAX_SEARCHED]
        return await search_blobs(small, _Reading(room, per_blob))


async def match_ends(
    repository: Repository, query: Query, wanted: Collection[tuple[str, int]], until: float
) -> tuple[dict[tuple[str, int], int], bool]:
    """The end of the first match in these lines, in bytes, and whether all are known.

    Empty matches are left out; the result is empty if the query determines the length.
    """
    ends: dict[tuple[str, int], int] = {}
    if query.exact_length is not None:
        return ends, True
    lines = LineSplitter()

    def take(piece: bytes) -> bool:
        for line in lines.feed(piece):
            sha, number, column, text = line.split(b":", 3)
            place = sha.decode(), int(number)
            # Git's columns are reliable only for the first match of a line.
            if place in wanted and place not in ends:
                ends[place] = int(column) - 1 + len(text)
        return True

    shas = list(dict.fromkeys(sha for sha, _ in wanted))
    for first in range(0, len(shas), _BLOBS):
        arguments = ["grep", "-I", "-n", "--column", "-o", *query.options, *query.expression]
        arguments += shas[first : first + _BLOBS]
        if not await run(repository, arguments, take, until, query=query):
            return ends, False
    return ends, True
