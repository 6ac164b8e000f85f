"""VMs of the SDK, with both clients."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stead import AsyncStead, Stead
from stead.sdk import errors
from support.scripted_server import Drop, Pieces, Reply, scripted
from support.sdk_calls import CREATED, VM, said
from support.sdk_clients import Client, attempt, close, done


async def used(vm: Any, error: BaseException | None) -> None:
    """Use a VM in a `with` statement whose body raises."""
    if hasattr(vm, "__aenter__"):
        async with vm:
            if error is not None:
                raise error
    else:
        with vm:
            if error is not None:
                raise error


async def test_context_manager_deletes_the_vm(client: Client) -> None:
    with scripted(Reply(), Reply(404, {"code": "VM_NOT_FOUND"})) as server:
        stead = client(server.url)
        await used(stead.vms.ref(VM), None)
        await used(stead.vms.ref(VM), None)
        await close(stead)
    assert [request.method for request in server.seen] == ["DELETE", "DELETE"]


async def test_failed_delete_does_not_hide_an_earlier_error(client: Client) -> None:
    refused = Reply(403, {"code": "FORBIDDEN", "message": "not yours"})
    with scripted(refused, refused) as server:
        stead = client(server.url)
        with pytest.raises(ZeroDivisionError) as caught:
            await used(stead.vms.ref(VM), ZeroDivisionError("the body"))
        assert "not yours" in caught.value.__notes__[0]
        with pytest.raises(errors.Forbidden):
            await used(stead.vms.ref(VM), None)
        await close(stead)


async def test_cancelled_task_deletes_its_vm() -> None:
    with scripted(CREATED, Pieces([said("stdout", b"begun")], hold=True), Reply()) as server:
        begun = asyncio.Event()

        async def work() -> None:
            async with AsyncStead("key", base_url=server.url) as stead, await stead.vms.create() as vm:
                async for _ in vm.exec_stream("sleep inf"):
                    begun.set()

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [request.method for request in server.seen] == ["POST", "POST", "DELETE"]


async def test_unknown_options_of_commands_are_refused() -> None:
    vm = AsyncStead("key", base_url="http://127.0.0.1:9").vms.ref(VM)
    with pytest.raises(TypeError, match="timout"):
        await vm.exec("true", timout=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="timout"):
        vm.exec_stream("true", timout=1)  # type: ignore[call-arg]


async def test_fork_returns_vms(client: Client) -> None:
    answer = {"vmId": VM, "forks": [{"id": "fork1", "domains": []}, {"id": "fork2"}]}
    forks, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fork(count=2, persistence="ephemeral"), Reply(content=answer)
    )
    assert [fork.id for fork in forks] == ["fork1", "fork2"]
    assert seen[0].json == {"count": 2, "persistence": {"type": "ephemeral"}}


async def test_fork_names_its_forks(client: Client) -> None:
    answer = {"vmId": VM, "forks": [{"id": "fork1", "name": "try-1"}, {"id": "fork2", "name": "try-2"}]}
    forks, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fork(count=2, name="try"), Reply(content=answer)
    )
    assert seen[0].json == {"count": 2, "name": "try"}
    assert [fork.name for fork in forks] == ["try-1", "try-2"]


async def test_rename_returns_the_new_info(client: Client) -> None:
    answer = Reply(content={"id": VM, "state": "running", "name": "web"})
    info, seen = await attempt(client, lambda stead: stead.vms.ref(VM).rename("web"), Drop(), answer)
    assert info.name == "web"
    assert [(request.method, request.json) for request in seen] == [("PATCH", {"name": "web"})] * 2


async def test_move_sends_both_paths_once_as_the_linux_user(client: Client) -> None:
    def move(stead: Any) -> Any:
        return stead.vms.ref(VM).user("alice").fs.move("/srv/a", Path("/srv/b"))

    _, seen = await attempt(client, move, Reply())
    assert seen[0].target == f"/v1/vms/{VM}/move" and seen[0].json == {"from": "/srv/a", "to": "/srv/b"}
    assert seen[0].headers["x-freestyle-vm-linux-user-id"] == "alice"
    error, seen = await attempt(client, move, Drop(), Reply())
    assert isinstance(error, errors.ServerUnreachable) and len(seen) == 1
    _, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.move("/a", "/b", overwrite=True), Reply()
    )
    assert seen[0].json == {"from": "/a", "to": "/b", "overwrite": True}


async def test_idle_timeout_none_differs_from_not_given(client: Client) -> None:
    """Without the argument the server decides; None disables the timeout."""
    _, seen = await attempt(client, lambda stead: stead.vms.create(idle_timeout_seconds=None), CREATED)
    assert seen[0].json == {"idleTimeoutSeconds": None}
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).start(), Reply())
    assert seen[0].json == {}


def test_ids_cannot_change_the_path() -> None:
    """An empty id would address the collection, dots a parent path."""
    with Stead("key", base_url="http://127.0.0.1:1") as stead:
        for vm_id in ("", ".", ".."):
            with pytest.raises(errors.InvalidArgument, match="invalid id or path"):
                stead.vms.ref(vm_id).delete()


async def test_fetch_sends_any_request(client: Client) -> None:
    answer, seen = await attempt(
        client,
        lambda stead: stead.fetch("/v1/{odd}/x", method="post", json={"a": 1}, query={"b": True, "c": None}),
        Reply(404, {"code": "NOT_FOUND"}),
    )
    assert answer.status_code == 404 and answer.json() == {"code": "NOT_FOUND"}
    assert seen[0].method == "POST" and seen[0].json == {"a": 1}
    assert seen[0].target == "/v1/%7Bodd%7D/x?b=true"
    assert seen[0].headers["authorization"] == "Bearer key"


async def test_lifetimes_of_snapshots(client: Client) -> None:
    snapshot = f"sc-{VM}"
    row = Reply(content={"snapshotId": snapshot, "expiresAt": "2033-01-31T12:00:00.5Z", "purpose": "agent"})
    moment = datetime(2033, 1, 31, 12, tzinfo=UTC)
    with scripted(row, row, row, Reply(), row, Reply(), row) as server:
        stead = client(server.url)
        vm = stead.vms.ref(VM)
        await done(vm.snapshot(ttl=timedelta(days=7), purpose="agent"))
        await done(vm.snapshot(expires_at=moment))
        await done(stead.vms.snapshots.ensure({"aptDeps": ["git"]}, ttl=90.2))
        extended = await done(stead.vms.snapshots.extend(snapshot, ttl=60))
        await done(stead.vms.snapshots.extend(snapshot, expires_at=None))
        for wrong in ({}, {"ttl": 1, "expires_at": moment}):
            with pytest.raises(ValueError, match="give"):
                await done(stead.vms.snapshots.extend(snapshot, **wrong))
        await close(stead)
    assert extended.expires_at == moment.replace(microsecond=500_000) and extended.purpose == "agent"
    bodies = [request.json for request in server.seen if request.method != "GET"]
    assert bodies[0] == {"ttlSeconds": 7 * 86400, "purpose": "agent"}
    assert datetime.fromisoformat(bodies[1]["expiresAt"]) == moment
    assert bodies[2] == {"spec": {"aptDeps": ["git"]}, "ttlSeconds": 91}
    assert bodies[3:] == [{"ttlSeconds": 60}, {"expiresAt": None}]
