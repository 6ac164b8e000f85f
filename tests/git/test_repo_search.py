"""Search in repositories, compared with plain Python on the same files, and with plain git."""

import asyncio
import os
import re
import subprocess
import time
import unicodedata
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stead.errors import InvalidRequest
from stead.repos.committing import Change, commit
from stead.repos.errors import InvalidRevision, ReferenceNotFound, RepoBusy
from stead.repos.fast_import import Author
from stead.repos.repository import Repository
from stead.repos.search.cache import SearchCache
from stead.repos.search.content import files_with_lines
from stead.repos.search.lines import MAX_LINE, MAX_MATCHES
from stead.repos.search.query import (
    EmptyQuery,
    InvalidPathPattern,
    InvalidQuery,
    InvalidRegex,
    Query,
    pathspecs,
)
from stead.repos.search.search import ContentFound, Search
from support.git_hosting import Stage, staged
from support.waiting import until

NOBODY = 1_899_999_998


@pytest_asyncio.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with staged(tmp_path_factory.mktemp("search")) as stage:
        yield stage


@pytest_asyncio.fixture
async def repository(stage: Stage) -> Repository:
    return await stage.repository()


@pytest_asyncio.fixture(scope="module")
async def several(stage: Stage) -> Repository:
    """Files whose names differ for patterns; read only."""
    repository = await stage.repository()
    every = ["a.ts", "src/b.ts", "src/x/c.ts", "src/x/d.md", "-O", "x y/é.md", "src/*.js"]
    await put(repository, dict.fromkeys(every, "here\n"))
    return repository


@pytest.fixture
def search() -> Search:
    return Search()


async def put(repository: Repository, files: Mapping[str, str | bytes | None], message: str = "m") -> str:
    changes = [Change(path, text.encode() if isinstance(text, str) else text) for path, text in files.items()]
    return (await commit(repository, changes, message)).sha


def git(repository: Repository, *arguments: str, stdin: bytes = b"") -> bytes:
    """Plain git, to verify results independently."""
    environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "LC_ALL": "C.UTF-8"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "A", f"GIT_{who}_EMAIL": "a@example.org"}
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=repository.path,
        input=stdin,
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def paths(found: ContentFound) -> list[str]:
    return [file.path for file in found.files]


# Reference implementation in Python


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
    for sha in git(repository, "rev-list", branch).decode().split():
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
    patch = git(repository, "diff-tree", "--root", "-r", "-M", "-p", "-U0", "--no-prefix", sha).decode()
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


# Content


async def test_published_search_examples(repository: Repository, search: Search) -> None:
    await put(
        repository,
        {
            "src/a.ts": "// TODO one\nexport async function go() {}\nfunction stop() {}\n",
            "src/deep/b.test.ts": "// TODO not this\n",
            "src/deep/c.ts": "  // todo two\nconst functional = 1\n",
            "lib/d.ts": "TODO elsewhere\n",
        },
    )
    found = await search.content(
        repository, "TODO", "main", path_pattern="src/**/*.ts", exclude_pattern="**/*.test.ts"
    )
    assert paths(found) == ["src/a.ts", "src/deep/c.ts"]
    assert [m.line for file in found.files for m in file.matches] == ["// TODO one", "  // todo two"]
    expression = r"^(export\s+)?(async\s+)?function\s+\w+"
    found = await search.content(repository, expression, regex=True, path_pattern="**/*.ts")
    (file,) = found.files
    assert [m.line[m.start_column : m.end_column] for m in file.matches] == [
        "export async function go",
        "function stop",
    ]
    assert (file.path, file.extension) == ("src/a.ts", "ts")


