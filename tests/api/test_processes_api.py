"""Background processes and forwarded ports, with a guest in memory."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.fake_api import USER, FakeApi, closed, fake_api
from support.waiting import until


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        yield api


async def test_start_write_read_and_wait(api: FakeApi) -> None:
    async with api.http() as http:
        made = (await http.post("/processes", json={"command": "cat", "stdin": True, "id": "p"})).json()
        assert made == {
            "id": "p",
            "user": "root",
            "pid": 100,
            "command": ["/bin/sh", "-c", "cat"],
            "pty": False,
            "cols": None,
            "rows": None,
            "status": "running",
            "exitCode": None,
            "signal": None,
            "timedOut": False,
            "createdAt": "2023-11-14T22:13:20.000000Z",
            "exitedAt": None,
            "offset": 0,
            "start": 0,
        }
        assert (await http.post("/processes/p/stdin", content=b"abc")).json() == {}
        assert (await http.post("/processes/p/stdin?close=true", content=b"def")).json() == {}
        assert api.session("p").stdin_closed
        page = (await http.get("/processes/p/output?offset=2&limit=3")).json()
        chunk = {"stream": "stdout", "offset": 2, "data": base64.b64encode(b"cde").decode()}
        assert (page["chunks"], page["nextOffset"], page["cut"]) == ([chunk], 5, None)
        assert page["process"]["id"] == "p"
        assert (await http.get("/processes/p/wait?timeoutMs=1")).json()["status"] == "running"
        waiting = asyncio.create_task(http.get("/processes/p/wait?timeoutMs=99999999"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await http.post("/processes/p/signal", json={"signal": "SIGTERM"})
        ended = (await waiting).json()
        assert (ended["status"], ended["exitCode"], ended["signal"]) == ("exited", 143, "SIGTERM")
        assert [each["id"] for each in (await http.get("/processes")).json()["processes"]] == ["p"]
        assert (await http.get("/processes/p")).json()["id"] == "p"
        assert (await http.delete("/processes/p")).json()["id"] == "p"
        missing = await http.get("/processes/p")
        assert (missing.status_code, missing.json()["code"]) == (404, "SESSION_NOT_FOUND")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/processes", {"command": ""}),
        ("/processes", {"command": "x", "id": "a/b"}),
        ("/processes", {"command": "x", "timeoutMs": 0}),
        ("/processes/p/signal", {"signal": "kill it"}),
        ("/processes/p/signal", {"signal": "SIGNONE"}),
    ],
)
async def test_invalid_requests_are_refused(api: FakeApi, path: str, body: dict[str, object]) -> None:
    async with api.http() as http:
        answer = await http.post(path, json=body)
    expected = "INVALID_SESSION_ID" if body.get("id") else "INVALID_REQUEST"
    assert (answer.status_code, answer.json()["code"]) == (400, expected)


async def test_a_signal_to_an_exited_process_is_an_error(api: FakeApi) -> None:
    async with api.http() as http:
        await http.post("/processes", json={"command": "exit 3", "id": "done"})
        assert (await http.get("/processes/done/wait")).json()["exitCode"] == 3
        answer = await http.post("/processes/done/signal", json={"signal": "SIGTERM"})
        assert (answer.status_code, answer.json()["code"]) == (409, "PROCESS_EXITED")
        assert answer.json()["sessionId"] == "done"
        assert (await http.delete("/processes/done")).status_code == 200


async def test_processes_of_other_linux_users(api: FakeApi) -> None:
    async with api.http(**{USER: "alice"}) as alice, api.http(**{USER: "bob"}) as bob:
        await alice.post("/processes", json={"command": "cat", "id": "hers"})
        assert (await bob.get("/processes")).json() == {"processes": []}
        refused = await bob.delete("/processes/hers")
        assert (refused.status_code, refused.json()["code"]) == (403, "SESSION_USER_MISMATCH")
        await alice.delete("/processes/hers")


async def test_attach_from_an_offset(api: FakeApi) -> None:
    async with api.http() as http:
        await http.post("/processes", json={"command": "cat", "stdin": True, "id": "a"})
        await http.post("/processes/a/stdin", content=b"abcdef")
    async with api.socket("/processes/a/attach?offset=4") as process:
        first = json.loads(await process.recv())
        assert (first["type"], first["id"], first["offset"]) == ("process", "a", 6)
        assert await process.recv() == b"\x01ef"
        await process.send(b"more")
        assert await process.recv() == b"\x01more"
        await process.send('{"type": "closeStdin"}')
        await process.send(b"exit 3")
        last = json.loads(await process.recv())
        assert (last["type"], last["exitCode"], last["status"]) == ("exited", 3, "exited")
        assert (await closed(process))[0] == 1000
    assert api.session("a").stdin_closed


# Ports


@contextlib.asynccontextmanager
async def service(api: FakeApi, port: int) -> AsyncIterator[list[bytes]]:
    """A program in the guest that reads to the end and answers with the length."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        seen.append(data)
        writer.write(b"%d bytes" % len(data))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    api.sessions.ports[port] = server.sockets[0].getsockname()
    async with server:
        yield seen
    del api.sessions.ports[port]


async def test_forwarded_connection_with_half_close(api: FakeApi) -> None:
    async with service(api, 3000) as seen, api.socket("/forward/3000") as tunnel:
        for _ in range(8):
            await tunnel.send(b"x" * 500_000)
        await tunnel.send('{"type": "eof"}')
        assert await tunnel.recv() == b"4000000 bytes"
        assert json.loads(await tunnel.recv()) == {"type": "eof"}
        assert (await closed(tunnel))[0] == 1000
        assert [len(each) for each in seen] == [4_000_000]


async def test_refused_port_is_an_answer_before_the_upgrade(api: FakeApi) -> None:
    status, body = await api.refusal("/forward/4444")
    assert (status, body["code"]) == (502, "CONNECTION_REFUSED")
    for path in ("/forward/0", "/forward/65536", "/forward/x"):
        status, body = await api.refusal(path)
        assert (status, body["code"]) == (400, "INVALID_REQUEST"), path


async def test_client_that_leaves_closes_the_connection_in_the_vm(api: FakeApi) -> None:
    async with service(api, 3000) as seen:
        async with api.socket("/forward/3000") as tunnel:
            await tunnel.send(b"half")
            await asyncio.sleep(0.1)

        async def read_to_the_end() -> list[bytes]:
            return seen

        assert await until(read_to_the_end, 60) == [b"half"]
