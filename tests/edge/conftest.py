"""An edge in front of namespaces that stand for VMs."""

from collections.abc import AsyncIterator

import pytest_asyncio

from support.edge_with_namespaces import EdgeWithNamespaces, FakeVm, echo_app, edge_with_namespaces


@pytest_asyncio.fixture(scope="module")
async def edge_ns(root: None) -> AsyncIterator[EdgeWithNamespaces]:
    async with edge_with_namespaces() as edge_ns:
        yield edge_ns


@pytest_asyncio.fixture
async def vm(edge_ns: EdgeWithNamespaces) -> AsyncIterator[FakeVm]:
    """A VM whose port 80 echoes, mapped to `app.style.dev`."""
    name = f"vm{len(edge_ns.vms.found)}"
    vm = edge_ns.add_vm(name)
    edge_ns.map("app.style.dev", name)
    async with vm.serving(echo_app(name), 80):
        yield vm
    edge_ns.mappings.found.clear()
    edge_ns.edge.mappings_changed()
