"""Search in file names, commit messages and diffs."""

from pathlib import Path

from stead.repos.committing import Change, commit
from stead.repos.fast_import import Author
from stead.repos.repository import Repository
from stead.repos.search.search import Search
from support.git_hosting import open_hosting
from support.git_search import put

NOBODY = 1_899_999_998


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
    async with open_hosting(open_folder, range(NOBODY - 1, NOBODY + 1)) as hosting:
        repository = await hosting.repository()
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
