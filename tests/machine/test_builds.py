"""The builder with real VMs: layers are built once and cached, and failures say where and why."""

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.builds import builder as builder_module
from stead.builds.builder import Builder, MachineOrder, SnapshotOrder
from stead.builds.errors import (
    BaseSnapshotDeleted,
    BuildBudgetExceeded,
    BuildNotFound,
    InvalidSpec,
    ProgramFailed,
    SetupFailed,
)
from stead.builds.records import BuildInfo
from stead.builds.spec import (
    Clone,
    File,
    GitUser,
    Group,
    Layer,
    Restart,
    Service,
    ServicePatch,
    User,
)
from stead.errors import ServerStopping, SnapshotNotFound
from stead.identity.accounts import Accounts
from stead.limits import UNLIMITED, Limits
from stead.machines import Machine, Machines, Persistent, SnapshotState, State, Sticky
from stead.machines.snapshots import SnapshotInfo
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.transfer.bundles import Bundles
from stead.store.builds import BuildRow, BuildStore
from support.git_client import GitClient, gits_of
from support.guests import sh
from support.installations import Server
from support.waiting import until

AWKWARD = 'a "quoted" \\ back, 100% and $HOME\nsecond line\ttab é'


@dataclass
class Lines:
    """A logbook that keeps its lines."""

    entries: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    async def write(self, account: str, message: str, **about: Any) -> None:
        self.entries.append((account, message, about))

    def of(self, account: str) -> list[str]:
        return [message for whose, message, _ in self.entries if whose == account]


@pytest.fixture(scope="module")
def lines() -> Lines:
    return Lines()


@pytest_asyncio.fixture(scope="module")
async def repos(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Repos]:
    async with Repos.open(machines.database, tmp_path_factory.mktemp("repos"), unlimited) as repos:
        yield repos


@pytest.fixture(scope="module")
def bundles(machines: Machines, repos: Repos) -> Bundles:
    return Bundles(repos, RepoAccess(machines.database, repos), "https://git.example.org")


@pytest_asyncio.fixture(scope="module")
async def builder(machines: Machines, lines: Lines, bundles: Bundles) -> AsyncIterator[Builder]:
    builder = Builder(machines, BuildStore(machines.database), lines, bundles, linger=0)
    yield builder
    await builder.close()


@pytest_asyncio.fixture
async def account(machines: Machines) -> AsyncIterator[str]:
    """An account whose VMs and snapshots are deleted after the test."""
    account = (await Accounts(machines.database).create(str(uuid.uuid4()))).id
    yield account
    for info in await machines.list(account):
        await machines.delete(info.id, forget=True)
    for snapshot in await machines.snapshots.list(account):
        await machines.snapshots.delete(snapshot.id)


async def unlimited(_: str) -> Limits:
    return UNLIMITED


async def builds_of(machines: Machines, account: str) -> list[BuildRow]:
    store = BuildStore(machines.database)
    return await store._select(store.table.select().where(store.table.c.account == account))


async def phase_names(builder: Builder, account: str, build: str) -> list[str]:
    return [phase.name for phase in await builder.phases(account, build)]


async def layers_built(builder: Builder, account: str) -> int:
    """How often a layer was built, by all builds of an account."""
    builds, total = await builder.builds(account)
    assert len(builds) == total
    names = [name for build in builds for name in await phase_names(builder, account, build.id)]
    return sum(name.endswith("snapshot") for name in names)


async def hidden(machines: Machines, account: str) -> list[str]:
    """VMs of builds, which their account cannot see."""
    rows = await machines.journal.store.list(account=account, purpose="build")
    return [row.id for row in rows]


async def said(lines: Lines, account: str, message: str) -> bool:
    return message in lines.of(account)


async def active(machine: Machine, unit: str) -> str:
    return (await machine.exec(f"systemctl is-active {unit}")).stdout.decode().strip()


def run_command(number: int, script: str, after: str | None = None) -> tuple[Service, File]:
    """A `run` step as the npm client sends it."""
    name = f"freestyle-run-command-{number}"
    path = f"/opt/freestyle/scripts/{name}.sh"
    before = () if after is None else (f"{after}.service",)
    service = Service(
        name,
        mode="oneshot",
        exec=(f"/bin/bash {path}",),
        env={"HOME": "/root"},
        workdir="/root",
        after=before,
        requires=before,
        delete_after_success=True,
    )
    return service, File(path, f"#!/bin/bash\n{script}".encode())


