"""What a build sets up in a VM, and failures that say where and why."""

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from stead.builds import builder as builder_module
from stead.builds.builder import Builder, SnapshotOrder
from stead.builds.errors import BuildNotFound, ProgramFailed, SetupFailed
from stead.builds.spec import File, GitUser, Group, Layer, Restart, Service, User
from stead.creation.creation import Creation
from stead.machines import Machines, SnapshotState, Sticky
from support.builds import Lines, active, builds_of, create_vm, hidden, phase_names, vm_order, with_commands
from support.guests import sh
from support.installations import Server

AWKWARD = 'a "quoted" \\ back, 100% and $HOME\nsecond line\ttab é'


async def test_vm_has_the_users_groups_files_and_services_of_its_layer(
    builder: Builder, creation: Creation, machines: Machines, account: str, lines: Lines
) -> None:
    """A layer is built once; a second VM from it is restored, not built."""
    server = "/bin/sh -c 'id -un >who; pwd >where; printf %s \"$$AWKWARD\" >what; exec sleep infinity'"
    layer = Layer(
        groups=(Group("crew", 4321), Group("sudo")),
        users=(
            User("alice", 1234, "Alice A.", ("crew", "sudo", "made-for-her"), shell="/bin/sh"),
            User("daemon-user", system=True),
        ),
        files=(
            File("/opt/app/bin/tool", b"#!/bin/sh\necho tooled\n", executable=True),
            File("/home/alice/data", bytes(range(256))),
        ),
        git_user=GitUser("Ada L.", "ada@example.com", "ABCD"),
        workdir="/home/alice/work",
        services=(
            Service(
                "web",
                exec=("/bin/sh -c 'echo first > /home/alice/order'", server),
                env={"AWKWARD": AWKWARD},
                user="alice",
                workdir="/home/alice",
                wanted_by=("multi-user.service",),
                restart=Restart("on-failure", 0.5, 3, 10),
            ),
            Service("asleep", exec=("/bin/false",), enable=False),
        ),
    )
    order = vm_order(account, spec=Layer(snapshot=layer), name="mine", warnings=("unknown key: x",))
    machine = await create_vm(creation, order)
    info = await machine.info()
    assert (info.name, info.account, info.workdir) == ("mine", account, "/home/alice/work")
    assert info.purpose == "use"

    assert await sh(machine, "id alice") == (
        "uid=1234(alice) gid=1234(alice) groups=1234(alice),27(sudo),4321(crew),"
        + (await sh(machine, "getent group made-for-her")).split(":")[2]
        + "(made-for-her)"
    )
    assert await sh(machine, "getent passwd alice") == "alice:x:1234:1234:Alice A.:/home/alice:/bin/sh"
    assert (await sh(machine, "getent passwd daemon-user")).endswith(":/:/usr/sbin/nologin")
    assert await sh(machine, "/opt/app/bin/tool") == "tooled"
    assert await machine.files().read("/home/alice/data") == bytes(range(256))
    assert await sh(machine, "git config user.name; git config user.email; git config user.signingkey") == (
        "Ada L.\nada@example.com\nABCD"
    )
    assert await sh(machine, "test -d /home/alice/work && cat /home/alice/order") == "first"
    assert await active(machine, "web") == "active"
    assert await sh(machine, "systemctl is-enabled web") == "enabled"
    assert await active(machine, "asleep") == "inactive"
    assert await sh(machine, "cat /home/alice/who /home/alice/where") == "alice\n/home/alice"
    assert (await machine.files().read("/home/alice/what")).decode() == AWKWARD

    (build,) = await builds_of(machines, account)
    assert info.build == build.id
    record = await builder.records.get(account, build.id)
    assert (record.state, record.failure, record.account) == ("succeeded", None, account)
    phases = await builder.records.phases(account, build.id)
    steps = ("vm", "groups", "users", "files", "repositories", "services", "snapshot")
    assert tuple(phase.name for phase in phases) == (*(f"layer 1: {step}" for step in steps), "vm")
    assert tuple(phase.name for phase in phases) == record.planned_phases
    assert {(phase.state, phase.snapshot) for phase in phases} == {("succeeded", None)}
    assert [phase.finished_at for phase in phases[:-1]] == [phase.started_at for phase in phases[1:]]
    assert phases[-1].finished_at == record.finished_at
    noted = {message: about for whose, message, about in lines.entries if whose == account}
    assert noted["wrote /opt/app/bin/tool (22 bytes)"]["build"] == build.id
    assert (noted["unknown key: x"]["build"], noted["unknown key: x"]["level"]) == (build.id, "warn")
    with pytest.raises(BuildNotFound):
        await builder.records.get(str(uuid.uuid4()), build.id)

    again = await create_vm(creation, replace(order, properties=replace(order.properties, name=None)))
    assert (await again.info()).snapshot == info.snapshot
    assert await active(again, "web") == "active"
    (newest, _), total = await builder.records.list(account)
    assert total == 2
    assert (await again.info()).build == newest.id
    assert newest.planned_phases == ("layer 1: cached", "vm")
    assert await phase_names(builder, account, newest.id) == ["layer 1: cached", "vm"]
    assert await hidden(machines, account) == []


