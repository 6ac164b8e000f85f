"""Repositories of a spec are cloned into its VM."""

import asyncio
import contextlib
import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from stead.builds.builder import Builder, SnapshotOrder
from stead.builds.errors import InvalidSpec, ProgramFailed, SetupFailed
from stead.builds.spec import Clone, File, GitUser, Layer, Service
from stead.creation.creation import Creation
from stead.machines import Machines
from stead.machines.snapshots import SnapshotInfo
from stead.repos.repos import Repos
from support.builds import Lines, builds_of, create_vm, hidden, said, vm_order
from support.git_client import GitClient, gits_of
from support.guests import sh
from support.waiting import until

SERVER = """
import base64, functools, http.server

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(b"me:s3cr@t").decode():
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        super().do_GET()

handler = functools.partial(Handler, directory="/srv")
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler).serve_forever()
"""


@pytest.mark.slow
async def test_repositories_are_cloned_without_their_credentials(
    builder: Builder, creation: Creation, account: str
) -> None:
    """By branch, tag and commit; files of the spec are written over those of the repository."""
    history = """
    git init -q --bare -b main /srv/repo.git && git init -q -b main /tmp/work && cd /tmp/work
    git config user.name me && git config user.email me@example.com
    echo one >file && git add . && git commit -qm one && git tag v1
    git checkout -qb next && echo two >file && git commit -qam two
    git push -q /srv/repo.git main next v1 && git -C /srv/repo.git update-server-info
    git rev-parse main >/srv/main
    """
    image = f"# the base\nFROM debian:trixie-slim AS base\n\nRUN <<'END'\n{history}\nEND\n"
    server = Service("server", exec=("/usr/bin/python3 /opt/server.py",))
    repositories = Layer(
        base_image=image,
        services=(server,),
        files=(File("/opt/server.py", SERVER.encode()),),
    )
    ready = Service(
        "reachable",
        mode="oneshot",
        exec=("/bin/sh -c 'until curl -s -o /dev/null http://127.0.0.1:8000; do sleep 0.1; done'",),
        after=("server",),
    )
    repositories = replace(repositories, services=(server, ready))
    base = await builder.ensure_snapshot(SnapshotOrder(account, repositories))
    probe = await create_vm(creation, vm_order(account, top=Layer(snapshot_id=base.id)))
    main = await sh(probe, "cat /srv/main")

    clones = Layer(
        snapshot_id=base.id,
        repositories=(
            Clone("file:///srv/repo.git", "/root/plain"),
            Clone("http://me:s3cr%40t@127.0.0.1:8000/repo.git", "/root/next/", "next"),
            Clone("file:///srv/repo.git", "/root/tag", "v1"),
            Clone("file:///srv/repo.git", "/root/commit", main),
        ),
        files=(File("/root/plain/extra", b"mine"), File("/root/tag/file", b"mine")),
        workdir="/root/plain",
    )
    machine = await create_vm(creation, vm_order(account, spec=clones))
    assert await sh(machine, "cd /root && cat plain/file next/file commit/file") == "one\ntwo\none"
    assert await sh(machine, "cat /root/plain/extra /root/tag/file") == "minemine"
    branches = "for each in plain next tag commit; do git -C /root/$each rev-parse --abbrev-ref HEAD; done"
    assert await sh(machine, branches) == "main\nnext\nHEAD\nHEAD"
    assert await sh(machine, "git -C /root/next remote get-url origin") == "http://127.0.0.1:8000/repo.git"
    assert (await machine.exec("grep -r s3cr /root /etc")).exit_code == 1

    wrong = replace(clones, repositories=(Clone("http://me:no@127.0.0.1:8000/repo.git", "/x"),), files=())
    with pytest.raises(ProgramFailed, match=r"repositories: git clone of http://127\.0\.0\.1:8000/repo\.git"):
        await create_vm(creation, vm_order(account, spec=wrong))
    with pytest.raises(InvalidSpec):
        await create_vm(creation, vm_order(account, spec=replace(clones, base_image="FROM alpine")))


