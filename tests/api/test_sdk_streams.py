"""Streams and files of the SDK, with both clients."""

import asyncio
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from stead import AsyncStead
from stead.sdk import errors
from stead.sdk.models import Exited, Output
from support.scripted_server import Drop, Pieces, Reply, scripted
from support.sdk_calls import VM, first, line, said
from support.sdk_clients import Client, attempt, close, done


async def test_exec_stream_decodes_events_across_chunks(client: Client) -> None:
    """Chunks end anywhere: within a line, within a character."""
    coin = "€".encode()
    whole = (
        said("stdout", b"a" + coin[:1])
        + b"\n"
        + line("news", about="something newer than this client")
        + said("stderr", b"oops")
        + said("stdout", coin[1:])
        + said("stdout", b"\xff")
        + said("stderr", coin[:2])
        + line("exit", statusCode=137, signal="SIGKILL", timedOut=True, durationMs=1500)
    )
    for size in (1, 7, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        with scripted(Pieces(pieces)) as server:
            stead = client(server.url)
            found = await done(stead.vms.ref(VM).exec_stream("x", timeout=60))
            await close(stead)
        assert found[:-1] == [
            Output("stdout", b"a" + coin[:1], "a"),
            Output("stderr", b"oops", "oops"),
            Output("stdout", coin[1:], "€"),
            Output("stdout", b"\xff", "\ufffd"),
            Output("stderr", coin[:2], ""),
            Output("stderr", b"", "\ufffd"),
        ]
        assert found[-1] == Exited(137, "SIGKILL", True, 1.5)
        assert server.seen[0].target == f"/v1/vms/{VM}/exec-stream"


@pytest.mark.parametrize("complete", [True, False])
async def test_exec_stream_that_is_cut_is_server_unreachable(client: Client, complete: bool) -> None:
    whole = said("stdout", b"begun")
    for pieces in ([whole], [whole, whole[: len(whole) // 2]]):
        with scripted(Pieces(pieces, complete=complete)) as server:
            stead = client(server.url)
            with pytest.raises(errors.ServerUnreachable) as caught:
                await done(stead.vms.ref(VM).exec_stream("x"))
            assert caught.value.sent and not caught.value.retryable
            await close(stead)


async def test_error_event_of_a_lost_vm_is_the_matching_error(client: Client) -> None:
    gone = line("error", code="VM_NOT_RUNNING", message="the VM was stopped")
    with scripted(Pieces([said("stdout", b"begun"), gone]), Reply(404, {"code": "VM_NOT_FOUND"})) as server:
        stead = client(server.url)
        with pytest.raises(errors.VmNotRunning, match="the VM was stopped"):
            await done(stead.vms.ref(VM).exec_stream("x"))
        with pytest.raises(errors.VmNotFound):
            await done(stead.vms.ref(VM).exec_stream("x"))
        await close(stead)


async def test_error_event_of_a_stopping_server_is_the_matching_error(client: Client) -> None:
    """The command had started, so that the error is not retryable, whatever its code."""
    stopped = line("error", code="SERVICE_UNAVAILABLE", message="the server is stopping")
    with scripted(Pieces([said("stdout", b"begun"), stopped]), Pieces([stopped])) as server:
        stead = client(server.url)
        with pytest.raises(errors.ServiceUnavailable, match="the server is stopping") as caught:
            await done(stead.vms.ref(VM).exec_stream("x"))
        assert not caught.value.retryable
        with pytest.raises(errors.ServiceUnavailable):
            await done(stead.vms.ref(VM).fs.watch())
        await close(stead)


async def test_closing_a_stream_closes_its_connection(client: Client) -> None:
    """The server kills the command when the connection closes."""
    step = Pieces([said("stdout", b"begun")], hold=True)
    with scripted(step) as server:
        stead = client(server.url)
        event = await first(stead.vms.ref(VM).exec_stream("x"))
        assert event.text == "begun"
        assert await asyncio.to_thread(step.gone.wait, 5)
        await close(stead)


async def test_watch_yields_file_events(client: Client) -> None:
    change = b'{"eventType": "change", "filename": "/etc/hosts"}\n'
    last = b'{"eventType": "rename", "filename": "/tmp/x", "overflow": true}'
    with scripted(Pieces([b"\n", change + b"\n\n", last])) as server:
        stead = client(server.url)
        found = await done(stead.vms.ref(VM).fs.watch())
        await close(stead)
    assert [(event.event_type, event.filename, event.overflow) for event in found] == [
        ("change", "/etc/hosts", False),
        ("rename", "/tmp/x", True),
    ]


async def test_following_logs_yields_each_new_line_once(client: Client) -> None:
    """Lines from before the call are skipped, and lines that the next query returns again."""

    def entry(second: int) -> dict[str, str]:
        return {"timestamp": f"2026-01-01T00:00:{second:02}.500000Z", "message": f"line {second}"}

    steps = [
        Reply(content={"logs": [entry(1)]}),
        Reply(content={"logs": [entry(1), entry(2)], "nextPageToken": "p"}),
        Reply(content={"logs": [entry(3)]}),
        Reply(content={"logs": [entry(3)]}),
        Reply(content={"logs": [entry(3), entry(4)]}),
    ]
    with scripted(*steps) as server:
        stead = client(server.url)
        stream = stead.logs.stream(vm_id=VM, interval=0.01)
        found = [
            str(await done(anext(stream) if hasattr(stream, "__anext__") else next(stream))) for _ in range(3)
        ]
        await close(stream)
        await close(stead)
    assert found == ["line 2", "line 3", "line 4"]
    assert "startTime=2026-01-01T00%3A00%3A03.500000Z" in server.seen[-1].target


async def test_paths_are_percent_encoded(client: Client) -> None:
    path = "/srv/a b/ü?#%2F/\udcff"
    _, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.write(path, b"\x00data", mode=0o640), Reply()
    )
    encoded = "%2Fsrv%2Fa%20b%2F%C3%BC%3F%23%252F%2F%FF"
    assert seen[0].target == f"/v1/vms/{VM}/files/{encoded}?mode=0640"
    assert seen[0].body == b"\x00data" and seen[0].headers["content-length"] == "5"
    assert seen[0].headers["content-type"] == "application/octet-stream"


async def test_read_returns_bytes(client: Client) -> None:
    data, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.read("/x"), Drop(), Reply(content=b"\xff\x00")
    )
    assert data == b"\xff\x00"
    assert seen[1].headers["accept"] == "application/octet-stream"
    error, _ = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.read("/x"), Reply(404, {"code": "FILE_NOT_FOUND"})
    )
    assert isinstance(error, errors.FileNotFound)


async def test_exists_is_false_for_missing_files_only(client: Client) -> None:
    """A missing VM, or a file without permission, is an error."""

    def ask(stead: Any) -> Any:
        return stead.vms.ref(VM).fs.exists("/x")

    facts = {"name": "x", "kind": "directory", "size": 1, "mode": 0o755, "user": "root", "mtimeMs": 1000.0}
    assert (await attempt(client, ask, Reply(content=facts)))[0] is True
    assert (await attempt(client, ask, Reply(404, {"code": "FILE_NOT_FOUND"})))[0] is False
    error, _ = await attempt(client, ask, Reply(404, {"code": "VM_NOT_FOUND"}))
    assert isinstance(error, errors.VmNotFound)


async def test_read_dir_of_a_file_is_not_a_directory_error(client: Client) -> None:
    with scripted(Reply(content={"content": "", "encoding": "utf8"})) as server:
        stead = client(server.url)
        with pytest.raises(NotADirectoryError):
            await done(stead.vms.ref(VM).fs.read_dir("/etc/hosts"))
        await close(stead)


async def test_upload_is_retried_from_the_start_of_the_file(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.write_bytes(b"x" * 300_000)
    file.chmod(0o755)
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).fs.upload(file, "/opt/"), Drop(), Reply())
    assert [len(request.body) for request in seen] == [300_000, 300_000]
    assert seen[1].target == f"/v1/vms/{VM}/files/%2Fopt%2Ftool?mode=0755"


