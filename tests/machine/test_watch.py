"""Changes of a real machine's files, told as they happen: to root, to others, to one who reads slowly."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator

import httpx2
import pytest
import pytest_asyncio

from stead.api import watching
from stead.errors import GuestError, GuestUnreachable
from stead.guest.watching import FileEvent
from stead.machines import Machine
from stead.machines.records import Properties
from support.installations import Server
from support.waiting import until

Events = AsyncGenerator[FileEvent, None]


@pytest_asyncio.fixture(scope="module")
async def alice(shared: Machine) -> str:
    assert (await shared.exec("useradd --create-home alice")).ok
    return "alice"


async def told(events: Events, folder: str, last: str) -> list[str]:
    """What is told of a folder, as "kind name", up to the line that is the last one awaited."""
    seen: list[str] = []
    try:
        async with asyncio.timeout(60):
            async for event in events:
                if event.kind == "overflow":
                    seen.append("overflow")
                elif event.path.startswith(f"{folder}/"):
                    seen.append(f"{event.kind} {event.path.removeprefix(f'{folder}/')}")
                if seen and seen[-1] == last:
                    return seen
    except TimeoutError:
        pytest.fail(f"{last!r} was not told, only {seen}")
    pytest.fail(f"the events ended before {last!r}: {seen}")


async def watches(machine: Machine) -> int:
    """How many watches the guest holds open."""
    count = await machine.exec("ls -l /proc/$(systemctl show --property MainPID --value stead-agent)/fd")
    return count.stdout.count(b"fanotify")


async def test_changes_in_new_folders_arrive_in_order(shared: Machine, folder: str) -> None:
    """A file is made, written, renamed and removed in folders that did not exist when the watch began."""
    async with shared.watch() as events:
        await shared.exec(f"mkdir -p {folder}/a/b && : >{folder}/a/b/file")
        assert await told(events, folder, "create a/b/file") == ["create a", "create a/b", "create a/b/file"]
        await shared.exec(f"echo text >>{folder}/a/b/file")
        assert await told(events, folder, "change a/b/file") == ["change a/b/file"]
        await shared.exec(f"mv {folder}/a/b/file {folder}/a/name")
        assert await told(events, folder, "moved_to a/name") == ["moved_from a/b/file", "moved_to a/name"]
        await shared.exec(f"mv {folder}/a {folder}/c; chmod 700 {folder}/c/name")
        assert await told(events, folder, "change c/name") == ["moved_from a", "moved_to c", "change c/name"]
        await shared.exec(f"rm -r {folder}/c")
        deleted = await told(events, folder, "delete c")
        assert sorted(deleted) == ["delete c", "delete c/b", "delete c/name"]


async def test_files_written_through_the_api_are_reported_once(shared: Machine, folder: str) -> None:
    """What the agent does on the way, and its own files, are nobody's business."""
    async with shared.watch() as events:
        await shared.files().write(f"{folder}/written", b"content")
        await shared.exec("touch /var/lib/stead/own; rm /var/lib/stead/own")
        await shared.files().make_folder(f"{folder}/made")
        seen = []
        async for event in events:
            if event.path.startswith((folder, "/var/lib/stead")):
                seen.append(event)
            if event.path == f"{folder}/made":
                break
    assert seen == [
        FileEvent("moved_to", f"{folder}/written"),
        FileEvent("create", f"{folder}/made"),
    ]


async def test_names_may_be_any_bytes(shared: Machine, folder: str) -> None:
    async with shared.watch() as events:
        name = "new\nline \udcff\u2603"
        await shared.files().write(f"{folder}/{name}", b"")
        await told(events, folder, f"moved_to {name}")


async def test_a_user_sees_changes_only_in_folders_it_may_list(
    shared: Machine, folder: str, alice: str
) -> None:
    await shared.exec(f"mkdir {folder}/open {folder}/closed && chmod 700 {folder}/closed")
    async with shared.watch(alice) as events:
        await shared.exec(f": >/root/secret; : >{folder}/closed/file; : >{folder}/open/file; rm /root/secret")
        await shared.exec(f": >{folder}/end", user=alice)
        assert await told(events, folder, "create end") == ["create open/file", "create end"]
    with pytest.raises(GuestError, match="mallory"):
        async with shared.watch("mallory"):
            pass