@pytest.mark.parametrize(
    ("include", "exclude", "wanted"),
    [
        ("*.ts", None, {"a.ts", "src/b.ts", "src/x/c.ts"}),
        ("/*.ts", None, {"a.ts"}),
        ("./src/*.ts", None, {"src/b.ts"}),
        ("src/**/*.ts", None, {"src/b.ts", "src/x/c.ts"}),
        ("**/*.ts", None, {"a.ts", "src/b.ts", "src/x/c.ts"}),
        ("**", None, {"a.ts", "src/b.ts", "src/x/c.ts", "src/x/d.md", "-O", "x y/é.md", "src/*.js"}),
        ("src", None, {"src/b.ts", "src/x/c.ts", "src/x/d.md", "src/*.js"}),
        ("x/", None, set()),
        ("src/x/", None, {"src/x/c.ts", "src/x/d.md"}),
        ("*.{ts,md}", "{src/x,x y}", {"a.ts", "src/b.ts"}),
        ("src/{x/{c,d}.*,b.ts}", None, {"src/b.ts", "src/x/c.ts", "src/x/d.md"}),
        ("[ab].ts", None, {"a.ts", "src/b.ts"}),
        ("[!a].ts", None, {"src/b.ts", "src/x/c.ts"}),
        ("?.md", None, {"src/x/d.md"}),  # é is two bytes to git
        ("-O", None, {"-O"}),
        ("é.md", None, {"x y/é.md"}),
        (r"\*.js", None, {"src/*.js"}),
        (":(top)*", None, set()),
        ("!a.ts", None, set()),
        (None, "*.ts", {"src/x/d.md", "-O", "x y/é.md", "src/*.js"}),
        (None, "src", {"a.ts", "-O", "x y/é.md"}),
        ("", "", {"a.ts", "src/b.ts", "src/x/c.ts", "src/x/d.md", "-O", "x y/é.md", "src/*.js"}),
    ],
)
async def test_path_patterns_select_files(
    several: Repository, search: Search, include: str | None, exclude: str | None, wanted: set[str]
) -> None:
    found = await search.content(several, "here", path_pattern=include, exclude_pattern=exclude)
    assert set(paths(found)) == wanted
    names = await search.files(several, ".", path_pattern=include, exclude_pattern=exclude)
    assert {file.path for file in names.files} == {path for path in wanted if "." in path}


@pytest.mark.parametrize(
    "pattern", ["../x", "a/../b", "a//b", "/", "a/./b", "[a", "a{b", "a\\", "\0", "\ud800", "x" * 1001]
)
async def test_invalid_path_patterns_are_refused(several: Repository, search: Search, pattern: str) -> None:
    for look in (search.content, search.files, search.diffs):
        with pytest.raises(InvalidPathPattern) as refused:
            await look(several, "x", path_pattern=pattern)
        assert refused.value.scope == look.__name__
        assert refused.value.reason
        with pytest.raises(InvalidPathPattern):
            await look(several, "x", exclude_pattern=pattern)


def test_path_pattern_expansion_limit() -> None:
    with pytest.raises(InvalidPathPattern):
        pathspecs("content", "{a,b}" * 7, None)


async def test_content_pages_have_each_file_once(repository: Repository, search: Search) -> None:
    every = {f"d{n % 7}/f{n}.txt": "needle\n" for n in range(53)}
    await put(repository, {**every, "other.txt": "hay\n"})
    seen: list[str] = []
    offset = 0
    while True:
        found = await search.content(repository, "needle", max_results=10, offset=offset)
        assert (found.total_files, found.total_matches) == (53, 53)
        seen += paths(found)
        if not found.has_more:
            break
        offset += 10
    assert len(seen) == 53
    assert set(seen) == set(every)
    beyond = await search.content(repository, "needle", max_results=10, offset=60)
    assert (beyond.files, beyond.has_more, beyond.total_files) == ([], False, 53)


async def test_long_line_is_cut_around_its_match(repository: Repository, search: Search) -> None:
    """Columns refer to the shown part."""
    await put(repository, {"min.js": "é" * 100_000 + "Needle😀" + "x" * 3_000_000 + "\nnext\n"})
    for regex in (False, True):
        found = await search.content(repository, "needle😀", regex=regex)
        (match,) = found.files[0].matches
        assert len(match.line.encode()) <= MAX_LINE
        assert "\ufffd" not in match.line
        units = match.line.encode("utf-16-le")
        assert units[2 * match.start_column : 2 * match.end_column].decode("utf-16-le") == "Needle😀"
        assert match.context_after == ["next"]
    found = await search.content(repository, "x{3,}", regex=True)
    (match,) = found.files[0].matches
    assert match.end_column <= len(match.line.encode("utf-16-le")) // 2
    found = await search.content(repository, "next")
    assert len(found.files[0].matches[0].context_before[0].encode()) <= MAX_LINE


