"""Specs to build, and what builds have left."""

from dataclasses import dataclass, field
from typing import Any

from stead.builds.builder import Builder
from stead.builds.plan import plan_machine
from stead.builds.spec import File, Layer, Service
from stead.creation.creation import Creation, VmOrder
from stead.limits import UNLIMITED, Limits
from stead.logbook import Logbook
from stead.machines import Machine, Machines, Properties
from stead.store.builds import BuildRow, BuildStore
from support.internals import inside


@dataclass
class Lines(Logbook):
    """A logbook that keeps its lines."""

    entries: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    async def write(self, account: str, message: str, **about: Any) -> None:
        self.entries.append((account, message, about))

    def of(self, account: str) -> list[str]:
        return [message for whose, message, _ in self.entries if whose == account]


def vm_order(
    account: str,
    *,
    spec: Layer | None = None,
    top: Layer | None = None,
    name: str | None = None,
    warnings: tuple[str, ...] = (),
) -> VmOrder:
    """A VM of a spec; `top` has the fields beside it."""
    plan = plan_machine(spec, None, top or Layer())
    return VmOrder(plan, Properties(account=account, name=name), warnings=warnings)


async def create_vm(creation: Creation, order: VmOrder) -> Machine:
    return await creation.machines.get((await creation.create(order)).id)


async def unlimited(_: str) -> Limits:
    return UNLIMITED


async def builds_of(machines: Machines, account: str) -> list[BuildRow]:
    store = BuildStore(inside(machines).database)
    return await store._select(store.table.select().where(store.table.c.account == account))


async def phase_names(builder: Builder, account: str, build: str) -> list[str]:
    return [phase.name for phase in await builder.records.phases(account, build)]


async def layers_built(builder: Builder, account: str) -> int:
    """How often a layer was built, by all builds of an account."""
    builds, total = await builder.records.list(account)
    assert len(builds) == total
    names = [name for build in builds for name in await phase_names(builder, account, build.id)]
    return sum(name.endswith("snapshot") for name in names)


async def hidden(machines: Machines, account: str) -> list[str]:
    """VMs of builds, which their account cannot see."""
    rows = await inside(machines).store.list(account=account, purpose="build")
    return [row.id for row in rows]


async def said(lines: Lines, account: str, message: str) -> bool:
    return message in lines.of(account)


async def active(machine: Machine, unit: str) -> str:
    return (await machine.exec(f"systemctl is-active {unit}")).stdout.decode().strip()


def run_command(number: int, script: str, after: str | None = None) -> tuple[Service, File]:
    """A `run` step as the npm client sends it."""
    name = f"freestyle-run-command-{number}"
    path = f"/opt/freestyle/scripts/{name}.sh"
    before = () if after is None else (f"{after}.service",)
    service = Service(
        name,
        mode="oneshot",
        exec=(f"/bin/bash {path}",),
        env={"HOME": "/root"},
        workdir="/root",
        after=before,
        requires=before,
        delete_after_success=True,
    )
    return service, File(path, f"#!/bin/bash\n{script}".encode())


def with_commands(*scripts: str, **more: Any) -> Layer:
    pairs, last = [], None
    for number, script in enumerate(scripts, 1):
        pairs.append(run_command(number, script, last))
        last = pairs[-1][0].name
    services, files = (tuple(column) for column in zip(*pairs, strict=True))
    return Layer(**{"services": services, "files": files} | more)


def note(text: str, **more: Any) -> Layer:
    return Layer(files=(File("/srv/note", text.encode()),), **more)
