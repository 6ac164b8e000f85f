"""Imports of files, and of tar and zip archives."""

import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from stead.repos.errors import InvalidChange, InvalidPath, TooLarge
from stead.repos.fast_import import Author
from stead.repos.ssrf import AddressRefused, RequestFailed, SsrfGuard
from stead.repos.transfer.archives import Kind
from stead.repos.transfer.imports import Imports, SubdirNotFound
from stead.repos.transfer.remotes import SourceInvalid, SourceNotFound, SourceUnauthorized
from support.git_hosting import open_hosting
from support.git_imports import Importing, file, files, link, shown, special, tar_of, tree
from support.git_repos import git
from support.git_server import Page, redirect

NOBODY = 1_899_999_999


async def test_import_runs_as_the_git_user(importing: Importing, origin: Path, open_folder: Path) -> None:
    async with open_hosting(open_folder, range(NOBODY - 1, NOBODY + 1)) as hosting:
        url = importing.url()
        importing.server.pages["/a.tar"] = Page(tar_of(file("a/b", b"text")))
        for fill in (
            importing.source(),
            importing.source(rev="v1"),
            importing.sources.tree(url, "all", folder="dir"),
            importing.sources.files({"a": "b"}, "all"),
            importing.archive("tar", "a.tar"),
        ):
            repository = await hosting.repository(fill=fill)
            assert all(each.lstat().st_uid == NOBODY for each in repository.path.rglob("*"))


async def test_import_files_as_one_commit(importing: Importing) -> None:
    texts = {"README.md": "# ü\n", "src/a b.py": "", 'q"\\': "x"}
    fill = importing.sources.files(texts, "Begin", Author("Ada", "ada@example.org"))
    repository = await importing.make(fill, default_branch="trunk")
    commits = await repository.commits([await repository.resolve(None)])
    assert (commits[0].message, commits[0].author.name, commits[0].parents) == ("Begin\n", "Ada", ())
    assert [branch.name for branch in await repository.branches()] == ["trunk"]
    assert {path: shown(repository, path) for path in texts} == {k: v.strip() for k, v in texts.items()}