async def test_regex_on_long_lines_is_retried_without_jit(repository: Repository, search: Search) -> None:
    await put(repository, {"long.txt": "ab" * 200_000 + "c\n"})
    found = await search.content(repository, "(?:a|b)*c", regex=True)
    assert found.total_matches == 1


async def test_matches_per_file_limit(repository: Repository, search: Search) -> None:
    await put(repository, {"full.txt": "".join(f"needle {n}\n" for n in range(1500))})
    found = await search.content(repository, "needle")
    (file,) = found.files
    assert (found.total_matches, file.match_count, len(file.matches)) == (1500, 1500, MAX_MATCHES)
    assert file.matches[-1].context_after == ["needle 1000", "needle 1001"]


async def test_result_size_limit_is_reported(repository: Repository, search: Search) -> None:
    """Each file is still listed once with its count, and paging ends."""
    text = "needle " + "x" * 200 + "\n"
    await put(repository, {f"f{n:03}.txt": text * 1000 + str(n) for n in range(60)})
    found = await search.content(repository, "needle", max_results=1000)
    assert (found.stopped, found.has_more) == (True, True)
    assert (found.total_files, found.total_matches) == (60, 60_000)
    assert len(found.files) == 60
    assert len(found.files[0].matches) == MAX_MATCHES
    assert found.files[-1].matches == []
    beyond = await search.content(repository, "needle", max_results=1000, offset=1000)
    assert (beyond.files, beyond.has_more) == ([], False)


async def test_invalid_utf8_is_searched_and_shown(repository: Repository, search: Search) -> None:
    await put(repository, {"latin.txt": b"\xe9t\xe9 caf\xe9 needle \xff\n"})
    found = await search.content(repository, "NEEDLE")
    (match,) = found.files[0].matches
    assert match.line[match.start_column : match.end_column] == "needle"
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"needle\n").decode().strip()
    tree = git(repository, "mktree", "-z", stdin=b"100644 blob %s\tcaf\xe9\nx.txt\0" % blob.encode())
    sha = git(repository, "commit-tree", "-m", "m", tree.decode().strip()).decode().strip()
    git(repository, "update-ref", "refs/heads/odd", sha)
    found = await search.content(repository, "needle", "odd")
    assert [(file.path, file.size, len(file.matches)) for file in found.files] == [("caf\ufffd\nx.txt", 7, 1)]
    assert [file.size for file in (await search.files(repository, "x.t", "odd")).files] == [7]
    assert (await search.files(repository, r"\.txt$", "odd", regex=True)).total_files == 1
    assert (await search.diffs(repository, "needle", "odd")).total_commits == 1


async def test_symlinks_and_submodules_are_not_searched(repository: Repository, search: Search) -> None:
    first = await put(repository, {"real": "needle\n"})
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"needle").decode().strip()
    entries = f"120000 blob {blob}\tlink\n160000 commit {first}\tmodule\n"
    tree = git(repository, "mktree", "--missing", stdin=entries.encode()).decode().strip()
    sha = git(repository, "commit-tree", "-m", "m", tree).decode().strip()
    git(repository, "update-ref", "refs/heads/links", sha)
    assert (await search.content(repository, "needle", "links")).total_files == 0
    assert (await search.diffs(repository, "needle", "links")).total_commits == 0
    assert [file.path for file in (await search.files(repository, "l", "links")).files] == ["link"]


async def test_javascript_escapes_are_supported(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "café 😀\n", "b": "\\u00e9\n", "c": "plain\n"})
    for expression in (r"caf\u00e9", r"\u{1F600}", r"\ud83d\ude00", "(?<name>café)"):
        assert paths(await search.content(repository, expression, regex=True)) == ["a"], expression
    assert paths(await search.content(repository, r"\\u00e9", regex=True)) == ["b"]


