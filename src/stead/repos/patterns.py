"""Patterns for the names of branches and the paths of files."""

import fnmatch
import re
from collections.abc import Callable, Sequence

from stead.repos.errors import RepoError
from stead.repos.names import is_ref

MAX_PATTERN = 256
MAX_ALTERNATIVES = 50
_SPECIAL = re.compile(r"\[[^]/]*\]|[*?]")
_BRACES = re.compile(r"\{([^{}]*)\}")
_Matches = Callable[[str], object]


class InvalidPattern(RepoError):
    code = "invalid_pattern"

    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(f"invalid pattern {pattern!r}: {why}", pattern=pattern)


class Pattern:
    """Names, part by part between their slashes, in one way or in several.

    In a part `*` stands for any characters, `?` for one, and `[abc]`, `[a-z]` and `[!a]` for one of some.
    A part `**` stands for any number of parts; at the end, for at least one. Case counts. However a
    pattern is made, to match it takes no longer than the product of both lengths.
    """

    def __init__(self, ways: Sequence[Sequence[str]]) -> None:
        self._ways = [_Way(parts) for parts in ways]

    def __len__(self) -> int:
        """How many simple patterns it stands for."""
        return len(self._ways)

    @classmethod
    def branch(cls, text: str) -> "Pattern":
        """Branches by their whole short names; no name of a branch has characters that are special then."""
        short = _checked(text).removeprefix("refs/heads/")
        if not is_ref(_SPECIAL.sub("x", short)):
            raise InvalidPattern(text, "not a valid branch name")
        return cls([short.split("/")])

    @classmethod
    def path(cls, text: str) -> "Pattern":
        """Paths of files. Without a slash it is about the file's name, in any folder: `*.js`.

        With one it begins at the root of the repository: `src/*.js`, `/*.js`, `src/**/*.js`. One that ends
        with a slash is about everything in that folder. `{a,b}` stands for one of both.
        """
        if _checked(text).startswith("!"):
            raise InvalidPattern(text, "negation with ! is not supported")
        ways = []
        for each in _alternatives(text):
            parts = (each + "**" if each.endswith("/") else each).removeprefix("/").split("/")
            if any(part in ("", ".", "..") for part in parts):
                raise InvalidPattern(text, "contains empty, . or .. components")
            ways.append(parts if "/" in each else ["**", *parts])
        return cls(ways)

    def matches(self, name: str) -> bool:
        parts = name.split("/")
        return any(way.matches(parts) for way in self._ways)


class _Way:
    def __init__(self, parts: Sequence[str]) -> None:
        spelled = [*parts, "*"] if parts[-1] == "**" else parts
        self._parts = [None if part == "**" else _part(part) for part in spelled]

    def matches(self, parts: Sequence[str]) -> bool:
        """Each `**` first stands for nothing, and the last one for more and more when the rest fails."""
        wanted = self._parts
        place = seen = 0
        many, from_here = -1, 0
        while seen < len(parts):
            if place < len(wanted) and (part := wanted[place]) is None:
                many, from_here = place, seen
                place += 1
            elif place < len(wanted) and part is not None and part(parts[seen]):
                place += 1
                seen += 1
            elif many >= 0:
                from_here += 1
                place, seen = many + 1, from_here
            else:
                return False
        return all(part is None for part in wanted[place:])


def _alternatives(text: str) -> list[str]:
    """Each pattern that one with braces stands for; a brace without its other half is a character."""
    ways = [text]
    while found := next(filter(None, map(_BRACES.search, ways)), None):
        cut = found.string
        ways.remove(cut)
        ways += [cut[: found.start()] + each + cut[found.end() :] for each in found[1].split(",")]
        if len(ways) > MAX_ALTERNATIVES:
            raise InvalidPattern(text, f"expands to more than {MAX_ALTERNATIVES} alternatives")
    return list(dict.fromkeys(ways))


def _part(text: str) -> _Matches:
    # Parts of Python's pattern cannot be tried in more than one way: no name makes it slow.
    return re.compile(fnmatch.translate(text)).match if _SPECIAL.search(text) else text.__eq__


def _checked(text: str) -> str:
    if not 0 < len(text) <= MAX_PATTERN or not text.isprintable():
        raise InvalidPattern(text[:MAX_PATTERN], f"must have 1 to {MAX_PATTERN} printable characters")
    return text
