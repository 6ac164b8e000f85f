"""A data folder restored at another path: uids depend on the path, so files change their owners."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from stead.host import network
from stead.installation import open_installation
from stead.machines.records import Properties
from stead.repos.committing import Change
from stead.settings import Settings
from support import ROOT
from support.guests import sh
from support.installations import delete_all, other_settings

pytestmark = [pytest.mark.qemu, pytest.mark.root]


def _back_up_and_restore(old: Path, new: Path) -> None:
    """With the commands of the page, and without leaving the original."""
    text = (ROOT / "docs" / "operate.md").read_text()
    create, extract = re.findall(r"^ *# (tar --(?:create|extract) .*)$", text, re.M)
    archive, unpacked = old.parent / "stead.tar.zst", old.parent / "unpacked"
    unpacked.mkdir()
    create = create.replace("-C /var/lib stead", f"-C {old.parent} {old.name}")
    extract = extract.replace("/srv/rehearsal", str(unpacked))
    for command in (create, extract):
        subprocess.run(shlex.split(command.replace("/backup/stead.tar.zst", str(archive))), check=True)
    shutil.rmtree(old)
    (unpacked / old.name).rename(new)


@pytest.mark.parametrize("end", ["suspend", pytest.param("kill", marks=pytest.mark.slow)])
async def test_vms_and_repositories_of_a_moved_data_folder_work(settings: Settings, end: str) -> None:
    with other_settings(settings) as parent:
        parent.data.chmod(0o711)
        old, new = (parent.replace(data=parent.data / name) for name in ("old", "new"))
        async with open_installation(old) as installation:
            account = (await installation.accounts.create("tests")).id
            machine = await installation.machines.create(Properties(account=account))
            await sh(machine, "echo kept > /root/note; sync")
            await getattr(machine, end)()
            repo = (await installation.repos.create(account)).id
            first = await installation.writer.commit(
                installation.repos.repository(repo), [Change("file", b"kept")], "first"
            )
        _back_up_and_restore(old.data, new.data)
        await network.remove(old)  # an installation with VMs keeps it
        (old.runtime / old.instance).rmdir()
        assert old.git_uids != new.git_uids
        async with open_installation(new) as installation:
            moved = await installation.machines.get(machine.id)
            assert await sh(moved, "cat /root/note") == "kept"
            repository = installation.repos.repository(repo)
            second = await installation.writer.commit(
                repository, [Change("other", b"new")], "second", expected=first.sha
            )
            assert (await repository.branch("main")).sha == second.sha
            await delete_all(installation.machines)
            await installation.repos.delete(repo)