def with_commands(*scripts: str, **more: Any) -> Layer:
    pairs, last = [], None
    for number, script in enumerate(scripts, 1):
        pairs.append(run_command(number, script, last))
        last = pairs[-1][0].name
    services, files = (tuple(column) for column in zip(*pairs, strict=True))
    return Layer(**{"services": services, "files": files} | more)


def note(text: str, **more: Any) -> Layer:
    return Layer(files=(File("/srv/note", text.encode()),), **more)


async def test_vm_has_the_users_groups_files_and_services_of_its_layer(
    builder: Builder, machines: Machines, account: str, lines: Lines
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
    order = MachineOrder(account, spec=Layer(snapshot=layer), name="mine", warnings=("unknown key: x",))
    machine = await builder.create_machine(order)
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
    record = await builder.build(account, build.id)
    assert (record.state, record.failure, record.account) == ("succeeded", None, account)
    phases = await builder.phases(account, build.id)
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
        await builder.build(str(uuid.uuid4()), build.id)

    again = await builder.create_machine(replace(order, name=None))
    assert (await again.info()).snapshot == info.snapshot
    assert await active(again, "web") == "active"
    (newest, _), total = await builder.builds(account)
    assert total == 2
    assert (await again.info()).build == newest.id
    assert newest.planned_phases == ("layer 1: cached", "vm")
    assert await phase_names(builder, account, newest.id) == ["layer 1: cached", "vm"]
    assert await hidden(machines, account) == []


@pytest.mark.slow
async def test_commands_run_in_order_and_leave_no_units(builder: Builder, account: str, lines: Lines) -> None:
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
    machine = await builder.create_machine(MachineOrder(account, spec=spec))

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


async def test_ten_concurrent_requests_share_one_build(
    builder: Builder, machines: Machines, account: str, lines: Lines
) -> None:
    """Each request has a record; nine of them say which build they wait for."""
    order = SnapshotOrder(account, note("shared"), name="first name")
    other = replace(order, name=None)
    snapshots = await asyncio.gather(*(builder.ensure_snapshot(each) for each in [order, *[other] * 9]))
    (one,) = {snapshot.id for snapshot in snapshots}
    builds, total = await builder.builds(account, "succeeded")
    assert total == 10
    phases = [await phase_names(builder, account, build.id) for build in builds]
    assert sorted(phases) == [["vm", "files", "snapshot"], *[["waiting"]] * 9]
    assert all(list(build.planned_phases) == names for build, names in zip(builds, phases, strict=True))
    (owner,) = {(await machines.snapshots.get(one)).build}
    assert lines.of(account).count(f"waiting for build {owner}, which builds the same layer") == 9
    assert (await builder.builds(account, limit=3, offset=8))[0] == builds[8:]
    assert await builder.builds(account, "failed") == ([], 0)

    kept = await machines.snapshots.get(one)
    assert (kept.name, kept.persistence, kept.state) == ("first name", Persistent(), SnapshotState.READY)
    stranger = str(uuid.uuid4())
    with pytest.raises(SnapshotNotFound):
        await builder.create_machine(MachineOrder(stranger, top=Layer(snapshot_id=one)))
    assert await machines.snapshots.find(stranger, kept.template_hash or "") is None

    await machines.snapshots.delete(one)
    with pytest.raises(BaseSnapshotDeleted):
        await builder.create_machine(MachineOrder(account, top=Layer(snapshot_id=one)))
    anew = await builder.ensure_snapshot(order)
    assert anew.id != one


async def test_a_changed_layer_discriminator_or_skip_cache_rebuilds(
    builder: Builder, machines: Machines, account: str
) -> None:
    """The newest snapshot of a layer is the one that later requests get."""

    async def ensure(layer: Layer, persistence: Any = None) -> SnapshotInfo:
        return await builder.ensure_snapshot(
            SnapshotOrder(account, layer, persistence=persistence or Sticky())
        )

    first = await ensure(note("one"))
    assert (await ensure(note("one"))).id == first.id
    assert (await ensure(note("one", discriminator="x"))).id != first.id
    fresh = await ensure(note("one", skip_cache=True))
    assert fresh.id != first.id
    assert (await ensure(note("one"))).id == fresh.id
    assert await layers_built(builder, account) == 3

    assert fresh.persistence == Sticky()
    assert (await ensure(note("one"), Persistent())).persistence == Persistent()
    assert (await ensure(note("one"))).persistence == Persistent()


async def test_only_changed_layers_are_rebuilt(builder: Builder, machines: Machines, account: str) -> None:
    """A changed layer is built on the cached one below; services keep running from layer to layer."""
    counter = Service("counter", exec=("/bin/sh -c 'while :; do echo >>/srv/ticks; sleep 0.1; done'",))
    inner = Layer(users=(User("bob"),), services=(counter,), discriminator="inner")
    patch = ServicePatch("counter", env={"COLOUR": "red"}, restart=Restart("always"))

    async def create(text: str) -> tuple[Machine, BuildInfo]:
        layer = Layer(snapshot=inner, files=(File("/home/bob/note", text.encode()),), patches=(patch,))
        machine = await builder.create_machine(MachineOrder(account, spec=Layer(snapshot=layer)))
        info = await machine.info()
        return machine, await builder.build(account, info.build or "")

    machine, build = await create("one")
    assert build.planned_phases == (
        *("layer 1: vm", "layer 1: users", "layer 1: services", "layer 1: snapshot"),
        *("layer 2: vm", "layer 2: files", "layer 2: services", "layer 2: snapshot"),
        "vm",
    )
    assert await phase_names(builder, account, build.id) == list(build.planned_phases)
    assert len(await builds_of(machines, account)) == 1
    assert await sh(machine, "cat /home/bob/note") == "one"
    environ = "tr '\\0' '\\n' </proc/$(systemctl show -P MainPID counter)/environ"
    assert "COLOUR=red" in await sh(machine, environ)
    before = int(await sh(machine, "wc -l </srv/ticks"))

    async def ticked() -> bool:
        return int(await sh(machine, "wc -l </srv/ticks")) > before

    await until(ticked, 10)
    machine, build = await create("two")
    assert await sh(machine, "cat /home/bob/note; id -un bob") == "twobob"
    assert (await phase_names(builder, account, build.id))[:2] == ["layer 1: cached", "layer 2: vm"]
    assert await layers_built(builder, account) == 3


async def test_failed_run_step_reports_its_command_and_output(
    builder: Builder, machines: Machines, account: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VM is deleted; a snapshot of it as it was is kept for debugging."""
    monkeypatch.setattr(builder_module, "KEPT_FAILURES", 1)
    spec = with_commands("echo fine", "echo something is wrong >&2; exit 3", "echo never >/root/never")
    with pytest.raises(SetupFailed) as raised:
        await builder.create_machine(MachineOrder(account, spec=spec, name="broken"))
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

    build = await builder.build(account, error.build or "")
    assert (build.state, build.failure) == ("failed", str(error))
    failed = (await builder.phases(account, build.id))[-1]
    assert (failed.name, failed.snapshot) == ("services", error.snapshot)
    assert await machines.list(account) == []
    assert await hidden(machines, account) == []

    kept = await machines.snapshots.get(error.snapshot or "")
    assert (kept.state, kept.failure, kept.persistence) == (SnapshotState.FAILED, str(error), Sticky(0))
    machine = await builder.create_machine(MachineOrder(account, spec=Layer(snapshot_id=kept.id)))
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
    builds, _ = await builder.builds(account, "failed")
    assert len(builds) == 5
    last = [(await builder.phases(account, build.id))[-1] for build in builds[1:4]]
    assert sorted(phase.name for phase in last) == ["services", "waiting", "waiting"]
    assert {(phase.state, phase.snapshot) for phase in last} == {("failed", newest.id)}


@pytest.mark.slow
async def test_create_waits_for_the_ready_signal_as_requested(
    builder: Builder, machines: Machines, account: str
) -> None:
    """With waitForReadySignal a late service is an error; without it the VM is returned."""
    soon = "/bin/sh -c 'sleep 1.5; touch /run/was-ready; systemd-notify --ready; exec sleep infinity'"
    ready = Layer(services=(Service("late", exec=(soon,), ready_signal=True),), wait_for_ready=True)
    machine = await builder.create_machine(MachineOrder(account, spec=ready))
    assert await active(machine, "late") == "active"
    await sh(machine, "test -e /run/was-ready")

    never = Service("never", exec=("/bin/sleep infinity",), ready_signal=True, timeout=0)
    layer = Layer(services=(never,), ready_timeout=1.5)
    with pytest.raises(SetupFailed, match=r"not ready within 1\.5 s: never\.service") as raised:
        await builder.create_machine(MachineOrder(account, spec=replace(layer, wait_for_ready=True)))
    assert raised.value.diagnostics is not None
    assert [log.unit for log in raised.value.diagnostics.failed_logs] == ["never.service"]

    for patience in (None, False):
        machine = await builder.create_machine(
            MachineOrder(account, spec=replace(layer, wait_for_ready=patience))
        )
        assert await active(machine, "never") == "activating"
    assert len(await machines.list(account)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("network")
async def test_apt_packages_are_installed_and_a_failure_says_why(
    builder: Builder, account: str, lines: Lines
) -> None:
    layer = Layer(packages=("hello", "git"))
    machine = await builder.create_machine(MachineOrder(account, spec=Layer(snapshot=layer)))
    assert await sh(machine, "hello") == "Hello, world!"
    assert any(line.startswith("Setting up hello") for line in lines.of(account))

    sources = File("/etc/apt/sources.list", b"")
    with pytest.raises(ProgramFailed) as raised:
        await builder.create_machine(
            MachineOrder(account, top=Layer(packages=("no-such-thing",), files=(sources,)))
        )
    assert raised.value.exit_code == 100
    assert "Unable to locate package no-such-thing" in raised.value.stderr
    assert str(raised.value).startswith("packages: apt-get exited with 100: E: Unable to locate package")


SERVER = """
import base64, functools, http.server

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(b"me:s3cr@t").decode():
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        super().do_GET()

handler = functools.partial(Handler, directory="/srv")
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler).serve_forever()
"""


@pytest.mark.slow
async def test_repositories_are_cloned_without_their_credentials(builder: Builder, account: str) -> None:
    """By branch, tag and commit; files of the spec are written over those of the repository."""
    history = """
    git init -q --bare -b main /srv/repo.git && git init -q -b main /tmp/work && cd /tmp/work
    git config user.name me && git config user.email me@example.com
    echo one >file && git add . && git commit -qm one && git tag v1
    git checkout -qb next && echo two >file && git commit -qam two
    git push -q /srv/repo.git main next v1 && git -C /srv/repo.git update-server-info
    git rev-parse main >/srv/main
    """
    image = f"# the base\nFROM debian:trixie-slim AS base\n\nRUN <<'END'\n{history}\nEND\n"
    server = Service("server", exec=("/usr/bin/python3 /opt/server.py",))
    repositories = Layer(
        base_image=image,
        services=(server,),
        files=(File("/opt/server.py", SERVER.encode()),),
    )
    ready = Service(
        "reachable",
        mode="oneshot",
        exec=("/bin/sh -c 'until curl -s -o /dev/null http://127.0.0.1:8000; do sleep 0.1; done'",),
        after=("server",),
    )
    repositories = replace(repositories, services=(server, ready))
    base = await builder.ensure_snapshot(SnapshotOrder(account, repositories))
    probe = await builder.create_machine(MachineOrder(account, top=Layer(snapshot_id=base.id)))
    main = await sh(probe, "cat /srv/main")

    clones = Layer(
        snapshot_id=base.id,
        repositories=(
            Clone("file:///srv/repo.git", "/root/plain"),
            Clone("http://me:s3cr%40t@127.0.0.1:8000/repo.git", "/root/next/", "next"),
            Clone("file:///srv/repo.git", "/root/tag", "v1"),
            Clone("file:///srv/repo.git", "/root/commit", main),
        ),
        files=(File("/root/plain/extra", b"mine"), File("/root/tag/file", b"mine")),
        workdir="/root/plain",
    )
    machine = await builder.create_machine(MachineOrder(account, spec=clones))
    assert await sh(machine, "cd /root && cat plain/file next/file commit/file") == "one\ntwo\none"
    assert await sh(machine, "cat /root/plain/extra /root/tag/file") == "minemine"
    branches = "for each in plain next tag commit; do git -C /root/$each rev-parse --abbrev-ref HEAD; done"
    assert await sh(machine, branches) == "main\nnext\nHEAD\nHEAD"
    assert await sh(machine, "git -C /root/next remote get-url origin") == "http://127.0.0.1:8000/repo.git"
    assert (await machine.exec("grep -r s3cr /root /etc")).exit_code == 1

    wrong = replace(clones, repositories=(Clone("http://me:no@127.0.0.1:8000/repo.git", "/x"),), files=())
    with pytest.raises(ProgramFailed, match=r"repositories: git clone of http://127\.0\.0\.1:8000/repo\.git"):
        await builder.create_machine(MachineOrder(account, spec=wrong))
    with pytest.raises(InvalidSpec):
        await builder.create_machine(MachineOrder(account, spec=replace(clones, base_image="FROM alpine")))


async def test_repositories_of_this_server_are_cloned(
    builder: Builder, repos: Repos, machines: Machines, account: str, lines: Lines, git: GitClient
) -> None:
    """By id and by URL, by branch, tag and commit, and empty ones, although the guest cannot reach its host:
    with the public URL as origin, and without secrets."""
    repo, empty = [await repos.create(account, default_branch="trunk") for _ in range(2)]
    work = await git.work_tree("work", {"file": "one"})
    first = await git("rev-parse", "HEAD", cwd=work)
    await git("tag", "v1", cwd=work)
    await git.commit(work, {"file": "two", "large": bytes(2 << 20)})
    await git("push", "-q", str(repos.repository(repo.id).path), "main:trunk", "v1", cwd=work)
    await git("push", "-q", str(repos.repository(repo.id).path), "main~1:refs/heads/next", cwd=work)
    address = f"https://me:s3cr3t@git.example.org/{repo.id}.git"

    clones = Layer(
        repositories=(
            Clone(repo.id, "/root/plain"),
            Clone(address, "/root/next/", "next"),
            Clone(f"https://git.freestyle.sh/{repo.id}", "/root/tag", "v1"),
            Clone(repo.id, "/root/commit", first),
            Clone(empty.id, "/root/empty"),
        ),
        files=(File("/root/plain/extra", b"mine"),),
        git_user=GitUser("me", "me@example.org"),
    )
    machine = await builder.create_machine(MachineOrder(account, top=clones))
    assert await sh(machine, "cd /root && cat plain/file next/file tag/file commit/file") == "twooneoneone"
    heads = "for each in plain next tag commit; do git -C /root/$each rev-parse --abbrev-ref HEAD; done"
    assert await sh(machine, heads) == "trunk\nnext\nHEAD\nHEAD"
    tracked = "git -C /root/next status --short --branch; git -C /root/plain branch --remotes"
    assert (await sh(machine, tracked)).split() == [
        *("##", "next...origin/next"),
        *("origin/HEAD", "->", "origin/trunk", "origin/next", "origin/trunk"),
    ]
    origins = await sh(machine, "for each in /root/*/; do git -C $each remote get-url origin; done")
    url = f"https://git.example.org/{repo.id}"
    assert origins.splitlines() == [url, f"https://git.example.org/{empty.id}", url, url, url]
    begun = "cd /root/empty && git commit -q --allow-empty -m first && git branch --show-current"
    assert await sh(machine, begun) == "trunk"
    left = "grep -rls s3cr3t /root /etc /tmp /var /run /proc/*/environ; find /tmp /var/tmp -name 'stead-*'"
    assert await sh(machine, left) == ""
    assert not any("s3cr3t" in line for line in lines.of(account))

    built = await builds_of(machines, account)
    for refused in (Clone(repo.id, "/a", "none"), Clone(str(uuid.uuid4()), "/a")):
        with pytest.raises(InvalidSpec):
            await builder.create_machine(MachineOrder(account, top=Layer(repositories=(refused,))))
    with pytest.raises(InvalidSpec):
        await builder.create_machine(MachineOrder("another", top=clones))
    assert await builds_of(machines, account) == built


async def test_a_push_changes_the_cache_key_of_a_layer(
    builder: Builder, repos: Repos, account: str, git: GitClient
) -> None:
    """A layer with a repository of this server is cached until something is pushed."""
    repo = await repos.create(account)
    work = await git.work_tree("work", {"file": "one"})
    layer = Layer(repositories=(Clone(repo.id, "/srv/code", "main"),))
    order = SnapshotOrder(account, layer)

    async def pushed() -> SnapshotInfo:
        await git("push", "-q", str(repos.repository(repo.id).path), "main", cwd=work)
        return await builder.ensure_snapshot(order)

    first = await pushed()
    assert await builder.ensure_snapshot(order) == first
    await git.commit(work, {"file": "two"})
    second = await pushed()
    assert second.id != first.id
    assert (await pushed()).id == second.id
    for snapshot, text in ((first, "one"), (second, "two")):
        machine = await builder.create_machine(MachineOrder(account, top=Layer(snapshot_id=snapshot.id)))
        assert await sh(machine, "cat /srv/code/file") == text
        await machine.delete()


@pytest.mark.slow
async def test_a_large_repository_is_copied_in_bounded_memory(
    builder: Builder, repos: Repos, account: str, lines: Lines, git: GitClient
) -> None:
    """The host's memory does not grow with the repository, and the log has progress lines."""
    repo = await repos.create(account)
    work = await git.work_tree("work")
    with (work / "large").open("wb") as file:
        for _ in range(192):
            file.write(os.urandom(1 << 20))
    await git.commit(work, {})
    await git("push", "-q", str(repos.repository(repo.id).path), "main", cwd=work)

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) >> 10

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    top = Layer(repositories=(Clone(repo.id, "/srv/code"),))
    machine = await builder.create_machine(MachineOrder(account, top=top))
    assert peak() - before < 48
    assert await sh(machine, "git -C /srv/code status --short; stat -c %s /srv/code/large") == str(192 << 20)
    assert any("MiB of https://git.example.org/" in line for line in lines.of(account))