async def test_regex_with_whole_word(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "foo_bar foobar\nfoo bar\nfooé\nxfoo foo\n"})
    found = await search.content(repository, "foo|foo_bar", regex=True, whole_word=True)
    (file,) = found.files
    assert [(m.line_number, m.start_column, m.end_column) for m in file.matches] == [
        (1, 0, 7),
        (2, 0, 3),
        (4, 5, 8),
    ]


@pytest.mark.parametrize("expression", ["a(", "a)", "[a", "*a", "a\\", "(?<n", "a{2,1}", r"\p{Nothing}"])
async def test_invalid_regex_is_refused_with_a_reason(
    several: Repository, search: Search, expression: str
) -> None:
    for look in (search.content, search.files, search.commits, search.diffs):
        with pytest.raises(InvalidRegex) as refused:
            await look(several, expression, regex=True)
        assert refused.value.scope == look.__name__
        assert refused.value.reason
    for look_for_word in (search.content, search.diffs):
        with pytest.raises(InvalidRegex):
            await look_for_word(several, expression, regex=True, whole_word=True)


@pytest.mark.parametrize("text", ["a\nb", "a\0b", "\ud800", "x" * 1001])
async def test_impossible_queries_are_refused(several: Repository, search: Search, text: str) -> None:
    for look in (search.content, search.files, search.commits, search.diffs):
        for regex in (False, True):
            with pytest.raises(InvalidQuery) as refused:
                await look(several, text, regex=regex)
            assert refused.value.scope == look.__name__
        with pytest.raises(EmptyQuery) as empty:
            await look(several, "")
        assert empty.value.scope == look.__name__


@pytest.mark.parametrize(
    "text",
    [
        "--open-files-in-pager=touch /tmp/owned",
        "-Otouch",
        "-O",
        "--",
        "-e",
        "HEAD",
        ":(top)",
        "(",
        ")",
        "--and",
        "--not",
        "\\E(",
        "\\Q",
        "a\\Eb[",
        "-f/etc/passwd",
        "$(id)",
        "`id`",
        "--output=x",
    ],
)
async def test_literal_text_is_never_parsed_as_options_or_regex(
    repository: Repository, search: Search, text: str
) -> None:
    """Not a git option, not a revision, not a regular expression."""
    await put(
        repository, {f"{text.replace('/', '_')} file": f"some {text} here\n", "z": "other\n"}, f"so {text} it"
    )
    for whole_word in (False, True):
        found = await search.content(repository, text, whole_word=whole_word)
        assert found.total_files == 1
        (match,) = found.files[0].matches
        assert match.line[match.start_column : match.end_column] == text
        changes = await search.diffs(repository, text, whole_word=whole_word)
        assert [len(each.files) for each in changes.commits] == [1]
    assert (await search.commits(repository, text)).total_commits == 1
    assert (await search.files(repository, text.replace("/", "_"))).total_files == 1
    escaped = "".join(f"\\x{{{ord(sign):x}}}" for sign in text)
    assert (await search.content(repository, escaped, regex=True)).total_files == 1


@pytest.mark.parametrize(
    "pattern", ["--open-files-in-pager=x", "-O", ":(exclude)*", ":!a", ":/", "--", "HEAD"]
)
async def test_path_pattern_is_never_parsed_as_options_or_magic(
    repository: Repository, search: Search, pattern: str
) -> None:
    await put(repository, {"a": "needle\n"})
    for look in (search.content, search.files, search.diffs):
        query = "a" if look == search.files else "needle"
        found = await look(repository, query, path_pattern=pattern)
        assert getattr(found, "total_files", getattr(found, "total_commits", None)) == 0
        found = await look(repository, query, exclude_pattern=pattern)
        assert getattr(found, "total_files", getattr(found, "total_commits", None)) == 1


@pytest.mark.parametrize("rev", ["--all", "-x", "main..main", "HEAD~0:", "a b"])
async def test_search_in_missing_revision_is_refused(several: Repository, search: Search, rev: str) -> None:
    for look in (search.content, search.files, search.commits, search.diffs):
        with pytest.raises(InvalidRevision):
            await look(several, "x", rev)
        with pytest.raises(ReferenceNotFound):
            await look(several, "x", "gone")


