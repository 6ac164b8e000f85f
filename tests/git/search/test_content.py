"""Search in contents."""

import pytest

from stead.errors import InvalidRequest
from stead.repos.errors import InvalidRevision, ReferenceNotFound
from stead.repos.repository import Repository
from stead.repos.search.lines import MAX_LINE, MAX_MATCHES
from stead.repos.search.query import EmptyQuery, InvalidPathPattern, InvalidQuery, InvalidRegex, pathspecs
from stead.repos.search.search import Search
from support.git_repos import git
from support.git_search import paths, put


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
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"needle\n")
    tree = git(repository, "mktree", "-z", stdin=b"100644 blob %s\tcaf\xe9\nx.txt\0" % blob.encode())
    sha = git(repository, "commit-tree", "-m", "m", tree)
    git(repository, "update-ref", "refs/heads/odd", sha)
    found = await search.content(repository, "needle", "odd")
    assert [(file.path, file.size, len(file.matches)) for file in found.files] == [("caf\ufffd\nx.txt", 7, 1)]
    assert [file.size for file in (await search.files(repository, "x.t", "odd")).files] == [7]
    assert (await search.files(repository, r"\.txt$", "odd", regex=True)).total_files == 1
    assert (await search.diffs(repository, "needle", "odd")).total_commits == 1


async def test_symlinks_and_submodules_are_not_searched(repository: Repository, search: Search) -> None:
    first = await put(repository, {"real": "needle\n"})
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"needle")
    entries = f"120000 blob {blob}\tlink\n160000 commit {first}\tmodule\n"
    tree = git(repository, "mktree", "--missing", stdin=entries.encode())
    sha = git(repository, "commit-tree", "-m", "m", tree)
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
