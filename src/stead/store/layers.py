"""Frozen disk layers as rows, and who stands on them."""

from collections.abc import Collection

import sqlalchemy as sa

from stead.store.machines import LayerRow
from stead.store.rows import Rows
from stead.store.tables import layers, machines, snapshots


class LayerStore(Rows[LayerRow]):
    table = layers
    row = LayerRow

    async def lineage(self, layer_id: str) -> list[LayerRow]:
        """A layer and all that it stands on, newest first; nothing when there is no such layer."""
        start = sa.select(layers, sa.literal(0).label("depth")).where(layers.c.id == layer_id)
        chain = start.cte("chain", recursive=True)
        chain = chain.union_all(sa.select(layers, chain.c.depth + 1).where(layers.c.id == chain.c.parent))
        columns = (chain.c[column.name] for column in layers.c)
        return await self._select(sa.select(*columns).order_by(chain.c.depth))

    async def list(self) -> list[LayerRow]:
        return await self._select(sa.select(layers).order_by(layers.c.created_at))

    async def referenced(self) -> set[str]:
        """The layers that a machine or a snapshot stands on directly."""
        return await self._used("layer")

    async def checkpoints(self) -> set[str]:
        """The checkpoints that a machine or a snapshot needs."""
        return await self._used("checkpoint")

    async def _used(self, column: str) -> set[str]:
        found = sa.union(*(sa.select(table.c[column]) for table in (machines, snapshots)))
        return await self.database.read(lambda connection: set(connection.execute(found).scalars()) - {None})

    async def rebase(self, layer_id: str, file: str, parent: str | None) -> bool:
        """From now on a layer is this file over this parent; tells whether there is such a layer."""
        return await self.update(layer_id, file=file, parent=parent) is not None

    async def remove(self, ids: Collection[str]) -> bool:
        """Remove rows, all or none; tells whether, for one of them may have come into use."""
        try:
            # Those that stand on others go in the same transaction as these.
            deferred = sa.text("PRAGMA defer_foreign_keys = ON")
            await self.database.execute(deferred, layers.delete().where(layers.c.id.in_(ids)))
        except sa.exc.IntegrityError:
            return False
        return True