async def test_out_of_range_parameters_are_refused(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "x\n"})
    for look in (search.content, search.files, search.commits, search.diffs):
        for size, offset in ((0, 0), (1001, 0), (1, -1)):
            with pytest.raises(InvalidRequest):
                await look(repository, "x", max_results=size, offset=offset)
    for context in (-1, 21):
        with pytest.raises(InvalidRequest):
            await search.content(repository, "x", context=context)


async def test_search_in_empty_repository(repository: Repository, search: Search) -> None:
    assert (await search.content(repository, "x")).files == []
    assert (await search.files(repository, "x")).files == []
    assert (await search.commits(repository, "x")).commits == []
    assert (await search.diffs(repository, "x")).commits == []
    with pytest.raises(ReferenceNotFound):
        await search.content(repository, "x", "main")


async def test_search_in_branch_tag_and_commit(repository: Repository, search: Search) -> None:
    first = await put(repository, {"a": "one\n"}, "first")
    git(repository, "tag", "-a", "-m", "t", "v1", first)
    await put(repository, {"a": "two\n"}, "second")
    for rev in (first, first[:10], "v1", "refs/tags/v1"):
        assert (await search.content(repository, "one", rev)).total_files == 1
        assert (await search.content(repository, "two", rev)).total_files == 0
        assert (await search.commits(repository, "second", rev)).total_commits == 0
    for newest in (None, "main", "refs/heads/main"):
        assert (await search.content(repository, "two", newest)).total_files == 1
        assert (await search.content(repository, "one", newest)).total_files == 0


# File names


async def test_search_file_names(repository: Repository, search: Search) -> None:
    every = ["Index.ts", "src/index.js", "src/index/a.md", "src/b", "-index", "ünï.Ts", "x y/.hidden"]
    await put(repository, dict(zip(every, every, strict=True)))
    found = await search.files(repository, "INDEX")
    assert {file.path for file in found.files} == {"Index.ts", "src/index.js", "src/index/a.md", "-index"}
    assert {(file.path, file.extension, file.size) for file in found.files} >= {
        ("src/index.js", "js", 12),
        ("-index", None, 6),
    }
    found = await search.files(repository, "index", case_sensitive=True, exclude_pattern="*.md")
    assert {file.path for file in found.files} == {"src/index.js", "-index"}
    found = await search.files(repository, r"^src/.*\.(js|md)$", regex=True)
    assert [file.path for file in found.files] == ["src/index.js", "src/index/a.md"]
    found = await search.files(repository, r"ÜNÏ\.ts$", regex=True)
    assert [(file.path, file.extension) for file in found.files] == [("ünï.Ts", "Ts")]
    assert (await search.files(repository, "hidden")).files[0].extension is None
    pages = [await search.files(repository, "i", max_results=2, offset=n) for n in (0, 2, 4)]
    assert [page.has_more for page in pages] == [True, True, False]
    assert len({file.path for page in pages for file in page.files}) == pages[0].total_files == 5


async def test_file_name_regex_runs_as_the_git_user(open_folder: Path) -> None:
    async with staged(open_folder, NOBODY) as stage:
        repository = await stage.repository()
        await put(repository, {"src/a.ts": "x\n"})
        assert (await Search().files(repository, r"\.ts$", regex=True)).total_files == 1


# Commit messages


async def test_search_commit_messages(repository: Repository, search: Search) -> None:
    people = Author("Ä. Author", "a@example.org")
    for number, message in enumerate(["Fix one", "other\n\nit is a fix, too", "nothing", "prefix"]):
        await commit(repository, [Change("f", str(number).encode())], message, author=people)
    found = await search.commits(repository, "fix")
    assert [each.message.partition("\n")[0] for each in found.commits] == ["prefix", "other", "Fix one"]
    assert found.commits[0].author.name == "Ä. Author"
    assert (found.total_commits, found.has_more, found.stopped) == (3, False, False)
    assert (await search.commits(repository, "Fix", case_sensitive=True)).total_commits == 1
    assert (await search.commits(repository, r"^it\s+is", regex=True)).total_commits == 1
    assert (await search.commits(repository, "Author")).total_commits == 0
    pages = [await search.commits(repository, "fix", max_results=1, offset=n) for n in range(4)]
    assert [page.has_more for page in pages] == [True, True, False, False]
    assert len({each.sha for page in pages for each in page.commits}) == 3