@pytest.mark.slow
async def test_commands_run_in_order_and_leave_no_units(
    creation: Creation, account: str, lines: Lines
) -> None:
    """As the npm client sends them: a chain of commands, then a service that requires the last of them.

    The units of the commands delete themselves after success. The service starts at a reboot without them.
    """
    layer = with_commands(
        "sleep 1; echo one >>log; echo said-by-one",
        "cat log; echo two >>log; systemctl daemon-reload",
        "echo three >>log",
    )
    last = layer.services[-1].name
    server = Service(
        "web",
        exec=("/bin/sleep infinity",),
        after=(f"{last}.service",),
        requires=(f"{last}.service",),
    )
    spec = replace(layer, services=(*layer.services, server))
    machine = await create_vm(creation, vm_order(account, spec=spec))

    assert await sh(machine, "cat /root/log") == "one\ntwo\nthree"
    assert "said-by-one" in lines.of(account)
    assert await active(machine, "web") == "active"
    listed = "systemctl list-units --all | grep -v not-found; systemctl list-unit-files"
    units = await sh(machine, f"{listed}; find /etc/systemd /run/systemd/system ! -type d")
    assert "freestyle-run-command" not in units
    await sh(machine, "systemctl restart web")

    await machine.stop()
    await machine.start(ready_timeout=120)
    assert await active(machine, "web") == "active"
    assert await sh(machine, "systemctl is-system-running; cat /root/log") == "running\none\ntwo\nthree"


