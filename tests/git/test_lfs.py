"""Git LFS: the object store, the batch API and the real git-lfs client."""

import asyncio
import functools
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.api.smart_http import SmartHttp
from stead.repos.errors import RepoNotFound, TooLarge
from stead.repos.lfs.store import (
    InvalidLfsObject,
    LfsObject,
    LfsObjectMismatch,
    LfsObjectNotFound,
    LfsObjects,
)
from stead.repos.repos import RepoInfo
from support.git_client import GitClient, basic
from support.git_hosting import RepoServer, served
from support.waiting import until

LARGEST = 4 << 20


@pytest_asyncio.fixture(scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RepoServer]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("stead.api.app.SmartHttp", functools.partial(SmartHttp, max_lfs_object=LARGEST))
        async with served(tmp_path_factory.mktemp("hosting")) as host:
            yield host


@pytest_asyncio.fixture
async def repo(host: RepoServer) -> RepoInfo:
    return await host.repo()


@pytest_asyncio.fixture
async def http(host: RepoServer) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"authorization": f"Bearer {host.key}", "accept": "application/vnd.git-lfs+json"}
    async with httpx2.AsyncClient(base_url=host.url, headers=headers, timeout=30) as client:
        yield client


async def _sent(*pieces: bytes) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece


def _left(objects: Path) -> list[Path]:
    return [path for path in objects.rglob("*") if path.is_file()]


# Object store


async def test_lfs_object_is_stored_completely_or_not_at_all(host: RepoServer, repo: RepoInfo) -> None:
    repository = host.hosting.repos.repository(repo.id)
    objects = LfsObjects(repository, host.hosting.repos.quotas, 1000)
    content = os.urandom(900)
    oid = hashlib.sha256(content).hexdigest()
    with pytest.raises(LfsObjectMismatch):
        await objects.write(oid, _sent(content, b"x"))
    with pytest.raises(TooLarge):
        await objects.write(oid, _sent(content, bytes(200)))
    assert objects.size(oid) is None
    assert _left(repository.path / "lfs") == []
    await objects.write(oid, _sent(content[:100], content[100:]))
    await objects.write(oid, _sent(content))
    assert _left(repository.path / "lfs") == [repository.path / f"lfs/objects/{oid[:2]}/{oid[2:4]}/{oid}"]
    with objects.open(oid) as stored:
        assert await stored.read(100, 50) == content[100:150]
    objects.verify(LfsObject(oid, 900))
    with pytest.raises(LfsObjectMismatch):
        objects.verify(LfsObject(oid, 901))
    with pytest.raises(LfsObjectNotFound):
        objects.verify(LfsObject("0" * 64, 1))


async def test_partial_lfs_uploads_are_removed_after_a_day(host: RepoServer, repo: RepoInfo) -> None:
    repository = host.hosting.repos.repository(repo.id)
    incoming = repository.path / "lfs" / "incoming"
    incoming.mkdir(parents=True)
    for name, age in (("old", 2 * 86400), ("young", 60)):
        (incoming / name).write_bytes(b"half")
        now = (incoming / name).stat().st_mtime
        os.utime(incoming / name, (now - age, now - age))
    await LfsObjects(repository, host.hosting.repos.quotas).write(
        hashlib.sha256(b"new").hexdigest(), _sent(b"new")
    )
    assert [path.name for path in incoming.iterdir()] == ["young"]


async def test_lfs_upload_to_deleted_repository_is_refused(host: RepoServer) -> None:
    repo = await host.repo()
    objects = LfsObjects(host.hosting.repos.repository(repo.id), host.hosting.repos.quotas)

    async def deleted_meanwhile() -> AsyncGenerator[bytes, None]:
        yield b"some"
        await host.hosting.repos.delete(repo.id)
        yield b"more"

    with pytest.raises(RepoNotFound):
        await objects.write(hashlib.sha256(b"somemore").hexdigest(), deleted_meanwhile())
    with pytest.raises(RepoNotFound):
        await objects.write(hashlib.sha256(b"x").hexdigest(), _sent(b"x"))
    assert not host.path(repo).exists()


