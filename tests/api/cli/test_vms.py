"""Commands that find, create, change and remove VMs, snapshots and identities, against a server with VMs."""

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from stead.settings import Settings
from support.run_cli import Shell

VM_ID = re.compile(r"[a-z0-9]{20}")


# Finding VMs


async def test_a_vm_is_listed_and_shown(shell: Shell, vm: str, settings: Settings) -> None:
    listed = await shell.ask("vm", "list")
    (found,) = (each for each in listed["vms"] if each["id"] == vm)
    assert (found["name"], found["state"]) == ("workbench", "running")
    assert listed["total_count"] == len(listed["vms"])
    table = (await shell.run("vm", "list")).splitlines()
    assert table[0].split() == ["id", "name", "state", "size", "address", "created"]
    assert [vm, "workbench", "running", "2x512Mx20G"] in [line.split()[:4] for line in table]
    assert (await shell.ask("vm", "get", vm))["workdir"] == "/srv"
    described = await shell.run("vm", "get", vm)
    assert re.search(r"^state +running$", described, re.M)
    assert re.search(r"^last traffic +(never|\d{4}-\d\d-\d\d .*ago\))$", described, re.M)
    assert await shell.run("vm", "list", "--state", "stopped", "--quiet") == ""
    assert (await shell.run("vm", "list", "--search", "workb", "--quiet")).split() == [vm]


async def test_vms_are_found_by_id_prefix_and_name(shell: Shell, vm: str) -> None:
    for given in (vm[:4], vm[:12], "workbench"):
        assert (await shell.ask("vm", "get", given))["id"] == vm
    assert await shell.refused("vm", "get", "absent") == "error: no VM 'absent' (VM_NOT_FOUND)\n"
    assert "at least 4 characters" in await shell.refused("vm", "get", vm[:3])
    missing = "0" * 20
    assert re.search(
        rf"VM {missing} not found \(VM_NOT_FOUND, trace \w+\)", await shell.refused("vm", "get", missing)
    )


async def test_an_ambiguous_reference_is_refused(shell: Shell, vm: str) -> None:
    """A second VM has the same name, and the name of a third is an id prefix of the first."""
    second = (await shell.ask("vm", "create", "--name", "workbench"))["id"]
    third = (await shell.ask("vm", "create", "--name", vm[:5]))["id"]
    try:
        refusal = await shell.refused("vm", "delete", third, "workbench")
        assert vm in refusal and second in refusal
        refusal = await shell.refused("vm", "suspend", vm[:5])
        assert f"{vm} (workbench)" in refusal and third in refusal
        assert {vm, second, third} <= set(await shell.vm_ids())
    finally:
        await shell.run("vm", "delete", second, third)
    assert await shell.vm_ids() == [vm]


async def test_create_if_missing_prints_the_vm_of_that_name(shell: Shell, vm: str) -> None:
    found = await shell.try_("vm", "create", "--name", "workbench", "--if-missing")
    assert (found.stdout, f"VM {vm} existed already" in found.stderr) == (f"{vm}\n", True)
    answer = await shell.ask("vm", "create", "--name", "workbench", "--if-missing")
    assert (answer["id"], answer["created"]) == (vm, False)
    assert await shell.vm_ids() == [vm]
    odd = await shell.refused("vm", "create", "--size", "2x700Mx20G")
    assert "memory must be a power of two (0.5, 1, 2, 4, ... GiB), not 0.683594" in odd
    assert "memSizeGb" not in odd
    assert "needs --name" in await shell.refused("vm", "create", "--if-missing", code=2)
    for kind in (["git"], ["identity"], ["vpc"]):
        made = await shell.ask(*kind, "create", "--name", "the-one", "--if-missing")
        again = await shell.ask(*kind, "create", "--name", "the-one", "--if-missing")
        assert (made["created"], again["created"], again["id"]) == (True, False, made["id"])
        await shell.run(*kind, "delete", "the-one")


# State changes