async def test_invalid_file_imports_are_refused(importing: Importing) -> None:
    for path in ("../a", "/a", ".git/config", "a/.GIT/x", ""):
        await importing.refused(importing.sources.files({path: "x"}, "all"), InvalidPath)
    await importing.refused(importing.sources.files({"a": "b", "a/b": "c"}, "all"), InvalidChange)
    await importing.refused(importing.sources.files({"a": "\ud800"}, "all"), InvalidChange)
    evil = '[submodule "m"]\n\tpath = m\n\turl = --upload-pack=evil\n'
    await importing.refused(importing.sources.files({".gitmodules": evil}, "all"), SourceInvalid)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that archives can contain."""
    work = tmp_path_factory.mktemp("work") / "project"
    (work / "src" / "deep").mkdir(parents=True)
    (work / "empty").mkdir()
    (work / "README.md").write_text("read me\n")
    (work / "src" / "run.sh").write_text("#!/bin/sh\n")
    (work / "src" / "run.sh").chmod(0o755)
    (work / "src" / "nothing").touch()
    (work / "src" / 'a "b" \\ ü').write_bytes(b"\0\xff" * 100)
    (work / "src" / "deep" / ("long" * 40)).write_text("long\n")
    (work / "/".join(["folder" * 8] * 6)).mkdir(parents=True)
    (work / "/".join(["folder" * 8] * 6) / "file").write_text("far\n")
    (work / "src" / "link").symlink_to("../README.md")
    (work / "src" / "deep" / "up").symlink_to("../../src")
    (work / "dangling").symlink_to("no/such")
    (work / "large").write_bytes(random.Random(2).randbytes(300_001))
    os.link(work / "README.md", work / "src" / "same")
    return work


def tree_of(work: Path) -> str:
    """The tree that git makes of a folder."""
    git(work, "init", "-q")
    git(work, "add", "-A")
    made = git(work, "write-tree")
    shutil.rmtree(work / ".git")
    return made


def packed(work: Path, *command: str) -> bytes:
    return subprocess.run(command, cwd=work, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("form", "option"), [("gnu", ""), ("gnu", "-z"), ("gnu", "-j"), ("pax", "-J"), ("pax", "")]
)
async def test_tar_import_equals_git_add(importing: Importing, work: Path, form: str, option: str) -> None:
    expected = tree_of(work)
    options = [option] if option else []
    importing.server.pages["/a"] = Page(packed(work, "tar", "-c", *options, f"--format={form}", "."))
    repository = await importing.make(importing.archive("tar", message="Begin"))
    assert tree(repository) == expected
    assert git(repository, "rev-list", "--count", "--all") == "1"
    assert not (repository.path / "import").exists()
    assert git(repository, "count-objects", "-v").splitlines()[-2:] == ["garbage: 0", "size-garbage: 0"]


async def test_zip_import_equals_git_add(importing: Importing, work: Path) -> None:
    expected = tree_of(work)
    packed(work, "zip", "-q", "-r", "-y", "../a.zip", ".")
    importing.server.pages["/a"] = Page((work.parent / "a.zip").read_bytes())
    repository = await importing.make(importing.archive("zip", message="Begin"))
    assert tree(repository) == expected


@pytest.mark.parametrize("form", ["tar", "tar.gz", "zip"])
async def test_import_of_git_archive_output(
    importing: Importing, origin: Path, tmp_path: Path, form: str
) -> None:
    """With one top-level folder, as code hosts make them; it is kept unless `dir` names it."""
    made = tmp_path / "a"
    git(origin, "archive", f"--format={form}", "--prefix=origin-1/", f"--output={made}", "trunk")
    importing.server.pages["/a"] = Page(made.read_bytes())
    kind: Kind = "zip" if form == "zip" else "tar"
    whole = await importing.make(importing.archive(kind))
    assert set(files(whole)) == {"origin-1/one", "origin-1/two", "origin-1/dir/three"}
    inner = await importing.make(importing.archive(kind, folder="/origin-1/"))
    assert tree(inner) == tree(origin, "trunk")
    deep = await importing.make(importing.archive(kind, folder="origin-1/dir"))
    assert set(files(deep)) == {"three"}
    for missing in ("origin", "origin-1/di", "origin-1/one", "origin-1/dir/three/x"):
        error = await importing.refused(importing.archive(kind, folder=missing), SubdirNotFound)
        assert (error.source, error.folder) == (importing.url("a"), missing)
    with pytest.raises(InvalidPath):
        importing.archive(kind, folder="../x")


async def test_last_duplicate_entry_wins(importing: Importing) -> None:
    repository = await importing.tar(
        file("a", b"1"), file("./a", b"2", 0o755), link("b", "../x"), file("b", b"3")
    )
    assert files(repository) == {"a": "100755", "b": "100644"}
    assert (shown(repository, "a"), shown(repository, "b")) == ("2", "3")


async def test_git_folders_in_archives_are_skipped(importing: Importing) -> None:
    repository = await importing.tar(file("a"), file(".git/config"), file("sub/.git"), file(".gitignore"))
    assert set(files(repository)) == {"a", ".gitignore"}


async def test_internal_symlinks_are_kept(importing: Importing) -> None:
    repository = await importing.tar(
        link("x/y/up", "../.."),
        link("again", "x/y/up/x/../x/y"),
        link("loop", "loop"),
        link("round", "x/y/up/round"),
        link("later", "./file"),
        file("file"),
        special("copy", tarfile.LNKTYPE, "./file"),
        special("copied", tarfile.LNKTYPE, "later"),
    )
    modes = files(repository)
    assert {path for path, mode in modes.items() if mode == "120000"} == {
        "x/y/up", "again", "loop", "round", "later", "copied"
    }  # fmt: skip
    assert (shown(repository, "x/y/up"), shown(repository, "copy")) == ("../..", "text")


async def test_archive_download_failures_are_reported(importing: Importing) -> None:
    await importing.refused(importing.archive("tar", "missing.tar"), SourceNotFound)
    for path, page in {
        "/broken": Page(b"x" * 1000, complete=False),
        "/error": Page(status=503),
        "/large": Page(b"x" * 5000),
        "/inside": redirect("http://10.0.0.1/a.tar"),
    }.items():
        importing.server.pages[path] = page
    await importing.refused(importing.archive("tar", "broken"), RequestFailed)
    await importing.refused(importing.archive("tar", "error"), RequestFailed, "503")
    await importing.refused(importing.limited(most_bytes=4999).archive("tar", "large"), TooLarge)
    await importing.refused(importing.archive("tar", "inside"), AddressRefused)
    await importing.refused(
        Imports(SsrfGuard()).archive("tar", importing.url("large"), "all"), AddressRefused
    )
    importing.server.credentials = "a:s3cret"
    await importing.refused(importing.archive("tar"), SourceUnauthorized)
    importing.server.pages["/a"] = Page(tar_of(file("a")))
    url = importing.server.url.replace("http://", "http://a:s3cret@")
    repository = await importing.make(importing.sources.archive("tar", f"{url}/a?signed=yes", "all"))
    assert set(files(repository)) == {"a"}
