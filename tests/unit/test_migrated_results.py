"""Results of creates that the version before stored as HTTP answers: they are answered as before."""

import contextlib
import hashlib
import importlib
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from stead.api.background import answer, result
from stead.api.errors import ApiError
from stead.api.wire import Wire, rfc3339
from stead.api.wire.identities import CreatedIdentity
from stead.api.wire.networks import CreatedVpc
from stead.creation.background import BackgroundRequests
from stead.creation.idempotency import IdempotencyKeys, KeyedCall
from stead.creation.results import (
    BuiltSnapshot,
    CreatedVm,
    Ensured,
    ForkChild,
    ForkChildren,
    TakenSnapshot,
)
from stead.identity.identities import Identity
from stead.networks.networks import Vpc
from stead.store.database import Database, open_database
from stead.store.idempotency import IdempotencyStore
from stead.store.requests import RequestStore
from support.databases import migrate

VM = {
    "id": "v" * 20,
    "domains": ["b.style.dev", "a.style.dev"],
    "consoleUrl": None,
    "snapshotId": "sc-1",
    "created": False,
}
SNAPSHOT = {"snapshotId": "sc-2"}
FAILURE = ApiError(
    "VM_SETUP_FAILED", "step: why", failedReason="why", diagnostics={"serviceStates": [], "count": 2}
)
BUSY = ApiError("SERVICE_UNAVAILABLE", "64 VMs are being created", retryable=True)
IDENTITY = {
    "id": "i",
    "managed": False,
    "name": "agent",
    "createdAt": "2026-11-18T09:00:00.123457Z",
    "vmGrants": 1,
    "repoGrants": 2,
    "created": False,
}
VPC = {
    "vpcId": "vpc-1",
    "name": None,
    "cidr": "10.0.0.0/16",
    "accountId": "me",
    "createdAt": "2026-11-18T09:00:00.999999Z",
    "created": True,
}
FORKS = {
    "vmId": "parent",
    "forks": [
        {"id": "one", "name": "x-1", "domains": [], "consoleUrl": None},
        {"id": "two", "name": None, "domains": [], "consoleUrl": None},
    ],
}
TAKEN = {"snapshotId": "sc-3", "sourceVmId": "parent", "sourceVmInstanceId": "run"}
REQUESTS = {
    "ri-vm": (200, VM),
    "ri-snapshot": (200, SNAPSHOT),
    "ri-failed": (FAILURE.status, FAILURE.body()),
    "ri-busy": (BUSY.status, BUSY.body()),
}
KEYED = {
    "/v1/vms": VM,
    "/v1/vms/snapshots": SNAPSHOT,
    "/v1/vms/parent/fork": FORKS,
    "/v1/vms/parent/snapshot": TAKEN,
    "/git/v1/repo": {"repoId": "r", "created": True},
    "/identity/v1/identities": IDENTITY,
    "/v1/vpcs": VPC,
}


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    path = tmp_path / "stead.db"
    migrate(path, "0022")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executemany(
            "INSERT INTO background_requests (id, account, state, status, answer, created_at, finished_at)"
            " VALUES (?, 'me', 'done', ?, ?, 1, 2)",
            [(name, status, json.dumps(body)) for name, (status, body) in REQUESTS.items()],
        )
        connection.execute(
            "INSERT INTO background_requests (id, account, state, created_at)"
            " VALUES ('ri-running', 'me', 'pending', 1)"
        )
        connection.executemany(
            "INSERT INTO idempotency_keys (id, account, target, content, request, answer, created_at)"
            " VALUES (?, 'me', ?, ?, 'ri-1', ?, 4e18)",
            [
                (
                    hashlib.sha256(f"me\0{path}".encode()).hexdigest(),
                    f"POST {path}",
                    hashlib.sha256(b"{}").hexdigest(),
                    json.dumps(body),
                )
                for path, body in KEYED.items()
            ],
        )
        connection.commit()
    opened = await open_database(path)
    yield opened
    await opened.dispose()


@pytest.mark.parametrize("request_id", REQUESTS)
async def test_finished_requests_keep_their_answers(database: Database, request_id: str) -> None:
    found = await result(BackgroundRequests(RequestStore(database)), "me", request_id)
    assert (found.status_code, json.loads(bytes(found.body))) == REQUESTS[request_id]


async def test_running_request_is_recovered(database: Database) -> None:
    background = BackgroundRequests(RequestStore(database))

    async def find(request: str) -> CreatedVm:
        assert request == "ri-running"
        return CreatedVm("it")

    assert (await result(background, "me", "ri-running")).status_code == 202
    await background.recover(find, lambda error: pytest.fail(repr(error)))
    found = await background.get("me", "ri-running")
    assert found is not None and found.result == CreatedVm("it")


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("/v1/vms", CreatedVm("v" * 20, "sc-1", ("b.style.dev", "a.style.dev"), created=False)),
        ("/v1/vms/snapshots", BuiltSnapshot("sc-2")),
        (
            "/v1/vms/parent/fork",
            ForkChildren("parent", (ForkChild("one", "x-1"), ForkChild("two"))),
        ),
        ("/v1/vms/parent/snapshot", TakenSnapshot("sc-3", "parent", "run")),
    ],
)
async def test_keys_of_vms_keep_their_results(database: Database, path: str, made: object) -> None:
    assert await repeated(database, path, type(made)) == made
    if isinstance(made, CreatedVm | BuiltSnapshot):
        assert json.loads(bytes(answer(made).body)) == KEYED[path]


async def test_keys_of_repositories_identities_and_vpcs_keep_their_results(database: Database) -> None:
    assert await repeated(database, "/git/v1/repo", Ensured[str]) == Ensured("r")
    identity = await repeated(database, "/identity/v1/identities", Ensured[Identity])
    assert (identity.value.account, identity.created) == ("me", False)
    assert dumped(CreatedIdentity.model_validate(identity.value)) | {"created": False} == IDENTITY
    vpc = await repeated(database, "/v1/vpcs", Ensured[Vpc])
    assert dumped(CreatedVpc.of(vpc.value)) == VPC


async def repeated(database: Database, path: str, kind: Any) -> Any:
    async def make() -> object:
        raise AssertionError("created again")

    call = KeyedCall.parse("me", path, f"POST {path}", b"{}", "ri-2")
    return await IdempotencyKeys(IdempotencyStore(database)).run(call, kind, make)


def dumped(model: Wire) -> dict[str, Any]:
    return model.model_dump(by_alias=True)


@given(st.floats(min_value=1.5e9, max_value=4e9))
def test_times_are_shown_as_before(seconds: float) -> None:
    migration: Any = importlib.import_module("stead.store.migrations.versions.0023_created_things")
    assert rfc3339(migration._seconds(rfc3339(seconds))) == rfc3339(seconds)
