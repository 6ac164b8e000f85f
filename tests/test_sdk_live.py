"""The client library against the real server and real machines."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from conftest import Server
from waiting import until

from stead import AsyncStead, AsyncVm, Exited, Output, Service, Stead, User, VmSpec
from stead.sdk import errors
from stead.sdk.models import LogEntry


@pytest_asyncio.fixture(scope="module")
async def stead(server: Server) -> AsyncIterator[AsyncStead]:
    async with AsyncStead(server.key, base_url=server.url) as stead:
        yield stead


@pytest_asyncio.fixture(scope="module")
async def vm(stead: AsyncStead) -> AsyncIterator[AsyncVm]:
    """One machine for the tests that leave it as they found it."""
    async with await stead.vms.create(name="sdk", users=["alice"], idle_timeout_seconds=None) as vm:
        yield vm


async def test_a_machine_from_first_to_last(server: Server) -> None:
    """The synchronous client, as in a script."""

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


async def test_the_synchronous_examples_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEAD_API_URL", server.url)
    monkeypatch.setenv("STEAD_API_KEY", server.key)
    page = (Path(__file__).parent.parent / "docs" / "python-sdk.md").read_text()
    examples = re.findall(r"^```py\n(.*?)^```", page, re.S | re.M)
    assert examples
    for example in examples:
        await asyncio.to_thread(exec, example, {"__name__": "example"})


async def test_what_is_known_of_a_machine(vm: AsyncVm) -> None:
    info = await vm.info()
    assert (info.id, info.name, info.state) == (vm.id, "sdk", "running")
    assert info.created_at is not None and info.idle_timeout_seconds is None
    assert info.sizing is not None and info.sizing.vcpu_count and info.sizing.mem_size_mib
    assert info.persistence is not None and info.persistence.type == "persistent"


async def test_a_command_and_its_surroundings(vm: AsyncVm) -> None:
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
    with pytest.raises(errors.FileNotFound):
        await vm.exec(["/no/such/program"])
    with pytest.raises(errors.LinuxUserNotFound):
        await vm.exec("true", user="nobody-like-this")


async def test_a_command_whose_time_is_up(vm: AsyncVm) -> None:
    with pytest.raises(errors.ExecTimedOut) as caught:
        await vm.exec("echo begun; echo oops >&2; sleep 60", timeout=1)
    assert (caught.value.stdout, caught.value.stderr, caught.value.timeout) == ("begun\n", "oops\n", 1.0)
    events = [event async for event in vm.exec_stream("echo begun; sleep 60", timeout=1)]
    assert isinstance(events[-1], Exited) and events[-1].timed_out and not events[-1].ok


async def test_leaving_a_stream_ends_its_command(vm: AsyncVm) -> None:
    async with vm.exec_stream("echo $$; sleep 300") as stream:
        event = await anext(stream)
        assert isinstance(event, Output)
        pid = event.text.strip()
    gone = f"for i in $(seq 100); do kill -0 {pid} 2>/dev/null || exit 0; sleep 0.1; done; exit 1"
    assert (await vm.exec(gone)).ok


async def test_much_output_streams_through(vm: AsyncVm) -> None:
    size = 0
    async for event in vm.exec_stream("head -c 5000000 /dev/zero"):
        size += len(event.data) if isinstance(event, Output) else 0
    assert size == 5_000_000


async def test_files(vm: AsyncVm) -> None:
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


async def test_folders_travel_both_ways(vm: AsyncVm, tmp_path: Path) -> None:
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


async def test_changes_are_seen(vm: AsyncVm) -> None:
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


async def test_services(vm: AsyncVm) -> None:
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


async def test_output_that_is_kept_under_a_name(vm: AsyncVm) -> None:
    await vm.exec("echo one; printf '\\033[31mtwo\\033[0m\\n'", terminal="sdk-build")
    assert "sdk-build" in [terminal.name for terminal in await vm.terminals.list()]
    assert [line.line for line in await vm.terminals.logs("sdk-build")][:1] == ["one"]
    assert "\033[31mtwo" in await vm.terminals.output("sdk-build")


async def test_forks_and_snapshots(stead: AsyncStead) -> None:
    async with await stead.vms.create() as vm:
        await vm.exec("echo before > /root/mark; nohup sleep 1000 >/dev/null 2>&1 &")
        snapshot = await vm.snapshot(name="sdk-kept")
        await vm.exec("echo after > /root/mark")
        (fork,) = await vm.fork(count=1)
        async with fork, await stead.vms.create(snapshot_id=snapshot.id) as revived:
            assert await fork.fs.read_text("/root/mark") == "after\n"
            assert await revived.fs.read_text("/root/mark") == "before\n"
            assert (await revived.exec("pgrep -x sleep")).ok
    kept = await stead.vms.snapshots.get(snapshot.id)
    assert (kept.name, kept.state, kept.source_vm_id) == ("sdk-kept", "ready", vm.id)
    await stead.vms.snapshots.update(snapshot.id, name="renamed")
    assert [each.name for each in await stead.vms.snapshots.list() if each.id == snapshot.id] == ["renamed"]
    await stead.vms.snapshots.delete(snapshot.id)
    with pytest.raises((errors.NotFound, errors.SnapshotAlreadyDeleted)):
        await stead.vms.snapshots.delete(snapshot.id)


async def test_a_machine_sleeps_and_wakes(stead: AsyncStead) -> None:
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


async def test_who_may_do_what(stead: AsyncStead, vm: AsyncVm, server: Server) -> None:
    identity = await stead.identities.create()
    token = await identity.tokens.create()
    assert await identity.tokens.list() == [token.id]
    async with AsyncStead(access_token=token.token, base_url=server.url) as theirs:
        assert (await theirs.whoami()).identity_id == identity.id
        with pytest.raises(errors.VmNotFound):
            await theirs.vms.ref(vm.id).exec("true")
        granted = await identity.permissions.vms.grant(vm.id, allowed_users=["alice"])
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
        await identity.permissions.vms.revoke(vm.id)
        with pytest.raises(errors.PermissionNotFound):
            await identity.permissions.vms.get(vm.id)
        await identity.tokens.revoke(token.id)
        with pytest.raises(errors.Unauthorized):
            await theirs.whoami()
    assert identity.id in [each.id for each in await stead.identities.list()]
    await stead.identities.delete(identity.id)


async def test_a_spec_is_built_and_followed(stead: AsyncStead) -> None:
    spec = VmSpec().file("/etc/greeting", "hello\n").run("cp /etc/greeting /srv/made").snapshot()
    spec = spec.user("dev").service("app", bash="exec sleep infinity", user="dev")
    told: list[LogEntry] = []
    async with await stead.vms.create(spec=spec, progress=told.append) as vm:
        assert await vm.fs.read_text("/srv/made") == "hello\n"
        assert (await vm.systemd.status("app")).active
        build = await stead.vms.builds.wait((await vm.build()).id, timeout=60)
        assert build.state == "succeeded" and await stead.vms.builds.phases(build.id)


async def test_a_build_that_fails_says_why(stead: AsyncStead) -> None:
    with pytest.raises(errors.SetupFailed) as caught:
        await stead.vms.snapshots.ensure(VmSpec().run("echo it is broken >&2; exit 7"))
    error = caught.value
    assert isinstance(error, errors.BuildFailed) or error.failed_reason


async def test_refusals(stead: AsyncStead, server: Server) -> None:
    with pytest.raises(errors.InvalidSize):
        await stead.vms.create(vcpu_count=3)
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


async def test_what_happened_can_be_read(stead: AsyncStead, vm: AsyncVm) -> None:
    assert (await stead.whoami()).identity_id is None
    page = await vm.logs(page_size=5)
    assert all(entry.time is not None for entry in page) and len(page) <= 5
