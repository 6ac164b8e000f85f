"""Start-up with broken rows and folders: each is logged and skipped, and the server starts."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stead.api.background import failed
from stead.creation.background import BackgroundRequests
from stead.creation.results import CreatedVm, RequestFailure
from stead.host.interface import Inventory, TemplateUnreadable
from stead.host.local import LocalHost, LocalTemplates
from stead.identity.accounts import Accounts
from stead.installation import open_machines
from stead.limits import Limits
from stead.machines import Machines, State
from stead.machines.processes import Processes
from stead.processes import ProcessId
from stead.repos.repos import Repos
from stead.settings import Settings
from stead.store.database import open_database
from stead.store.installation_id import open_database_of
from stead.store.machines import MachineRow, MachineStore
from stead.store.repos import RepoRow, RepoStore
from stead.store.requests import RequestRow, RequestStore
from stead.store.snapshots import SnapshotRow, SnapshotStore
from support.installations import delete_all, other_settings
from support.internals import inside


@contextlib.contextmanager
def undeletable(folder: Path) -> Iterator[Path]:
    """A folder that can be neither moved nor removed, as a mount point is."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def machine(name: str, slot: int, state: str, **facts: Any) -> MachineRow:
    return MachineRow(name, None, state, None, 1, 512, 20, slot, "template", name, name, **facts)


async def insert(settings: Settings, *rows: MachineRow | SnapshotRow) -> None:
    database = await open_database_of(settings.data)
    for row in rows:
        if isinstance(row, MachineRow):
            await MachineStore(database).insert(row)
        else:
            await SnapshotStore(database).insert(row)
    await database.dispose()


async def states(machines: Machines) -> dict[str, str]:
    return {row.id: row.state for row in await inside(machines).store.list()}


async def test_an_unknown_state_makes_only_its_own_vm_unusable(settings: Settings, tmp_path: Path) -> None:
    with other_settings(settings, cache=tmp_path) as other:
        await insert(other, machine("bad", 0, "flying"), machine("gone", 1, State.DELETING))
        async with open_machines(other) as machines:
            (info,) = await machines.list()
            assert (info.id, info.state) == ("bad", State.LOST)
            assert info.reason is not None
            assert info.reason.startswith("lost: its row in the database is inconsistent (state 'flying'")
            await delete_all(machines)
            assert await states(machines) == {}


async def test_a_folder_that_cannot_be_removed_keeps_no_server_from_starting(
    settings: Settings, tmp_path: Path
) -> None:
    with other_settings(settings, cache=tmp_path) as other:
        await insert(other, machine("a", 0, State.DELETING), machine("b", 1, State.DELETING))
        (other.data / "machines/b").mkdir(parents=True)
        (other.data / "checkpoints/after").mkdir(parents=True)
        with (
            undeletable(other.data / "machines/a"),
            undeletable(other.data / "machines/orphan"),
            undeletable(other.data / "checkpoints/before"),
            undeletable(other.data / "quarantine/2020-01-01"),
        ):
            async with open_machines(other) as machines:
                assert await states(machines) == {"a": State.DELETING}, "tried again at the next start"
                (other.data / "checkpoints/before/memory").touch()
                await inside(machines).layers.collect()
                assert (other.data / "checkpoints/before/memory").exists(), "it could not be set aside"
            assert not (other.data / "machines/b").exists()
            (day,) = (path for path in (other.data / "quarantine").iterdir() if path.name != "2020-01-01")
            assert [path.name for path in (day / "checkpoints").iterdir()] == ["after"]
        async with open_machines(other) as machines:
            assert await states(machines) == {}


async def test_recovery_sets_files_without_rows_aside_before_any_garbage_collection(
    settings: Settings, tmp_path: Path
) -> None:
    """A deletion that recovery finishes leads to a collection; it must not come first."""
    with other_settings(settings, cache=tmp_path) as other:
        await insert(other, machine("gone", 0, State.DELETING), machine("gone too", 1, State.DELETING))
        for name in ("checkpoints/saved", "layers/layer.qcow2"):
            (other.data / name).mkdir(parents=True)
        async with open_machines(other) as machines:
            await inside(machines).layers.collect()
        (day,) = (other.data / "quarantine").iterdir()
        assert (day / "checkpoints/saved").exists()
        assert (day / "layers/layer.qcow2").exists()


async def test_garbage_that_cannot_be_removed_does_not_keep_the_rest(
    settings: Settings, tmp_path: Path
) -> None:
    with other_settings(settings, cache=tmp_path) as other:
        async with open_machines(other) as machines:
            with undeletable(other.data / "checkpoints/a"):
                for name in ("b", "0"):
                    (other.data / "checkpoints" / name).mkdir()
                await inside(machines).layers.collect()
                assert [path.name for path in (other.data / "checkpoints").iterdir()] == ["a"]