async def test_write_from_an_iterator_is_not_retried(client: Client) -> None:
    with scripted(Drop(), Reply()) as server:
        stead = client(server.url)
        is_async = isinstance(stead, AsyncStead)

        async def later() -> Any:
            yield b"only once"

        source: Any = later() if is_async else iter([b"only once"])
        with pytest.raises(errors.ServerUnreachable):
            await done(stead.vms.ref(VM).fs.write("/x", source))
        await close(stead)
    assert [request.body for request in server.seen] == [b"only once"]


async def test_folder_is_uploaded_as_a_tar_archive(client: Client, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(b"y" * 1000)
    (tmp_path / "link").symlink_to("sub/data")
    (tmp_path / "empty").touch()
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).fs.upload(tmp_path, "/srv"), Reply())
    assert seen[0].target == f"/v1/vms/{VM}/archives/%2Fsrv"
    assert seen[0].headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(seen[0].body)) as tar:
        assert sorted(tar.getnames()) == ["empty", "link", "sub", "sub/data"]
        content = tar.extractfile("sub/data")
        assert content is not None and content.read() == b"y" * 1000
        assert tar.getmember("link").linkname == "sub/data"
        assert {entry.uid for entry in tar} == {0}


async def test_interrupted_download_keeps_the_old_file(client: Client, tmp_path: Path) -> None:
    target = tmp_path / "report"
    target.write_text("old")
    facts = Reply(content={"name": "report", "kind": "file", "size": 9, "mode": 0o6755})

    def fetch(stead: Any) -> Any:
        return stead.vms.ref(VM).fs.download("/srv/report", tmp_path)

    error, _ = await attempt(client, fetch, facts, Pieces([b"new"], complete=False))
    assert isinstance(error, errors.ServerUnreachable)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    skipped, _ = await attempt(client, fetch, facts, Pieces([b"new ", b"report"]))
    assert skipped == [] and target.read_text() == "new report"
    assert target.stat().st_mode & 0o7777 == 0o755 and list(tmp_path.iterdir()) == [target]