@pytest.mark.parametrize("oid", ["", "../../HEAD", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_invalid_lfs_oid_reaches_no_file(host: RepoServer, repo: RepoInfo, oid: str) -> None:
    with pytest.raises(InvalidLfsObject):
        LfsObject(oid, 1)
    with pytest.raises(LfsObjectNotFound):
        LfsObjects(host.hosting.repos.repository(repo.id), host.hosting.repos.quotas).size(oid)


# Batch API


async def _batch(
    http: httpx2.AsyncClient, repo: RepoInfo, operation: str, *objects: Any, **more: Any
) -> httpx2.Response:
    body = {"operation": operation, "objects": list(objects), **more}
    return await http.post(f"/{repo.id}.git/info/lfs/objects/batch", content=json.dumps(body))


async def test_lfs_batch_upload_and_download(
    host: RepoServer, repo: RepoInfo, http: httpx2.AsyncClient
) -> None:
    """Upload, verify, download, and no action for existing objects. Links carry no credentials."""
    content = os.urandom(3 << 20)
    wanted = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
    answer = await _batch(http, repo, "upload", wanted, transfers=["lfs-standalone-file", "basic"])
    assert answer.headers["content-type"] == "application/vnd.git-lfs+json"
    offer = answer.json()
    assert offer["transfer"] == "basic"
    actions = offer["objects"][0]["actions"]
    for action in actions.values():
        assert action["href"].startswith(f"{host.url}/{repo.id}.git/info/lfs/objects/{wanted['oid']}")
    assert host.key not in answer.text and "authenticated" not in offer["objects"][0]
    verified = await http.post(actions["verify"]["href"], json=wanted)
    assert verified.status_code == 404
    put = await http.put(actions["upload"]["href"], content=content)
    assert put.status_code == 200
    verified = await http.post(actions["verify"]["href"], json=wanted)
    assert verified.status_code == 200
    again = (await _batch(http, repo, "upload", wanted)).json()["objects"][0]
    assert "actions" not in again
    assert "error" not in again
    answer = await _batch(http, repo, "download", wanted)
    assert host.key not in answer.text
    link = answer.json()["objects"][0]["actions"]["download"]["href"]
    got = await http.get(link)
    assert (got.status_code, got.content) == (200, content)
    part = await http.get(link, headers={"range": "bytes=1000000-"})
    assert (part.status_code, part.content) == (206, content[1000000:])
    assert part.headers["content-range"] == f"bytes 1000000-{len(content) - 1}/{len(content)}"
    beyond = await http.get(link, headers={"range": f"bytes={len(content)}-"})
    assert beyond.status_code == 416


async def test_lfs_batch_reports_errors_per_object(
    host: RepoServer, repo: RepoInfo, http: httpx2.AsyncClient
) -> None:
    missing, bad, negative = (
        {"oid": "1" * 64, "size": 1},
        {"oid": "../x", "size": 1},
        {"oid": "2" * 64, "size": -1},
    )
    large = {"oid": "3" * 64, "size": LARGEST + 1}
    down = (await _batch(http, repo, "download", missing, bad, negative)).json()["objects"]
    assert [each["error"]["code"] for each in down] == [404, 422, 422]
    up = (await _batch(http, repo, "upload", large, missing)).json()["objects"]
    assert up[0]["error"]["code"] == 422
    assert up[1]["actions"]["upload"]
    empty = {"oid": hashlib.sha256(b"").hexdigest(), "size": 0}
    assert (await http.put(f"/{repo.id}/info/lfs/objects/{empty['oid']}", content=b"")).status_code == 200
    assert (await _batch(http, repo, "download", empty)).json()["objects"][0]["actions"]
    assert (await http.get(f"/{repo.id}/info/lfs/objects/{empty['oid']}")).content == b""


async def test_invalid_lfs_requests_are_refused(repo: RepoInfo, http: httpx2.AsyncClient) -> None:
    here = f"/{repo.id}/info/lfs"
    one = {"oid": "1" * 64, "size": 1}
    tries = [
        (await _batch(http, repo, "steal", one), 422),
        (await _batch(http, repo, "download", {"oid": 1}), 422),
        (await _batch(http, repo, "download", one, transfers=["ssh"]), 422),
        (await _batch(http, repo, "download", one, hash_algo="sha1"), 409),
        (await _batch(http, repo, "download", *[one] * 1001), 413),
        (await http.post(f"{here}/objects/batch", content=b"nonsense"), 422),
        (await http.post(f"{here}/objects/batch", content=b" " * (5 << 20)), 413),
        (await http.get(f"{here}/objects/batch"), 405),
        (await http.get(f"{here}/objects/{'1' * 64}"), 404),
        (await http.delete(f"{here}/objects/{'1' * 64}"), 405),
        (await http.put(f"{here}/objects/{'1' * 64}", content=b"not that"), 422),
        (await http.put(f"{here}/objects/{'1' * 64}", content=bytes(LARGEST + 1)), 413),
        (await http.put(f"{here}/objects/..%2f..%2fHEAD", content=b"evil"), 404),
        (await http.post(f"{here}/objects/{'1' * 64}/verify", json={"oid": "2" * 64, "size": 1}), 422),
        (await http.post(f"{here}/objects/{'1' * 64}/verify", json={}), 422),
        (await http.post(f"{here}/locks/verify", json={}), 404),
        (await http.get(f"{here}/locks"), 404),
    ]
    for answer, status in tries:
        assert answer.status_code == status, (answer.request.method, answer.request.url, answer.text)
        assert answer.headers["content-type"] == "application/vnd.git-lfs+json"
        assert answer.json()["message"]


async def test_lfs_access_levels(host: RepoServer) -> None:
    private, public = await host.repo(), await host.repo(public=True)
    content = b"large"
    oid = hashlib.sha256(content).hexdigest()
    secrets = {
        "nobody": None,
        "owner": basic("x-access-token", host.key),
        "reader": basic("x-access-token", await host.token(private, "read")),
        "writer": basic("x-access-token", await host.token(private, "write")),
        "no rights": basic("x-access-token", await host.token()),
        "wrong": basic("x-access-token", "stid_" + "x" * 43),
    }
    expected = {
        ("private", "PUT"): [401, 200, 403, 200, 404, 401],
        ("public", "PUT"): [401, 200, 403, 403, 403, 401],
        ("private", "GET"): [401, 200, 200, 200, 404, 401],
        ("public", "GET"): [200, 200, 200, 200, 200, 401],
    }
    seen: dict[tuple[str, str], list[int]] = {}
    async with httpx2.AsyncClient(base_url=host.url) as http:
        for (kind, method), _ in expected.items():
            repo = private if kind == "private" else public
            for secret in secrets.values():
                headers = {} if secret is None else {"authorization": secret}
                sent = content if method == "PUT" else None
                place = f"/{repo.id}/info/lfs/objects/{oid}"
                answer = await http.request(method, place, headers=headers, content=sent)
                seen.setdefault((kind, method), []).append(answer.status_code)
                if answer.status_code == 401:
                    assert answer.headers["lfs-authenticate"].startswith("Basic")
                operation = "upload" if method == "PUT" else "download"
                body = {"operation": operation, "objects": [{"oid": oid, "size": len(content)}]}
                batch = await http.post(f"/{repo.id}/info/lfs/objects/batch", headers=headers, json=body)
                assert batch.status_code == answer.status_code
    assert seen == expected


async def test_aborted_lfs_upload_leaves_nothing(host: RepoServer, repo: RepoInfo) -> None:
    name, port = host.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(name, int(port))
    head = f"PUT /{repo.id}/info/lfs/objects/{'1' * 64} HTTP/1.1\r\nHost: x\r\n"
    head += f"Authorization: Bearer {host.key}\r\n"
    writer.write(head.encode() + b"Content-Length: 3000000\r\n\r\n" + bytes(2_000_000))
    await writer.drain()
    incoming = host.path(repo) / "lfs" / "incoming"

    await until(lambda: incoming.is_dir() and any(path.stat().st_size for path in incoming.iterdir()), 60)
    writer.close()
    await writer.wait_closed()

    await until(lambda: not any(incoming.iterdir()), 60)


# Real client


async def test_git_lfs_pushes_and_clones(host: RepoServer, repo: RepoInfo, git: GitClient) -> None:
    """A push uploads the object and a clone downloads it; git stores a pointer."""
    work = await git.work_tree("work")
    await git("lfs", "install", "--local", cwd=work)
    await git("lfs", "track", "*.bin", cwd=work)
    content = os.urandom(2 << 20)
    await git.commit(work, {"a.bin": content, "b.bin": b"small"})
    await git("remote", "add", "origin", host.remote(repo), cwd=work)
    pushed = await git.run("push", "origin", "main", cwd=work)
    assert pushed.status == 0, pushed.err
    pointer = await git("cat-file", "-p", "HEAD:a.bin", cwd=work)
    assert re.search(r"oid sha256:([0-9a-f]{64})", pointer)
    token = await host.token(repo, "read")
    await git("config", "--global", "filter.lfs.smudge", "git-lfs smudge -- %f")
    await git("config", "--global", "filter.lfs.process", "git-lfs filter-process")
    await git("config", "--global", "filter.lfs.clean", "git-lfs clean -- %f")
    await git("clone", "-q", host.remote(repo, token), "mine")
    assert (git.home / "mine" / "a.bin").read_bytes() == content
    assert (git.home / "mine" / "b.bin").read_bytes() == b"small"
    await git.commit(git.home / "mine", {"c.bin": b"more"})
    refused = await git.run("push", "origin", "main", cwd=git.home / "mine")
    assert refused.status != 0
