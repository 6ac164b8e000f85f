"""Templates by vCPUs and memory: built when first needed, removed when no VM has needed them for days."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator

from stead.deadlines import scaled
from stead.errors import SteadError, TooBusy
from stead.host.interface import Progress, Report, Template, TemplateUnreadable, template_size
from stead.logs import get_logger
from stead.machines.engine import Engine
from stead.machines.pool import Pool
from stead.settings import Size
from stead.shares import KeyedLimit, Release, share_of
from stead.store.layers import LayerStore
from stead.tasks import SingleFlight, work_for

_ONCE = "(once for all disk sizes; 1 to 2 minutes without KVM)"
_BUILDS = max(2, (os.cpu_count() or 1) // 2)
"""Templates that are built at the same time: each is a guest that boots."""
_SHARE = share_of(_BUILDS)
_WAITING = 16
"""Callers of an account that wait for a place; more are refused at once."""
_MAX_WAIT = scaled(600.0)
_LINGER = 15.0
"""Seconds that a build continues after its last caller has left."""

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
        self._subject = f"template of {size.compute}"
        self._write = write
        self._title: str | None = None

    def __call__(self, step: Progress) -> None:
        if self._title is None:
            self._write(f"building the {self._subject} {_ONCE}")
        if step.phase and step.title != self._title:
            subject = self._subject if step.subject == "template" else step.subject
            self._write(f"building the {subject}, once: {step.phase}")
        self._title = step.title


def _busy() -> TooBusy:
    return TooBusy(
        f"too many templates are being built: at most {_SHARE} for an account and {_BUILDS} in all;"
        " try again in 5 s, or use vCPUs and memory that VMs have already"
    )


class Templates:
    """Builds are bounded, in fair order between accounts, and end when no caller waits for them any more."""

    def __init__(self, engine: Engine, *, pool: Pool, layer_rows: LayerStore, default_size: Size) -> None:
        self._engine = engine
        self._pool = pool
        self._layer_rows = layer_rows
        self._default = default_size
        self._builds: SingleFlight[Template] = SingleFlight(_LINGER)
        self._places = KeyedLimit(_BUILDS, _SHARE, max_waiting=_WAITING, max_wait=_MAX_WAIT, busy=_busy)
        self._progress: dict[Size, _SharedProgress] = {}
        """By the size of the template, which has the smallest disk."""

    async def ensure(
        self,
        size: Size | None = None,
        report: Report = lambda _: None,
        *,
        account: str | None = None,
        admitted: bool = False,
    ) -> Template:
        """The template for VMs of a size, built single-flight when missing; creates from it are fast.

        `report` gets the steps of a build, also of one that another caller has started.
        LimitExceeded or CapacityExceeded before it is built when the account may not have a VM of this size
        now, unless the VM is `admitted` already.
        """
        async with self.held(size or self._default, report, account=account, admitted=admitted) as template:
            return template

    @contextlib.asynccontextmanager
    async def held(
        self,
        size: Size,
        report: Report = lambda _: None,
        *,
        account: str | None = None,
        admitted: bool = False,
    ) -> AsyncIterator[Template]:
        """As `ensure`, for a block that inserts the row of the VM.

        Until the end of the block, a template that was built for it counts in the limits of the account.
        """
        base = template_size(size)
        async with contextlib.AsyncExitStack() as counted:
            template = await self._engine.host.templates.find(base)
            if template is None:
                if not admitted:
                    await self._engine.quotas.check(account, size)
                    adding = self._engine.quotas.adding_template(account, base, self._sizes_of)
                    await counted.enter_async_context(adding)
                template = await self._built(base, report, account)
            if base == template_size(self._default):
                self._pool.keep(template)
            yield template

    async def _sizes_of(self, account: str) -> set[Size]:
        """The sizes of the templates below an account's VMs and snapshots, of every version of the image."""
        ids = await self._layer_rows.templates_of(account)
        found = [self._engine.host.templates.load(each) for each in ids]
        return {template_size(template.size) for template in found if template is not None}

    async def _built(self, size: Size, report: Report, account: str | None) -> Template:
        """Wait for a place, unless the template is being built, then for the build."""
        release: Release | None = None
        if not self._builds.running(size):
            release = self._places.try_acquire(account)
            if release is None:
                report(Progress("waiting for other templates", "", None, "template"))
                release = await self._places.acquire(account)
        if release is not None and self._builds.running(size):
            # Another account's build of the same size has begun meanwhile: its place is enough.
            release()
        progress = self._progress.setdefault(size, _SharedProgress())
        with progress.reported_to(report):
            return await self._builds.run(
                size, lambda: self._build(size, progress, release), name=f"template {size}"
            )

    async def _build(self, size: Size, progress: "_SharedProgress", release: Release | None) -> Template:
        # Other accounts wait for it too.
        work_for(None)
        try:
            return await self._build_in_place(size, progress)
        finally:
            if release is not None:
                release()

    async def _build_in_place(self, size: Size, progress: "_SharedProgress") -> Template:
        started = time.monotonic()
        log.info("building a template", size=size.compute)
        progress(Progress("", "", None, "template"))
        try:
            template = await self._engine.host.templates.ensure(size, progress)
        except SteadError as error:
            log.error("template build failed", size=size.compute, error=str(error))
            raise
        finally:
            self._progress.pop(size, None)
        seconds = round(time.monotonic() - started, 1)
        log.info("built a template", size=size.compute, seconds=seconds)
        try:
            await self.remove_unused()
        except (SteadError, OSError) as error:
            log.warning("cannot remove unused templates", error=str(error))
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
