"""Logs over the HTTP API: of VMs, services and lifecycle events."""

import os
import signal
from typing import Any

import httpx2

from stead.api.server import running
from stead.machines import Ephemeral, Machine, Machines, State
from stead.machines.records import Properties
from stead.settings import Settings
from support.api_calls import another_account, refused
from support.installations import Server, another_installation
from support.run_cli import Shell
from support.serve_process import client_of
from support.waiting import until


async def test_logs_of_vms_and_services(http: httpx2.AsyncClient, vm: Machine) -> None:
    await vm.exec("systemd-run --wait --unit talker sh -c 'echo Loud And Clear'")
    path = f"/observability/v1/logs?vmId={vm.id}"
    lines = (await http.get(path)).json()["logs"]
    assert any(line["message"] == f"VM {vm.id} created" for line in lines)
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    spoken = (await http.get(f"{path}&vmService=talker&search=loud")).json()["logs"]
    assert all("loud" in line["message"].lower() for line in spoken)
    said = next(line for line in spoken if line["message"] == "Loud And Clear")
    assert (said["vmService"], said["resourceId"]) == ("talker.service", vm.id)
    again = (await http.get(f"{path}&vmService=talker&startTime={said['timestamp']}")).json()["logs"]
    assert said in again
    refused(await http.get("/observability/v1/logs?vmService=talker"), 400, "INVALID_QUERY")


async def all_pages(http: httpx2.AsyncClient, path: str) -> list[list[dict[str, Any]]]:
    """The lines of each page, read to the last one."""
    pages: list[list[dict[str, Any]]] = []
    token = ""
    while True:
        answer = await http.get(f"{path}{token}")
        assert answer.status_code == 200, answer.text
        found = answer.json()
        pages.append(found["logs"])
        if found["nextPageToken"] is None:
            return pages
        token = f"&pageToken={found['nextPageToken']}"


async def test_pages_merge_the_journal_with_the_log_of_a_vm(
    http: httpx2.AsyncClient, server: Server, vm: Machine
) -> None:
    """Over several pages: nothing lost, nothing twice, ordered by time; search covers the whole journal."""
    path = f"/observability/v1/logs?vmId={vm.id}"
    said = await vm.exec("seq -f 'Marker (%g)' 1 40 | logger -t pager; journalctl --sync")
    assert said.ok, said.stderr
    await server.installation.logbook.write(server.account, "noise marker (41)", machine=vm.id)
    # Enough lines after the first ones that no page of the newest lines would hold them.
    await vm.exec("seq -f 'filler %g' 1 60 | logger -t pager; journalctl --sync")
    pages = await all_pages(http, f"{path}&pageSize=16&search=mARKER%20%28")
    assert [len(page) for page in pages] == [16, 16, 9]
    found = [line for page in pages for line in page]
    expected = [f"Marker ({number})" for number in range(1, 41)] + ["noise marker (41)"]
    assert [line["message"] for line in found] == expected
    assert [line["timestamp"] for line in found] == sorted(line["timestamp"] for line in found)
    start = found[0]["timestamp"]
    whole = (await http.get(f"{path}&startTime={start}")).json()["logs"]
    split = await all_pages(http, f"{path}&startTime={start}&pageSize=40")
    assert len(split) > 2
    common = [line for page in split for line in page][: len(whole)]
    assert common == whole
    assert [line["message"] for line in whole if "filler" in line["message"]] == [
        f"filler {number}" for number in range(1, 61)
    ]


async def test_lines_belong_to_a_run_of_the_vm(http: httpx2.AsyncClient) -> None:
    """`instanceId` filters the log and the journal by the run of the VM that wrote the lines."""
    vm = (await http.post("/v1/vms")).json()["id"]
    path, logs = f"/v1/vms/{vm}", f"/observability/v1/logs?vmId={vm}"

    async def say(word: str) -> None:
        command = {"command": f"logger -t speaker {word}; journalctl --sync"}
        assert (await http.post(f"{path}/exec-await", json=command)).json()["statusCode"] == 0

    async def lines(instance: str) -> dict[str, str]:
        found = (await http.get(f"{logs}&instanceId={instance}")).json()["logs"]
        assert {line["instanceId"] for line in found} <= {instance}
        return {line["message"]: line["source"] for line in found}

    try:
        first = (await http.get(path)).json()["vmInstanceId"]
        await say("morning")
        await http.post(f"{path}/suspend")
        await say("evening")
        second = (await http.get(path)).json()["vmInstanceId"]
        assert first != second
        early, late = await lines(first), await lines(second)
        assert early["morning"] == "journal" and "evening" not in early
        assert late["evening"] == "journal" and "morning" not in late
        suspended = f"VM {vm} suspended: requested"
        assert suspended in early and suspended not in late
        assert await lines("0" * 20) == {}
        everything = (await http.get(logs)).json()["logs"]
        assert {line["instanceId"] for line in everything} == {first, second}
    finally:
        await http.delete(path)


