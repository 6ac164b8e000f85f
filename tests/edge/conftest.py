"""An edge in front of namespaces that stand for VMs."""

from collections.abc import AsyncIterator

import pytest_asyncio

from support.edge_stage import EdgeStage, FakeVm, echo_app, edge_stage


@pytest_asyncio.fixture(scope="module")
async def stage(root: None) -> AsyncIterator[EdgeStage]:
    async with edge_stage() as stage:
        yield stage


@pytest_asyncio.fixture
async def vm(stage: EdgeStage) -> AsyncIterator[FakeVm]:
    """A VM whose port 80 echoes, mapped to `app.style.dev`."""
    name = f"vm{len(stage.vms.found)}"
    vm = stage.add_vm(name)
    stage.map("app.style.dev", name)
    async with vm.serving(echo_app(name), 80):
        yield vm
    stage.mappings.found.clear()
    stage.edge.mappings_changed()
