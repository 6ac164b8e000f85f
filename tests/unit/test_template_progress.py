"""Progress of a template's build: shared by all callers that wait for it, one line for each phase."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stead.errors import TemplateError
from stead.host.interface import Progress, Report
from stead.machines.quotas import Quotas
from stead.machines.templates import TemplateLines, Templates
from stead.settings import Size
from support.waiting import until

SIZE = Size.parse("2x1Gx20G")
ONCE = "building the template of 2x1G (once for all disk sizes; 1 to 2 minutes without KVM)"


class SlowTemplates:
    """A host whose builds go on when the test says so."""

    def __init__(self) -> None:
        self.builds = 0
        self.go_on = asyncio.Event()
        self.failure: Exception | None = None

    async def find(self, _: Size) -> None:
        return None

    async def ensure(self, size: Size, report: Report) -> Any:
        self.builds += 1
        report(Progress("install", "git", 0.3))
        report(Progress("install", "curl", 0.4))
        report(Progress("booting the image", str(size), 0.1, "template"))
        await self.go_on.wait()
        report(Progress("warming up", "true", 0.4, "template"))
        report(Progress("warming up", "id", 0.5, "template"))
        if self.failure is not None:
            raise self.failure
        report(Progress("ready", "", 1.0, "template"))
        return SimpleNamespace(id="template", size=size)

    async def remove_unused(self, used: object) -> list[str]:
        return []


class NoRows:
    """No VM and no snapshot refers to a template."""

    async def templates(self) -> set[str]:
        return set()

    async def templates_of(self, account: str) -> set[str]:
        return set()


def templates_of(host: SlowTemplates) -> Templates:
    nothing: Any = None
    rows: Any = NoRows()
    engine: Any = SimpleNamespace(host=SimpleNamespace(templates=host), quotas=Quotas(nothing))
    return Templates(engine, pool=nothing, layer_rows=rows, default_size=Size())


async def count_of(reported: Sequence[object], number: int) -> None:
    async def reached() -> bool:
        return len(reported) >= number

    await until(reached, 60)


async def test_all_callers_that_wait_for_a_build_are_told_its_phases() -> None:
    host = SlowTemplates()
    templates = templates_of(host)
    first, second = list[str](), list[str]()
    one = asyncio.create_task(templates.ensure(SIZE, TemplateLines(SIZE, first.append)))
    await count_of(first, 3)
    assert first == [
        ONCE,
        "building the base image, once: install",
        "building the template of 2x1G, once: booting the image",
    ]
    two = asyncio.create_task(templates.ensure(SIZE, TemplateLines(SIZE, second.append)))
    await count_of(second, 2)
    assert second == [ONCE, first[-1]]
    host.go_on.set()
    await asyncio.gather(one, two)
    later = [f"building the template of 2x1G, once: {phase}" for phase in ("warming up", "ready")]
    assert first[3:] == second[2:] == later
    assert host.builds == 1
    await templates.close()


async def test_callers_that_left_are_not_told_and_a_failure_reaches_all_others() -> None:
    host = SlowTemplates()
    host.failure = TemplateError("cannot build a template of 2x1G: QEMU exited")
    templates = templates_of(host)
    first, second = list[Progress](), list[Progress]()
    one = asyncio.create_task(templates.ensure(SIZE, first.append))
    two = asyncio.create_task(templates.ensure(SIZE, second.append))
    await count_of(second, 4)
    one.cancel()
    await asyncio.wait({one})
    known = len(first)
    host.go_on.set()
    with pytest.raises(TemplateError, match="QEMU exited"):
        await two
    assert len(first) == known < len(second)
    # The next caller starts a new build, and hears nothing of the old one.
    host.failure = None
    third: list[Progress] = []
    await templates.ensure(SIZE, third.append)
    assert (third[0].phase, third[-1].phase) == ("", "ready")
    await templates.close()
