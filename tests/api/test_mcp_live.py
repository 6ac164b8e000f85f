"""`stead mcp` with the reference client, over both transports, and a real VM."""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
import pytest_asyncio
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from stead import AsyncStead, AsyncVm
from support.installations import Server
from support.waiting import until

STEAD = Path(sys.executable).parent / "stead"


class Tools:
    """Calls tools, and returns their structured results."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await self._client.call_tool(tool, arguments)
        assert not result.is_error, result.content
        assert isinstance(result.structured_content, dict)
        return result.structured_content

    async def error(self, tool: str, **arguments: Any) -> str:
        result = await self._client.call_tool(tool, arguments)
        assert result.is_error, result
        return result.content[0].text  # type: ignore[union-attr]


@pytest_asyncio.fixture(scope="module")
async def stead(server: Server) -> AsyncIterator[AsyncStead]:
    async with AsyncStead(server.key, base_url=server.url) as stead:
        yield stead


@pytest_asyncio.fixture(scope="module")
async def vm(stead: AsyncStead) -> AsyncIterator[AsyncVm]:
    async with await stead.vms.create(name=f"mcp-{secrets.token_hex(4)}") as vm:
        yield vm


@asynccontextmanager
async def over_stdio(server: Server) -> AsyncIterator[tuple[Client, Tools]]:
    environment = {
        "PATH": os.environ["PATH"],
        "STEAD_API_URL": server.url,
        "STEAD_API_KEY": server.key,
    }
    command = StdioServerParameters(command=str(STEAD), args=["mcp"], env=environment)
    async with Client(command, read_timeout_seconds=300) as client:
        yield client, Tools(client)


@pytest_asyncio.fixture(scope="module")
async def url(server: Server) -> AsyncIterator[str]:
    """The URL of `stead mcp --http`, which has no key of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"PATH": os.environ["PATH"], "STEAD_API_URL": server.url}
    process = await asyncio.create_subprocess_exec(STEAD, "mcp", "--http", address, env=environment)
    try:
        async with httpx2.AsyncClient() as http:

            async def listening() -> bool:
                try:
                    return (await http.get(f"http://{address}/mcp")).status_code == 401
                except httpx2.TransportError:
                    return False

            await until(listening, 120)
        yield f"http://{address}/mcp"
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGTERM


@asynccontextmanager
async def over_http(
    url: str, token: str, mode: Literal["auto", "legacy"] = "auto"
) -> AsyncIterator[tuple[Client, Tools]]:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, timeout=300) as http:
        transport = streamable_http_client(url, http_client=http)
        async with Client(transport, mode=mode, read_timeout_seconds=300) as client:
            yield client, Tools(client)


async def test_commands_and_files_over_stdio(server: Server, vm: AsyncVm) -> None:
    async with over_stdio(server) as (_, tools):
        found = await tools("vm_get", vm=vm.id)
        assert (found["id"], found["state"]) == (vm.id, "running")
        assert vm.id in [each["id"] for each in (await tools("vm_list", search=vm.id))["vms"]]

        ended = await tools("exec", vm=vm.id, command="cat; echo oops >&2; exit 3", stdin="a line\n")
        assert (ended["exit_code"], ended["stdout"], ended["stderr"]) == (3, "a line\n", "oops\n")
        line = "printf first; sleep 60"
        ended = await tools("exec", vm=vm.id, command=line, timeout_seconds=1.5)
        assert (ended["timed_out"], ended["stdout"]) == (True, "first")
        ended = await tools("exec", vm=vm.id, command="seq 1 20000", output_limit=1000)
        assert ended["stdout"].startswith("1\n2\n") and ended["stdout"].endswith("19999\n20000\n")
        assert f"[... {ended['stdout_left_out']} characters left out ...]" in ended["stdout"]
        assert len(ended["stdout"]) < 1100
        ended = await tools("exec", vm=vm.id, command="yes | head -c 1000000")
        assert len(ended["stdout"]) < 21_000, "bounded without a limit, too"

        path = f"/srv/{secrets.token_hex(4)}/note.txt"
        await tools("file_write", vm=vm.id, path=path, content="one é two é", mode="640")
        part = await tools("file_read", vm=vm.id, path=path, limit=5)
        assert (part["content"], part["next_offset"]) == ("one ", 4)
        rest = await tools("file_read", vm=vm.id, path=path, offset=part["next_offset"])
        assert (rest["content"], rest["next_offset"], rest["size"]) == ("é two é", None, 13)
        twice = await tools.error("file_edit", vm=vm.id, path=path, old_text="é", new_text="e")
        assert "occurs 2 times" in twice
        edit = await tools("file_edit", vm=vm.id, path=path, old_text="é", new_text="e", replace_all=True)
        assert edit["replacements"] == 2
        ended = await tools("exec", vm=vm.id, command=f"cat {path}; stat -c ' %a' {path}")
        assert ended["stdout"] == "one e two e 640\n"
        folder = await tools("file_list", vm=vm.id, path=str(Path(path).parent))
        assert folder["entries"] == [{"name": "note.txt", "kind": "file"}]
        await tools("file_write", vm=vm.id, path=path, content="AP8=", encoding="base64")
        binary = await tools("file_read", vm=vm.id, path=path)
        assert (binary["encoding"], binary["content"]) == ("base64", "AP8=")

        assert "FILE_NOT_FOUND" in await tools.error("file_read", vm=vm.id, path="/nowhere")
        assert "is a folder" in await tools.error("file_read", vm=vm.id, path="/srv")
        assert "VM_NOT_FOUND" in await tools.error("exec", vm="0" * 20, command="true")