async def test_files_in_place_of_vm_folders_are_set_aside_or_removed(
    settings: Settings, tmp_path: Path
) -> None:
    with other_settings(settings, cache=tmp_path) as other:
        await insert(other, machine("fifo", 0, State.DELETING), machine("kept", 1, State.STOPPED))
        folder = other.data / "machines"
        folder.mkdir()
        for name in ("fifo", "kept", "orphan", "template-x"):
            os.mkfifo(folder / name)
        (folder / "file").touch()
        (folder / "link").symlink_to("/nowhere")
        async with open_machines(other) as machines:
            assert await states(machines) == {"kept": State.STOPPED}
            assert [path.name for path in folder.iterdir()] == ["kept"]
            (day,) = (other.data / "quarantine").iterdir()
            assert {path.name for path in (day / "machines").iterdir()} == {"orphan", "file", "link"}
            await delete_all(machines)


@pytest.fixture
def process() -> Iterator[ProcessId]:
    child = subprocess.Popen(["sleep", "600"])
    process = ProcessId.of(child.pid)
    assert process is not None
    yield process
    child.kill()
    child.wait()


async def test_a_vm_that_cannot_be_adopted_is_left_running(
    settings: Settings, process: ProcessId, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = machine("bad", 0, State.RUNNING, top="top", pid=process.pid, pid_started=process.started)

    async def adopt(*_: object) -> None:
        raise RuntimeError("a bug")

    found = Inventory({process: "bad"}, frozenset({"bad"}))
    with other_settings(settings, cache=tmp_path) as other:
        await insert(other, row, machine("good", 1, State.DELETING))
        with monkeypatch.context() as patch:
            patch.setattr(Processes, "adopt", adopt)
            patch.setattr(LocalHost, "inventory", lambda _: found)
            async with open_machines(other) as machines:
                assert await states(machines) == {"bad": State.RUNNING}
            assert process.alive(), "what is not understood is not killed"
        async with open_machines(other) as machines:
            # The next start looks again: here it is no QEMU.
            assert await states(machines) == {"bad": State.STOPPED}
            await delete_all(machines)


async def test_a_bad_snapshot_keeps_no_server_from_starting(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ("machine", 1, 512, 20, "template")
    with other_settings(settings, cache=tmp_path) as other:
        rows = [SnapshotRow(name, None, state, *facts) for name, state in (("a", "ready"), ("b", "building"))]
        await insert(other, *rows)

        async def size(*_: object) -> int:
            raise RuntimeError("a bug")

        monkeypatch.setattr("stead.machines.layers.Layers.size", size)
        async with open_machines(other) as machines:
            assert [info.id for info in await machines.snapshots.list()] == ["a"]
            await delete_all(machines)


async def test_an_unreadable_template_keeps_no_server_from_starting(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unreadable(*_: object) -> None:
        raise TemplateUnreadable("cannot read template")

    monkeypatch.setattr(LocalTemplates, "find", unreadable)
    with other_settings(settings, cache=tmp_path) as other:
        async with open_machines(other) as machines:
            assert await machines.list() == []


async def unlimited(_: str) -> Limits:
    return Limits()


async def test_a_repository_that_cannot_be_moved_keeps_no_server_from_starting(tmp_path: Path) -> None:
    """A crash came between the rows of two new repositories and the move of their folders."""
    database = await open_database(tmp_path / "stead.db")
    account = (await Accounts(database).create("tests")).id
    folder = tmp_path / "repos"
    for repo in ("aa-bad", "bb-good"):
        await RepoStore(database).insert(RepoRow(repo, account, None, False))
        (folder / "new" / repo).mkdir(parents=True)
    (folder / "aa").touch()
    async with Repos.open(database, folder, unlimited):
        assert (folder / "bb/bb-good.git").is_dir()
        assert (folder / "new/aa-bad").is_dir()
    (folder / "aa").unlink()
    async with Repos.open(database, folder, unlimited):
        assert (folder / "aa/aa-bad.git").is_dir()
    await database.dispose()


async def test_a_request_whose_result_cannot_be_found_has_failed(tmp_path: Path) -> None:
    database = await open_database(tmp_path / "stead.db")
    account = (await Accounts(database).create("tests")).id
    store = RequestStore(database)
    for name in ("bad", "good"):
        await store.insert(RequestRow(name, account))

    async def find(request: str) -> CreatedVm:
        if request == "bad":
            raise ValueError("'flying' is not a valid State")
        return CreatedVm("vm")

    requests = BackgroundRequests(store)
    await requests.recover(find, failed())
    bad, good = await requests.get(account, "bad"), await requests.get(account, "good")
    assert bad is not None and good is not None
    assert isinstance(bad.result, RequestFailure) and bad.result.status == 503
    assert good.result == CreatedVm("vm")
    await database.dispose()
