"""Data types of repository contents: commits, tags, branches, entries; and their parsers."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Literal

from stead.repos.errors import RepoDamaged


@dataclass(frozen=True)
class Signature:
    name: str
    email: str
    date: datetime


@dataclass(frozen=True)
class Commit:
    sha: str
    tree: str
    parents: tuple[str, ...]
    author: Signature
    committer: Signature
    message: str

    @property
    def subject(self) -> str:
        """The first line of the message."""
        return self.message.lstrip("\n").partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag; an annotated tag has a tagger and a message."""

    name: str
    sha: str
    target: str
    tagger: Signature | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    name: str
    sha: str


Kind = Literal["blob", "tree", "commit"]


@dataclass(frozen=True, slots=True)
class TreeItem:
    """A file or folder in a tree. Submodules have the kind `commit`."""

    path: str
    sha: str
    kind: Kind
    mode: str
    size: int | None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def parse_commit(sha: str, data: bytes) -> Commit:
    headers, message = _split(sha, data)
    encoding = next((value for name, value in headers if name == "encoding"), b"utf-8").decode(
        errors="replace"
    )
    people = {name: value for name, value in headers if name in ("author", "committer")}
    trees = [value.decode() for name, value in headers if name == "tree"]
    if len(trees) != 1 or len(people) != 2:
        raise RepoDamaged(f"cannot parse commit {sha}")
    return Commit(
        sha=sha,
        tree=trees[0],
        parents=tuple(value.decode() for name, value in headers if name == "parent"),
        author=parse_signature(people["author"], encoding),
        committer=parse_signature(people["committer"], encoding),
        message=_text(message, encoding),
    )


def parse_tag(name: str, sha: str, data: bytes) -> Tag:
    """Parse an annotated tag object."""
    headers, message = _split(sha, data)
    known = dict(headers)
    tagger = parse_signature(known["tagger"], "utf-8") if "tagger" in known else None
    return Tag(
        name or known.get("tag", b"").decode(errors="replace"),
        sha,
        known["object"].decode(),
        tagger,
        _text(message, "utf-8"),
    )


def parse_signature(line: bytes, encoding: str) -> Signature:
    """Parse `Name <email> seconds zone`; malformed ones in old histories are read as far as possible."""
    name, _, rest = line.partition(b"<")
    email, _, when = rest.rpartition(b">")
    words = when.split()
    seconds = int(words[0]) if words and words[0].lstrip(b"-").isdigit() else 0
    zone = UTC
    if len(words) > 1 and len(words[1]) == 5 and words[1][1:].isdigit():
        minutes = int(words[1][1:3]) * 60 + int(words[1][3:])
        offset = timedelta(minutes=-minutes if words[1].startswith(b"-") else minutes)
        zone = timezone(offset) if abs(offset) < timedelta(days=1) else UTC
    try:
        date = datetime.fromtimestamp(seconds, zone)
    except (OverflowError, ValueError, OSError):
        date = datetime.fromtimestamp(0, UTC)
    return Signature(_text(name.strip(), encoding), _text(email.strip(), encoding), date)


def _split(sha: str, data: bytes) -> tuple[list[tuple[str, bytes]], bytes]:
    """Headers, with continuation lines joined, and the body."""
    head, _, message = data.partition(b"\n\n")
    headers: list[tuple[str, bytes]] = []
    for line in head.split(b"\n"):
        if line.startswith(b" ") and headers:
            name, value = headers[-1]
            headers[-1] = name, value + b"\n" + line[1:]
        else:
            key, _, value = line.partition(b" ")
            headers.append((key.decode(errors="replace"), value))
    if not headers:
        raise RepoDamaged(f"cannot parse tag {sha}")
    return headers, message


def _text(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except (LookupError, UnicodeDecodeError):
        return data.decode("utf-8", errors="replace")