async def test_failed_run_step_reports_its_command_and_output(
    builder: Builder,
    creation: Creation,
    machines: Machines,
    account: str,
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The VM is deleted; a snapshot of it as it was is kept for debugging."""
    monkeypatch.setattr(builder_module, "KEPT_FAILURES", 1)
    spec = with_commands("echo fine", "echo something is wrong >&2; exit 3", "echo never >/root/never")
    with pytest.raises(SetupFailed) as raised:
        await create_vm(creation, vm_order(account, spec=spec, name="broken"))
    error = raised.value
    command = "'echo something is wrong >&2; exit 3' (freestyle-run-command-2.service)"
    assert str(error) == f"services: {command} exited with 3: something is wrong"
    assert error.phase == "services"
    assert error.diagnostics is not None
    (log,) = error.diagnostics.failed_logs
    assert log.unit == "freestyle-run-command-2.service"
    assert "something is wrong" in log.log
    states = {(each.active_state, each.sub_state): each.services for each in error.diagnostics.states}
    assert states["failed", "failed"] == ["freestyle-run-command-2.service"]
    assert "stead-agent.service" in states["active", "running"]
    assert "something is wrong" in lines.of(account)

    build = await builder.records.get(account, error.build or "")
    assert (build.state, build.failure) == ("failed", str(error))
    failed = (await builder.records.phases(account, build.id))[-1]
    assert (failed.name, failed.snapshot) == ("services", error.snapshot)
    assert await machines.list(account) == []
    assert await hidden(machines, account) == []

    kept = await machines.snapshots.get(error.snapshot or "")
    assert (kept.state, kept.failure, kept.persistence) == (SnapshotState.FAILED, str(error), Sticky(0))
    machine = await create_vm(creation, vm_order(account, spec=Layer(snapshot_id=kept.id)))
    assert await active(machine, "freestyle-run-command-2") == "failed"
    assert (await machine.exec("test -e /root/never")).exit_code == 1

    layer = Layer(services=(Service("missing", exec=("/no/such/program",)),))
    order = SnapshotOrder(account, layer)
    results = await asyncio.gather(
        *(builder.ensure_snapshot(order) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(result, SetupFailed) for result in results)
    assert len({getattr(result, "build", None) for result in results}) == 1
    text = "'/no/such/program' (missing.service) exited with 203 (systemd could not execute it)"
    assert text in str(results[0])
    (newest,) = [each for each in await machines.snapshots.list(account) if each.failure is not None]
    assert newest.id == getattr(results[0], "snapshot", None)
    with pytest.raises(SetupFailed):
        await builder.ensure_snapshot(order)
    builds, _ = await builder.records.list(account, "failed")
    assert len(builds) == 5
    last = [(await builder.records.phases(account, build.id))[-1] for build in builds[1:4]]
    assert sorted(phase.name for phase in last) == ["services", "waiting", "waiting"]
    assert {(phase.state, phase.snapshot) for phase in last} == {("failed", newest.id)}


@pytest.mark.slow
async def test_create_waits_for_the_ready_signal_as_requested(
    creation: Creation, machines: Machines, account: str
) -> None:
    """With waitForReadySignal a late service is an error; without it the VM is returned."""
    soon = "/bin/sh -c 'sleep 1.5; touch /run/was-ready; systemd-notify --ready; exec sleep infinity'"
    ready = Layer(services=(Service("late", exec=(soon,), ready_signal=True),), wait_for_ready=True)
    machine = await create_vm(creation, vm_order(account, spec=ready))
    assert await active(machine, "late") == "active"
    await sh(machine, "test -e /run/was-ready")

    never = Service("never", exec=("/bin/sleep infinity",), ready_signal=True, timeout=0)
    layer = Layer(services=(never,), ready_timeout=1.5)
    with pytest.raises(SetupFailed, match=r"not ready within 1\.5 s: never\.service") as raised:
        await create_vm(creation, vm_order(account, spec=replace(layer, wait_for_ready=True)))
    assert raised.value.diagnostics is not None
    assert [log.unit for log in raised.value.diagnostics.failed_logs] == ["never.service"]

    for patience in (None, False):
        machine = await create_vm(creation, vm_order(account, spec=replace(layer, wait_for_ready=patience)))
        assert await active(machine, "never") == "activating"
    assert len(await machines.list(account)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("network")
async def test_apt_packages_are_installed_and_a_failure_says_why(
    creation: Creation, account: str, lines: Lines
) -> None:
    layer = Layer(packages=("hello", "git"))
    machine = await create_vm(creation, vm_order(account, spec=Layer(snapshot=layer)))
    assert await sh(machine, "hello") == "Hello, world!"
    assert any(line.startswith("Setting up hello") for line in lines.of(account))

    sources = File("/etc/apt/sources.list", b"")
    with pytest.raises(ProgramFailed) as raised:
        await create_vm(creation, vm_order(account, top=Layer(packages=("no-such-thing",), files=(sources,))))
    assert raised.value.exit_code == 100
    assert "Unable to locate package no-such-thing" in raised.value.stderr
    assert str(raised.value).startswith("packages: apt-get exited with 100: E: Unable to locate package")


async def test_unknown_keys_are_refused_or_logged_and_builds_are_listed_over_http(server: Server) -> None:
    headers = {"Authorization": f"Bearer {server.key}"}
    strict = {"X-Stead-Unknown-Keys": "refuse"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=120) as http:
        body: dict[str, Any] = {"spec": {"aptDep": ["git"]}}
        for path, code in (("/v1/vms", "CREATE_VM"), ("/v1/vms/snapshots", "CREATE_SNAPSHOT")):
            refused = await http.post(path, json=body, headers=strict)
            assert refused.status_code == 400, refused.text
            assert refused.json()["code"] == f"{code}_BAD_REQUEST"
            assert refused.json()["message"] == "unknown key spec.aptDep: did you mean aptDeps?"

        created = await http.post("/v1/vms", json=body)
        assert created.status_code == 200, created.text
        vm = created.json()["id"]
        logs = (await http.get("/observability/v1/logs", params={"vmId": vm})).json()["logs"]
        warnings = [line["message"] for line in logs if line["level"] == "warn"]
        assert warnings == ["unknown key spec.aptDep: did you mean aptDeps? (ignored)"]
        await http.delete(f"/v1/vms/{vm}")

        layer = {
            "additionalFiles": {"/a": {"content": "b"}},
            "persistence": {"type": "sticky", "priority": 2},
        }
        made = (await http.post("/v1/vms/snapshots", json={"template": layer | {"nam": "x"}})).json()
        snapshot = (await http.get(f"/v1/vms/snapshots/{made['snapshotId']}")).json()
        assert snapshot["snapshotPersistence"] == {"type": "sticky", "priority": 2, "deleteEvent": None}
        listed = (await http.get("/v1/vms/builds", params={"state": "succeeded", "limit": 1})).json()
        (build,) = listed["builds"]
        assert build["buildId"] == snapshot["buildId"]
        assert listed["totalCount"] >= 1
        assert (await http.get(f"/v1/vms/builds/{build['buildId']}")).json() == build
        phases = (await http.get(f"/v1/vms/builds/{build['buildId']}/phases")).json()["phases"]
        assert [(phase["name"], phase["state"]) for phase in phases] == [
            *(("vm", "succeeded"), ("files", "succeeded"), ("snapshot", "succeeded"))
        ]
        assert phases[-1]["finishedAt"] == build["finishedAt"]
        logs = (await http.get("/observability/v1/logs", params={"buildId": build["buildId"]})).json()["logs"]
        assert [line["message"] for line in logs][:2] == [
            "unknown key template.nam: did you mean name? (ignored)",
            "phase started: vm",
        ]
        assert (await http.get("/v1/vms/builds", params={"state": "odd"})).status_code == 400
        await http.delete(f"/v1/vms/snapshots/{made['snapshotId']}")
