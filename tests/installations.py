"""A second installation of Stead beside the one of the test run, with settings of its own."""

import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from conftest import leftovers

from stead.machines import Machines
from stead.settings import Settings


@contextlib.contextmanager
def other_settings(settings: Settings, **changes: Any) -> Iterator[Settings]:
    """Settings for an installation with a data folder of its own; nothing of it may be left at the end."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder:
        other = dataclasses.replace(settings, **({"data": Path(folder)} | changes))
        yield other
        assert leftovers(other) == []


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
