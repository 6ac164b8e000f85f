"""A second installation of Stead beside the one of the test run, with settings of its own."""

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conftest import leftovers

from stead.host import network
from stead.host.cgroups import ControlGroups
from stead.host.processes import ProcessId, kill
from stead.host.vm import running_machines
from stead.machines import Machines
from stead.settings import Settings


@contextlib.contextmanager
def other_settings(settings: Settings, **changes: Any) -> Iterator[Settings]:
    """Settings for an installation with a data folder of its own; nothing of it may be left at the end."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder:
        other = dataclasses.replace(settings, **({"data": Path(folder)} | changes))
        try:
            yield other
        except BaseException:
            _sweep(other)
            raise
        assert leftovers(other) == []


def _sweep(settings: Settings) -> None:
    """A test that failed must not leave its machines to the next."""

    async def sweep() -> None:
        for pid in running_machines(settings.instance):
            if (process := ProcessId.of(pid)) is not None:
                await kill(process)
        groups = ControlGroups(settings)
        for machine in groups.machines():
            groups.release(machine)
        groups.remove()
        await network.remove(settings)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, sweep()).result()
    shutil.rmtree(settings.runtime / settings.instance, ignore_errors=True)


@contextlib.asynccontextmanager
async def another_installation(settings: Settings, **changes: Any) -> AsyncIterator[Machines]:
    """An installation that is open for the length of a block, and gone after it."""
    with other_settings(settings, **changes) as other:
        async with Machines.open(other) as machines:
            yield machines
            await delete_all(machines)


async def delete_all(machines: Machines) -> None:
    for info in await machines.list():
        await machines.delete(info.id)
