"""An account, or a client without credentials, does its worst with git; others are served beside it."""

import asyncio
import bz2
import contextlib
import gzip
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead import landlock
from stead.errors import HostError
from stead.files import give_tree_to
from stead.host.cgroups import Hierarchy, detect
from stead.host.commands import run
from stead.host.git_groups import GitGroups
from stead.launcher import Launch
from stead.processes import command_lines, environments
from stead.repos.committing import Change, commit
from stead.repos.confinement import Confinement
from stead.repos.errors import RepoBusy, RepoDamaged
from stead.repos.git import Git
from stead.repos.lfs.store import LfsObject, LfsObjects
from stead.repos.maintenance import housekeeping
from stead.repos.name_lookups import NameLookups
from stead.repos.repos import RepoInfo
from stead.repos.repository import Repository
from stead.repos.ssrf import RequestFailed, SsrfGuard
from stead.repos.transfer import pace
from stead.repos.transfer.archives import ArchiveInvalid, ArchiveLimits, ReadingPause, members, reading
from stead.repos.transfer.serving import packet
from stead.settings import Settings
from stead.tasks import Threads, cancel_and_wait, in_thread
from support.git_client import GitClient
from support.git_hosting import RepoHosting, RepoServer, open_hosting, served
from support.name_server import NameServer
from support.smart_http import gits_in
from support.waiting import until
from support.webhooks import Endpoint, World, verified

UIDS = range(1_899_000_000, 1_899_000_010)
LIMIT = 60.0


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[RepoServer]:
    async with served(tmp_path / "hosting") as host:
        yield host


@pytest_asyncio.fixture
async def victim(host: RepoServer, git: GitClient) -> RepoInfo:
    """A repository of the second account, with a commit."""
    repo = await host.hosting.repos.create(host.hosting.theirs)
    work = await git.work_tree("victim")
    await git("push", "-q", host.remote(repo, host.their_key), "main", cwd=work)
    return repo


@contextlib.asynccontextmanager
async def request(host: RepoServer, head: str, body: bytes = b"") -> AsyncIterator[asyncio.StreamWriter]:
    """A client that sends a request and reads nothing."""
    name, port = host.url.removeprefix("http://").split(":")
    # A small buffer: what is not read stays at the server.
    reader, writer = await asyncio.open_connection(name, int(port), limit=1024)
    try:
        writer.write(f"{head}\r\nHost: x\r\n".encode() + body)
        await writer.drain()
        yield writer
        assert reader is not None
    finally:
        writer.transport.abort()


def push_head(repo: RepoInfo, key: str) -> str:
    """The head of a push that announces a body."""
    lines = [
        f"POST /{repo.id}/git-receive-pack HTTP/1.1",
        f"Authorization: Bearer {key}",
        "Content-Type: application/x-git-receive-pack-request",
        "Content-Length: 100000",
    ]
    return "\r\n".join(lines)


# Shares