async def test_background_processes_and_terminals(server: Server, url: str, vm: AsyncVm) -> None:
    async with over_http(url, server.key) as (_, tools):
        process = await tools("process_start", vm=vm.id, command="echo ready; cat; echo gone >&2; exit 4")
        place = {"vm": vm.id, "process": process["id"]}
        first = await tools("process_output", **place, wait_seconds=30)
        assert first["parts"] == [{"stream": "stdout", "text": "ready\n"}]
        nothing = await tools("process_output", **place, offset=first["next_offset"], wait_seconds=0.1)
        assert (nothing["parts"], nothing["running"]) == ([], True)
        await tools("process_write", **place, text="typed\n", close=True)
        seen: dict[str, str] = {}
        offset, running = first["next_offset"], True
        while running:
            page = await tools("process_output", **place, offset=offset, wait_seconds=30)
            for part in page["parts"]:
                seen[part["stream"]] = seen.get(part["stream"], "") + part["text"]
            offset, running = page["next_offset"], page["running"]
        assert page["exit_code"] == 4
        # Two pipes: which one the agent reads first is open.
        assert seen == {"stdout": "typed\n", "stderr": "gone\n"}

        shell = await tools("process_start", vm=vm.id, command="python3 -q", id="repl", terminal=True)
        assert shell["terminal"]
        place = {"vm": vm.id, "process": "repl"}
        await tools("process_write", **place, text="6 * 7\n")
        shown = ""
        while "42" not in shown:
            page = await tools("process_output", **place, wait_seconds=30)
            shown = "".join(part["text"] for part in page["parts"])
        ended = await tools("process_signal", **place, signal="SIGKILL", wait_seconds=30)
        assert (ended["running"], ended["exit_code"]) == (False, 137)
        listed = {
            each["id"]: each["running"] for each in (await tools("process_list", vm=vm.id))["processes"]
        }
        assert listed["repl"] is False


async def test_long_calls_report_progress_and_cancelled_ones_kill_the_command(
    server: Server, vm: AsyncVm
) -> None:
    mark = str(secrets.randbelow(10**9))

    async def started() -> bool:
        return await vm.fs.exists(f"/srv/{mark}")

    async def alive() -> bool:
        return (await vm.exec(["pgrep", "-f", f"sleep 600.{mark}"])).ok

    async with over_stdio(server) as (client, _):
        reported: list[tuple[float, str | None]] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            reported.append((progress, message))

        arguments = {"vm": vm.id, "command": "echo working; sleep 5"}
        await client.call_tool("exec", arguments, progress_callback=on_progress)
        assert len(reported) >= 2
        assert reported[-1][1] == "working"
        assert [each[0] for each in reported] == sorted({each[0] for each in reported})

        line = f"touch /srv/{mark}; exec sleep 600.{mark}"
        call = asyncio.create_task(client.call_tool("exec", {"vm": vm.id, "command": line}))
        await until(started, 60)
        assert await alive()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        async def killed() -> bool:
            return not await alive()

        await until(killed, 60)


