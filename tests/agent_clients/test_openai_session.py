"""Sessions of the OpenAI Agents SDK in real VMs."""

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from agents.sandbox import Manifest
from agents.sandbox.entries import Dir, File, LocalDir
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    InvalidManifestPathError,
    PtySessionNotFoundError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.manifest import Environment
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.sandbox.types import Group, User
from agents.sandbox.workspace_paths import SandboxPathGrant

from stead import AsyncStead
from stead.agents.openai import (
    SteadSandboxClient,
    SteadSandboxClientOptions,
    SteadSandboxSessionState,
    SteadSession,
)
from stead.sdk import Snapshot
from support.flaky_proxy import FlakyProxy
from support.installations import Server
from support.waiting import until


@pytest_asyncio.fixture(scope="module")
async def session(client: SteadSandboxClient) -> AsyncIterator[SteadSession]:
    """One session for the tests that leave it usable."""
    alice = User(name="alice")
    manifest = Manifest(
        entries={"notes/todo.md": File(content=b"# todo\n- old item\n")},
        environment=Environment(value={"GREETING": "hello"}),
        users=[alice],
        groups=[Group(name="writers", users=[alice])],
    )
    session = await client.create(manifest=manifest)
    await session.start()
    yield session
    await session.shutdown()


async def test_exec_passes_arguments_environment_and_folder(session: SteadSession) -> None:
    end = await session.exec("printf", "%s|", "a b", "$HOME", "ü", shell=False)
    assert (end.stdout, end.exit_code) == ("a b|$HOME|ü|".encode(), 0)
    end = await session.exec('echo $GREETING; pwd; echo err >&2; printf "\\0\\377"; exit 3')
    assert (end.stdout, end.stderr, end.exit_code) == (b"hello\n/workspace\n\0\xff", b"err\n", 3)
    assert (await session.exec("no-such-program", shell=False)).exit_code == 127


async def test_exec_runs_as_another_user(session: SteadSession) -> None:
    assert (await session.exec("id -un; id -Gn", user="alice")).stdout == b"alice\nalice writers\n"
    assert (await session.exec("whoami", user=User(name="alice"))).stdout == b"alice\n"


async def test_exec_timeout_keeps_the_output(session: SteadSession) -> None:
    with pytest.raises(ExecTimeoutError) as caught:
        await session.exec("echo before; echo problem >&2; sleep 600", timeout=5)
    assert caught.value.context["stdout"] == "before\n"
    assert caught.value.context["stderr"] == "problem\n"
    assert caught.value.timeout_s == 5 and caught.value.retryable is False


async def _until(session: SteadSession, number: int | None, text: bytes, output: bytes = b"") -> bytes:
    """Poll a command until it has printed a text; returns all output."""
    while text not in output:
        assert number is not None, output
        update = await session.pty_write_stdin(session_id=number, chars="")
        number, output = update.process_id, output + update.output
    return output


async def test_long_command_is_polled_to_its_end(session: SteadSession) -> None:
    await session.exec("mkfifo /tmp/gate")
    command = "echo one; read -r line < /tmp/gate; echo $line >&2; exit 4"
    first = await session.pty_exec_start(command, yield_time_s=0.25)
    assert first.process_id is not None and first.exit_code is None
    assert await _until(session, first.process_id, b"one", first.output) == b"one\n"
    with pytest.raises(RuntimeError, match=r"^stdin is not available for this process$"):
        await session.pty_write_stdin(session_id=first.process_id, chars="x")
    await session.exec("echo two > /tmp/gate; rm /tmp/gate")
    last = await session.pty_write_stdin(session_id=first.process_id, chars="", yield_time_s=30)
    assert (last.process_id, last.output, last.exit_code) == (None, b"two\n", 4)
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=first.process_id, chars="")


async def test_tty_command_runs_directly_on_a_terminal(session: SteadSession) -> None:
    command = "[ -t 0 ] && [ -t 1 ] && echo terminal; printf 'name? '; read -r name; echo got:$name; exit 7"
    first = await session.pty_exec_start(command, tty=True, yield_time_s=0.25)
    shown = await _until(session, first.process_id, b"name? ", first.output)
    assert shown == b"terminal\r\nname? "
    assert first.process_id is not None
    end = await session.pty_write_stdin(session_id=first.process_id, chars="ada\n", yield_time_s=30)
    assert (end.process_id, end.output, end.exit_code) == (None, b"ada\r\ngot:ada\r\n", 7)


