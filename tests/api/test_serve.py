"""`stead serve` as a process: started, stopped, killed, started again."""

import asyncio
import base64
import json
import signal

from stead.host.vm import running_machines
from stead.machines import Machines
from stead.settings import Settings
from support.installations import other_settings
from support.run_cli import PROGRAM
from support.serve_process import client_of, end, environment, serving, start


async def test_answered_vms_survive_a_killed_server(settings: Settings, machines: Machines) -> None:
    """Killed during a create at several moments: the machine that was answered for is there with its file,
    what is listed can be used, and nothing is half there.
    """
    with other_settings(settings) as other:
        process, said = await start(other)
        key = said["key"]
        async with client_of(said["url"], key) as http:
            known = (await http.post("/v1/vms", json={"name": "known"})).json()["id"]
            path = f"/v1/vms/{known}"
            written = await http.put(f"{path}/files/%2Froot%2Fkept", json={"content": "precious"})
            assert written.status_code == 200
        for seconds in (0.05, 0.5):
            async with client_of(said["url"], key) as http:
                creating = asyncio.create_task(http.post("/v1/vms"))
                await asyncio.sleep(seconds)
                await end(process, signal.SIGKILL)
                await asyncio.gather(creating, return_exceptions=True)
            process, said = await start(other)
            assert said["key"] is None
            async with client_of(said["url"], key) as http:
                listed = (await http.get("/v1/vms")).json()["vms"]
                assert known in [vm["id"] for vm in listed]
                assert {vm["state"] for vm in listed} == {"running"}
                for vm in listed:
                    said_in = await http.post(f"/v1/vms/{vm['id']}/exec-await", json={"command": "echo ok"})
                    assert said_in.json()["stdout"] == "ok\n"
                    if vm["id"] != known:
                        await http.delete(f"/v1/vms/{vm['id']}")
        async with client_of(said["url"], key) as http:
            kept = (await http.get(f"/v1/vms/{known}/files/%2Froot%2Fkept")).json()
            assert kept["content"] == "precious"
            assert (await http.delete(f"/v1/vms/{known}")).status_code == 200
        assert await end(process) == 0


async def test_vms_keep_running_while_the_server_is_stopped(settings: Settings, machines: Machines) -> None:
    """SIGTERM: a running call finishes, the exit code is 0, the VM keeps running."""
    with other_settings(settings) as other:
        async with serving(other) as (process, said), client_of(said["url"], said["key"]) as http:
            vm = (await http.post("/v1/vms")).json()["id"]
            beat = "while :; do date +%s%N > /run/new; mv /run/new /run/beat; sleep 0.2; done"
            count = f"nohup sh -c '{beat}' > /dev/null 2>&1 &"
            await http.post(f"/v1/vms/{vm}/exec-await", json={"command": count})
            command = {"command": "echo begun; sleep 2; echo finished"}
            async with http.stream("POST", f"/v1/vms/{vm}/exec-stream", json=command) as stream:
                lines = stream.aiter_lines()
                assert json.loads(await anext(lines))["type"] == "stdout"
                assert await end(process) == 0
                said_last, ended = [json.loads(line) async for line in lines]
            assert base64.b64decode(said_last["data"]) == b"finished\n" and ended["statusCode"] == 0
        assert list(running_machines(other).values()) == [vm]
        async with serving(other) as (process, again), client_of(again["url"], said["key"]) as http:
            command = {"command": "a=$(cat /run/beat); sleep 1; [ $(cat /run/beat) -gt $a ] && echo alive"}
            answer = await http.post(f"/v1/vms/{vm}/exec-await", json=command)
            assert answer.json()["stdout"] == "alive\n"
            await http.delete(f"/v1/vms/{vm}")


async def test_second_server_reports_the_conflict(settings: Settings, machines: Machines) -> None:
    async def refused(where: dict[str, str]) -> bytes:
        with other_settings(settings) as third:
            second = await asyncio.create_subprocess_exec(
                PROGRAM,
                "serve",
                env=environment(third) | where,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await asyncio.wait_for(second.communicate(), 60)
        assert second.returncode == 1
        assert b"Traceback" not in errors
        return errors

    with other_settings(settings) as other:
        async with serving(other) as (_, said):
            folder = {"STEAD_DATA": str(other.data), "STEAD_LISTEN": "127.0.0.1:0"}
            assert b"another Stead process uses" in await refused(folder)
            port = {"STEAD_LISTEN": said["url"].removeprefix("http://")}
            assert b"cannot listen on" in await refused(port)
