"""The client library against a real server and real VMs."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead import AsyncStead, AsyncVm, Exited, Output, Service, Stead, User, VmSpec
from stead.sdk import errors
from stead.sdk.models import LogEntry
from support.installations import Server
from support.waiting import until


@pytest_asyncio.fixture(scope="module")
async def stead(server: Server) -> AsyncIterator[AsyncStead]:
    async with AsyncStead(server.key, base_url=server.url) as stead:
        yield stead


@pytest_asyncio.fixture(scope="module")
async def vm(stead: AsyncStead) -> AsyncIterator[AsyncVm]:
    """One VM for the tests that do not change its state."""
    async with await stead.vms.create(name="sdk", users=["alice"], idle_timeout_seconds=None) as vm:
        yield vm


async def test_synchronous_client_creates_uses_and_deletes_a_vm(server: Server) -> None:
    """As in a script, in a thread."""

    def script() -> str:
        with Stead(server.key, base_url=server.url) as stead:
            with stead.vms.create(name="script") as vm:
                assert vm.exec("echo hello", check=True).stdout == "hello\n"
                vm.fs.write_text("/tmp/note", "kept")
                assert vm.fs.read_text("/tmp/note") == "kept"
                *printed, last = vm.exec_stream("echo one; echo two >&2; exit 3")
                assert sorted(event.text for event in printed if isinstance(event, Output)) == [
                    "one\n",
                    "two\n",
                ]
                assert isinstance(last, Exited) and last.status_code == 3
                assert vm.id in [info.id for info in stead.vms.list(state="running", search="script")]
                assert stead.vms.get(vm.id).last_info == vm.info()
            with pytest.raises(errors.VmNotFound):
                stead.vms.get(vm.id)
            return vm.id

    assert len(await asyncio.to_thread(script)) == 20


async def test_info_find_and_rename(stead: AsyncStead, vm: AsyncVm) -> None:
    info = await vm.info()
    assert (info.id, info.name, info.state) == (vm.id, "sdk", "running")
    assert info.created_at is not None and info.idle_timeout_seconds is None
    assert info.sizing is not None and info.sizing.vcpu_count and info.sizing.mem_size_mib
    assert info.persistence is not None and info.persistence.type == "persistent"
    assert info.address and info.size == str(info.size) and re.fullmatch(r"\d+x\d+[MG]x\d+G", info.size)
    (row,) = [each for each in await stead.vms.list() if each.id == vm.id]
    assert (row.address, row.size) == (info.address, info.size)
    assert (await stead.vms.find(vm.id[:8])).id == vm.id
    assert (await vm.rename("sdk-renamed")).name == "sdk-renamed"
    try:
        assert (await stead.vms.find("sdk-renamed")).id == vm.id
        with pytest.raises(errors.VmNotFound):
            await stead.vms.find("sdk")
    finally:
        assert (await vm.rename("sdk")).name == vm.name == "sdk"


async def test_exec_takes_cwd_env_stdin_and_user(vm: AsyncVm) -> None:
    result = await vm.exec(
        ["sh", "-c", 'pwd; echo "$A"; cat; id -un'], cwd="/tmp", env={"A": "b c"}, stdin="in\n"
    )
    assert result.ok and result.stdout == "/tmp\nb c\nin\nroot\n"
    assert result.duration is not None and 0 < result.duration < 30
    assert (await vm.user("alice").exec("id -un")).stdout == "alice\n"
    assert (await vm.exec("id -un", user="alice")).stdout == "alice\n"
    killed = await vm.exec("kill -9 $$")
    assert killed.signal == "SIGKILL" and not killed.ok
    with pytest.raises(errors.CommandFailed, match="exited with 4: why"):
        await vm.exec("echo why >&2; exit 4", check=True)
    missing, refused = await vm.exec(["/no/such/program"]), await vm.exec(["/etc/passwd"])
    assert (missing.status_code, refused.status_code) == (127, 126)
    with pytest.raises(errors.LinuxUserNotFound):
        await vm.exec("true", user="nobody-like-this")


async def test_exec_timeout(vm: AsyncVm) -> None:
    with pytest.raises(errors.ExecTimedOut) as caught:
        await vm.exec("echo begun; echo oops >&2; sleep 60", timeout=3)
    assert (caught.value.stdout, caught.value.stderr, caught.value.timeout) == ("begun\n", "oops\n", 3.0)
    events = [event async for event in vm.exec_stream("echo begun; sleep 60", timeout=3)]
    assert isinstance(events[-1], Exited) and events[-1].timed_out and not events[-1].ok


async def test_closing_a_stream_kills_its_command(vm: AsyncVm) -> None:
    async with vm.exec_stream("echo $$; sleep 300") as stream:
        event = await anext(stream)
        assert isinstance(event, Output)
        pid = event.text.strip()
    gone = f"for i in $(seq 100); do kill -0 {pid} 2>/dev/null || exit 0; sleep 0.1; done; exit 1"
    assert (await vm.exec(gone)).ok


async def test_large_output_is_streamed(vm: AsyncVm) -> None:
    size = 0
    async for event in vm.exec_stream("head -c 5000000 /dev/zero"):
        size += len(event.data) if isinstance(event, Output) else 0
    assert size == 5_000_000


async def test_files_are_written_read_moved_and_removed(vm: AsyncVm) -> None:
    files = vm.fs
    path = "/srv/sdk/a b/ü$`'\".bin"
    content = os.urandom(3_000_000)
    await files.write(path, content, mode=0o640)
    assert await files.read(path) == content
    assert b"".join([chunk async for chunk in files.read_chunks(path)]) == content
    found = await files.stat(path)
    assert found.is_file and (found.size, found.mode, found.owner) == (3_000_000, 0o640, "root")
    assert found.modified is not None

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"%d\n" % number

    await files.write("/srv/sdk/pieces", pieces())
    assert (await files.read_text("/srv/sdk/pieces")).splitlines()[-1] == "99"
    assert {(entry.name, entry.kind) for entry in await files.read_dir("/srv/sdk")} == {
        ("a b", "directory"),
        ("pieces", "file"),
    }
    with pytest.raises(NotADirectoryError):
        await files.read_dir("/srv/sdk/pieces")
    with pytest.raises(errors.InvalidFileRequest):
        await files.read("/srv/sdk")
    with pytest.raises(errors.FileNotFound):
        await files.mkdir("/srv/none/of/these")
    await files.mkdir("/srv/sdk/x/y", parents=True)
    await files.mkdir("/srv/sdk/x/y", parents=True)
    await files.move("/srv/sdk/pieces", "/srv/sdk/x/moved")
    assert not await files.exists("/srv/sdk/pieces")
    assert (await files.read_text("/srv/sdk/x/moved")).startswith("0\n")
    await files.write_text("/srv/sdk/other", "new")
    with pytest.raises(errors.SteadApiError):
        await files.move("/srv/sdk/other", "/srv/sdk/x/moved")
    await files.move("/srv/sdk/other", "/srv/sdk/x/moved", overwrite=True)
    assert await files.read_text("/srv/sdk/x/moved") == "new"
    assert await files.exists("/srv/sdk/x/y") and not await files.exists("/srv/none")
    with pytest.raises(errors.InvalidFileRequest):
        await files.remove("/srv/sdk")
    await files.remove("/srv/sdk", recursive=True)
    assert not await files.exists("/srv/sdk")


async def test_files_of_a_linux_user(vm: AsyncVm) -> None:
    alice = vm.user("alice")
    await alice.fs.write_text("/home/alice/hers", "x")
    assert (await vm.fs.stat("/home/alice/hers")).owner == "alice"
    with pytest.raises(errors.VmAccessDenied):
        await alice.fs.read("/etc/shadow")


async def test_folders_are_uploaded_and_downloaded(vm: AsyncVm, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "data").write_bytes(os.urandom(2_000_000))
    (source / "tool").write_text("#!/bin/sh\necho ran\n")
    (source / "tool").chmod(0o755)
    (source / "link").symlink_to("sub/data")
    await vm.fs.upload(source, "/srv/folder")
    assert (await vm.exec("/srv/folder/tool")).stdout == "ran\n"
    await vm.exec("ln -s /etc/passwd /srv/folder/out; mkfifo /srv/folder/pipe", check=True)
    skipped = await vm.fs.download("/srv/folder", tmp_path / "back")
    assert sorted(skipped) == ["out", "pipe"]
    assert (tmp_path / "back" / "link").read_bytes() == (source / "sub" / "data").read_bytes()
    assert (tmp_path / "back" / "tool").stat().st_mode & 0o777 == 0o755
    await vm.fs.upload(source / "tool", "/srv/folder/copies/")
    await vm.fs.download("/srv/folder/copies/tool", tmp_path)
    assert (tmp_path / "tool").read_text() == (source / "tool").read_text()
    await vm.fs.remove("/srv/folder", recursive=True)


async def test_watch_reports_changes(vm: AsyncVm) -> None:
    async with asyncio.timeout(60), vm.fs.watch() as changes:

        async def seen() -> str:
            async for event in changes:
                if event.filename == "/root/watched":
                    return event.event_type
            return "nothing"

        watching = asyncio.create_task(seen())
        while not watching.done():
            await vm.exec("echo x >> /root/watched")
            await asyncio.wait({watching}, timeout=0.5)
        assert watching.result() in ("change", "rename")


@pytest.mark.slow
async def test_service_lifecycle(vm: AsyncVm) -> None:
    service = Service(name="sdk-test", bash="echo ready; exec sleep infinity", user="alice")
    assert (await vm.systemd.create(service)).removesuffix(".service") == "sdk-test"

    async def active() -> bool:
        return (await vm.systemd.status("sdk-test")).active

    await until(active, 60)
    assert any(name.removesuffix(".service") == "sdk-test" for name in await vm.systemd.list())
    with pytest.raises(errors.AlreadyExists):
        await vm.systemd.create(service)
    (result,) = await vm.systemd.restart("sdk-test")
    assert result.success

    async def ready() -> bool:
        return "ready" in [line.message for line in await vm.systemd.logs("sdk-test", lines=50)]

    await until(ready, 60)
    (result,) = await vm.systemd.stop("sdk-test")
    assert result.success and not (await vm.systemd.status("sdk-test")).active
    await vm.systemd.delete("sdk-test")
    with pytest.raises(errors.ServiceNotFound):
        await vm.systemd.status("sdk-test")


async def test_exec_output_is_in_its_terminal(vm: AsyncVm) -> None:
    await vm.exec("echo one; printf '\\033[31mtwo\\033[0m\\n'", terminal="sdk-build")
    assert "sdk-build" in [terminal.name for terminal in await vm.terminals.list()]
    assert [line.line for line in await vm.terminals.logs("sdk-build")][:1] == ["one"]
    assert "\033[31mtwo" in await vm.terminals.output("sdk-build")


async def test_forks_and_snapshots(stead: AsyncStead) -> None:
    async with await stead.vms.create() as vm:
        await vm.exec("echo before > /root/mark; nohup sleep 1000 >/dev/null 2>&1 &")
        snapshot = await vm.snapshot(name="sdk-kept")
        await vm.exec("echo after > /root/mark")
        (fork,) = await vm.fork(name="sdk-fork")
        async with fork, await stead.vms.create(snapshot_id="sdk-kept") as revived:
            assert fork.name == (await fork.info()).name == "sdk-fork"
            assert await fork.fs.read_text("/root/mark") == "after\n"
            assert await revived.fs.read_text("/root/mark") == "before\n"
            assert (await revived.exec("pgrep -x sleep")).ok
    kept = await stead.vms.snapshots.find("sdk-kept")
    assert (kept.id, kept.state, kept.source_vm_id) == (snapshot.id, "ready", vm.id)
    assert kept.size_bytes and kept.size
    await stead.vms.snapshots.update(snapshot.id, name="renamed")
    assert [each.name for each in await stead.vms.snapshots.list() if each.id == snapshot.id] == ["renamed"]
    await stead.vms.snapshots.delete(snapshot.id)
    with pytest.raises((errors.NotFound, errors.SnapshotAlreadyDeleted)):
        await stead.vms.snapshots.delete(snapshot.id)


async def test_suspend_wake_kill_and_wait_for_exit(stead: AsyncStead) -> None:
    async with await stead.vms.create() as vm:
        await vm.exec("echo here > /run/mark")
        waiting = asyncio.create_task(vm.wait_for_exit(timeout=120))
        await vm.suspend()
        assert (await vm.info()).state == "suspended"
        assert await waiting
        assert (await vm.exec("cat /run/mark")).stdout == "here\n"
        await vm.kill()
        assert (await vm.info()).state == "stopped"
        with pytest.raises(errors.VmNotRunning):
            await vm.stop()


async def test_identity_permissions(stead: AsyncStead, vm: AsyncVm, server: Server) -> None:
    identity = await stead.identities.create(name="sdk-ci")
    token = await identity.tokens.create()
    assert await identity.tokens.list() == [token.id]
    async with AsyncStead(access_token=token.token, base_url=server.url) as theirs:
        assert (await theirs.whoami()).identity_id == identity.id
        with pytest.raises(errors.VmNotFound):
            await theirs.vms.ref(vm.id).exec("true")
        granted = await identity.permissions.vms.grant("sdk", allowed_users=["alice"])
        assert granted.allowed_users == ("alice",)
        with pytest.raises(errors.PermissionAlreadyExists):
            await identity.permissions.vms.grant(vm.id)
        assert (await theirs.vms.ref(vm.id).exec("id -un")).stdout == "alice\n"
        with pytest.raises(errors.Forbidden):
            await theirs.vms.ref(vm.id).exec("true", user="root")
        with pytest.raises(errors.Forbidden):
            await theirs.vms.ref(vm.id).delete()
        with pytest.raises(errors.Forbidden):
            await theirs.vms.create()
        assert (await identity.permissions.vms.update(vm.id)).allowed_users is None
        assert [each.vm_id for each in await identity.permissions.vms.list()] == [vm.id]
        repo = await stead.git.repos.create(name="sdk-repo")
        await identity.permissions.git.grant("sdk-repo", "write")
        (row,) = [each for each in await stead.identities.list() if each.id == identity.id]
        assert (row.name, row.vm_grants, row.repo_grants) == ("sdk-ci", 1, 1) and row.created_at
        assert (await theirs.git.repos.find("sdk-repo")).id == repo.id
        await repo.delete()
        await identity.permissions.vms.revoke(vm.id)
        with pytest.raises(errors.PermissionNotFound):
            await identity.permissions.vms.get(vm.id)
        await identity.tokens.revoke(token.id)
        with pytest.raises(errors.Unauthorized):
            await theirs.whoami()
    assert (await stead.identities.find("sdk-ci")).id == identity.id
    await stead.identities.delete("sdk-ci")


async def test_spec_is_built_with_progress_phases_and_logs(stead: AsyncStead) -> None:
    spec = VmSpec().file("/etc/greeting", "hello\n").run("cp /etc/greeting /srv/made").snapshot()
    spec = spec.user("dev").service(Service(name="app", bash="exec sleep infinity", user="dev"))
    lines: list[LogEntry] = []
    async with await stead.vms.create(spec=spec, progress=lines.append) as vm:
        assert await vm.fs.read_text("/srv/made") == "hello\n"
        assert (await vm.systemd.status("app")).active
        build = await stead.vms.builds.wait((await vm.build()).id, timeout=60)
        assert build.state == "succeeded"
        phases = await stead.vms.builds.phases(build.id)
        assert phases and all(each.finished_at and each.state == "succeeded" for each in phases)
        assert build.id in [each.id for each in await stead.vms.builds.list(state="succeeded")]
        assert len(await stead.vms.builds.logs(build.id))


@pytest.mark.slow
async def test_failed_build_has_a_reason(stead: AsyncStead) -> None:
    with pytest.raises(errors.SetupFailed) as caught:
        await stead.vms.snapshots.ensure(VmSpec().run("echo it is broken >&2; exit 7"))
    error = caught.value
    assert isinstance(error, errors.BuildFailed) or error.failed_reason


async def test_refused_requests_raise_the_matching_error(stead: AsyncStead, server: Server) -> None:
    with pytest.raises(errors.InvalidSize):
        await stead.vms.create(cpu=3)
    with pytest.raises(errors.InvalidRequest, match="aptDeps"):
        await stead.vms.create(spec={"snapshot": {"aptdeps": ["git"]}})
    with pytest.raises(errors.InvalidRequest, match="aptDeps"):
        await stead.vms.snapshots.ensure({"aptdeps": ["git"]})
    with pytest.raises(errors.SnapshotNotFound):
        await stead.vms.create(snapshot_id="sc-aaaaaaaaaaaaaaaaaaaa")
    with pytest.raises(errors.InvalidLinuxUser):
        await stead.vms.create(users=[User("twice"), User("twice")])
    with pytest.raises(errors.VmNotFound):
        await stead.vms.get("aaaaaaaaaaaaaaaaaaaa")
    with pytest.raises(errors.BuildNotFound):
        await stead.vms.builds.get("bld-aaaaaaaaaaaaaaaaaaaa")
    async with AsyncStead("stead_wrong", base_url=server.url) as stranger:
        with pytest.raises(errors.Unauthorized) as caught:
            await stranger.vms.list()
    assert caught.value.trace_id and caught.value.status == 401
    answer = await stead.fetch("/no/such/thing")
    assert answer.status_code == 404


async def test_vm_logs_are_paged(stead: AsyncStead, vm: AsyncVm) -> None:
    assert (await stead.whoami()).identity_id is None
    page = await vm.logs(page_size=5)
    assert all(entry.time is not None for entry in page) and len(page) <= 5
