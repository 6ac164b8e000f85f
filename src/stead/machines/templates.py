"""Templates by size: built once when a size is first used, removed when no VM has needed them for days."""

from stead.host.interface import Host, Report, Template, TemplateUnreadable
from stead.logs import get_logger
from stead.machines.pool import Pool
from stead.machines.quotas import Quotas
from stead.settings import Size
from stead.store.layers import LayerStore
from stead.tasks import SingleFlight

log = get_logger("stead.templates")


class Templates:
    def __init__(
        self, host: Host, quotas: Quotas, pool: Pool, layers: LayerStore, default_size: Size
    ) -> None:
        self._host = host
        self._quotas = quotas
        self._pool = pool
        self._layers = layers
        self._default = default_size
        self._builds: SingleFlight[Template] = SingleFlight()

    async def ensure(
        self, size: Size | None = None, report: Report = lambda _: None, *, account: str | None = None
    ) -> Template:
        """The template of a size, built single-flight when missing; creates from it are fast.

        LimitExceeded before it is built when the account may not have a VM of this size now.
        """
        size = size or self._default
        template = await self._host.templates.find(size)
        if template is None:
            async with self._quotas.admitting(account, size):
                pass
            template = await self._builds.run(
                size, lambda: self._build(size, report), name=f"template {size}"
            )
        if size == self._default:
            self._pool.keep(template)
        return template

    async def _build(self, size: Size, report: Report) -> Template:
        return await self._host.templates.ensure(size, report)

    async def fill_pool(self) -> None:
        """Fill the pool from now on, if the template of the default size exists."""
        try:
            if (template := await self._host.templates.find(self._default)) is not None:
                self._pool.keep(template)
        except TemplateUnreadable as error:
            log.error("the pool of prepared VMs is not filled", error=str(error))

    async def remove_unused(self) -> None:
        removed = await self._host.templates.remove_unused(await self._layers.templates())
        if removed:
            log.info("removed unused templates", templates=removed)

    async def close(self) -> None:
        await self._builds.close()