async def test_another_client_continues_commands_by_number(session: SteadSession, server: Server) -> None:
    first = await session.pty_exec_start("echo ready; exec sleep 1000", tty=True, yield_time_s=0.25)
    await _until(session, first.process_id, b"ready", first.output)
    assert first.process_id is not None
    # All that another process has is the serialised state.
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as other:
        payload = json.loads(json.dumps(other.serialize_session_state(session.state)))
        again = await other.resume(other.deserialize_session_state(payload))
        assert await again.running()
        end = await again.pty_write_stdin(session_id=first.process_id, chars="\x03", yield_time_s=30)
    assert (end.process_id, end.output, end.exit_code) == (None, b"^C", 130)


async def test_commands_continue_without_their_offsets(
    session: SteadSession, client: SteadSandboxClient
) -> None:
    """After a crash, the state on disk may be older than the command."""
    payload = json.loads(json.dumps(client.serialize_session_state(session.state)))
    first = await session.pty_exec_start("echo started; exec sleep 1000", yield_time_s=0.25)
    await _until(session, first.process_id, b"started", first.output)
    assert first.process_id is not None
    again = await client.resume(client.deserialize_session_state(payload))
    assert await _until(again, first.process_id, b"started") == b"started\n"
    await session.pty_terminate_all()
    with pytest.raises(PtySessionNotFoundError):
        await session.pty_write_stdin(session_id=first.process_id, chars="")


async def test_broken_connections_are_replaced(session: SteadSession, server: Server) -> None:
    """Between commands and while one is polled. A command that may have started is not run again."""
    await session.exec("mkdir /tmp/cuts")
    async with (
        FlakyProxy(server.url) as network,
        SteadSandboxClient(api_key=server.key, base_url=network.url) as other,
    ):
        again = await other.resume(
            other.deserialize_session_state(other.serialize_session_state(session.state))
        )
        assert (await again.exec("echo one")).stdout == b"one\n"
        network.cut()
        assert (await again.exec("echo two")).stdout == b"two\n"

        first = await again.pty_exec_start(
            "echo started; while [ ! -e /tmp/cuts/end ]; do sleep 0.1; done; echo ended", yield_time_s=0.25
        )
        assert first.process_id is not None
        opened = network.connections
        poll = asyncio.create_task(
            again.pty_write_stdin(session_id=first.process_id, chars="", yield_time_s=30)
        )

        def reconnected() -> bool:
            network.cut()
            return network.connections > opened + 1

        await until(reconnected, 60)
        await session.exec("touch /tmp/cuts/end")
        end = await poll
        assert first.output + end.output == b"started\nended\n" and end.exit_code == 0

        running = asyncio.create_task(again.exec("echo ran >> /tmp/cuts/once; exec sleep 1000"))

        async def begun() -> bool:
            return (await session.exec("test -s /tmp/cuts/once")).exit_code == 0

        await until(begun, 60)
        network.cut()
        with pytest.raises(ExecTransportError) as caught:
            await running
        assert caught.value.retryable is False
        assert (await again.exec("cat /tmp/cuts/once; rm -r /tmp/cuts")).stdout == b"ran\n"


async def test_files_are_bytes_and_checked_in_the_vm(session: SteadSession) -> None:
    content = bytes(range(256)) * 100
    await session.write(Path("data/raw.bin"), io.BytesIO(content))
    assert (await session.read(Path("data/raw.bin"))).read() == content
    assert await session.read_range("data/raw.bin", offset=255, length=3) == b"\xff\0\1"
    assert await session.read_bounded(Path("data/raw.bin"), max_bytes=5) == content[:5]
    assert [entry.path for entry in await session.ls("data")] == ["/workspace/data/raw.bin"]
    await session.mv("data/raw.bin", "data/moved")
    await session.rm("data", recursive=True)
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("data/moved"))
    await session.exec("ln -s /etc out; ln -s /etc/passwd passwd")
    for path in ("out/hostname", "passwd"):
        with pytest.raises(InvalidManifestPathError):
            await session.read(Path(path))
        with pytest.raises(InvalidManifestPathError):
            await session.write(Path(path), io.BytesIO(b"x"))
    assert (await session.exec("grep -c root: /etc/passwd")).exit_code == 0
    await session.exec("rm out passwd")


