"""Templates by size: built once when a size is first used, removed when no VM has needed them for days."""

import contextlib
import time
from collections.abc import Callable, Iterator

from stead.errors import SteadError
from stead.host.interface import Progress, Report, Template, TemplateUnreadable
from stead.logs import get_logger
from stead.machines.engine import Engine
from stead.machines.pool import Pool
from stead.settings import Size
from stead.store.layers import LayerStore
from stead.tasks import SingleFlight

_ONCE = "(once for each size; 1 to 2 minutes without KVM)"

log = get_logger("stead.templates")


class _SharedProgress:
    """The progress of one build, for all callers that wait for it."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._last: Progress | None = None

    def __call__(self, step: Progress) -> None:
        self._last = step
        for report in tuple(self._reports):
            report(step)

    @contextlib.contextmanager
    def reported_to(self, report: Report) -> Iterator[None]:
        """Report the steps in this block; first the present one, if the build is running."""
        if self._last is not None:
            report(self._last)
        self._reports.append(report)
        try:
            yield
        finally:
            self._reports.remove(report)


class TemplateLines:
    """The progress of a template as lines of text for a user: one for each phase."""

    def __init__(self, size: Size, write: Callable[[str], None]) -> None:
        self._size = size
        self._write = write
        self._title: str | None = None

    def __call__(self, step: Progress) -> None:
        if self._title is None:
            self._write(f"building the template of {self._size} {_ONCE}")
        if step.phase and step.title != self._title:
            subject = f"template of {self._size}" if step.subject == "template" else step.subject
            self._write(f"building the {subject}, once: {step.phase}")
        self._title = step.title


class Templates:
    def __init__(self, engine: Engine, *, pool: Pool, layer_rows: LayerStore, default_size: Size) -> None:
        self._engine = engine
        self._pool = pool
        self._layer_rows = layer_rows
        self._default = default_size
        self._builds: SingleFlight[Template] = SingleFlight()
        self._progress: dict[Size, _SharedProgress] = {}

    async def ensure(
        self, size: Size | None = None, report: Report = lambda _: None, *, account: str | None = None
    ) -> Template:
        """The template of a size, built single-flight when missing; creates from it are fast.

        `report` gets the steps of a build, also of one that another caller has started.
        LimitExceeded before it is built when the account may not have a VM of this size now.
        """
        size = size or self._default
        template = await self._engine.host.templates.find(size)
        if template is None:
            async with self._engine.quotas.admitting(account, size):
                pass
            progress = self._progress.setdefault(size, _SharedProgress())
            with progress.reported_to(report):
                template = await self._builds.run(
                    size, lambda: self._build(size, progress), name=f"template {size}"
                )
        if size == self._default:
            self._pool.keep(template)
        return template

    async def _build(self, size: Size, progress: "_SharedProgress") -> Template:
        started = time.monotonic()
        log.info("building a template", size=str(size))
        progress(Progress("", "", None, "template"))
        try:
            template = await self._engine.host.templates.ensure(size, progress)
        except SteadError as error:
            log.error("template build failed", size=str(size), error=str(error))
            raise
        finally:
            self._progress.pop(size, None)
        seconds = round(time.monotonic() - started, 1)
        log.info("built a template", size=str(size), seconds=seconds)
        return template

    async def fill_pool(self) -> None:
        """Fill the pool from now on, if the template of the default size exists."""
        try:
            if (template := await self._engine.host.templates.find(self._default)) is not None:
                self._pool.keep(template)
        except TemplateUnreadable as error:
            log.error("the pool of prepared VMs is not filled", error=str(error))

    async def remove_unused(self) -> None:
        removed = await self._engine.host.templates.remove_unused(await self._layer_rows.templates())
        if removed:
            log.info("removed unused templates", templates=removed)

    async def close(self) -> None:
        await self._builds.close()