async def test_stalled_pushes_of_one_account_leave_places_for_others(
    host: RepoServer, git: GitClient, victim: RepoInfo
) -> None:
    hostile = [await host.repo() for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        for number in range(40):
            head = push_head(hostile[number % 4], host.key)
            await stack.enter_async_context(request(host, head, b"\r\n00"))
        await until(lambda: len(gits_in(host)) >= 4, LIMIT)
        started = time.monotonic()
        await git("clone", "-q", host.remote(victim, host.their_key), "cloned")
        # Without a share of its own it waits 30 s for a place.
        assert time.monotonic() - started < 15
        assert len(gits_in(host)) <= 8
    await until(lambda: not gits_in(host), LIMIT)


async def test_clients_without_credentials_leave_places_for_the_owner(
    host: RepoServer, git: GitClient
) -> None:
    repo = await host.repo(public=True)
    work = await git.work_tree("work")
    await git("push", "-q", host.remote(repo), "main", cwd=work)
    lines = [
        f"POST /{repo.id}/git-upload-pack HTTP/1.1",
        "Content-Type: application/x-git-upload-pack-request",
        "Content-Length: 100000",
    ]
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(40):
            await stack.enter_async_context(request(host, "\r\n".join(lines), b"\r\n00"))
        await until(lambda: gits_in(host), LIMIT)
        started = time.monotonic()
        # A clone of a public repository sends no credentials; a push does.
        await git("push", "-q", host.remote(repo), "main:next", cwd=work)
        assert time.monotonic() - started < 15
        assert len(gits_in(host)) <= 6
    await until(lambda: not gits_in(host), LIMIT)


async def test_calls_of_one_account_start_a_bounded_number_of_git_processes(
    host: RepoServer, git: GitClient, victim: RepoInfo
) -> None:
    repo = await host.repo()
    work = await git.work_tree("work")
    for number in range(3):
        await git.commit(work, {f"file{number}": "x"})
    await git("push", "-q", host.remote(repo), "main", cwd=work)
    base = await git("rev-parse", "HEAD~3", cwd=work)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, _processes_of(host))
            await asyncio.sleep(0.005)

    async with httpx2.AsyncClient(base_url=host.url, timeout=LIMIT) as http:
        ours, theirs = ({"authorization": f"Bearer {key}"} for key in (host.key, host.their_key))
        watching = asyncio.create_task(watch())
        calls = [
            asyncio.create_task(
                http.get(
                    f"/git/v1/repo/{repo.id}/compare", params={"base": base, "head": "main"}, headers=ours
                )
            )
            for _ in range(60)
        ]
        read = await http.get(f"/git/v1/repo/{victim.id}/contents/README", headers=theirs)
        answers = await asyncio.gather(*calls)
        await cancel_and_wait(watching)
    assert read.status_code == 200
    assert {answer.status_code for answer in answers} == {200}
    assert 0 < most <= 8


def _processes_of(host: RepoServer) -> int:
    """Git processes in the repositories, except pooled readers."""
    folder = f"GIT_DIR={host.hosting.folder}".encode()
    inside = {
        pid for pid, environment in environments() if any(each.startswith(folder) for each in environment)
    }
    return sum(pid in inside and b"cat-file" not in line for pid, line in command_lines())


# Minimum rate


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "GRACE", 0.5)
    monkeypatch.setattr(pace, "MAX_CREDIT", 1.0)


async def test_a_push_that_arrives_byte_by_byte_ends(host: RepoServer, impatient: None) -> None:
    repo = await host.repo()
    async with request(host, push_head(repo, host.key), b"\r\n0") as writer:
        await until(lambda: gits_in(host), LIMIT)

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"0")
                    await writer.drain()
                    await asyncio.sleep(0.1)

        dripping = asyncio.create_task(drip())
        await until(lambda: not gits_in(host), LIMIT)
        await cancel_and_wait(dripping)


@pytest.mark.parametrize("what", ["tarball", "zip", "clone"])
async def test_a_response_that_is_not_read_ends(
    host: RepoServer, git: GitClient, impatient: None, what: str
) -> None:
    repo = await host.repo()
    work = await git.work_tree("work", {"large": os.urandom(48 << 20)})
    await git("push", "-q", host.remote(repo), "main", cwd=work)
    await host.hosting.repos.quotas.flush()
    await host.hosting.repos.housekeeping.join()
    sha = await git("rev-parse", "main", cwd=work)
    wanted = packet(f"want {sha} ofs-delta\n".encode()) + b"0000" + packet(b"done\n")
    if what == "clone":
        head = f"POST /{repo.id}/git-upload-pack HTTP/1.1\r\nAuthorization: Bearer {host.key}\r\n"
        head += f"Content-Type: application/x-git-upload-pack-request\r\nContent-Length: {len(wanted)}"
        body = b"\r\n" + wanted
    else:
        head = f"GET /git/v1/repo/{repo.id}/{what} HTTP/1.1\r\nAuthorization: Bearer {host.key}"
        body = b"\r\n"
    async with request(host, head, body):
        await until(lambda: _processes_of(host), LIMIT)
        await until(lambda: not _processes_of(host), LIMIT)


# Name lookups and threads


class HalfDeaf(NameServer):
    """Never answers questions about names with `blackhole`."""

    def datagram_received(self, data: bytes, address: tuple[str | object, int]) -> None:
        if b"blackhole" in data:
            self.asked.append(data)
        else:
            super().datagram_received(data, address)


@pytest_asyncio.fixture
async def half_deaf() -> AsyncIterator[tuple[HalfDeaf, int]]:
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: HalfDeaf(IPv4Address("93.184.215.14")), local_addr=("127.0.0.1", 0)
    )
    yield server, transport.get_extra_info("sockname")[1]
    transport.close()


