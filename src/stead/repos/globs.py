"""Glob patterns of users, in one dialect, with bounded work: for branches and changed files, and for search.

`*` matches any characters in a component, `?` one, and `[abc]`, `[a-z]` and `[!a]` one of a set. A component
`**` matches any number of components. `{a,b}` and `{1..3}` expand as in bash; a backslash escapes. A pattern
of a path without a slash matches in any folder, others start at the root.

Patterns are hostile, so matching is not left to a library: wcmatch 11.2 is exponential in the number of `**`
(path of 40 components, `**/a/` four times: 0.14 s, six times: 8.5 s).
"""

import fnmatch
import re
from collections.abc import Callable, Sequence

import bracex

from stead.repos.errors import RepoError
from stead.repos.names import is_ref

MAX_PATTERN = 256
MAX_ALTERNATIVES = 50
_SPECIAL = re.compile(r"\[[^]/]*\]|[*?]")
_ESCAPED = re.compile(r"\\(.)")
_Matches = Callable[[str], object]


class InvalidPattern(RepoError):
    def __init__(self, pattern: str, reason: str) -> None:
        super().__init__(f"invalid pattern {pattern!r}: {reason}")
        self.pattern = pattern
        self.reason = reason


class GlobPattern:
    """A pattern of branches or files, or several alternatives, matched component by component.

    `**` at the end matches at least one component. Case-sensitive. Matching takes at most time proportional
    to the product of both lengths.
    """

    def __init__(self, ways: Sequence[Sequence[str]]) -> None:
        self._ways = [_Way(parts) for parts in ways]

    def __len__(self) -> int:
        """The number of alternatives."""
        return len(self._ways)

    @classmethod
    def branch(cls, text: str) -> "GlobPattern":
        """A pattern for short branch names. Branch names cannot contain glob characters."""
        short = _checked(text).removeprefix("refs/heads/")
        if not is_ref(_SPECIAL.sub("x", short)):
            raise InvalidPattern(text, "not a valid branch name")
        return cls([short.split("/")])

    @classmethod
    def path(cls, text: str) -> "GlobPattern":
        """A pattern for paths of files: `*.js`, `/*.js`, `src/**/*.js`, or `src/` for all in that folder."""
        if _checked(text).startswith("!"):
            raise InvalidPattern(text, "negation with ! is not supported")
        ways = []
        for each in _expand_braces(text):
            parts = (each + "**" if each.endswith("/") else each).removeprefix("/").split("/")
            _check_components(text, parts)
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
        position = matched = 0
        last_globstar, restart = -1, 0
        while matched < len(parts):
            if position < len(wanted) and (part := wanted[position]) is None:
                last_globstar, restart = position, matched
                position += 1
            elif position < len(wanted) and part is not None and part(parts[matched]):
                position += 1
                matched += 1
            elif last_globstar >= 0:
                restart += 1
                position, matched = last_globstar + 1, restart
            else:
                return False
        return all(part is None for part in wanted[position:])


def _part(text: str) -> _Matches:
    plain = _ESCAPED.sub(lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], text)
    # Each component's regular expression is unambiguous: no input makes it backtrack.
    return re.compile(fnmatch.translate(plain)).match if _SPECIAL.search(plain) else plain.__eq__


def _checked(text: str) -> str:
    if not 0 < len(text) <= MAX_PATTERN or not text.isprintable():
        raise InvalidPattern(text[:MAX_PATTERN], f"must have 1 to {MAX_PATTERN} printable characters")
    return text


def _check_components(text: str, parts: Sequence[str]) -> None:
    if any(part in ("", ".", "..") for part in parts):
        raise InvalidPattern(text, "contains empty, . or .. components")


def _expand_braces(text: str) -> list[str]:
    """The alternatives; an unbalanced brace is a literal character."""
    try:
        # No more braces than alternatives: bracex recurses for each.
        if text.count("{") <= MAX_ALTERNATIVES:
            return list(dict.fromkeys(bracex.expand(text, keep_escapes=True, limit=MAX_ALTERNATIVES)))
    except bracex.ExpansionLimitException:
        pass
    raise InvalidPattern(text, f"expands to more than {MAX_ALTERNATIVES} alternatives")


def git_globs(text: str) -> list[str]:
    """The pattern as globs of git's pathspecs. A matching folder includes its contents."""
    unescaped = _ESCAPED.sub("", text)
    if unescaped.count("{") > unescaped.count("}"):
        raise InvalidPattern(text, "unclosed {")
    return [glob for each in _expand_braces(text) for glob in _rooted(text, each)]


def _rooted(text: str, way: str) -> list[str]:
    path = way.removeprefix("./")
    anywhere = "/" not in path
    path = path.removeprefix("/").removesuffix("/")
    _check_components(text, path.split("/"))
    _check_brackets(text, path)
    path = f"**/{path}" if anywhere and path != "**" else path
    below = [] if path.endswith("**") else [f"{path}/**"]
    return below if way.endswith("/") and below else [path, *below]


def _check_brackets(text: str, path: str) -> None:
    position = 0
    while position < len(path):
        if path[position] == "\\":
            position += 1
            if position == len(path):
                raise InvalidPattern(text, "ends with a backslash")
        elif path[position] == "[":
            # A ] right after [, [! or [^ is a literal.
            start = position + 2 + (path[position + 1 : position + 2] in ("!", "^"))
            position = path.find("]", start)
            if position < 0:
                raise InvalidPattern(text, "unclosed [")
        position += 1