# Diffs


async def test_diff_search_reports_added_and_removed_lines(repository: Repository, search: Search) -> None:
    await put(repository, {"a.ts": "x\ndeprecatedMethod()\ny\n", "keep": "deprecatedMethod\n"}, "add")
    await put(repository, {"a.ts": "x\ny\n"}, "remove")
    await put(repository, {"keep": "deprecatedMethod\nmore\n"}, "beside it")
    await put(repository, {"keep": None, "moved": "deprecatedMethod\nmore\n"}, "move")
    await put(repository, {"moved": "0\ndeprecatedMethod\r\nmore\n😀 deprecatedMethod"}, "line end")
    found = await search.diffs(repository, "deprecatedmethod")
    told = {
        each.commit.message.strip(): [
            (file.path, m.line_number, m.line, m.start_column, m.end_column, m.is_addition)
            for file in each.files
            for m in file.matches
        ]
        for each in found.commits
    }
    assert told == {
        "line end": [
            ("moved", 1, "deprecatedMethod", 0, 16, False),
            ("moved", 2, "deprecatedMethod", 0, 16, True),
            ("moved", 4, "😀 deprecatedMethod", 3, 19, True),
        ],
        "remove": [("a.ts", 2, "deprecatedMethod()", 0, 16, False)],
        "add": [
            ("a.ts", 2, "deprecatedMethod()", 0, 16, True),
            ("keep", 1, "deprecatedMethod", 0, 16, True),
        ],
    }
    only = await search.diffs(repository, "deprecatedMethod", path_pattern="*.ts")
    assert [each.commit.message.strip() for each in only.commits] == ["remove", "add"]


async def test_diff_pages_have_each_commit_once(repository: Repository, search: Search) -> None:
    for number in range(7):
        await put(repository, {"f": f"needle {number}\n" if number % 2 else f"{number}\n"}, f"c{number}")
    for asked in (search, search, Search()):
        seen = []
        for offset in range(0, 9, 3):
            found = await asked.diffs(repository, "needle", max_results=3, offset=offset)
            assert (found.total_commits, found.has_more) == (6, offset < 3)
            seen += [each.commit.message.strip() for each in found.commits]
        assert seen == ["c6", "c5", "c4", "c3", "c2", "c1"]


# Cache


async def test_results_are_cached_by_commit(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "needle\n"}, "needle one")
    content = await search.content(repository, "needle")
    files = await search.files(repository, "a")
    commits = await search.commits(repository, "needle")
    diffs = await search.diffs(repository, "needle")
    assert content is await search.content(repository, "needle", "main")
    assert files is await search.files(repository, "a")
    assert commits is await search.commits(repository, "needle")
    assert diffs is await search.diffs(repository, "needle")
    await put(repository, {"a": None, "b a": "a needle more\n"}, "needle two")
    newer = await search.content(repository, "needle")
    assert [(file.path, file.matches[0].line) for file in newer.files] == [("b a", "a needle more")]
    assert [file.path for file in (await search.files(repository, "a")).files] == ["b a"]
    assert (await search.commits(repository, "needle")).total_commits == 2
    assert (await search.diffs(repository, "needle")).total_commits == 2
    git(repository, "update-ref", "refs/heads/main", commits.commits[0].sha)
    assert await search.content(repository, "needle") == content


async def test_cache_key_has_all_parameters(repository: Repository, search: Search) -> None:
    await put(repository, {"a": "1\nNeedle\n2\n", "b": "needles\nx\n"})
    counts = [
        (await search.content(repository, "needle")).total_files,
        (await search.content(repository, "needle", case_sensitive=True)).total_files,
        (await search.content(repository, "needle", whole_word=True)).total_files,
        (await search.content(repository, "needle.", regex=True)).total_files,
        (await search.content(repository, "needle.")).total_files,
        (await search.content(repository, "needle", path_pattern="b")).total_files,
        len((await search.content(repository, "needle", max_results=1)).files),
        len((await search.content(repository, "needle", context=0)).files[0].matches[0].context_before),
    ]
    assert counts == [2, 1, 1, 1, 0, 1, 1, 0]


