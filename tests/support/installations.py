"""Installations of Stead: a second one beside that of the test run, and what is left of one."""

import asyncio
import contextlib
import fcntl
import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from stead.host.authority import CERTIFICATE_FILE, create_root
from stead.host.interface import Disk, narrowed
from stead.host.local import LocalHost
from stead.host.templates import LocalTemplate
from stead.host.vm import running_machines
from stead.installation import open_installation
from stead.installation_parts import Installation
from stead.machines import Machines, State
from stead.settings import Accelerator, Settings, Size
from support.internals import inside
from support.reaper import reaped, sweep


def shared_authority(cache: Path) -> Path:
    """A folder with a CA for all installations of tests: their templates contain its certificate."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = os.open(cache / "ca.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / "ca" / CERTIFICATE_FILE).exists():
            # Without constraints: tests also sign for names of others, to stand for their servers.
            create_root(cache / "ca", "Stead CA of tests", ())
    finally:
        os.close(lock)
    return cache / "ca"


def small_installation(data: Path, cache: Path) -> Settings:
    """Small VMs and no pool; `make trial-kvm` sets the accelerator and another size."""
    return Settings(
        data=data,
        cache=cache,
        ca=shared_authority(cache),
        accelerator=cast("Accelerator", os.environ.get("STEAD_ACCELERATOR", "auto")),
        default_size=Size.parse(os.environ.get("STEAD_DEFAULT_SIZE", "2x512Mx20G")),
        pool=0,
        idle_timeout=None,
        anonymous_rate=100_000,
        https_listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
    )


@dataclass(frozen=True)
class Server:
    """A served API, with the API key of an account of the tests' own."""

    url: str
    key: str
    account: str
    installation: Installation
    https_port: int


def leftovers(settings: Settings) -> list[str]:
    """Everything on this host that carries an installation's name, and what it keeps of machines."""
    instance = settings.instance
    found = [f"process {pid} of {name}" for pid, name in running_machines(settings).items()]
    found += [f"namespace {path}" for path in Path("/run/netns").glob(f"stead-{instance}*")]
    found += [f"interface {path.name}" for path in Path("/sys/class/net").glob(f"st{instance}*")]
    # Unlike a glob, a walk does not mind groups of others that go while it looks.
    for folder, groups, _ in os.walk("/sys/fs/cgroup"):
        if Path(folder).name.startswith(f"stead-{instance}"):
            found += [f"group {folder}/{group}" for group in groups]
    for kept in ("machines", "layers", "checkpoints"):
        found += [f"{kept}: {path}" for path in (settings.data / kept).glob("*")]
    found += [f"folder {path}" for path in settings.runtime.glob(f"{instance}/**")]
    found += [f"folder {path}" for path in settings.runtime.glob(f"edge/{instance}/**")]
    tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True).stdout
    found += [line for line in tables.splitlines() if f"stead_{instance}" in line]
    return found


@contextlib.contextmanager
def other_settings(settings: Settings, **changes: Any) -> Iterator[Settings]:
    """Settings for an installation with a data folder of its own; nothing of it may be left at the end."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder:
        other = settings.replace(**({"data": Path(folder)} | changes))
        try:
            with reaped(other.data):
                yield other
        except BaseException:
            _sweep(other)
            raise
        assert leftovers(other) == [], leftovers(other)


def _sweep(settings: Settings) -> None:
    """A test that failed must not leave its machines to the next."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, sweep(settings)).result()


@contextlib.contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """A folder on a disk of its own, which has no more room than that."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", folder], check=True)
        try:
            with reaped(Path(folder)):
                yield Path(folder)
        finally:
            _unmount(folder)


@contextlib.contextmanager
def small_ext4(mib: int) -> Iterator[Path]:
    """A folder on an ext4 file system of its own, on a loop device."""
    with (
        tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder,
        tempfile.NamedTemporaryFile(prefix="stead-test-disk-", dir="/var/tmp") as image,
    ):
        image.truncate(mib << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", image.name], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        mounted = subprocess.run(["mount", "-o", "loop", image.name, folder], capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"this host allows no loop device: {mounted.stderr.strip()}")
        try:
            Path(folder).chmod(0o711)
            with reaped(Path(folder)):
                yield Path(folder)
        finally:
            _unmount(folder)


def _unmount(folder: str) -> None:
    """What a process had open there may be let go of a moment after it is done with it."""
    deadline = time.monotonic() + 10
    while (ended := subprocess.run(["umount", folder], capture_output=True, text=True)).returncode:
        assert time.monotonic() < deadline, (ended.stderr, _users_of(folder))
        gc.collect()
        time.sleep(0.1)


def _users_of(folder: str) -> list[str]:
    """Which processes have something of a folder open."""
    links = (*Path("/proc").glob("[0-9]*/fd/*"), *Path("/proc").glob("[0-9]*/cwd"))
    found = []
    for link in links:
        with contextlib.suppress(OSError):
            if str(link.readlink()).startswith(folder):
                found.append(str(link))
    return found


def fill_up(disk: Path, left: int) -> Path:
    """A file that leaves only so many bytes of a disk free."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - left)
    return filler


@contextlib.asynccontextmanager
async def another_installation(settings: Settings, **changes: Any) -> AsyncIterator[Installation]:
    """An installation that is open for the length of a block, and gone after it."""
    with other_settings(settings, **changes) as other:
        async with open_installation(other) as installation:
            yield installation
            await delete_all(installation.machines)


async def delete_all(machines: Machines) -> None:
    """Delete everything that users can make, also names that are kept; what nobody needs then is removed."""
    for info in await machines.list():
        await machines.delete(info.id, forget=True)
    for row in await inside(machines).store.list():
        if row.state == State.DELETED:
            await machines.delete(row.id, forget=True)
    for snapshot in await machines.snapshots.list():
        await machines.snapshots.delete(snapshot.id)
    await inside(machines).layers.collect()


def local_host(machines: Machines) -> LocalHost:
    """The host of an engine with real VMs."""
    return narrowed(inside(machines).host, LocalHost)


def disk_files(machines: Machines, machine: str, disk: Disk) -> tuple[Path, ...]:
    """All layers of a VM's disk, top first."""
    host = local_host(machines)
    frozen = map(host.layers.path, disk.frozen)
    return host.disks.layer(machine, disk.top), *frozen, *local_template(disk.template).layers


def local_template(template: object) -> LocalTemplate:
    return narrowed(template, LocalTemplate)