async def test_names_that_dns_does_not_answer_stop_nobody_else(
    half_deaf: tuple[HalfDeaf, int], tmp_path: Path
) -> None:
    server, port = half_deaf
    resolvers = tmp_path / "resolv.conf"
    resolvers.write_text("nameserver 127.0.0.1\n")
    guard = SsrfGuard(
        lookups=NameLookups(hosts=tmp_path / "hosts", resolvers=resolvers, port=port, timeout=5)
    )
    ours, theirs = guard.for_account("ours"), guard.for_account("theirs")
    hanging = [
        asyncio.create_task(ours.check(f"https://a{number}.blackhole.example/")) for number in range(30)
    ]
    await until(lambda: server.asked, LIMIT)
    started = time.monotonic()
    assert await in_thread(lambda: "done") == "done"
    target = await theirs.check("https://git.example/")
    assert time.monotonic() - started < 2
    assert target.addresses == ("93.184.215.14",)
    # Eight at a time, two questions each.
    assert len([question for question in server.asked if b"blackhole" in question]) <= 16
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_lookups_of_an_account_are_bounded_and_fail_in_time(
    half_deaf: tuple[HalfDeaf, int], tmp_path: Path
) -> None:
    _, port = half_deaf
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    lookups = NameLookups(
        hosts=tmp_path / "hosts", resolvers=tmp_path / "resolv.conf", port=port, timeout=0.3, per_account=2
    )
    guard = SsrfGuard(lookups=lookups).for_account("ours")
    checks = (guard.check(f"https://a{number}.blackhole.example/") for number in range(80))
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert {type(each) for each in found} <= {RequestFailed, RepoBusy}
    assert any(isinstance(each, RepoBusy) for each in found)
    assert any(isinstance(each, RequestFailed) for each in found)


async def test_hosts_file_and_search_list_are_honoured(
    half_deaf: tuple[HalfDeaf, int], tmp_path: Path
) -> None:
    server, port = half_deaf
    hosts, resolvers = tmp_path / "hosts", tmp_path / "resolv.conf"
    hosts.write_text(
        "# names\n10.1.2.3 git.internal git # local\nfe80::1%eth0 git.internal\nnot-an-address x\n"
    )
    resolvers.write_text("search corp.example\nnameserver 127.0.0.1\n")
    lookups = NameLookups(hosts=hosts, resolvers=resolvers, port=port)
    assert await lookups.addresses(None, "GIT.internal") == ["10.1.2.3", "fe80::1"]
    assert await lookups.addresses(None, "localhost") == ("127.0.0.1", "::1")
    assert server.asked == []
    assert await lookups.addresses(None, "host") == ["93.184.215.14"]
    assert any(b"\x04host\x04corp\x07example\0" in question for question in server.asked)
    hosts.write_text("10.1.2.4 git.internal\n")
    assert await lookups.addresses(None, "git.internal") == ["10.1.2.4"]


async def test_one_kind_of_work_cannot_take_the_threads_of_another() -> None:
    held = [asyncio.create_task(Threads.TREES.run(time.sleep, 1)) for _ in range(8)]
    await asyncio.sleep(0)
    started = time.monotonic()
    for threads in Threads:
        if threads is not Threads.TREES:
            await threads.run(lambda: None)
    assert time.monotonic() - started < 0.9
    await asyncio.gather(*held)