async def test_repositories_of_this_server_are_cloned(
    creation: Creation, repos: Repos, machines: Machines, account: str, lines: Lines, git: GitClient
) -> None:
    """By id and by URL, by branch, tag and commit, and empty ones; `origin` is the URL that guests reach, and
    there are no secrets."""
    repo, empty = [await repos.create(account, default_branch="trunk") for _ in range(2)]
    work = await git.work_tree("work", {"file": "one"})
    first = await git("rev-parse", "HEAD", cwd=work)
    await git("tag", "v1", cwd=work)
    await git.commit(work, {"file": "two", "large": bytes(2 << 20)})
    await git("push", "-q", str(repos.repository(repo.id).path), "main:trunk", "v1", cwd=work)
    await git("push", "-q", str(repos.repository(repo.id).path), "main~1:refs/heads/next", cwd=work)
    address = f"https://me:s3cr3t@git.example.org/{repo.id}.git"

    clones = Layer(
        repositories=(
            Clone(repo.id, "/root/plain"),
            Clone(address, "/root/next/", "next"),
            Clone(f"https://git.freestyle.sh/{repo.id}", "/root/tag", "v1"),
            Clone(repo.id, "/root/commit", first),
            Clone(empty.id, "/root/empty"),
        ),
        files=(File("/root/plain/extra", b"mine"),),
        git_user=GitUser("me", "me@example.org"),
    )
    machine = await create_vm(creation, vm_order(account, top=clones))
    assert await sh(machine, "cd /root && cat plain/file next/file tag/file commit/file") == "twooneoneone"
    heads = "for each in plain next tag commit; do git -C /root/$each rev-parse --abbrev-ref HEAD; done"
    assert await sh(machine, heads) == "trunk\nnext\nHEAD\nHEAD"
    tracked = "git -C /root/next status --short --branch; git -C /root/plain branch --remotes"
    assert (await sh(machine, tracked)).split() == [
        *("##", "next...origin/next"),
        *("origin/HEAD", "->", "origin/trunk", "origin/next", "origin/trunk"),
    ]
    origins = await sh(machine, "for each in /root/*/; do git -C $each remote get-url origin; done")
    url = f"https://git.vms.org/{repo.id}"
    assert origins.splitlines() == [url, f"https://git.vms.org/{empty.id}", url, url, url]
    begun = "cd /root/empty && git commit -q --allow-empty -m first && git branch --show-current"
    assert await sh(machine, begun) == "trunk"
    left = "grep -rls s3cr3t /root /etc /tmp /var /run /proc/*/environ; find /tmp /var/tmp -name 'stead-*'"
    assert await sh(machine, left) == ""
    assert not any("s3cr3t" in line for line in lines.of(account))

    built = await builds_of(machines, account)
    for refused in (Clone(repo.id, "/a", "none"), Clone(str(uuid.uuid4()), "/a")):
        with pytest.raises(InvalidSpec):
            await create_vm(creation, vm_order(account, top=Layer(repositories=(refused,))))
    with pytest.raises(InvalidSpec):
        await create_vm(creation, vm_order("another", top=clones))
    assert await builds_of(machines, account) == built
    assert await builds_of(machines, "another") == []
    assert await machines.list("another") == []


async def test_a_push_changes_the_cache_key_of_a_layer(
    builder: Builder, creation: Creation, repos: Repos, account: str, git: GitClient
) -> None:
    """A layer with a repository of this server is cached until something is pushed."""
    repo = await repos.create(account)
    work = await git.work_tree("work", {"file": "one"})
    layer = Layer(repositories=(Clone(repo.id, "/srv/code", "main"),))
    order = SnapshotOrder(account, layer)

    async def pushed() -> SnapshotInfo:
        await git("push", "-q", str(repos.repository(repo.id).path), "main", cwd=work)
        return await builder.ensure_snapshot(order)

    first = await pushed()
    assert await builder.ensure_snapshot(order) == first
    await git.commit(work, {"file": "two"})
    second = await pushed()
    assert second.id != first.id
    assert (await pushed()).id == second.id
    for snapshot, text in ((first, "one"), (second, "two")):
        machine = await create_vm(creation, vm_order(account, top=Layer(snapshot_id=snapshot.id)))
        assert await sh(machine, "cat /srv/code/file") == text
        await machine.delete()


@pytest.mark.slow
async def test_a_large_repository_is_copied_in_bounded_memory(
    creation: Creation, repos: Repos, account: str, lines: Lines, git: GitClient
) -> None:
    """The host's memory does not grow with the repository, and the log has progress lines."""
    repo = await repos.create(account)
    work = await git.work_tree("work")
    with (work / "large").open("wb") as file:
        for _ in range(192):
            file.write(os.urandom(1 << 20))
    await git.commit(work, {})
    await git("push", "-q", str(repos.repository(repo.id).path), "main", cwd=work)

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) >> 10

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    top = Layer(repositories=(Clone(repo.id, "/srv/code"),))
    machine = await create_vm(creation, vm_order(account, top=top))
    assert peak() - before < 48
    assert await sh(machine, "git -C /srv/code status --short; stat -c %s /srv/code/large") == str(192 << 20)
    assert any("MiB of https://git.example.org/" in line for line in lines.of(account))


@pytest.mark.slow
async def test_a_cancelled_or_failed_clone_leaves_nothing(
    builder: Builder, repos: Repos, machines: Machines, account: str, lines: Lines, git: GitClient
) -> None:
    """The repository is deleted before the clone, or the client disconnects during the copy."""
    repo = await repos.create(account)
    path = repos.repository(repo.id).path
    work = await git.work_tree("work", {"large": os.urandom(32 << 20)})
    await git("push", "-q", str(path), "main", cwd=work)

    stuck = "#!/bin/sh\necho stuck\nexec sleep 600\n"
    command = f"printf '{stuck}' >/usr/local/bin/git; chmod +x /usr/local/bin/git"
    layer = Layer(commands=(command,), repositories=(Clone(repo.id, "/srv/code"),))
    waiting = asyncio.create_task(builder.ensure_snapshot(SnapshotOrder(account, layer)))
    await until(lambda: said(lines, account, "stuck"), 180)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert await hidden(machines, account) == []
    assert gits_of(path) == []

    slow = replace(layer, commands=("echo beginning; sleep 2",))
    waiting = asyncio.create_task(builder.ensure_snapshot(SnapshotOrder(account, slow)))
    await until(lambda: said(lines, account, "beginning"), 180)
    await repos.delete(repo.id)
    with pytest.raises(SetupFailed, match=f"repositories: no repository {repo.id}") as raised:
        await waiting
    assert raised.value.phase == "repositories"
    assert await hidden(machines, account) == []
