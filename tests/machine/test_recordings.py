"""Recordings of a real machine: what was printed is kept with it."""

import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import httpx2
import pytest
import pytest_asyncio

from stead.errors import GuestError, GuestUnreachable, InvalidRequest
from stead.guest import recordings
from stead.machines import Machine
from stead.machines.records import Properties
from support.installations import Server
from support.waiting import until

T = TypeVar("T")


@pytest_asyncio.fixture(scope="module")
async def alice(shared: Machine) -> str:
    assert (await shared.exec("useradd --create-home alice")).ok
    return "alice"


async def on(machine: Machine, call: Callable[..., Awaitable[T]], *rest: object, **options: object) -> T:
    async with machine.using() as agent:
        return await call(agent, *rest, **options)


async def texts(machine: Machine, name: str, user: str | None = None) -> list[str]:
    return [line.text for line in await on(machine, recordings.logs, name, user)]


async def test_output_is_recorded_and_returned(shared: Machine) -> None:
    """Two commands in one terminal: both streams as they came, in lines with their times."""
    before = time.time() - 60
    first = await on(shared, recordings.run, "main", "printf 'one\\r\\ntw'; sleep 0.3; echo o; exit 3")
    assert (first.stdout, first.exit_code) == (b"one\r\ntwo\n", 3)
    second = await on(shared, recordings.run, "main", ["sh", "-c", "echo three >&2; printf four"], cwd="/tmp")
    assert (second.stdout, second.stderr) == (b"four", b"three\n")
    kept = await on(shared, recordings.output, "main")
    assert kept in (b"one\r\ntwo\nthree\nfour", b"one\r\ntwo\nfourthree\n")
    lines = list(await on(shared, recordings.logs, "main"))
    assert [line.text for line in lines[:2]] == ["one", "two"]
    times = [line.at for line in lines]
    assert before < times[0] <= times[1] <= times[2] < time.time() + 60
    (info,) = [each for each in await on(shared, recordings.find) if each.name == "main"]
    assert (info.user, info.status) == ("root", "exited")
    assert before < info.created_at <= times[0] + 1


async def test_output_of_background_processes_is_recorded(shared: Machine) -> None:
    result = await on(shared, recordings.run, "server", "(sleep 1; echo ready) & echo begun")
    assert result.stdout == b"begun\n"

    async def status() -> str:
        return next(each.status for each in await on(shared, recordings.find) if each.name == "server")

    assert await status() == "running"

    async def ended() -> bool:
        return await status() == "exited"

    await until(ended, 60)
    assert await texts(shared, "server") == ["begun", "ready"]


async def test_users_see_only_their_own_recordings(shared: Machine, alice: str) -> None:
    await on(shared, recordings.run, "hers", "id -un", user=alice)
    await on(shared, recordings.run, "roots", "id -un")
    assert [each.name for each in await on(shared, recordings.find, alice)] == ["hers"]
    assert {"hers", "roots"} <= {each.name for each in await on(shared, recordings.find)}
    assert await texts(shared, "hers", alice) == await texts(shared, "hers") == ["alice"]
    with pytest.raises(GuestError) as error:
        await on(shared, recordings.logs, "roots", alice)
    assert error.value.code == "not_found"
    with pytest.raises(GuestError) as error:
        await on(shared, recordings.run, "roots", "true", user=alice)
    assert error.value.code == "permission_denied"


async def test_invalid_terminal_names(shared: Machine) -> None:
    for name in ("", ".", "../etc", "a b", "a" * 65, "ä"):
        with pytest.raises(InvalidRequest):
            await on(shared, recordings.run, name, "true")
        with pytest.raises(GuestError):
            await on(shared, recordings.output, name)


async def test_the_end_of_a_long_output_is_kept(shared: Machine) -> None:
    result = await on(shared, recordings.run, "long", "seq 1 400000", timeout=60)
    kept = await on(shared, recordings.output, "long")
    assert len(kept) < len(result.stdout)
    assert result.stdout.endswith(kept[-500_000:])


async def test_recordings_survive_suspend_and_fork(machine: Machine) -> None:
    """Through a fork, through sleep in the middle of a command, through a restart of the agent."""
    await on(machine, recordings.run, "main", "echo before; (sleep 2; echo after) &")
    (child,) = await machine.fork()
    await on(child, recordings.run, "main", "echo child")
    await machine.suspend()

    async def done() -> bool:
        return await texts(machine, "main") == ["before", "after"]

    await until(done, 60)

    async def done_in_child() -> bool:
        return sorted(await texts(child, "main")) == ["after", "before", "child"]

    await until(done_in_child, 60)
    await child.delete()
    pid = "systemctl show --property MainPID --value stead-agent"
    before = await machine.exec(pid)
    with contextlib.suppress(GuestUnreachable):
        await machine.exec("systemctl --no-block restart stead-agent")

    async def restarted() -> bool:
        with contextlib.suppress(GuestUnreachable):
            return (await machine.exec(pid)).stdout not in (before.stdout, b"0\n")
        return False

    await until(restarted, 60)
    assert await texts(machine, "main") == ["before", "after"]
    (info,) = await on(machine, recordings.find)
    assert info.status == "exited"


async def test_recordings_over_the_wire(server: Server) -> None:
    machine = await server.installation.machines.create(Properties(account=server.account))
    async with httpx2.AsyncClient(
        base_url=f"{server.url}/v1/vms/{machine.id}",
        headers={"Authorization": f"Bearer {server.key}"},
        timeout=60,
    ) as http:
        body = {"command": "printf 'one\\ntwo'", "terminal": "main", "timeoutMs": None}
        assert (await http.post("/exec-await", json=body)).json()["stdout"] == "one\ntwo"
        (listed,) = (await http.get("/terminals")).json()["terminals"]
        assert listed == {"name": "main", "status": "exited", "created": listed["created"]}
        logs = (await http.get("/terminals/main/logs")).json()["logs"]
        assert [line["line"] for line in logs] == ["one", "two"]
        moment = datetime.fromisoformat(logs[0]["timestamp"])
        assert abs((moment - datetime.now(UTC)).total_seconds()) < 60
        assert (await http.get("/terminals/main/xterm-256color")).json() == {"output": "one\ntwo"}
        missing = await http.get("/terminals/none/logs")
        assert (missing.status_code, missing.json()["code"]) == (404, "NOT_FOUND")
    await machine.delete()
