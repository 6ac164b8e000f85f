"""Search queries: text, regular expressions and path patterns, translated for git."""

import re
from dataclasses import dataclass
from typing import Literal

from stead.repos.errors import RepoError
from stead.repos.git_messages import GitMessage
from stead.repos.globs import InvalidPattern, git_globs

Scope = Literal["content", "files", "commits", "diffs"]
MAX_QUERY = 1000
"""Maximum characters of a query and of a path pattern."""

# Lines may end with CR LF: `$` matches before it.
_VERBS = "(*ANYCRLF)"
_WORD = r"[\p{L}\p{M}\p{N}_]"
_JS_ESCAPES = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u([0-9a-fA-F]{4})|\\u\{([0-9a-fA-F]{1,6})\}|\\."
)
# Git first searches many lines at once, then the line it found. A pattern whose match depends on text after
# its line would be missed.
_MINDS_NEXT_LINE = re.compile(r"\(\?<?!|\(\?>|[*+?}]\+|\(\*|\\[AZzGKRX]")
_WHERE_AND_WHY = re.compile(r"fatal: (?:-e option|command line), '.*': (.+)", re.DOTALL)


class EmptyQuery(RepoError):
    def __init__(self, scope: Scope) -> None:
        super().__init__("query is empty")
        self.scope = scope


class InvalidQuery(RepoError):
    """The query cannot match any line."""

    def __init__(self, scope: Scope, reason: str) -> None:
        super().__init__(f"invalid query: {reason}")
        self.reason = reason
        self.scope = scope


class InvalidRegex(InvalidQuery):
    """Git's regular expression engine refuses the expression, or gave up on it."""


class InvalidPathPattern(RepoError):
    def __init__(self, scope: Scope, pattern: str, reason: str) -> None:
        super().__init__(f"invalid path pattern {_printable(pattern)!r}: {reason}")
        self.reason = reason
        self.scope = scope


class JitStackExhausted(Exception):
    """A line is too long for the JIT matcher: retry without JIT."""


@dataclass(frozen=True)
class Query:
    r"""A text or regular expression, matched line by line.

    Regular expressions are PCRE, which includes nearly all of JavaScript's; `\u00e9` is supported too.
    Without `case_sensitive`, case is ignored for all scripts. With `whole_word`, there must be no letter,
    digit or underscore of any script next to the match.
    """

    scope: Scope
    text: str
    regex: bool = False
    case_sensitive: bool = False
    whole_word: bool = False
    jit: bool = True
    """Use the PCRE JIT: faster, but with little stack for long lines."""

    def __post_init__(self) -> None:
        if not self.text:
            raise EmptyQuery(self.scope)
        if len(self.text) > MAX_QUERY:
            raise InvalidQuery(self.scope, f"longer than {MAX_QUERY} characters")
        if _printable(self.text) != self.text:
            raise InvalidQuery(self.scope, "not valid UTF-8")
        if "\n" in self.text or "\0" in self.text:
            raise InvalidQuery(
                self.scope, "line ends and NUL are not supported: lines are searched one by one"
            )

    @property
    def exact_length(self) -> int | None:
        """The length in characters of every possible match, if it is fixed."""
        return None if self.regex else len(self.text)

    @property
    def options(self) -> list[str]:
        return ["-F" if self._is_plain else "-P", *([] if self.case_sensitive else ["-i"])]

    @property
    def expression(self) -> list[str]:
        """The pattern options for `git grep`."""
        if self.regex and _MINDS_NEXT_LINE.search(self.text):
            return ["(", "-e", self.pattern, ")"]
        return ["-e", self.pattern]

    @property
    def _is_plain(self) -> bool:
        # Git quotes fixed text with \Q and \E, but does not escape a \E in the text.
        return not self.regex and not self.whole_word and "\\E" not in self.text

    @property
    def pattern(self) -> str:
        if self._is_plain:
            return self.text
        inner = _JS_ESCAPES.sub(_perl, self.text) if self.regex else re.escape(self.text)
        if self.whole_word:
            # Close an open \Q; without one, \E does nothing.
            inner = f"(?<!{_WORD})(?:{inner}\\E)(?!{_WORD})"
        return _VERBS + ("" if self.jit else "(*NO_JIT)") + inner

    def explain(self, stderr: str) -> None:
        """Raise InvalidQuery if git's error is about the query."""
        if not self._is_plain and self.jit and GitMessage.JIT_STACK_EXHAUSTED.found_in(stderr):
            raise JitStackExhausted
        if GitMessage.MATCH_LIMIT.found_in(stderr):
            raise InvalidRegex(self.scope, "the regular expression takes too many steps in this repository")
        if why := _WHERE_AND_WHY.search(stderr):
            raise InvalidRegex(self.scope, why[1].strip())


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _perl(found: re.Match[str]) -> str:
    high, low, unit, point = found.groups()
    if high:
        number = 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00
        return f"\\x{{{number:x}}}"
    return f"\\x{{{unit or point}}}" if unit or point else found[0]


def pathspecs(scope: Scope, include: str | None, exclude: str | None) -> tuple[str, ...]:
    """Translate path patterns to git pathspecs; a matching folder includes its contents."""
    specs = [f":(glob){glob}" for glob in _globs(scope, include)] if include else []
    specs += [f":(exclude,glob){glob}" for glob in _globs(scope, exclude)] if exclude else []
    return tuple(specs)


def _globs(scope: Scope, pattern: str) -> list[str]:
    if len(pattern) > MAX_QUERY or "\0" in pattern or _printable(pattern) != pattern:
        reason = f"must be valid UTF-8 without NUL, at most {MAX_QUERY} characters"
        raise InvalidPathPattern(scope, pattern[:MAX_QUERY], reason)
    try:
        return git_globs(pattern)
    except InvalidPattern as error:
        raise InvalidPathPattern(scope, pattern, error.reason) from None