async def test_two_concurrent_watches_leave_nothing_behind(shared: Machine, folder: str, alice: str) -> None:
    before = await watches(shared)
    async with shared.watch() as first:
        async with shared.watch(alice) as second:
            await shared.exec(f": >{folder}/one")
            assert await told(first, folder, "create one") == ["create one"]
            assert await told(second, folder, "create one") == ["create one"]
            assert await watches(shared) == before + 2
        await shared.exec(f": >{folder}/two")
        assert await told(first, folder, "create two") == ["create two"]

    async def none() -> bool:
        return await watches(shared) == before

    await until(none, 60)


async def test_a_slow_reader_gets_an_overflow_event(shared: Machine, folder: str) -> None:
    """Nothing grows for somebody who does not read: what does not fit is lost, and that is said."""
    flood = """import os, sys
for number in range(3000):
    os.close(os.open(f"{sys.argv[1]}/{number:0200}", os.O_CREAT, 0o600))
"""
    limit = "/proc/sys/fs/fanotify/max_queued_events"
    await shared.exec(f"cp {limit} /run/limit; echo 100 >{limit}")
    async with shared.watch() as events:
        await shared.exec(f"cat /run/limit >{limit}")
        assert (await shared.exec(["python3", "-c", flood, folder])).ok
        seen = await told(events, folder, "overflow")
        await shared.files().write(f"{folder}/end", b"")
        seen += await told(events, folder, "moved_to end")
    assert len(seen) < 3000


async def test_suspending_ends_the_watch(machine: Machine) -> None:
    """Nobody watches any more after a machine woke, and in its forks nobody ever did."""
    async with machine.watch() as events:
        (child,) = await machine.fork()
        assert await watches(child) == 0
        await child.delete()
        assert await watches(machine) == 1
        await machine.suspend()
        with pytest.raises(GuestUnreachable):
            async for _ in events:
                pass
    assert await watches(machine) == 0


async def test_cancelling_ends_the_watch(shared: Machine) -> None:
    before = await watches(shared)
    began = asyncio.Event()

    async def follow() -> None:
        async with shared.watch() as events:
            began.set()
            async for _ in events:
                pass

    task = asyncio.create_task(follow())
    await began.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    async def none() -> bool:
        return await watches(shared) == before

    await until(none, 60)


@pytest_asyncio.fixture(scope="module")
async def served(server: Server) -> AsyncIterator[Machine]:
    """A machine that the API knows an owner of."""
    machine = await server.installation.machines.create(Properties(account=server.account))
    yield machine
    await machine.delete()


@contextlib.asynccontextmanager
async def posted(server: Server, machine: Machine, **headers: str) -> AsyncIterator[httpx2.Response]:
    async with (
        httpx2.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {server.key}"}) as http,
        http.stream("POST", f"/v1/vms/{machine.id}/watch-files", headers=headers, timeout=60) as response,
    ):
        yield response


async def test_the_api_uses_the_event_names_of_node(server: Server, served: Machine) -> None:
    """Lines come as things happen; when the client leaves, nobody watches any more."""
    async with posted(server, served) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        events = (json.loads(line) async for line in answer.aiter_lines() if "/srv/" in line)
        for command, told in (
            ("mkdir /srv/new", [("rename", "/srv/new")]),
            (": >/srv/new/file", [("rename", "/srv/new/file")]),
            ("echo text >>/srv/new/file", [("change", "/srv/new/file")]),
            ("mv /srv/new/file /srv/file", [("rename", "/srv/new/file"), ("rename", "/srv/file")]),
            ("rm /srv/file", [("rename", "/srv/file")]),
        ):
            await served.exec(command)
            for kind, path in told:
                assert await anext(events) == {"eventType": kind, "filename": path}
        assert await watches(served) == 1

    async def none() -> bool:
        return await watches(served) == 0

    await until(none, 60)


async def test_an_idle_watch_sends_keep_alives(
    server: Server, served: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_QUIET", 0.2)
    async with posted(server, served) as answer:
        assert await anext(answer.aiter_raw()) == b"\n"


def test_the_api_reports_an_overflow() -> None:
    lost = watching._line(FileEvent("overflow", "/"))
    assert json.loads(lost) == {"eventType": "change", "filename": "/", "overflow": True}


async def test_the_api_refuses_before_it_answers(server: Server, served: Machine) -> None:
    async with posted(server, served, **{"X-Freestyle-Vm-Linux-User-Id": "mallory"}) as answer:
        assert answer.status_code == 404
        assert json.loads(await answer.aread())["code"] == "USER_NOT_FOUND"


async def test_the_response_ends_when_the_vm_is_suspended(server: Server, served: Machine) -> None:
    async with posted(server, served) as answer:
        await served.suspend()
        assert (await answer.aread()).strip() == b""
