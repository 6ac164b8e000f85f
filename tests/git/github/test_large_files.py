"""GitHub sync with Git LFS."""

import hashlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from stead.github.links import LinkState
from stead.repos.lfs.pointers import parse_pointer, pointed_objects
from stead.repos.lfs.store import LfsObject, LfsObjects
from support.github_scene import NAME, Scene

pytestmark = pytest.mark.heavy


def _objects(scene: Scene) -> LfsObjects:
    return LfsObjects(scene.repository, scene.stage.repos.quotas)


def _oid(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _pointer(content: bytes) -> str:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{_oid(content)}\nsize {len(content)}\n"


async def _pieces(content: bytes) -> AsyncGenerator[bytes]:
    yield content


async def _read(objects: LfsObjects, oid: str) -> bytes:
    with objects.open(oid) as stored:
        return await stored.read(0, stored.size)


async def _prepare(scene: Scene, folder: Path) -> None:
    """The user's clone uses git-lfs from now on."""
    await scene.person("lfs", "install", "--skip-repo")
    await scene.person("lfs", "track", "*.bin", cwd=folder)


# Real client


async def test_pull_from_github_with_lfs(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    folder = await scene.clone()
    await _prepare(scene, folder)
    content = os.urandom(3 << 20)
    (folder / "movie.bin").write_bytes(content)
    await scene.person("add", ".", cwd=folder)
    await scene.person("commit", "-q", "-m", "a movie", cwd=folder)
    await scene.push(folder, "main")
    assert set(scene.github.large_files) == {_oid(content)}
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.same()
    objects = _objects(scene)
    objects.verify(LfsObject(_oid(content), len(content)))
    with objects.open(_oid(content)) as stored:
        first = await stored.read(0, stored.size)
        assert first == content[: len(first)]


async def test_push_to_github_with_lfs(scene: Scene) -> None:
    content = os.urandom(3 << 20)
    await _objects(scene).write(_oid(content), _pieces(content))
    await scene.commit(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n")
    await scene.commit("movie.bin", _pointer(content))
    assert (await scene.enable()).state is LinkState.SYNCED
    assert scene.github.large_files == {_oid(content): content}
    assert scene.github.verified == [_oid(content)]
    asked = [(each.method, each.path) for each in scene.github.server.requests]
    brought = next(place for place, (method, _) in enumerate(asked) if method == "PUT")
    pushed = asked.index(("POST", f"/{NAME}.git/git-receive-pack"))
    assert brought < pushed, "GitHub refuses commits whose large files it does not have"
    await scene.person("lfs", "install", "--skip-repo")
    folder = await scene.clone()
    assert (folder / "movie.bin").read_bytes() == content


# Failures


async def test_refs_wait_for_their_lfs_objects(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    before = await scene.here()
    folder = await scene.clone()
    content = b"large" * 1000
    scene.github.large_files[_oid(content)] = content
    await scene.person.commit(folder, {"movie.bin": _pointer(content)})
    await scene.push(folder, "main")
    scene.github.lfs_answer = 403, {"message": "this repository is over its data quota"}
    link = await scene.sync()
    assert link.state is LinkState.FAILED
    assert link.error is not None and "this repository is over its data quota" in link.error
    assert await scene.here() == before
    scene.github.lfs_answer = None
    scene.github.large_files[_oid(content)] = b"LARGE" * 1000
    link = await scene.sync()
    assert link.state is LinkState.FAILED and link.error is not None and _oid(content) in link.error
    assert await scene.here() == before
    scene.github.large_files[_oid(content)] = content
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.same()
    assert await _read(_objects(scene), _oid(content)) == content


async def test_missing_lfs_objects_do_not_block_sync(scene: Scene) -> None:
    """A pointer can be committed without its object, on both sides."""
    await _objects(scene).write(_oid(b"another"), _pieces(b"another"))
    await scene.commit("here.bin", _pointer(b"never uploaded here"))
    await scene.enable()
    folder = await scene.clone()
    await scene.person.commit(folder, {"there.bin": _pointer(b"never uploaded there")})
    await scene.push(folder, "main")
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.same()
    assert scene.github.large_files == {}


async def test_sync_with_server_without_lfs(scene: Scene) -> None:
    content = b"large" * 1000
    await _objects(scene).write(_oid(content), _pieces(content))
    await scene.commit("movie.bin", _pointer(content))
    scene.github.lfs_answer = 404, {"message": "Not Found"}
    assert (await scene.enable()).state is LinkState.SYNCED
    assert await scene.same()


async def test_lfs_object_over_quota_is_refused(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    before = await scene.here()
    folder = await scene.clone()
    content = os.urandom(2 << 20)
    scene.github.large_files[_oid(content)] = content
    await scene.person.commit(folder, {"movie.bin": _pointer(content)})
    await scene.push(folder, "main")
    await scene.stage.accounts.set_limits(scene.stage.ours, {"repo_mib": 1})
    link = await scene.sync()
    assert link.state is LinkState.FAILED and link.error is not None and "quota exceeded" in link.error
    assert await scene.here() == before
    assert _objects(scene).size(_oid(content)) is None


async def test_lfs_download_passes_the_ssrf_guard(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    folder = await scene.clone()
    content = b"secrets of a neighbour"
    await scene.person.commit(folder, {"movie.bin": _pointer(content)})
    await scene.push(folder, "main")
    place = {"href": "http://10.1.2.3/secrets"}
    offer = {"objects": [{"oid": _oid(content), "actions": {"download": place}}]}
    scene.github.lfs_answer = 200, offer
    link = await scene.sync()
    assert link.state is LinkState.FAILED and link.error is not None and "10.1.2.3" in link.error


# Pointers


async def test_only_new_commits_are_scanned_for_pointers(scene: Scene) -> None:
    old = await scene.commit("old.bin", _pointer(b"old"))
    new = await scene.commit("new.bin", _pointer(b"new"))
    found = await pointed_objects(scene.repository, [new], [old], 30)
    assert found == [LfsObject(_oid(b"new"), 3)]
    both = await pointed_objects(scene.repository, [new], [], 30)
    assert {each.oid for each in both} == {_oid(b"old"), _oid(b"new")}
    assert await pointed_objects(scene.repository, [old], [new], 30) == []


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