@pytest.mark.slow
async def test_a_cancelled_or_failed_clone_leaves_nothing(
    builder: Builder, repos: Repos, machines: Machines, account: str, lines: Lines, git: GitClient
) -> None:
    """The repository is deleted before the clone, or the client disconnects during the copy."""
    repo = await repos.create(account)
    path = repos.repository(repo.id).path
    work = await git.work_tree("work", {"large": os.urandom(32 << 20)})
    await git("push", "-q", str(path), "main", cwd=work)

    stuck = "#!/bin/sh\necho stuck\nexec sleep 600\n"
    command = f"printf '{stuck}' >/usr/local/bin/git; chmod +x /usr/local/bin/git"
    layer = Layer(commands=(command,), repositories=(Clone(repo.id, "/srv/code"),))
    waiting = asyncio.create_task(builder.ensure_snapshot(SnapshotOrder(account, layer)))
    await until(lambda: said(lines, account, "stuck"), 180)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert await hidden(machines, account) == []
    assert gits_of(path) == []

    slow = replace(layer, commands=("echo beginning; sleep 2",))
    waiting = asyncio.create_task(builder.ensure_snapshot(SnapshotOrder(account, slow)))
    await until(lambda: said(lines, account, "beginning"), 180)
    await repos.delete(repo.id)
    with pytest.raises(SetupFailed, match=f"repositories: no repository {repo.id}") as raised:
        await waiting
    assert raised.value.phase == "repositories"


