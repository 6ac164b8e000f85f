"""Systemd services of a real VM: create, read, start, stop and delete."""

import time
from datetime import UTC, datetime

import httpx2
import pytest
import pytest_asyncio

from stead.builds.errors import InvalidSpec
from stead.builds.services import GuestServices, ServiceExists, ServiceNotFound
from stead.builds.spec import Service
from stead.builds.units import FOLDER
from stead.errors import GuestError, InvalidRequest
from stead.machines import Machine
from stead.machines.records import Properties
from support.documents import commands, run_by
from support.guests import sh
from support.installations import Server
from support.waiting import until


@pytest.fixture
def services(shared: Machine) -> GuestServices:
    return GuestServices(shared)


@pytest_asyncio.fixture(scope="module")
async def alice(shared: Machine) -> str:
    assert (await shared.exec("useradd --create-home alice")).ok
    return "alice"


@pytest.mark.slow
async def test_create_start_stop_and_delete_a_service(shared: Machine, services: GuestServices) -> None:
    """The service starts at once, logs, is stopped, started, restarted and deleted."""
    web = Service("web", exec=("/bin/sh -c 'echo serving $WHAT; sleep 1000'",), env={"WHAT": "100% of it"})
    created = await services.create(web)
    assert (created.active_state, created.sub_state) == ("active", "running")
    assert "web" in await services.list()
    status = await services.status("web.service")
    assert (status.name, status.sub_state, status.load_state, status.description) == (
        *("web", "running", "loaded", "web"),
    )

    async def spoken() -> bool:
        return any(entry.message == "serving 100% of it" for entry in await services.logs("web"))

    await until(spoken, 60)
    entry = next(each for each in await services.logs("web") if each.message == "serving 100% of it")
    assert (entry.unit, entry.priority) == ("web.service", "6")
    assert abs(entry.at - time.time()) < 60
    (last,) = await services.logs("web", lines=1)
    assert last == (await services.logs("web"))[-1]
    later = datetime.fromtimestamp(last.at + 1, UTC).isoformat()
    assert not await services.logs("web", since=later)
    assert await services.logs("web", since="1 hour ago")

    assert [
        (each.service, each.ok) for each in await services.change("stop", ["web", "nowhere", "web.service"])
    ] == [
        *(("web", True), ("nowhere", False), ("web.service", True)),
    ]
    assert (await services.status("web")).active_state == "inactive"
    (started,) = await services.change("start", ["web"])
    assert started.ok
    pid = await shared.exec("systemctl show --property MainPID --value web")
    (restarted,) = await services.change("restart", ["web"])
    assert restarted.ok
    assert (await shared.exec("systemctl show --property MainPID --value web")).stdout != pid.stdout
    assert (await shared.exec("systemctl is-enabled web")).stdout == b"enabled\n"

    with pytest.raises(ServiceExists):
        await services.create(web)
    await services.delete("web")
    assert (await shared.exec("pgrep -f 'sleep 100[0]'")).exit_code == 1
    assert "web" not in await services.list()
    for call in (services.status, services.delete):
        with pytest.raises(ServiceNotFound):
            await call("web")
    assert (await shared.exec(f"find {FOLDER} -name 'web*'")).stdout == b""


async def test_a_failed_start_says_why(shared: Machine, services: GuestServices) -> None:
    lonely = await services.create(Service("lonely", exec=("/bin/sleep 1000",), requires=("missing",)))
    assert "missing" in lonely.message
    await shared.files().remove(f"{FOLDER}/lonely.service")
    broken = await services.create(Service("broken", exec=("/bin/does-not-exist",)))
    assert "cannot start" in broken.message
    assert broken.active_state == "failed"
    (started,) = await services.change("start", ["broken"])
    assert not started.ok
    assert "broken" in started.message
    await services.delete("broken")
    with pytest.raises(ServiceNotFound):
        await services.status("broken")


