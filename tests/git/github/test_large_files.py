"""GitHub sync with Git LFS."""

import hashlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from stead.github.links import LinkState
from stead.repos.lfs.pointers import parse_pointer, pointed_objects
from stead.repos.lfs.store import LfsObject, LfsObjects
from support.github_link import NAME, LinkedRepo

pytestmark = pytest.mark.heavy


def _objects(linked_repo: LinkedRepo) -> LfsObjects:
    return LfsObjects(linked_repo.repository, linked_repo.hosting.repos.quotas)


def _oid(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _pointer(content: bytes) -> str:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{_oid(content)}\nsize {len(content)}\n"


async def _pieces(content: bytes) -> AsyncGenerator[bytes]:
    yield content


async def _read(objects: LfsObjects, oid: str) -> bytes:
    with objects.open(oid) as stored:
        return await stored.read(0, stored.size)


async def _prepare(linked_repo: LinkedRepo, folder: Path) -> None:
    """The user's clone uses git-lfs from now on."""
    await linked_repo.person("lfs", "install", "--skip-repo")
    await linked_repo.person("lfs", "track", "*.bin", cwd=folder)


# Real client


async def test_pull_from_github_with_lfs(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    await _prepare(linked_repo, folder)
    content = os.urandom(3 << 20)
    (folder / "movie.bin").write_bytes(content)
    await linked_repo.person("add", ".", cwd=folder)
    await linked_repo.person("commit", "-q", "-m", "a movie", cwd=folder)
    await linked_repo.push(folder, "main")
    assert set(linked_repo.github.large_files) == {_oid(content)}
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.same()
    objects = _objects(linked_repo)
    objects.verify(LfsObject(_oid(content), len(content)))
    with objects.open(_oid(content)) as stored:
        first = await stored.read(0, stored.size)
        assert first == content[: len(first)]


async def test_push_to_github_with_lfs(linked_repo: LinkedRepo) -> None:
    content = os.urandom(3 << 20)
    await _objects(linked_repo).write(_oid(content), _pieces(content))
    await linked_repo.commit(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n")
    await linked_repo.commit("movie.bin", _pointer(content))
    assert (await linked_repo.enable()).state is LinkState.SYNCED
    assert linked_repo.github.large_files == {_oid(content): content}
    assert linked_repo.github.verified == [_oid(content)]
    asked = [(each.method, each.path) for each in linked_repo.github.server.requests]
    brought = next(place for place, (method, _) in enumerate(asked) if method == "PUT")
    pushed = asked.index(("POST", f"/{NAME}.git/git-receive-pack"))
    assert brought < pushed, "GitHub refuses commits whose large files it does not have"
    await linked_repo.person("lfs", "install", "--skip-repo")
    folder = await linked_repo.clone()
    assert (folder / "movie.bin").read_bytes() == content


# Failures


async def test_refs_wait_for_their_lfs_objects(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    before = await linked_repo.here()
    folder = await linked_repo.clone()
    content = b"large" * 1000
    linked_repo.github.large_files[_oid(content)] = content
    await linked_repo.person.commit(folder, {"movie.bin": _pointer(content)})
    await linked_repo.push(folder, "main")
    linked_repo.github.lfs_answer = 403, {"message": "this repository is over its data quota"}
    link = await linked_repo.sync()
    assert link.state is LinkState.FAILED
    assert link.error is not None and "this repository is over its data quota" in link.error
    assert await linked_repo.here() == before
    linked_repo.github.lfs_answer = None
    linked_repo.github.large_files[_oid(content)] = b"LARGE" * 1000
    link = await linked_repo.sync()
    assert link.state is LinkState.FAILED and link.error is not None and _oid(content) in link.error
    assert await linked_repo.here() == before
    linked_repo.github.large_files[_oid(content)] = content
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.same()
    assert await _read(_objects(linked_repo), _oid(content)) == content


async def test_missing_lfs_objects_do_not_block_sync(linked_repo: LinkedRepo) -> None:
    """A pointer can be committed without its object, on both sides."""
    await _objects(linked_repo).write(_oid(b"another"), _pieces(b"another"))
    await linked_repo.commit("here.bin", _pointer(b"never uploaded here"))
    await linked_repo.enable()
    folder = await linked_repo.clone()
    await linked_repo.person.commit(folder, {"there.bin": _pointer(b"never uploaded there")})
    await linked_repo.push(folder, "main")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.same()
    assert linked_repo.github.large_files == {}


async def test_sync_with_server_without_lfs(linked_repo: LinkedRepo) -> None:
    content = b"large" * 1000
    await _objects(linked_repo).write(_oid(content), _pieces(content))
    await linked_repo.commit("movie.bin", _pointer(content))
    linked_repo.github.lfs_answer = 404, {"message": "Not Found"}
    assert (await linked_repo.enable()).state is LinkState.SYNCED
    assert await linked_repo.same()


async def test_lfs_object_over_quota_is_refused(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    before = await linked_repo.here()
    folder = await linked_repo.clone()
    content = os.urandom(2 << 20)
    linked_repo.github.large_files[_oid(content)] = content
    await linked_repo.person.commit(folder, {"movie.bin": _pointer(content)})
    await linked_repo.push(folder, "main")
    await linked_repo.hosting.accounts.set_limits(linked_repo.hosting.ours, {"repo_mib": 1})
    link = await linked_repo.sync()
    assert link.state is LinkState.FAILED and link.error is not None and "quota exceeded" in link.error
    assert await linked_repo.here() == before
    assert _objects(linked_repo).size(_oid(content)) is None


async def test_lfs_download_passes_the_ssrf_guard(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    content = b"secrets of a neighbour"
    await linked_repo.person.commit(folder, {"movie.bin": _pointer(content)})
    await linked_repo.push(folder, "main")
    place = {"href": "http://10.1.2.3/secrets"}
    offer = {"objects": [{"oid": _oid(content), "actions": {"download": place}}]}
    linked_repo.github.lfs_answer = 200, offer
    link = await linked_repo.sync()
    assert link.state is LinkState.FAILED and link.error is not None and "10.1.2.3" in link.error


# Pointers


async def test_only_new_commits_are_scanned_for_pointers(linked_repo: LinkedRepo) -> None:
    old = await linked_repo.commit("old.bin", _pointer(b"old"))
    new = await linked_repo.commit("new.bin", _pointer(b"new"))
    found = await pointed_objects(linked_repo.repository, [new], [old], 30)
    assert found == [LfsObject(_oid(b"new"), 3)]
    both = await pointed_objects(linked_repo.repository, [new], [], 30)
    assert {each.oid for each in both} == {_oid(b"old"), _oid(b"new")}
    assert await pointed_objects(linked_repo.repository, [old], [new], 30) == []


def test_pointer_parsing() -> None:
    whole = _pointer(b"x").encode()
    assert parse_pointer(whole) == LfsObject(_oid(b"x"), 1)
    extended = whole.replace(b"\noid", b"\next-0-case sha256:" + b"1" * 64 + b"\noid")
    assert parse_pointer(extended) == LfsObject(_oid(b"x"), 1)
    for other in (
        b"",
        b"version 1\n",
        whole[:-1],
        whole + b"more",
        whole.replace(b"sha256:", b"sha1:"),
        whole.replace(b"size 1", b"size -1"),
        whole.replace(b"size 1", b"size " + b"9" * 19),
        b"x" + whole,
    ):
        assert parse_pointer(other) is None, other