async def test_a_build_is_cancelled_after_its_last_client_disconnects(
    builder: Builder, machines: Machines, account: str, lines: Lines
) -> None:
    """Of two clients, one disconnects and the build continues; with the other it ends and leaves nothing."""
    order = SnapshotOrder(account, with_commands("echo at work; sleep 600"))
    waiting = [asyncio.create_task(builder.ensure_snapshot(order)) for _ in range(2)]

    await until(lambda: said(lines, account, "at work"), 180)
    (waiter, starter), _ = await builder.builds(account)
    assert (starter.state, starter.current_phase) == ("running", "services")
    assert (waiter.state, waiter.current_phase) == ("running", "waiting")
    waiting[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[0]
    assert not waiting[1].done()
    # The request that started the layer has gone; its record is finished with the layer.
    assert (await builder.build(account, starter.id)).state == "running"
    assert len(await hidden(machines, account)) == 1
    assert await machines.list(account) == []

    waiting[1].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[1]
    assert await hidden(machines, account) == []
    assert await machines.snapshots.list(account, deleted=True) == []
    builds, _ = await builder.builds(account)
    assert [build.state for build in builds] == ["failed", "failed"]
    assert {build.failure for build in builds} == {"cancelled: the client disconnected"}


async def test_a_cancelled_create_leaves_no_vm(
    builder: Builder, machines: Machines, account: str, lines: Lines
) -> None:
    task = asyncio.create_task(
        builder.create_machine(MachineOrder(account, spec=with_commands("echo at work; sleep 600")))
    )

    await until(lambda: said(lines, account, "at work"), 180)
    assert await machines.list(account) == []
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await hidden(machines, account) == []
    assert await machines.snapshots.list(account, deleted=True) == []


async def test_a_repeated_request_joins_the_build_that_lingers(
    machines: Machines, account: str, lines: Lines, bundles: Bundles
) -> None:
    """A client whose connection broke repeats its request; also the time limit of a build, and a stop."""
    builder = Builder(machines, BuildStore(machines.database), lines, bundles, linger=60)
    order = SnapshotOrder(account, with_commands("echo at work; until [ -e /root/go ]; do sleep 0.1; done"))
    first = asyncio.create_task(builder.ensure_snapshot(order))

    await until(lambda: said(lines, account, "at work"), 180)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(builder.ensure_snapshot(order))
    (machine_id,) = await hidden(machines, account)
    await Machine(machines, machine_id).files().write("/root/go", b"")
    snapshot = await second
    assert snapshot.state is SnapshotState.READY

    async def both_succeeded() -> bool:
        return (await builder.builds(account, "succeeded"))[1] == 2

    await until(both_succeeded, 10)
    assert await phase_names(builder, account, snapshot.build or "") == [
        "vm",
        "files",
        "services",
        "snapshot",
    ]

    hurried = Builder(machines, BuildStore(machines.database), lines, bundles, budget=4, linger=60)
    with pytest.raises(BuildBudgetExceeded) as raised:
        await hurried.ensure_snapshot(SnapshotOrder(account, with_commands("sleep 600")))
    reached = (await builder.phases(account, raised.value.build or ""))[-1]
    assert (raised.value.phase, raised.value.seconds) == (reached.name, 4)
    assert raised.value.snapshot == reached.snapshot
    assert await hidden(machines, account) == []

    abandoned = asyncio.create_task(
        builder.ensure_snapshot(SnapshotOrder(account, with_commands("echo second; sleep 600")))
    )

    await until(lambda: said(lines, account, "second"), 180)
    await builder.close()
    with pytest.raises(ServerStopping):
        await abandoned
    assert await hidden(machines, account) == []


async def test_requests_without_set_up_have_no_build_record(
    builder: Builder, machines: Machines, account: str
) -> None:
    """A snapshot of the base image is built on request; a layer without changes is its base."""
    machine = await builder.create_machine(MachineOrder(account, spec=Layer(packages=(), skip_cache=True)))
    assert (await machine.info()).state is State.RUNNING
    assert await builds_of(machines, account) == []

    base = await builder.ensure_snapshot(SnapshotOrder(account, Layer(), name="base"))
    assert (await builder.ensure_snapshot(SnapshotOrder(account, Layer()))).id == base.id
    empty = Layer(snapshot=Layer(snapshot_id=base.id))
    assert (await builder.ensure_snapshot(SnapshotOrder(account, empty))).id == base.id
    with pytest.raises(InvalidSpec) as raised:
        await builder.ensure_snapshot(SnapshotOrder(account, Layer(vcpus=3)))
    assert raised.value.rule == "vcpus_not_power_of_two"
    builds, _ = await builder.builds(account)
    assert [build.planned_phases for build in builds] == [("cached",), ("vm", "snapshot")]


async def test_recovery_fails_unfinished_builds(builder: Builder, machines: Machines, account: str) -> None:
    store = BuildStore(machines.database)
    await store.insert(BuildRow("bld-" + "a" * 20, account, "running", "[]"))
    await store.insert(BuildRow("bld-" + "b" * 20, account, "running", "[]"))
    await store.finish("bld-" + "b" * 20, "succeeded")
    await builder.recover()
    lost = await builder.build(account, "bld-" + "a" * 20)
    assert (lost.state, lost.failure) == ("failed", "the Stead server stopped during the build")
    assert lost.finished_at is not None
    assert (await builder.build(account, "bld-" + "b" * 20)).state == "succeeded"


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
