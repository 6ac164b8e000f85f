"""Search compared with plain Python on the same files, and with plain git."""

import re
import time
import unicodedata
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stead.repos.committing import Change, commit
from stead.repos.repository import Repository
from stead.repos.search.search import ContentFound, Search
from support.git_repos import git, git_output


@dataclass(frozen=True)
class Asked:
    text: str
    regex: bool = False
    case_sensitive: bool = False
    whole_word: bool = False

    def find(self, line: str) -> tuple[int, int] | None:
        """The first match, in UTF-16 units."""
        pattern = self.text if self.regex else re.escape(self.text)
        compiled = re.compile(pattern, 0 if self.case_sensitive else re.IGNORECASE)
        for start in range(len(line) + 1):
            match = compiled.match(line, start)
            if match and not (self.whole_word and _is_part_of_word(line, *match.span())):
                return _units(line[:start]), _units(line[: match.end()])
        return None


def _is_part_of_word(line: str, start: int, end: int) -> bool:
    beside = line[start - 1 : start] + line[end : end + 1]
    return any(unicodedata.category(sign)[0] in "LMN" or sign == "_" for sign in beside)


def _units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def lines_of(content: bytes) -> list[str]:
    lines = content.decode().split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def expected(files: dict[str, bytes], asked: Asked, context: int) -> dict[str, list[tuple[object, ...]]]:
    answer: dict[str, list[tuple[object, ...]]] = {}
    for path, content in files.items():
        if b"\0" in content[:8000]:
            continue
        lines = lines_of(content)
        for place, line in enumerate(lines):
            if columns := asked.find(line):
                before, after = lines[max(0, place - context) : place], lines[place + 1 : place + 1 + context]
                answer.setdefault(path, []).append((place + 1, line, *columns, before, after))
    return answer


def answered(found: ContentFound) -> dict[str, list[tuple[object, ...]]]:
    return {
        file.path: [
            (m.line_number, m.line, m.start_column, m.end_column, m.context_before, m.context_after)
            for m in file.matches
        ]
        for file in found.files
    }


_signs = st.sampled_from([*"aAbBkK\u212aéÉ_1 .(-\\E", "😀", "e\u0301", "\u017fs", "foo"])
_texts = st.lists(_signs, max_size=8).map("".join)
_ends = st.sampled_from(["\n", "\r\n"])
_content = st.lists(st.tuples(_texts, _ends).map("".join), max_size=6).map("".join)
_files = st.dictionaries(
    st.sampled_from(["a.ts", "src/b.ts", "src/deep/c d.md", "-O", "é😀/x", "q\"uote's.txt", "z"]),
    st.tuples(_content, _texts).map(lambda parts: "".join(parts).encode())
    | st.tuples(_content, _content).map(lambda parts: "\0".join(parts).encode()),
    min_size=1,
)
_regexes = st.sampled_from(
    [
        r"a+",
        r"^a",
        r"b$",
        r"a|é",
        r"[^a]b",
        r"(a)(b)?",
        r"[A-Za-z0-9_]+",
        r"c*",
        r"a(?!b)",
        r"(?<!a)b",
        r"😀?k",
        r"(?:foo)+?",
        r"\.",
        r"\(",
        r"b(?!\n)",
        r"(?<!\s)a",
        r"foo$|^1",
        r"[éÉ]",
        r"^$",
        r"a++",
        r".",
        r"^.{2,3}$",
    ]
)
_asked = st.builds(Asked, _texts.filter(bool), st.just(False), st.booleans(), st.booleans()) | st.builds(
    Asked, _regexes, st.just(True), st.booleans(), st.just(False)
)


@given(_files, st.lists(_asked, min_size=3, max_size=3), st.integers(0, 3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_content_search_matches_like_python(
    repository: Repository, search: Search, files: dict[str, bytes], asked: list[Asked], context: int
) -> None:
    """Plain text, any case, whole words, regular expressions; JavaScript columns; context lines."""
    branch = f"b{time.monotonic_ns()}"
    changes = [Change(path, content) for path, content in files.items()]
    await commit(repository, changes, "m", branch=branch)
    for each in asked:
        found = await search.content(
            repository,
            each.text,
            branch,
            context=context,
            regex=each.regex,
            case_sensitive=each.case_sensitive,
            whole_word=each.whole_word,
        )
        wanted = expected(files, each, context)
        assert answered(found) == wanted, each
        assert found.total_files == len(wanted)
        assert found.total_matches == sum(len(matches) for matches in wanted.values())
        assert (found.has_more, found.stopped) == (False, False)
        for file in found.files:
            assert file.size == len(files[file.path])
            assert file.match_count == len(file.matches)


_steps = st.lists(
    st.dictionaries(
        st.sampled_from(["a.ts", "src/b.ts", "c d"]),
        st.none() | st.lists(st.sampled_from(["foo", "Foo 1", "bar", "a foo b", "é foo"]), max_size=6),
        min_size=1,
    ),
    min_size=1,
    max_size=5,
)


@given(_steps, st.sampled_from([Asked("foo"), Asked("Foo", case_sensitive=True), Asked("^fo+", regex=True)]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_diff_search_equals_git_diff(
    repository: Repository, search: Search, steps: list[dict[str, list[str] | None]], asked: Asked
) -> None:
    branch = f"b{time.monotonic_ns()}"
    there: set[str] = set()
    for step in steps:
        changes = [
            Change(path, None if lines is None else "\n".join(lines).encode())
            for path, lines in step.items()
            if lines is not None or path in there
        ]
        there = (there | set(step)) - {path for path, lines in step.items() if lines is None}
        await commit(repository, changes, "m", branch=branch)
    found = await search.diffs(
        repository, asked.text, branch, regex=asked.regex, case_sensitive=asked.case_sensitive
    )
    wanted = {}
    for sha in git(repository, "rev-list", branch).split():
        if changed := _changed_lines(repository, sha, asked):
            wanted[sha] = changed
    assert [each.commit.sha for each in found.commits] == list(wanted)
    assert (found.total_commits, found.has_more, found.stopped) == (len(wanted), False, False)
    for each in found.commits:
        assert wanted[each.commit.sha] == {
            (file.path, m.is_addition, m.line_number, m.line, m.start_column, m.end_column)
            for file in each.files
            for m in file.matches
        }


def _changed_lines(repository: Repository, sha: str, asked: Asked) -> set[tuple[object, ...]]:
    options = "--root", "-r", "-M", "-p", "-U0", "--no-prefix"
    patch = git_output(repository, "diff-tree", *options, sha).decode()
    changed: set[tuple[object, ...]] = set()
    path, numbers = "", {"-": 0, "+": 0}
    for line in patch.split("\n"):
        if line.startswith("diff --git "):
            path = ""
        elif line.startswith(("--- ", "+++ ")):
            name = line[4:].rstrip("\t")
            path = path if name == "/dev/null" else name
        elif hunk := re.match(r"@@ -(\d+)\S* \+(\d+)", line):
            numbers = {"-": int(hunk[1]), "+": int(hunk[2])}
        elif line[:1] in numbers:
            if columns := asked.find(line[1:]):
                changed.add((path, line[0] == "+", numbers[line[0]], line[1:], *columns))
            numbers[line[0]] += 1
    return changed
