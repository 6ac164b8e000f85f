"""A user of the command line with an account and a VM."""

from collections.abc import AsyncIterator

import pytest_asyncio

from support.api_calls import new_account
from support.installations import Server
from support.run_cli import Shell


@pytest_asyncio.fixture(scope="module")
async def shell(server: Server) -> Shell:
    """A user with an account."""
    _, key = await new_account(server, "cli")
    return Shell(server.url, key)


@pytest_asyncio.fixture(scope="module")
async def vm(shell: Shell) -> AsyncIterator[str]:
    """A VM for all tests that leave it unchanged."""
    made = await shell.ask("vm", "create", "--name", "workbench", "--workdir", "/srv")
    yield made["id"]
    await shell.run("vm", "delete", made["id"])