async def test_forks_are_named_suspended_woken_killed_and_resized(shell: Shell, vm: str) -> None:
    await shell.run("vm", "exec", vm, "echo shared > /root/mark")
    left, right = (await shell.run("vm", "fork", "workbench", "--count", "2", "--name", "copy")).split()
    assert await shell.run("vm", "fs", "cat", "copy-1", "/root/mark") == "shared\n"
    assert "must be 1 to 200 printable characters" in await shell.refused("vm", "rename", "copy-2", "")
    assert (await shell.ask("vm", "rename", "copy-2", "other"))["id"] == right
    assert (await shell.ask("vm", "get", "other"))["name"] == "other"

    assert await shell.run("vm", "suspend", left, right) == f"suspended {left}\nsuspended {right}\n"
    assert re.search(r"^state +suspended$", await shell.run("vm", "get", left), re.M)
    assert await shell.ask("vm", "start", left) == {"vms": [{"id": left, "state": "running"}]}
    assert (await shell.ask("vm", "get", left))["state"] == "running"

    waiting = await shell.start("vm", "await", left)
    await shell.run("vm", "kill", left)
    out, _ = await asyncio.wait_for(waiting.communicate(), 60)
    assert waiting.returncode == 0
    assert out.strip()
    refusal = await shell.refused("vm", "stop", left)
    assert "it is stopped (VM_NOT_RUNNING, trace" in refusal

    resized = await shell.ask("vm", "resize", left, "--disk", "24G", "--memory", "1G")
    assert resized["sizing"] == {"vcpu_count": 2, "mem_size_mib": 1024, "rootfs_size_mb": 24 * 1024}
    assert "cannot shrink" in await shell.refused("vm", "resize", left, "--disk", "20G")
    deleted = await shell.ask("vm", "delete", left, right)
    assert deleted == {"vms": [{"id": left, "state": "deleted"}, {"id": right, "state": "deleted"}]}
    assert await shell.vm_ids() == [vm]


async def test_snapshots_are_listed_renamed_restored_and_deleted(shell: Shell, vm: str) -> None:
    taken = (await shell.run("vm", "snapshot", vm, "--name", "kept", "--expires", "7d")).strip()
    assert re.fullmatch(r"sc-[a-z0-9]{20}", taken)
    table = await shell.run("snapshot", "list")
    assert taken in table and "kept" in table and vm in table
    assert re.search(r"\bin 6d$", table, re.M)
    assert re.search(r"expires 2\d\d\d-", await shell.run("snapshot", "extend", "kept", "--expires", "4w"))
    assert re.search(r"\bin 27d$", await shell.run("snapshot", "list"), re.M)
    assert (await shell.ask("snapshot", "extend", "kept", "--expires", "never"))["expires_at"] is None
    found = await shell.ask("snapshot", "get", "kept")
    assert found["id"] == taken and found["size_bytes"] > 0
    await shell.run("snapshot", "rename", taken[3:9], "renamed")
    assert (await shell.ask("snapshot", "get", taken[:8]))["name"] == "renamed"
    made = await shell.try_("vm", "create", "--snapshot", "renamed", "--exec", "hostname", "--delete")
    assert VM_ID.fullmatch(made.stdout.strip()) and made.stdout.strip() != vm
    assert await shell.ask("snapshot", "delete", "renamed") == {"snapshots": [{"id": taken, "deleted": True}]}
    assert await shell.run("snapshot", "list", "--quiet") == ""
    assert "no snapshot 'renamed'" in await shell.refused("snapshot", "get", "renamed")
    assert re.search(r"\bdeleted\b", await shell.run("snapshot", "list", "--all"))


async def test_a_spec_becomes_a_snapshot_and_a_vm(shell: Shell, vm: str, tmp_path: Path) -> None:
    spec = {"additionalFiles": {"/srv/note": {"content": "from a spec"}}, "workdir": "/srv"}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    first = (await shell.run("snapshot", "create", "--spec", file, "--name", "built")).strip()
    assert (await shell.ask("snapshot", "create", "--spec", "-", stdin=file.read_bytes()))["id"] == first
    result = await shell.try_("vm", "create", "--spec", file, "--exec", "pwd; cat note", "--delete")
    assert (result.stdout, result.returncode) == ("/srv\nfrom a spec", 0)
    await shell.run("snapshot", "delete", *(await shell.run("snapshot", "list", "-q")).split())

    file.write_text("[]")
    assert "must hold a JSON object" in await shell.refused("vm", "create", "--spec", file)
    file.write_text("{")
    assert "is not valid JSON" in await shell.refused("vm", "create", "--spec", file)
    file.write_text(json.dumps({"systemd": {"services": [{"name": "", "exec": ["true"]}]}}))
    assert "SERVICE_NAME_EMPTY, trace" in await shell.refused("vm", "create", "--spec", file)
    assert await shell.vm_ids() == [vm]