async def test_deleting_repository_clears_its_cache(stage: Stage, search: Search) -> None:
    one, two = await stage.repository(), await stage.repository()
    for each in (one, two):
        await put(each, {"a": "needle\n"})
        await search.content(each, "needle")
    kept = search.cache.size
    search.drop_repo(one.id)
    assert 0 < search.cache.size < kept
    again = await search.content(two, "needle")
    assert again is await search.content(two, "needle")
    search.drop_repo(two.id)
    assert search.cache.size == 0


def test_cache_evicts_least_recently_used() -> None:
    cache = SearchCache(10_000)
    for name in "abcd":
        cache.put(("r", name), name, 1_900)
    cache.get(("r", "a"))
    cache.put(("r", "e"), "e", 1_900)
    assert [name for name in "abcde" if cache.get(("r", name))] == ["a", "c", "d", "e"]
    cache.put(("r", "huge"), "x", 9_000)
    assert cache.get(("r", "huge")) is None
    cache.put(("r", "a"), "new", 100)
    assert cache.get(("r", "a")) == "new"
    assert cache.size <= 10_000


# Limits

SLOW = "(a+)+$"
"""Takes about 250,000 steps on each line of `slow.txt`: below git's limit for one line."""


@pytest_asyncio.fixture
async def slow(repository: Repository) -> Repository:
    lines = ("a" * 17 + "b\n") * 3000
    files = {f"slow{n:02}.txt": lines + str(n) for n in range(30)}
    await put(repository, {"0.txt": "aaa\n", **files}, "\n".join(["a" * 17 + "b"] * 3000))
    return repository


def _searching() -> list[str]:
    """Command lines of git search processes below this process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            line = (status.parent / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and "git" in line and "cat-file" not in line:
            found.append(line)
    return found


async def test_search_time_limit_leaves_no_process(slow: Repository) -> None:
    """Matches found so far are returned."""
    search = Search(timeout=1.0)
    for look in (search.content, search.diffs, search.commits):
        found = await look(slow, SLOW, regex=True)
        assert found.stopped, look.__name__
        assert _searching() == []
    content = await search.content(slow, SLOW, regex=True)
    assert [file.path for file in content.files] in ([], ["0.txt"])
    assert content.has_more is bool(content.files)
    assert (await Search(timeout=20).content(slow, "aaab", max_results=1)).total_files == 30


async def test_late_matches_are_reported_by_name(slow: Repository) -> None:
    commit = await slow.resolve(None)
    counted = [(f"{commit}:0.txt".encode(), 1)]
    files, _ = await files_with_lines(slow, Query("content", "aaa"), counted, 0, time.monotonic() - 1)
    assert [(file.path, file.match_count) for file in files] == [("0.txt", 1)]


async def test_cancelled_search_leaves_no_process(slow: Repository) -> None:
    task = asyncio.create_task(Search().content(slow, SLOW, regex=True))

    async def begun() -> bool:
        return bool(_searching())

    await until(begun, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _searching() == []


async def test_search_concurrency_limit(slow: Repository) -> None:
    search = Search(timeout=1.0, at_once=1)
    answers = await asyncio.gather(
        *(search.content(slow, SLOW + "()" * n, regex=True) for n in range(10)), return_exceptions=True
    )
    assert [type(each) for each in answers].count(RepoBusy) >= 1
    assert (await search.files(slow, "0.txt")).total_files == 4


async def test_catastrophic_regex_is_refused(repository: Repository, search: Search) -> None:
    await put(repository, {"a" * 60 + "b": "a" * 60 + "b\n"}, "a" * 60 + "b")
    for look in (search.content, search.files, search.commits, search.diffs):
        async with asyncio.timeout(20):
            with pytest.raises(InvalidRegex, match="steps"):
                await look(repository, SLOW, regex=True)
        assert _searching() == []


def test_query_is_one_git_argument() -> None:
    """It always follows -e."""
    for text in ("-O", "--", "a b", "(?!x)"):
        for regex in (False, True):
            words = Query("content", text, regex=regex).expression
            assert words.count("-e") == 1
            assert text in words[words.index("-e") + 1]
