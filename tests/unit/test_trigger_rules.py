"""Pure rules of triggers: pattern matching and the retry schedule."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.repos.globs import GlobPattern, InvalidPattern
from stead.repos.webhooks.retries import (
    DELAYS,
    JITTER,
    MAX_AGE,
    MAX_ATTEMPTS,
    DeliveryProgress,
    DeliveryState,
)

SECOND = 10**9

# Patterns

PATHS = [
    ("*.js", "a.js", True),
    ("*.js", "src/deep/a.js", True),
    ("*.js", "a.jsx", False),
    ("*.js", "A.JS", False),
    ("Makefile", "sub/Makefile", True),
    ("/*.js", "a.js", True),
    ("/*.js", "src/a.js", False),
    ("src/*.js", "src/a.js", True),
    ("src/*.js", "src/deep/a.js", False),
    ("src/*.js", "other/src/a.js", False),
    ("src/**/*.js", "src/a.js", True),
    ("src/**/*.js", "src/x/y/a.js", True),
    ("**/test/*.py", "test/a.py", True),
    ("**/test/*.py", "x/y/test/a.py", True),
    ("docs/**", "docs/a", True),
    ("docs/**", "docs/a/b", True),
    ("docs/**", "docs", False),
    ("docs/", "docs/a/b", True),
    ("docs/", "other/docs/a", False),
    ("**", "a/b/c", True),
    ("/", "a/b/c", True),
    ("a?c", "abc", True),
    ("a?c", "a/c", False),
    ("[ab].c", "a.c", True),
    ("[!ab].c", "a.c", False),
    ("[0-9][0-9]-*", "x/07-name", True),
    ("a/**/b/**/c", "a/b/x/b/y/c", True),
    ("a/**/b/**/c", "a/x/c", False),
    ("a.b", "axb", False),
    ("[", "[", True),
    ("*.{js,ts}", "x/a.ts", True),
    ("*.{js,ts}", "x/a.tsx", False),
    ("{src,lib/{a,b}}/**", "lib/b/x", True),
    ("{src,lib/{a,b}}/**", "lib/c/x", False),
    ("a{b", "a{b", True),
    ("a{,b}", "a", True),
    ("v{1..3}", "v2", True),
    (r"\*.js", "*.js", True),
    (r"\*.js", "a.js", False),
    (r"\{a,b\}", "{a,b}", True),
]


@pytest.mark.parametrize(("pattern", "path", "expected"), PATHS)
def test_globs_match_as_documented(pattern: str, path: str, expected: bool) -> None:
    assert GlobPattern.path(pattern).matches(path) is expected


@pytest.mark.parametrize(
    ("pattern", "branch", "expected"),
    [
        ("main", "main", True),
        ("refs/heads/main", "main", True),
        ("main", "x/main", False),
        ("main", "main2", False),
        ("release/*", "release/1", True),
        ("release/*", "release/1/2", False),
        ("release/**", "release/1/2", True),
        ("release/**", "release", False),
        ("*", "main", True),
        ("*", "a/b", False),
        ("**", "a/b", True),
        ("v[0-9]*", "v1.2", True),
    ],
)
def test_branch_patterns_match_whole_names(pattern: str, branch: str, expected: bool) -> None:
    assert GlobPattern.branch(pattern).matches(branch) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "!a",
        "a//b",
        "../a",
        "a/./b",
        "a\n",
        "a" * 300,
        "{a,b}" * 6,
        "{" * 200,
        "{1..100000000}",
        "a/{,b}/c",
    ],
)
def test_invalid_globs_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        GlobPattern.path(pattern)


@pytest.mark.parametrize("pattern", ["", "a b", "a..b", "/a", "a/", "a\\*", "[a", "a" * 300, "refs/heads/"])
def test_invalid_branch_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        GlobPattern.branch(pattern)


def simply(pattern: str, name: str) -> bool:
    """Reference matcher for letters, ?, * and whole components **: tries every way."""
    if not pattern:
        return not name
    if pattern == "**":
        return bool(name)
    if pattern.startswith("**/"):
        starts = [0, *(place + 1 for place, sign in enumerate(name) if sign == "/")]
        return any(simply(pattern[3:], name[start:]) for start in starts)
    if pattern[0] == "*":
        ends = itertools.takewhile(lambda end: "/" not in name[:end], range(len(name) + 1))
        return any(simply(pattern[1:], name[end:]) for end in ends)
    return (
        bool(name)
        and (pattern[0] == name[0] or (pattern[0] == "?" and name[0] != "/"))
        and simply(pattern[1:], name[1:])
    )


PARTS = st.one_of(
    st.just("**"), st.text("ab*?", min_size=1, max_size=4).filter(lambda part: "**" not in part)
)
NAMES = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5).map("/".join)


@given(st.lists(PARTS, min_size=2, max_size=5).map("/".join), NAMES)
def test_patterns_match_like_a_reference_implementation(pattern: str, name: str) -> None:
    assert GlobPattern.path(pattern).matches(name) is simply(pattern, name)


def test_pattern_matching_is_polynomial() -> None:
    """A pattern with exponentially many ways to match, none of which succeeds."""
    many = GlobPattern.path("*a" * 100 + "b"), GlobPattern.path("**/a/" * 50 + "b")
    begun = time.process_time()
    assert not many[0].matches("a" * 4000)
    assert not many[1].matches("/".join("a" * 2000))
    assert time.process_time() - begun < 1


# Attempts


def test_delivery_ends_after_success_or_all_attempts() -> None:
    """Every path through the states: each attempt succeeds, fails, or is interrupted and repeated."""

    def walk(progress: DeliveryProgress, now: int, failures: int) -> int:
        assert progress.attempts == failures
        ways = 0
        begun = progress.begin()
        assert begun.begin() == begun, "what was interrupted is sent again, and it cost no attempt"
        assert begun.wait(0) == 0, "and at once, also when the clock was set back"
        assert progress.wait(now) == 0 < progress.wait(now - 1)
        assert begun.finished_at is None
        arrived = begun.end(True, now, 0.5)
        assert (arrived.state, arrived.finished_at, arrived.attempts) == (
            DeliveryState.DELIVERED,
            now,
            failures + 1,
        )
        for chance in (0.0, 1.0):
            failed = begun.end(False, now, chance)
            if failures + 1 == MAX_ATTEMPTS:
                assert (failed.state, failed.finished_at) == (DeliveryState.FAILED, now)
                ways += 1
                continue
            assert (failed.state, failed.finished_at) == (DeliveryState.PENDING, None)
            assert failed.next_at == now + int(DELAYS[failures] * (1 + JITTER * chance) * SECOND)
            ways += walk(failed, failed.next_at, failures + 1)
        for over in (arrived, failed) if failed.state.final else (arrived,):
            with pytest.raises(ValueError, match="delivery is"):
                over.begin()
        with pytest.raises(ValueError, match="delivery is"):
            progress.end(True, now, 0)
        return ways

    assert walk(DeliveryProgress.new(1000), 1000, 0) == 2**MAX_ATTEMPTS


def test_overdue_delivery_is_tried_once() -> None:
    progress = DeliveryProgress.new(0)
    late = MAX_AGE * SECOND
    assert progress.begin().end(True, late, 0).state is DeliveryState.DELIVERED
    assert progress.begin().end(False, late, 0).state is DeliveryState.FAILED
    assert progress.begin().end(False, late - 1, 0).state is DeliveryState.PENDING
    assert sum(DELAYS) * (1 + JITTER) < MAX_AGE, "what did not wait has all of its attempts"