async def test_files_of_another_user_obey_permissions(session: SteadSession) -> None:
    await session.exec("mkdir shared private; chmod 777 shared; chmod 700 private; echo x > private/file")
    await session.write(Path("shared/note"), io.BytesIO(b"from alice"), user="alice")
    assert (await session.exec("stat -c %U shared/note")).stdout == b"alice\n"
    with pytest.raises(Exception, match="failed to"):
        await session.read(Path("private/file"), user="alice")
    with pytest.raises(Exception, match="failed to"):
        await session.write(Path("private/file"), io.BytesIO(b"y"), user="alice")
    await session.rm("shared", recursive=True)
    await session.rm("private", recursive=True)


async def test_large_file_is_streamed(session: SteadSession) -> None:
    content = b"0123456789abcdef" * (5 << 16)
    await session.write(Path("large"), io.BytesIO(content))
    assert (await session.exec("stat -c %s large")).stdout == f"{len(content)}\n".encode()
    assert await session.read_range("large", offset=len(content) - 4, length=10) == b"cdef"
    await session.rm("large")


async def test_deleted_workspace_can_be_repaired(session: SteadSession) -> None:
    saved = (await session.read(Path("notes/todo.md"))).read()
    await session.exec("rm -rf /workspace")
    assert (await session.exec("pwd")).stdout == b"/\n"
    update = await session.pty_exec_start("pwd; mkdir /workspace", yield_time_s=30)
    assert (update.output, update.exit_code) == (b"/\n", 0)
    await session.write(Path("notes/todo.md"), io.BytesIO(saved))
    assert (await session.exec("pwd")).stdout == b"/workspace\n"


async def test_port_has_a_preview_url(session: SteadSession) -> None:
    endpoint = await session.resolve_exposed_port(8123)
    assert endpoint.tls and endpoint.url_for("ws").startswith("wss://")
    assert await session.resolve_exposed_port(8123) == endpoint


def days_left(snapshot: Snapshot) -> float:
    assert snapshot.expires_at is not None
    return (snapshot.expires_at - datetime.now(UTC)) / timedelta(days=1)