async def test_following_logs_does_not_keep_a_vm_awake(settings: Settings, machines: Machines) -> None:
    async with (
        another_installation(settings, idle_timeout=None, idle_check=0.2, listen="127.0.0.1:0") as other,
        running(other.settings, other) as url,
    ):
        account = await other.accounts.create("followers")
        _, key = await other.accounts.create_key(account.id)
        machine = await other.machines.create(Properties(account=account.id, idle_timeout=4))
        async with client_of(url, key) as http:
            logs = f"/observability/v1/logs?vmId={machine.id}"
            await machine.exec("logger awake; journalctl --sync")
            followed = (await http.get(logs)).json()["logs"]
            assert any(line["source"] == "journal" for line in followed)

            async def asleep() -> bool:
                assert (await http.get(logs)).status_code == 200
                return (await machine.info()).state is State.SUSPENDED

            await until(asleep, 60)

            async def recorded() -> bool:
                lines = (await http.get(logs)).json()["logs"]
                return any("suspended" in line["message"] for line in lines)

            # Nor does reading wake it.
            await until(recorded, 60)
            assert (await machine.info()).state is State.SUSPENDED
        await machine.delete()


async def test_sleep_wake_crash_and_deletion_of_a_vm_are_log_lines_with_their_reason(
    server: Server, http: httpx2.AsyncClient
) -> None:
    machines = server.installation.machines
    vm = await machines.create(Properties(account=server.account))
    (child,) = await vm.fork(persistence=Ephemeral())
    await http.post(f"/v1/vms/{child.id}/suspend")
    await http.post(f"/v1/vms/{vm.id}/suspend")
    assert (await http.get(f"/v1/vms/{vm.id}/files/%2Fetc%2Fhostname")).is_success
    pid = (await machines._row(vm.id)).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await vm.wait_for_exit() == "crashed: QEMU ended by SIGKILL"
    await http.delete(f"/v1/vms/{vm.id}")

    async def lines(vm_id: str) -> list[tuple[str, str]]:
        logs = (await http.get(f"/observability/v1/logs?vmId={vm_id}")).json()["logs"]
        return [(line["level"], line["message"]) for line in logs]

    expected = [
        ("info", f"VM {vm.id} created"),
        ("info", f"VM {vm.id} suspended: requested"),
        ("info", f"VM {vm.id} woken: file access"),
        ("error", f"VM {vm.id} crashed: QEMU ended by SIGKILL"),
        ("info", f"VM {vm.id} deleted: requested"),
    ]

    async def all_there() -> bool:
        return await lines(vm.id) == expected

    await until(all_there, 60)
    assert await lines(child.id) == [
        ("info", f"VM {child.id} created: forked from {vm.id}"),
        ("info", f"VM {child.id} deleted: ephemeral: suspended"),
    ]


async def test_the_console_of_a_guest_that_panicked_is_kept_for_its_owner(
    server: Server, http: httpx2.AsyncClient
) -> None:
    vm = (await http.post("/v1/vms")).json()["id"]
    path, logs = f"/v1/vms/{vm}", f"/observability/v1/logs?vmId={vm}"
    identities = server.installation.identities
    identity = await identities.create(server.account)
    await identities.grant(server.account, identity.id, vm)
    command = {"command": "echo hello > /dev/ttyS0; echo hidden >/dev/ttyS0"}
    assert (await http.post(f"{path}/exec-await", json=command)).is_success
    alive = (await http.get(f"{path}/console")).json()
    assert alive["running"] and "hello\nhidden" in alive["console"]
    # Reading it takes nothing away.
    assert (await http.get(f"{path}/console")).json() == alive

    crash = {"command": "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger"}
    refused(await http.post(f"{path}/exec-await", json=crash), 400, "VM_NOT_RUNNING")

    async def kept() -> dict[str, Any] | None:
        found: dict[str, Any] = (await http.get(f"{path}/console")).json()
        return found if not found["running"] and found["console"] else None

    ended = await until(kept, 60)
    assert ended is not None
    assert "hello\nhidden" in ended["console"]
    assert "Kernel panic - not syncing: sysrq triggered crash" in ended["console"]
    last = [(line["source"], line["message"]) for line in (await http.get(logs)).json()["logs"]][-2:]
    crashed = f"VM {vm} crashed: guest kernel panicked"
    assert last == [("vm", crashed), ("console", ended["console"])]
    shell = Shell(server.url, server.key)
    assert "Kernel panic" in await shell.run("vm", "console", vm)
    assert "Kernel panic" in await shell.run("vm", "logs", vm)

    # A token reads the log of the VM, not what its kernel printed.
    _, token = await identities.create_token(server.account, identity.id)
    async with client_of(server.url, token) as limited:
        refused(await limited.get(f"{path}/console"), 403, "FORBIDDEN")
        seen = [line["message"] for line in (await limited.get(logs)).json()["logs"]]
        assert seen[-1] == crashed
    async with another_account(server, "curious") as stranger:
        refused(await stranger.get(f"{path}/console"), 404, "VM_NOT_FOUND")

    await http.delete(path)

    async def gone() -> bool:
        lines = (await http.get(logs)).json()["logs"]
        return lines[-1]["message"].endswith("deleted: requested") and "console" not in {
            line["source"] for line in lines
        }

    await until(gone, 60)
    refused(await http.get(f"{path}/console"), 404, "VM_NOT_FOUND")


async def test_logbook_pages(server: Server) -> None:
    async with another_account(server, "talkative") as http:
        account = (await http.get("/auth/v1/whoami")).json()["accountId"]
        for number in range(25):
            await server.installation.logbook.write(account, f"line {number}", build="bld-1")
        seen: list[str] = []
        token = ""
        for _ in range(4):
            found = (await http.get(f"/observability/v1/logs?buildId=bld-1&pageSize=10{token}")).json()
            seen += [line["message"] for line in found["logs"]]
            if found["nextPageToken"] is None:
                break
            token = f"&pageToken={found['nextPageToken']}"
        assert seen == [f"line {number}" for number in range(25)]
