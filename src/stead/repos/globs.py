"""Glob patterns for branch names and file paths, matched in bounded time."""

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
    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(f"invalid pattern {pattern!r}: {why}")
        self.pattern = pattern


class Pattern:
    """A glob, or several alternatives, matched component by component.

    `*` matches any characters in a component, `?` one, and `[abc]`, `[a-z]` and `[!a]` one of a set. A
    component `**` matches any number of components; at the end, at least one. Case-sensitive. Matching takes
    at most time proportional to the product of both lengths.
    """

    def __init__(self, ways: Sequence[Sequence[str]]) -> None:
        self._ways = [_Way(parts) for parts in ways]

    def __len__(self) -> int:
        """The number of alternatives."""
        return len(self._ways)

    @classmethod
    def branch(cls, text: str) -> "Pattern":
        """A pattern for short branch names. Branch names cannot contain glob characters."""
        short = _checked(text).removeprefix("refs/heads/")
        if not is_ref(_SPECIAL.sub("x", short)):
            raise InvalidPattern(text, "not a valid branch name")
        return cls([short.split("/")])

    @classmethod
    def path(cls, text: str) -> "Pattern":
        """A pattern for paths of files. Without a slash it matches the file name in any folder: `*.js`.

        With a slash it is relative to the root: `src/*.js`, `/*.js`, `src/**/*.js`. A trailing slash matches
        everything in that folder. `{a,b}` matches either.
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
        """Backtrack only to the last `**`: each `**` first matches nothing, then more components."""
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
    """Expand braces; an unbalanced brace is a literal character."""
    ways = [text]
    while found := next(filter(None, map(_BRACES.search, ways)), None):
        cut = found.string
        ways.remove(cut)
        ways += [cut[: found.start()] + each + cut[found.end() :] for each in found[1].split(",")]
        if len(ways) > MAX_ALTERNATIVES:
            raise InvalidPattern(text, f"expands to more than {MAX_ALTERNATIVES} alternatives")
    return list(dict.fromkeys(ways))


def _part(text: str) -> _Matches:
    # Each component's regular expression is unambiguous: no input makes it backtrack.
    return re.compile(fnmatch.translate(text)).match if _SPECIAL.search(text) else text.__eq__


def _checked(text: str) -> str:
    if not 0 < len(text) <= MAX_PATTERN or not text.isprintable():
        raise InvalidPattern(text[:MAX_PATTERN], f"must have 1 to {MAX_PATTERN} printable characters")
    return text
