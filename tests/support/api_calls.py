"""Calls of the served API: clients, their VM, and refusals."""

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest_asyncio

from stead.machines import Machine
from stead.machines.records import Properties
from support.installations import Server
from support.serve_process import client_of

TRACE = "x-freestyle-trace-id"


@pytest_asyncio.fixture(scope="module")
async def http(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(server.url, server.key) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def vm(server: Server) -> AsyncIterator[Machine]:
    """One VM of the tests' account, shared by the tests of this module."""
    machine = await server.installation.machines.create(Properties(account=server.account, name="shared"))
    yield machine
    await machine.delete()


async def new_account(server: Server, name: str, **limits: int) -> tuple[str, str]:
    """An account and its key. Its name is unique: one test process may set a module's fixtures up twice."""
    account = await server.installation.accounts.create(f"{name}-{os.urandom(4).hex()}", limits)
    _, key = await server.installation.accounts.create_key(account.id)
    return account.id, key


@contextlib.asynccontextmanager
async def another_account(server: Server, name: str, **limits: int) -> AsyncIterator[httpx2.AsyncClient]:
    _, key = await new_account(server, name, **limits)
    async with client_of(server.url, key) as client:
        yield client
        for each in (await client.get("/v1/vms")).json()["vms"]:
            assert (await client.delete(f"/v1/vms/{each['id']}")).status_code == 200


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Checks the form of an error answer and returns its body."""
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["code"]) == (status, code), answer.text
    assert body["message"] == body["description"]
    assert answer.headers[TRACE]
    return body
