"""Rows of read-only disk layers, and references to them."""

from collections.abc import Collection

import sqlalchemy as sa

from stead.store.machines import LayerRow, layers, machines
from stead.store.rows import Rows
from stead.store.snapshots import snapshots


class LayerStore(Rows[LayerRow]):
    table = layers
    row = LayerRow

    async def lineage(self, layer_id: str) -> list[LayerRow]:
        """A layer and all layers below it, newest first; empty when it does not exist."""
        start = sa.select(layers, sa.literal(0).label("depth")).where(layers.c.id == layer_id)
        chain = start.cte("chain", recursive=True)
        chain = chain.union_all(sa.select(layers, chain.c.depth + 1).where(layers.c.id == chain.c.parent))
        columns = (chain.c[column.name] for column in layers.c)
        return await self._select(sa.select(*columns).order_by(chain.c.depth))

    async def list(self) -> list[LayerRow]:
        return await self._select(sa.select(layers).order_by(layers.c.created_at))

    async def referenced(self) -> set[str]:
        """The layers that a VM or a snapshot refers to."""
        return await self._used("layer")

    async def checkpoints(self) -> set[str]:
        """The checkpoints that a VM or a snapshot refers to."""
        return await self._used("checkpoint")

    async def _used(self, column: str) -> set[str]:
        found = sa.union(*(sa.select(table.c[column]) for table in (machines, snapshots)))
        return await self.database.read(lambda connection: set(connection.execute(found).scalars()) - {None})

    async def templates(self) -> set[str]:
        """The templates that a VM, a snapshot or a layer refers to."""
        found = sa.union(
            sa.select(machines.c.template),
            sa.select(machines.c.memory_base).where(machines.c.memory_base.is_not(None)),
            sa.select(layers.c.template),
            sa.select(snapshots.c.template).where(snapshots.c.deleted_at.is_(None)),
        )
        return await self.database.read(lambda connection: set(connection.execute(found).scalars()))

    async def templates_of(self, account: str) -> set[str]:
        """The templates below the disks of an account's VMs and snapshots."""
        found = sa.union(
            sa.select(machines.c.template).where(machines.c.account == account),
            sa.select(snapshots.c.template).where(
                snapshots.c.account == account, snapshots.c.deleted_at.is_(None)
            ),
        )
        return await self.database.read(lambda connection: set(connection.execute(found).scalars()))

    async def rebase(self, layer_id: str, file: str, parent: str | None) -> bool:
        """Give a layer another file and parent; returns whether it exists."""
        return await self.update(layer_id, file=file, parent=parent) is not None

    async def remove(self, ids: Collection[str]) -> bool:
        """Delete rows, all or none; False when one of them is referenced."""
        try:
            # Parents and children are deleted in one statement: check foreign keys at the commit.
            deferred = sa.text("PRAGMA defer_foreign_keys = ON")
            await self.database.execute(deferred, layers.delete().where(layers.c.id.in_(ids)))
        except sa.exc.IntegrityError:
            return False
        return True