async def test_create_waits_until_the_service_is_active(
    services: GuestServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = await services.create(Service("late", exec=("/bin/sleep 2", "/bin/sleep 1000")))
    assert (started.active_state, started.sub_state) == ("active", "running")
    assert started.message == "service late created and started"
    monkeypatch.setattr("stead.builds.services._NEW_TIMEOUT", 1.0)
    job = await services.create(Service("job", exec=("/bin/sleep 1000",), mode="oneshot"))
    assert (job.active_state, job.message) == (
        *("activating", "service job created; it is still starting after 1 s"),
    )
    for name in ("late", "job"):
        await services.delete(name)


async def test_invalid_service_requests_are_refused(services: GuestServices) -> None:
    for name, problem in (
        ("", "service_name_empty"),
        (".hidden", "service_name_invalid_prefix"),
        ("a/b", "service_name_invalid_chars"),
        ("a\nb", "service_name_invalid_chars"),
        ("a" * 300, "service_name_too_long"),
    ):
        with pytest.raises(InvalidSpec) as error:
            await services.create(Service(name, exec=("/bin/true",)))
        assert error.value.rule == problem
        with pytest.raises(InvalidSpec):
            await services.status(name)
    with pytest.raises(InvalidSpec):
        await services.create(Service("empty"))
    with pytest.raises(ServiceExists):
        await services.create(Service("dbus", exec=("/bin/true",)))
    with pytest.raises(InvalidRequest, match="part of the system"):
        await services.delete("dbus")
    with pytest.raises(InvalidRequest, match="not a time"):
        await services.logs("dbus", since="the other day")
    with pytest.raises(ServiceNotFound):
        await services.logs("nowhere")


async def test_the_guest_agent_is_hidden(services: GuestServices) -> None:
    assert "stead-agent" not in await services.list()
    for call in (services.status, services.delete, services.logs):
        with pytest.raises(ServiceNotFound):
            await call("stead-agent")
    (stopped,) = await services.change("stop", ["stead-agent.service"])
    assert not stopped.ok


async def test_a_linux_user_may_read_but_not_change_services(
    shared: Machine, services: GuestServices, alice: str
) -> None:
    hers = GuestServices(shared, alice)
    assert "dbus" in await hers.list()
    assert (await hers.status("dbus")).active_state == "active"
    await shared.files().write(f"{FOLDER}/roots.service", b"[Service]\nExecStart=/bin/sleep 1000\n")
    for refused in (
        hers.create(Service("hers", exec=("/bin/true",))),
        hers.delete("roots"),
        hers.logs("dbus"),
    ):
        with pytest.raises(GuestError) as error:
            await refused
        assert error.value.code == "permission_denied"
    (started,) = await hers.change("start", ["roots"])
    assert not started.ok
    assert (await services.status("roots")).active_state == "inactive"
    await shared.files().remove(f"{FOLDER}/roots.service")


@pytest.mark.slow
async def test_services_over_http(server: Server) -> None:
    machine = await server.installation.machines.create(Properties(account=server.account))
    async with httpx2.AsyncClient(
        base_url=f"{server.url}/v1/vms/{machine.id}/systemd",
        headers={"Authorization": f"Bearer {server.key}"},
        timeout=120,
    ) as http:
        wanted = {
            "name": "waits",
            "mode": "service",
            "exec": ["/bin/sleep 1000"],
            "enable": False,
            "user": None,
        }
        made = (await http.post("/services", json=wanted)).json()
        assert made == {
            "success": True,
            "message": "service waits created",
            "serviceName": "waits",
            "activeState": "inactive",
            "subState": "dead",
        }
        assert {"name": "waits"} in (await http.get("/services")).json()["services"]
        status = (await http.get("/services/waits/status")).json()
        assert status == {
            "name": "waits",
            "activeState": "inactive",
            "subState": "dead",
            "loadState": "loaded",
            "description": "waits",
        }
        changed = await http.post("/start", json={"services": [{"id": "waits"}, {"id": "none"}]})
        first, second = changed.json()["results"]
        assert first == {"serviceId": "waits", "success": True, "message": "service waits started"}
        assert (second["serviceId"], second["success"]) == ("none", False)
        logs = (await http.get("/services/waits/logs", params={"lines": 1})).json()["logs"]
        assert set(logs[0]) == {"message", "timestamp", "priority", "unit"}
        again = await http.post("/services", json=wanted)
        assert (again.status_code, again.json()["code"]) == (409, "SERVICE_ALREADY_EXISTS")
        assert again.json()["serviceName"] == "waits"
        nameless = await http.post("/services", json={**wanted, "name": ""})
        assert (nameless.status_code, nameless.json()["code"]) == (400, "SERVICE_NAME_EMPTY")
        missing = await http.get("/services/none/status")
        assert (missing.status_code, missing.json()["code"]) == (404, "SERVICE_NOT_FOUND")
        removed = (await http.delete("/services/waits")).json()
        assert removed == {"success": True, "message": "service waits removed"}
    await machine.delete()


SERVER = """#!/bin/sh
echo "started: $*, on $STEAD_LISTEN"
sleep 100000 &
echo $! > /run/child
wait
"""


async def test_unit_of_the_page_leaves_vms_running_when_the_server_stops(shared: Machine) -> None:
    """With a program in the place of the server; its child is in the place of a VM."""
    unit, typed = run_by(__file__, "docs/operate.md")
    files = shared.files()
    await files.write("/etc/systemd/system/stead.service", unit.body.encode())
    await files.write("/opt/stead/.venv/bin/stead", SERVER.encode(), mode=0o755)
    reload, enable, follow = (command.line for command in commands(typed.body))
    await sh(shared, f"{reload} && {enable}", 120)
    assert "started: serve --log-json, on 127.0.0.1:8600" in await sh(
        shared, f"timeout 60 {follow} | grep -m1 started:", 120
    )
    await sh(shared, "systemctl stop stead && kill -0 $(cat /run/child)", 120)
    cleaning = "systemctl disable --quiet stead; rm -r /etc/systemd/system/stead.service /opt/stead"
    await sh(shared, f"kill $(cat /run/child); {cleaning}; systemctl daemon-reload", 120)