async def test_workspace_is_saved_and_continued(
    client: SteadSandboxClient, server: Server, tmp_path: Path
) -> None:
    """One session through all ways to continue it: fork, sleep, replacement from a snapshot."""
    folder = tmp_path / "folder"
    for number in range(3):
        (folder / f"part{number}").mkdir(parents=True)
        (folder / f"part{number}" / "run").write_text("#!/bin/sh\necho ran\n")
        (folder / f"part{number}" / "run").chmod(0o755)
    manifest = Manifest(
        entries={
            "app": Dir(children={"main.py": File(content=b"print('app')\n")}),
            "copied": LocalDir(src=folder),
            "secret.txt": File(content=b"token", ephemeral=True),
        },
        extra_path_grants=(SandboxPathGrant(path=str(tmp_path)),),
    )
    snapshot = LocalSnapshotSpec(base_path=tmp_path / "snapshots")
    session = await client.create(manifest=manifest, snapshot=snapshot)
    async with AsyncStead(server.key, base_url=server.url) as stead:
        try:
            await session.start()
            assert (await session.exec("copied/part2/run; cat secret.txt app/main.py")).stdout == (
                b"ran\ntokenprint('app')\n"
            )
            await session.exec(
                "python3 -m venv --without-pip venv && ln app/main.py hard && echo home > ~/kept"
            )
            server_command = await session.pty_exec_start("exec sleep 5000", yield_time_s=0.25)
            assert server_command.process_id is not None

            forks = await session.fork(2)
            assert len({fork.vm.id for fork in forks} | {session.vm.id}) == 3
            await forks[0].exec("echo fork > app/main.py")
            for fork in forks:
                assert await fork.running()
                assert (await fork.exec("pgrep -xc sleep")).exit_code == 0
            assert (await session.read(Path("app/main.py"))).read() == b"print('app')\n"
            for fork in forks:
                await fork.shutdown()

            await session.vm.suspend()
            assert await session.running()
            assert (await session.exec("cat app/main.py")).exit_code == 0

            await session.stop()
            state = session.state
            assert isinstance(state, SteadSandboxSessionState)
            saved = state.saved_snapshot_id
            assert saved is not None
            # What is kept says whose it is and ends by itself, a week after it was last used.
            kept = await stead.vms.snapshots.get(saved)
            assert (kept.purpose, kept.name) == ("agent", f"agent-{state.session_id.hex[:16]}")
            assert days_left(kept) == pytest.approx(7, abs=0.1)
            await stead.vms.snapshots.extend(saved, ttl=3600)
            assert (await session.exec("cat secret.txt")).stdout == b"token"
            payload = json.loads(json.dumps(client.serialize_session_state(session.state)))
            old = session.vm.id
            await session.shutdown()
            assert not await session.running()
            assert old not in [info.id for info in await stead.vms.list()]

            session = await client.resume(client.deserialize_session_state(payload))
            assert session.vm.id != old
            assert days_left(await stead.vms.snapshots.get(saved)) == pytest.approx(7, abs=0.1)
            await session.vm.exec("test ! -e /workspace/secret.txt", check=True)
            await session.start()
            found = await session.exec("venv/bin/python hard; cat ~/kept secret.txt; pgrep -xc sleep")
            assert found.stdout == b"app\nhome\ntoken1\n"
            end = await session.pty_write_stdin(session_id=server_command.process_id, chars="")
            assert end.process_id == server_command.process_id
        finally:
            await session.shutdown()
        ended = (await stead.vms.snapshots.extend(saved, ttl=1)).expires_at
        await until(lambda: ended is not None and datetime.now(UTC) > ended, 60)
        with pytest.raises(
            WorkspaceStartError, match=f"from what was saved: .*snapshot {saved} expired at 20"
        ):
            await client.resume(client.deserialize_session_state(payload))


async def test_key_finds_the_session_again(client: SteadSandboxClient, server: Server) -> None:
    options = SteadSandboxClientOptions(key="chat-42", pause_on_exit=True)
    assert await client.find("chat-42") is None
    async with await client.create(options=options) as session:
        await session.write(Path("kept"), io.BytesIO(b"yes"))
        vm = session.vm
    assert (await vm.info()).state == "suspended"
    async with await client.create(options=options) as again:
        assert again.vm.id == vm.id
        assert (await again.read(Path("kept"))).read() == b"yes"
    found = await client.find("chat-42")
    assert found is not None and await found.running()
    assert (await found.read(Path("kept"))).read() == b"yes"
    await found.vm.delete()
    assert not await found.running()
    assert await client.find("chat-42") is None


async def test_tar_persistence_keeps_venvs_and_hard_links(client: SteadSandboxClient, tmp_path: Path) -> None:
    options = SteadSandboxClientOptions(workspace_persistence="tar")
    session = await client.create(
        options=options, manifest=Manifest(entries={"tmp": File(content=b"", ephemeral=True)})
    )
    try:
        await session.start()
        await session.exec(
            "ln -s /usr/bin/python3 python; echo linked > one; ln one two; mkdir d; echo x > d/tmp"
        )
        archive = await session.persist_workspace()
        await session.exec("rm -rf python one two d")
        await session.hydrate_workspace(archive)
        assert (
            await session.exec("readlink python; cat one two d/tmp")
        ).stdout == b"/usr/bin/python3\nlinked\nlinked\nx\n"
        archive.seek(0)
        with archive, tarfile.open(fileobj=archive) as tar:
            assert "./tmp" not in tar.getnames()
        evil = io.BytesIO()
        with tarfile.open(fileobj=evil, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("../evil"))
        evil.seek(0)
        with pytest.raises(WorkspaceArchiveWriteError):
            await session.hydrate_workspace(evil)
    finally:
        await session.shutdown()