def _tar(*entries: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def test_entries_that_are_skipped_do_not_hold_a_thread(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(gzip.compress(_tar((".git/large", bytes(32 << 20)), ("a", b"a")), 1))
    found = list(members("tar", archive, ArchiveLimits()))
    pauses = [each for each in found if isinstance(each, ReadingPause)]
    assert len(pauses) >= 32, "one for each MiB"
    assert [each.name for each in found if not isinstance(each, ReadingPause)] == [".git/large", "a"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_compressed_data_without_content_is_refused(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    archive = tmp_path / "archive"
    empty = compress(b"")
    header = _tar(("a", b"a"))[:512]
    archive.write_bytes(compress(header) + empty * ((5 << 20) // len(empty)))
    started = time.monotonic()
    with pytest.raises(ArchiveInvalid, match="without content"), reading("tar"):
        list(members("tar", archive, ArchiveLimits()))
    assert time.monotonic() - started < 30


# Webhook signatures


async def test_a_signature_fits_one_receiver_only(world: World, endpoint: Endpoint) -> None:
    async with (
        world.triggered(endpoint.url + "/hostile") as (hostile, _),
        world.triggered(endpoint.url + "/victim") as (repo, trigger),
    ):
        await world.push(hostile)
        await world.push(repo)
        (sent_to_hostile,) = await endpoint.count(1, "/hostile")
        (sent,) = await endpoint.count(1, "/victim")
        log = await world.settled(repo, trigger.id)
    claims = verified(world.signing, sent)
    assert (claims["aud"], claims["sub"], claims["jti"]) == (endpoint.url + "/victim", repo, log[0].id)
    replayed = verified(world.signing, sent_to_hostile)
    assert replayed["aud"] != claims["aud"] and replayed["sub"] != claims["sub"]


# Privileges of git


@pytest_asyncio.fixture
async def confined(open_folder: Path) -> AsyncIterator[RepoHosting]:
    """Repositories whose git runs as one user for each account."""
    async with open_hosting(open_folder, UIDS) as hosting:
        yield hosting


async def _of(hosting: RepoHosting, account: str) -> Repository:
    return hosting.repos.repository((await hosting.repos.create(account)).id)


async def test_git_of_one_account_cannot_read_repositories_of_another(confined: RepoHosting) -> None:
    ours, theirs = await _of(confined, confined.ours), await _of(confined, confined.theirs)
    assert ours.path.stat().st_uid != theirs.path.stat().st_uid
    assert {ours.path.stat().st_uid, theirs.path.stat().st_uid} <= set(UIDS)
    read = await ours.finish("hash-object", str(ours.path / "HEAD"))
    assert read.status == 0
    refused = await ours.finish("hash-object", str(theirs.path / "HEAD"))
    assert refused.status != 0 and "Permission denied" in refused.stderr
    again = await _of(confined, confined.ours)
    assert again.path.stat().st_uid == ours.path.stat().st_uid


async def test_users_of_git_are_kept_and_repositories_of_one_user_are_divided(open_folder: Path) -> None:
    """An earlier version had one user for all accounts."""
    async with open_hosting(open_folder, range(UIDS.stop, UIDS.stop + 2)) as before:
        ours, theirs = await _of(before, before.ours), await _of(before, before.theirs)
        sha = (await commit(theirs, [Change("a", b"a")], "one")).sha
        assert ours.path.stat().st_uid == theirs.path.stat().st_uid
    owners = []
    for _ in range(2):
        async with open_hosting(open_folder, UIDS) as after:
            owners.append([path.stat().st_uid for path in (ours.path, theirs.path)])
            assert {path.lstat().st_uid for path in theirs.path.rglob("*")} == {owners[-1][1]}
            assert await after.repos.repository(theirs.id).resolve("main") == sha
    assert owners[0] == owners[1]
    assert len(set(owners[0])) == 2 and set(owners[0]) <= set(UIDS)


@pytest.mark.parametrize("prefork", [False, True])
async def test_git_has_no_network(open_folder: Path, prefork: bool) -> None:
    async with open_hosting(open_folder, UIDS, landlocked=False) as confined:
        await _check_network(confined, prefork)


async def _check_network(confined: RepoHosting, prefork: bool) -> None:
    repository = await _of(confined, confined.ours)
    interfaces = "-c", "alias.interfaces=!tail -n +3 /proc/net/dev; id -u", "interfaces"
    uid = repository.path.stat().st_uid
    if prefork:
        await _until_launchers_wait(confined, repository)
    printed = (await repository.run(*interfaces)).decode().split()
    assert [word for word in printed if word.endswith(":")] == ["lo:"]
    assert printed[-1] == str(uid)
    dialled = await repository.finish(*interfaces, network=True)
    host_interfaces = Path("/proc/net/dev").read_text().splitlines()[2:]
    assert len(dialled.stdout.decode().splitlines()) == len(host_interfaces) + 1


async def _until_launchers_wait(hosting: RepoHosting, repository: Repository) -> None:
    await repository.run("version")
    pool = hosting.repos.git._launchers[repository.path.stat().st_uid, False]
    await until(lambda: pool._ready, LIMIT)


HOSTILE = """
attempt() { "$@" > /dev/null 2> errors && echo "$*"; cat errors >&2; }
attempt cat "$GIT_DIR/HEAD"
attempt sh -c 'echo made > new && mv new objects/moved && rm objects/moved'
attempt cat "$OPEN"
attempt cat "$OTHER/HEAD"
attempt ls "$OTHER"
attempt cat /proc/self/status
attempt cat /proc/1/cmdline
attempt ls /proc
attempt ls /run
attempt ls /tmp
attempt cat /etc/passwd
attempt ls /
attempt ln -s /etc/passwd link
attempt mkfifo pipe
attempt sh -c 'cp /bin/true run && chmod +x run && ./run'
rm -f run
"""


@pytest.mark.parametrize("launched", ["directly", "by a waiting launcher", "with network"])
async def test_git_can_use_its_own_repository_alone(confined: RepoHosting, launched: str) -> None:
    """A program in git's place, with the paths of files that all users may read."""
    if not landlock.version():
        pytest.skip("this kernel has no Landlock")
    ours = await _of(confined, confined.ours)
    # Of the same account, so that the user of git is the same.
    other = await _of(confined, confined.ours)
    assert other.path.stat().st_uid == ours.path.stat().st_uid
    public = confined.folder / "public"
    public.write_text("secret")
    public.chmod(0o644)
    if launched == "by a waiting launcher":
        await _until_launchers_wait(confined, ours)
    finished = await ours.finish(
        *("-c", f"alias.hostile=!cd $GIT_DIR; {HOSTILE}", "hostile"),
        env={"OPEN": str(public), "OTHER": str(other.path)},
        network=launched == "with network",
    )
    possible = finished.stdout.decode().splitlines()
    assert possible == [
        f"cat {ours.path}/HEAD",
        "sh -c echo made > new && mv new objects/moved && rm objects/moved",
    ]
    assert finished.stderr.count("Permission denied") == 13
    (ours.path / "errors").unlink()


async def test_git_without_landlock_works_as_before(open_folder: Path) -> None:
    async with open_hosting(open_folder, UIDS, landlocked=False) as hosting:
        repository = await _of(hosting, hosting.ours)
        printed = await repository.run("-c", "alias.run=!ls /run > /dev/null && echo seen", "run")
        assert printed == b"seen\n"


async def test_git_does_not_start_if_its_files_cannot_be_limited(confined: RepoHosting) -> None:
    repository = await _of(confined, confined.ours)
    # Rights that no kernel knows.
    confined.repos.git._common_rules = ("landlock=18446744073709551615",)
    refused = await repository.finish("version")
    assert (refused.status, refused.stdout) == (127, b"")
    assert "cannot make a Landlock ruleset" in refused.stderr


async def test_no_account_has_the_user_of_git_without_a_repository(confined: RepoHosting) -> None:
    ours = await _of(confined, confined.ours)
    assert ours.path.stat().st_uid == UIDS[1]
    git = confined.repos.git
    # A program in git's place would read the repositories of the first account.
    printed = await git.run(None, "-c", f"alias.user=!id -u; cat {ours.path}/HEAD || true", "user")
    assert printed.decode().split() == [str(UIDS[0])]
    os.chown(ours.path, UIDS.stop, UIDS.stop)
    with pytest.raises(RepoDamaged, match=f"user {UIDS.stop}, is not a user of git"):
        await ours.finish("version")
    os.chown(ours.path, UIDS[1], UIDS[1])


async def test_repositories_of_the_first_user_get_another(open_folder: Path) -> None:
    """An earlier version gave the first user to an account."""
    async with open_hosting(open_folder, UIDS) as before:
        ours = await _of(before, before.ours)
        sha = (await commit(ours, [Change("a", b"a")], "one")).sha
    give_tree_to(UIDS[0], ours.path)
    async with open_hosting(open_folder, UIDS) as after:
        assert {path.lstat().st_uid for path in (ours.path, *ours.path.rglob("*"))} == {UIDS[1]}
        assert await after.repos.repository(ours.id).resolve("main") == sha


async def test_a_repository_that_cannot_be_given_to_its_user_is_not_used(
    open_folder: Path, foreign: Path
) -> None:
    async with open_hosting(open_folder, UIDS) as before:
        ours, theirs = await _of(before, before.ours), await _of(before, before.theirs)
    give_tree_to(UIDS[0], ours.path)
    (ours.path / "hard").hardlink_to(foreign / "file0")
    async with open_hosting(open_folder, UIDS) as after:
        with pytest.raises(RepoDamaged, match="not a user of git"):
            await after.repos.repository(ours.id).branches()
        assert await after.repos.repository(theirs.id).branches() == []
        assert (foreign / "file0").stat().st_uid == 0
        (ours.path / "hard").unlink()
    async with open_hosting(open_folder, UIDS) as mended:
        assert await mended.repos.repository(ours.id).branches() == []


def group_limits(group: str) -> dict[str, str]:
    """What is written in the files with the limits of a cgroup, by controller."""
    root = Path("/sys/fs/cgroup")
    names = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.weight", "cpu.shares")
    files = [base / group / name for base in (root, *root.iterdir()) for name in names]
    return {file.name.partition(".")[0]: file.read_text().strip() for file in files if file.is_file()}


async def test_git_has_the_limits_of_its_account(open_folder: Path) -> None:
    settings = Settings(data=open_folder)
    groups = GitGroups(settings)
    try:
        prefix = groups.enter(UIDS.start)
        if not prefix:
            pytest.skip("cgroups are not writable")
        inside = (await run(*prefix, "cat", "/proc/self/cgroup")).stdout.decode()
        group = f"stead-{settings.instance}-git/{UIDS.start}"
        assert f"/{group}" in inside
        limits = group_limits(group)
        assert set(limits) == set(detect().controllers)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert int(limits.get("memory", 1)) <= memory // 4
        assert limits.get("pids", "512") == "512"
        assert limits.get("cpu", "100") in ("100", "1024"), "the default weight: an equal share"
        git = Git(open_folder / "config", Confinement(UIDS, groups.enter))
        assert git.command(Launch(["git", "version"]), UIDS.start)[: len(prefix)] == list(prefix)
        await git.close()
    finally:
        groups.close()
    assert list(Path("/sys/fs/cgroup").glob(f"*/stead-{settings.instance}-git")) == []


async def test_a_group_of_git_that_was_removed_is_made_again(open_folder: Path) -> None:
    groups = GitGroups(Settings(data=open_folder))
    try:
        prefix = groups.enter(UIDS.start)
        if not prefix:
            pytest.skip("cgroups are not writable")
        files = [Path(word) for word in prefix if word.endswith("/cgroup.procs")]
        for file in files:
            file.parent.rmdir()
        # A launcher that was about to join it does not run without limits.
        with pytest.raises(HostError, match=r"cgroup\.procs"):
            await run(*prefix, "echo", "unlimited")
        inside = await run(*groups.enter(UIDS.start), "cat", "/proc/self/cgroup")
        assert inside.stdout.decode().count(f"-git/{UIDS.start}\n") == len(files)
        for file in files:
            limits = {each.name: each.read_text().strip() for each in file.parent.glob("*.max")}
            assert limits.get("pids.max", "512") == "512"
    finally:
        groups.close()


def test_a_group_of_git_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    """With files in place of cgroups: the kernel's do not fail on demand."""
    groups = GitGroups(Settings(data=tmp_path), Hierarchy(1, ("pids",)), tmp_path)
    (tmp_path / "pids").write_text("not a folder")
    assert groups.enter(1) == groups.enter(1) == []
    (tmp_path / "pids").unlink()
    assert str(tmp_path / "pids") in " ".join(groups.enter(1))


# Links in repositories, as someone who broke git could make them


@pytest.fixture
def foreign(open_folder: Path) -> Path:
    """A folder of root with a file, beside the tree of somebody else."""
    (open_folder / "tree" / "inner").mkdir(parents=True)
    (open_folder / "foreign").mkdir()
    for number in range(20):
        for folder in ("foreign", "tree/inner"):
            (open_folder / folder / f"file{number}").write_text("x")
    return open_folder / "foreign"


def test_links_in_a_tree_give_no_file_of_others_away(foreign: Path) -> None:
    tree = foreign.parent / "tree"
    (tree / "inner" / "folder").symlink_to(foreign)
    (tree / "inner" / "file").symlink_to(foreign / "file0")
    give_tree_to(UIDS.start, tree)
    assert {path.lstat().st_uid for path in (tree, *tree.rglob("*"))} == {UIDS.start}
    assert {path.lstat().st_uid for path in (foreign, *foreign.iterdir())} == {0}
    (tree / "inner" / "hard").hardlink_to(foreign / "file0")
    with pytest.raises(HostError, match=r"hard in .*more than one name"):
        give_tree_to(UIDS.start + 1, tree)
    assert (foreign / "file0").stat().st_uid == 0


SWAP = """
import ctypes, sys
libc, exchange = ctypes.CDLL(None), 2
print("swapping", flush=True)
while True:
    libc.renameat2(-100, sys.argv[1].encode(), -100, sys.argv[2].encode(), exchange)
"""


def test_a_folder_that_is_swapped_for_a_link_gives_no_file_of_others_away(foreign: Path) -> None:
    tree = foreign.parent / "tree"
    (tree / "link").symlink_to(foreign)
    program = [sys.executable, "-c", SWAP, str(tree / "inner"), str(tree / "link")]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as swapping:
        try:
            assert swapping.stdout is not None and swapping.stdout.readline()
            for attempt in range(300):
                # A swap in the middle may be an error.
                with contextlib.suppress(HostError):
                    give_tree_to(UIDS[attempt % 2], tree)
        finally:
            swapping.kill()
    assert {path.lstat().st_uid for path in (foreign, *foreign.iterdir())} == {0}


async def test_lfs_objects_are_not_written_through_links(hosting: RepoHosting, tmp_path: Path) -> None:
    repository = await hosting.repository()
    target = tmp_path / "target"
    target.mkdir()
    (repository.path / "lfs").symlink_to(target)
    objects = LfsObjects(repository, hosting.repos.quotas)
    oid = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"

    async def body() -> AsyncIterator[bytes]:
        yield b"foo"

    with pytest.raises(RepoDamaged, match=r"lfs in .* is not a folder"):
        await objects.write(oid, body())
    with pytest.raises(RepoDamaged):
        await objects.missing([LfsObject(oid, 3)])
    assert list(target.iterdir()) == []
    (repository.path / "lfs").unlink()
    await objects.write(oid, body())
    assert await objects.missing([LfsObject(oid, 3)]) == []
    (repository.path / "lfs" / "objects" / oid[:2] / oid[2:4] / oid).unlink()
    (repository.path / "lfs" / "objects" / oid[:2] / oid[2:4] / oid).symlink_to("/etc/hostname")
    assert objects.size(oid) is None


async def test_commits_are_not_written_through_links(hosting: RepoHosting, tmp_path: Path) -> None:
    repository = await hosting.repository()
    target = tmp_path / "target"
    (repository.path / "objects").rename(target)
    before = sorted(target.rglob("*"))
    (repository.path / "objects").symlink_to(target)
    with pytest.raises(RepoDamaged, match=r"objects in .* is not a folder"):
        await commit(repository, [Change("a", b"a")], "one")
    assert sorted(target.rglob("*")) == before
    (repository.path / "objects").unlink()
    target.rename(repository.path / "objects")


async def test_stale_files_are_not_removed_through_links(hosting: RepoHosting, tmp_path: Path) -> None:
    repository = await hosting.repository()
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("kept")
    (repository.path / "lfs").mkdir()
    (repository.path / "lfs" / "incoming").symlink_to(target)
    (repository.path / "objects" / "tmp_obj_1").write_text("stale")
    housekeeping.remove_stale_files(hosting.folder / "repos", time.time() + 60)
    assert (target / "kept").exists()
    assert not (repository.path / "objects" / "tmp_obj_1").exists()


async def test_default_branch_is_not_read_through_links(hosting: RepoHosting, tmp_path: Path) -> None:
    repository = await hosting.repository()
    head = repository.path / "HEAD"
    kept = head.read_bytes()
    (tmp_path / "secret").write_text("ref: refs/heads/secret\n")
    head.unlink()
    head.symlink_to(tmp_path / "secret")
    with pytest.raises(RepoDamaged, match="not a regular file"):
        _ = repository.default_branch
    head.unlink()
    os.mkfifo(head)
    with pytest.raises(RepoDamaged, match="not a regular file"):
        _ = repository.default_branch
    head.unlink()
    head.write_bytes(kept)