async def test_fork_suspend_snapshot_and_url(
    server: Server, url: str, vm: AsyncVm, stead: AsyncStead
) -> None:
    async with over_http(url, server.key) as (_, tools):
        await tools("exec", vm=vm.id, command="echo before > /run/mark")
        (fork,) = (await tools("vm_fork", vm=vm.id, name="mcp-fork"))["forks"]
        try:
            ended = await tools("exec", vm="mcp-fork", command="cat /run/mark; echo after > /run/mark")
            assert ended["stdout"] == "before\n"
            assert (await tools("exec", vm=vm.id, command="cat /run/mark"))["stdout"] == "before\n"
            assert (await tools("vm_suspend", vm=fork["id"]))["state"] == "suspended"
            assert (await tools("vm_get", vm=fork["id"]))["state"] == "suspended"
            assert (await tools("exec", vm=fork["id"], command="cat /run/mark"))["stdout"] == "after\n"
        finally:
            assert (await tools("vm_delete", vm=fork["id"]))["deleted"] == fork["id"]
        assert "VM_NOT_FOUND" in await tools.error("vm_get", vm=fork["id"])

        saved = await tools("vm_snapshot", vm=vm.id, name="mcp-saved")
        try:
            assert saved["state"] == "ready"
            assert saved["id"] in [each["id"] for each in (await tools("snapshot_list"))["snapshots"]]
        finally:
            await stead.vms.snapshots.delete(saved["id"])
        preview = (await tools("port_url", vm=vm.id, port=8000))["url"]
        assert preview.startswith("https://")
        assert (await tools("port_url", vm=vm.id, port=8000))["url"] == preview


async def test_repositories(server: Server, url: str) -> None:
    async with over_http(url, server.key) as (_, tools):
        repo = await tools("repo_create", name=f"mcp-{secrets.token_hex(4)}")
        assert repo["clone_url"].endswith(repo["id"])
        files = {"src/main.py": "print('é')\n", "README.md": "# Read me\n"}
        first = await tools("repo_commit", repo=repo["id"], message="first", files=files)
        stale = await tools.error(
            "repo_commit", repo=repo["id"], message="x", files={"README.md": None}, expected_sha="0" * 40
        )
        assert "CONFLICTING_PARENT" in stale
        second = await tools(
            "repo_commit", repo=repo["name"], message="second", files={"README.md": None}, branch="main"
        )
        assert second["parents"] == [first["sha"]]
        root = await tools("repo_read", repo=repo["id"])
        assert [(each["path"], each["kind"]) for each in root["entries"]] == [("src", "folder")]
        read = await tools("repo_read", repo=repo["id"], path="src/main.py")
        assert (read["content"], read["size"]) == ("print('é')\n", 12)
        older = await tools("repo_read", repo=repo["id"], path="README.md", rev=first["sha"])
        assert older["content"] == "# Read me\n"
        (listed,) = (await tools("repo_list", search=repo["id"]))["repositories"]
        assert listed["branches"] == {"main": second["sha"]}


async def test_each_http_client_has_the_rights_of_its_own_token(
    server: Server, url: str, vm: AsyncVm, stead: AsyncStead
) -> None:
    identity = await stead.identities.create(name="mcp")
    await identity.permissions.vms.grant(vm.id, allowed_users=["nobody"])
    token = await identity.tokens.create()
    try:
        async with over_http(url, token.token) as (_, scoped), over_http(url, server.key) as (_, owner):
            ended = await scoped("exec", vm=vm.id, command="id -un", user="nobody")
            assert ended["stdout"] == "nobody\n"
            assert "Linux user root is not allowed" in await scoped.error(
                "exec", vm=vm.id, command="id -un", user="root"
            )
            assert "FORBIDDEN" in await scoped.error("vm_create")
            assert (await owner("exec", vm=vm.id, command="id -un"))["stdout"] == "root\n"
        async with httpx2.AsyncClient() as http:
            await identity.tokens.revoke(token.id)
            for unknown in (token.token, "wrong"):
                headers = {"Authorization": f"Bearer {unknown}"}
                answer = await http.post(url, json={}, headers=headers)
                assert answer.status_code == 401
                assert "UNAUTHORIZED" in answer.json()["error_description"]
    finally:
        await identity.delete()


async def test_http_clients_of_the_earlier_protocol_receive_progress(
    server: Server, url: str, vm: AsyncVm
) -> None:
    async with over_http(url, server.key, "legacy") as (client, _):
        reported: list[str | None] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            reported.append(message)

        arguments = {"vm": vm.id, "command": "echo working; sleep 3"}
        result = await client.call_tool("exec", arguments, progress_callback=on_progress)
        assert result.structured_content is not None
        assert result.structured_content["stdout"] == "working\n"
        assert reported[-1] == "working"