@pytest.mark.slow
async def test_set_up_options_are_cached_as_a_snapshot(shell: Shell, vm: str) -> None:
    """The command of the set-up runs once: the second create gets the result from the snapshot."""
    arguments = (
        "vm",
        "create",
        "--run",
        "cat /proc/uptime > /srv/mark",
        "--exec",
        "cat /srv/mark",
        "--delete",
    )
    first = await shell.try_(*arguments)
    assert (first.returncode, first.stdout != "") == (0, True), first.stderr
    assert (await shell.run(*arguments)) == first.stdout
    again, built, *_ = (await shell.ask("build", "list"))["builds"]
    assert (again["state"], built["state"]) == ("succeeded", "succeeded")
    assert any("cached" in each["name"] for each in (await shell.ask("build", "get", again["id"]))["phases"])
    phases = (await shell.ask("build", "get", built["id"][:10]))["phases"]
    assert phases and all(each["finished_at"] for each in phases)
    assert await shell.run("build", "logs", built["id"], "--follow") != ""
    await shell.run("snapshot", "delete", *(await shell.run("snapshot", "list", "-q")).split())
    assert await shell.vm_ids() == [vm]


# Logs


async def test_logs_are_shown_and_followed(shell: Shell, vm: str) -> None:
    await shell.run("vm", "exec", vm, "logger --tag cli-test before")
    lines = (await shell.ask("vm", "logs", vm, "--limit", "1000"))["logs"]
    assert any(f"VM {vm} created" in line["message"] for line in lines)
    assert len((await shell.ask("vm", "logs", vm, "--limit", "1"))["logs"]) == 1
    process = await shell.start("vm", "logs", vm, "--follow", "--json", "--limit", "1")
    assert process.stdout is not None
    await process.stdout.readline()
    await shell.run("vm", "exec", vm, "logger --tag cli-test after")
    async with asyncio.timeout(60):
        while "after" not in json.loads(await process.stdout.readline())["message"]:
            pass
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 130


# Identities


async def test_an_identity_uses_the_vm_that_was_granted(shell: Shell, vm: str) -> None:
    identity = (await shell.run("identity", "create", "--name", "ci")).strip()
    token = (await shell.run("identity", "token", "create", "ci")).strip()
    assert token.startswith("stid_")
    guest = Shell(shell.url, token)
    assert (await guest.ask("whoami"))["identity_id"] == identity
    assert await guest.vm_ids() == []

    await shell.run("identity", "grant", identity, "workbench")
    granted = await shell.ask("identity", "grant", identity, vm, "--user", "nobody")
    assert granted["allowed_users"] == ["nobody"]
    (permission,) = (await shell.ask("identity", "permissions", identity))["permissions"]
    table = await shell.run("identity", "permissions", identity)
    assert re.search(rf"^VM +{vm} +workbench ", table, re.M)
    assert permission["vm_id"] == vm
    assert await guest.run("vm", "exec", "workbench", "id -un") == "nobody\n"
    assert "(FORBIDDEN, trace" in await guest.refused("vm", "delete", vm)

    await shell.run("identity", "revoke", identity, vm)
    assert await guest.vm_ids() == []
    (listed,) = (await shell.run("identity", "token", "list", identity)).split()
    await shell.run("identity", "token", "revoke", identity, listed[:8])
    assert "UNAUTHORIZED_ERROR" in await guest.refused("vm", "list")
    assert identity in await shell.run("identity", "list")
    await shell.run("identity", "delete", identity)
    assert (await shell.ask("identity", "list"))["identities"] == []
