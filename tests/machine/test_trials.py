"""Slow trials: minutes each under emulation, so `make test` leaves them out and `make trials` runs them."""

import ast
import asyncio
import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest

from stead.host.commands import run
from stead.machines import Machine, Machines
from stead.machines.records import Properties
from stead.machines.states import Stopped
from stead.settings import Settings
from support import ROOT, guests
from support.installations import another_installation, disk_files, local_template
from support.internals import inside

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
sh = functools.partial(guests.sh, timeout=600)


@pytest.mark.usefixtures("network")
async def test_a_firewall_from_the_distribution_does_not_cut_the_agent_off(machine: Machine) -> None:
    """The guest installs ufw from Debian's packages, through NAT and DNS, and denies everything."""
    await sh(
        machine, "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq ufw iptables"
    )
    await sh(machine, "ufw --force enable && ufw default deny incoming && ufw default deny outgoing")
    assert "Status: active" in await sh(machine, "ufw status")
    await sh(
        machine,
        "for each in iptables ip6tables; do"
        " for chain in INPUT OUTPUT FORWARD; do $each -P $chain DROP; done; done"
        "; iptables -t nat -N DOCKER; iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
    )
    assert await sh(machine, "echo alive") == "alive"
    assert await machine.files().read("/etc/hostname") == f"{machine.id}\n".encode()


async def test_an_image_that_was_deleted_is_built_again(settings: Settings, machines: Machines) -> None:
    """Machines that run go on from the files they hold; the next create builds image and template anew."""
    template = local_template(await machines.template())
    with tempfile.TemporaryDirectory(prefix="stead-trial-", dir=settings.cache_folder.parent) as folder:
        cache = Path(folder)
        for part in (template.image.folder, template.folder):
            target = cache / part.relative_to(settings.cache_folder)
            target.parent.mkdir(parents=True)
            await run("cp", "--archive", "--link", part, target)
        async with another_installation(settings, cache=cache) as installation:
            other = installation.machines
            old = await other.create()
            assert (await other.template()).id == template.id
            shutil.rmtree(cache / template.image.folder.relative_to(settings.cache_folder))
            new = await other.create()
            assert (await other.template()).id != template.id
            assert await sh(new, "echo new") == "new"
            assert await sh(old, "python3 --version && echo old") != ""


STORM = (ROOT / "tests" / "support" / "write_storm.py").read_bytes()
ROUNDS = 30


async def start_storm(machine: Machine) -> None:
    await machine.files().write("/root/storm.py", STORM)
    await sh(machine, "python3 /root/storm.py run /root/storm")


async def weathered(machine: Machine) -> dict[str, int]:
    """Let the writers of a machine come to an end and check all they wrote; says how much that was."""
    return dict(ast.literal_eval(await sh(machine, "python3 /root/storm.py check /root/storm")))


async def whole(machines: Machines, machine: Machine, folder: Path) -> None:
    """After a clean stop the file system has nothing to repair."""
    await machine.stop()
    record = await inside(machines).journal.find(machine.id)
    assert isinstance(record.state, Stopped) and record.state.top is not None
    template = inside(machines).disks.template_of(record)
    async with inside(machines).disks.opened(record, record.state.top, template) as disk:
        node: dict[str, object] | None = None
        for layer in reversed(disk_files(machines, machine.id, disk)):
            below = {} if node is None else {"backing": node}
            file = {"driver": "file", "filename": str(layer), "locking": "off"}
            node = {"driver": layer.suffix.strip("."), "file": file, "read-only": True} | below
        raw = folder / "disk.raw"
        await run("qemu-img", "convert", "-O", "raw", f"json:{json.dumps(node)}", raw, timeout=600)
    try:
        await run("e2fsck", "-f", "-n", raw, timeout=600)
    finally:
        raw.unlink()


@pytest.mark.timeout(3600)
async def test_a_write_storm_survives_thirty_rounds(settings: Settings, machines: Machines) -> None:
    """Packages, a database, a repository and files are written while their machine is copied and sleeps."""
    with tempfile.TemporaryDirectory(prefix="stead-trial-", dir="/var/tmp") as folder:
        machine = await machines.create()
        await start_storm(machine)
        written = {"files": 0, "rows": 0, "commits": 0, "packages": 0}
        for number in range(ROUNDS):
            await asyncio.sleep(2)
            copy: Machine | None = None
            match number % 3:
                case 0:
                    snapshot = await machine.snapshot()
                    copy = await machines.create(Properties(snapshot=snapshot.id))
                    await machines.snapshots.delete(snapshot.id)
                case 1:
                    (copy,) = await machine.fork()
                case 2:
                    await machine.suspend()
                    await machine.start()
            if copy is not None:
                here = await weathered(copy)
                assert all(here[name] >= written[name] for name in written), (number, here, written)
                if number % 5 == 0:
                    await whole(machines, copy, Path(folder))
                await copy.delete()
                written = here
        last = await weathered(machine)
        assert all(last[name] >= max(10, written[name]) for name in ("files", "rows", "commits")), last
        assert last["packages"] >= written["packages"] > 0, last
        await whole(machines, machine, Path(folder))
        # Once more from the disk alone: a memory that is lost is as a power cut.
        await weathered(machine)
        await machine.delete()


@pytest.mark.usefixtures("network")
async def test_a_database_that_runs_in_a_snapshot_answers_at_once(machines: Machines) -> None:
    """Redis is installed and filled once; machines from the snapshot have it running, with what it holds."""
    builder = await machines.create()
    await sh(
        builder, "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server"
    )
    await sh(builder, "systemctl start redis-server && until redis-cli ping; do sleep 0.2; done")
    # Only in its memory: nothing of it is on the disk.
    await sh(builder, "redis-cli config set save '' && redis-cli set answer 42")
    server = await sh(builder, "pidof redis-server")
    snapshot = await builder.snapshot("redis")
    copies = await asyncio.gather(*(machines.create(Properties(snapshot=snapshot.id)) for _ in range(2)))
    for number, copy in enumerate(copies):
        assert await sh(copy, "redis-cli get answer") == "42"
        assert await sh(copy, "pidof redis-server") == server
        await sh(copy, f"redis-cli set answer {number}")
    assert await asyncio.gather(*(sh(copy, "redis-cli get answer") for copy in copies)) == ["0", "1"]
    assert await sh(builder, "redis-cli get answer") == "42"
    for each in (builder, *copies):
        await each.delete()
    await machines.snapshots.delete(snapshot.id)
