"""The identity endpoints over HTTP, without VMs: the ownership of VM ids is faked."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI

from stead.api.app import create_app, with_middleware
from stead.identity.identities import Identities
from stead.repos.repos import Repos
from support.git_hosting import open_hosting

BASE = "/identity/v1/identities"
NOWHERE = "00000000-0000-4000-8000-000000000000"
MACHINE = "abcdefghij0123456789"
FOREIGN = "zyxwvutsrq9876543210"
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z")

ENDPOINTS = [
    ("GET", ""),
    ("POST", ""),
    ("DELETE", "/{i}"),
    ("POST", "/{i}/tokens"),
    ("GET", "/{i}/tokens"),
    ("DELETE", "/{i}/tokens/{t}"),
    ("GET", "/{i}/permissions/git"),
    ("GET", "/{i}/permissions/git/{r}"),
    ("POST", "/{i}/permissions/git/{r}"),
    ("PUT", "/{i}/permissions/git/{r}"),
    ("DELETE", "/{i}/permissions/git/{r}"),
    ("GET", "/{i}/permissions/vm"),
    ("GET", "/{i}/permissions/vm/{v}"),
    ("POST", "/{i}/permissions/vm/{v}"),
    ("PUT", "/{i}/permissions/vm/{v}"),
    ("DELETE", "/{i}/permissions/vm/{v}"),
]


@dataclass
class Client:
    """An HTTP client with the credentials of an account or an identity."""

    http: httpx2.AsyncClient
    headers: dict[str, str]

    async def send(self, method: str, path: str, json: Any = None, **options: Any) -> httpx2.Response:
        if json is not None:
            options["json"] = json
        return await self.http.request(method, BASE + path, headers=self.headers, **options)

    async def succeed(self, method: str, path: str, json: Any = None, **options: Any) -> Any:
        answer = await self.send(method, path, json, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def fail(self, status: int, code: str, method: str, path: str, json: Any = None) -> Any:
        answer = await self.send(method, path, json)
        body = answer.json()
        assert (answer.status_code, body["code"]) == (status, code), body
        assert body["error"] == code
        assert body["message"] == body["description"] != ""
        return body

    async def identity(self) -> str:
        return cast(str, (await self.succeed("POST", ""))["id"])


@dataclass
class TwoAccounts:
    http: httpx2.AsyncClient
    ours: Client
    theirs: Client
    account: str
    repos: Repos


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app()


@pytest_asyncio.fixture
async def two_accounts(app: FastAPI, tmp_path: Path) -> AsyncIterator[TwoAccounts]:
    async with open_hosting(tmp_path) as git:

        async def owns(account: str, machine: str) -> bool:
            return {MACHINE: git.ours, FOREIGN: git.theirs}.get(machine) == account

        here = replace(git.installation, identities=Identities(git.database, owns))
        app.state.installation = here
        served, calls = with_middleware(app, here)
        transport = httpx2.ASGITransport(served, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://stead.test") as http:
            clients = []
            for account in (git.ours, git.theirs):
                _, key = await git.accounts.create_key(account)
                clients.append(Client(http, {"Authorization": f"Bearer {key}"}))
            ours, theirs = clients
            yield TwoAccounts(http, ours, theirs, git.ours, git.repos)
        await calls.close()


def fill(path: str, identity: str, machine: str = MACHINE, token: str = NOWHERE) -> str:
    return path.format(i=identity, t=token, r=NOWHERE, v=machine)


async def test_identities_are_created_listed_and_deleted(two_accounts: TwoAccounts) -> None:
    ours = two_accounts.ours
    made = [await ours.succeed("POST", "", options) for options in (None, {}, {"name": "ci"})]
    for identity, name in zip(made, (None, None, "ci"), strict=True):
        assert identity.pop("created") is True
        assert UUID4.fullmatch(identity["id"]) and TIME.fullmatch(identity["createdAt"])
        assert identity == {
            "id": identity["id"],
            "managed": False,
            "name": name,
            "createdAt": identity["createdAt"],
            "vmGrants": 0,
            "repoGrants": 0,
        }
    assert await ours.succeed("GET", "?offset=0") == {"identities": made, "offset": 0, "total": 3}
    page = await ours.succeed("GET", "?limit=1&offset=1")
    assert page == {"identities": made[1:2], "offset": 1, "total": 3}
    assert await ours.succeed("GET", "?offset=7") == {"identities": [], "offset": 7, "total": 3}
    assert await ours.succeed("DELETE", f"/{made[0]['id']}") == {}
    assert (await ours.succeed("GET", ""))["identities"] == made[1:]
    await ours.fail(404, "IDENTITY_NOT_FOUND", "DELETE", f"/{made[0]['id']}")


async def test_list_counts_the_permissions_of_each_identity(two_accounts: TwoAccounts) -> None:
    ours = two_accounts.ours
    some, other = await ours.identity(), await ours.identity()
    repos = [(await two_accounts.repos.create(two_accounts.account)).id for _ in range(2)]
    await ours.succeed("POST", f"/{some}/permissions/vm/{MACHINE}")
    for repo in repos:
        await ours.succeed("POST", f"/{some}/permissions/git/{repo}", {"permission": "read"})

    async def grants() -> dict[str, tuple[int, int]]:
        rows = (await ours.succeed("GET", ""))["identities"]
        return {row["id"]: (row["vmGrants"], row["repoGrants"]) for row in rows}

    assert await grants() == {some: (1, 2), other: (0, 0)}
    await ours.succeed("DELETE", f"/{some}/permissions/git/{repos[0]}")
    await ours.succeed("DELETE", f"/{some}/permissions/vm/{MACHINE}")
    assert await grants() == {some: (0, 1), other: (0, 0)}


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201, 7])
async def test_invalid_identity_names_are_refused(two_accounts: TwoAccounts, name: Any) -> None:
    await two_accounts.ours.fail(400, "INVALID_REQUEST", "POST", "", {"name": name})
    assert (await two_accounts.ours.succeed("GET", ""))["total"] == 0


async def test_token_is_valid_until_revoked(two_accounts: TwoAccounts) -> None:
    ours = two_accounts.ours
    identity = await ours.identity()
    made = await ours.succeed("POST", f"/{identity}/tokens")
    assert made.keys() == {"id", "token"}
    assert re.fullmatch(r"stid_[A-Za-z0-9_-]{43}", made["token"])
    assert await ours.succeed("GET", f"/{identity}/tokens") == {"tokens": [{"id": made["id"]}]}

    holder = Client(two_accounts.http, {"X-Freestyle-Identity-Access-Token": made["token"]})
    await holder.fail(403, "FORBIDDEN", "GET", "")
    assert await ours.succeed("DELETE", f"/{identity}/tokens/{made['id']}") == {}
    await holder.fail(401, "UNAUTHORIZED_ERROR", "GET", "")
    assert await ours.succeed("GET", f"/{identity}/tokens") == {"tokens": []}
    await ours.fail(404, "NOT_FOUND", "DELETE", f"/{identity}/tokens/{made['id']}")


async def test_vm_permission_is_granted_updated_and_revoked(two_accounts: TwoAccounts) -> None:
    ours = two_accounts.ours
    identity = await ours.identity()
    path = f"/{identity}/permissions/vm/{MACHINE}"
    await ours.fail(404, "VM_PERMISSION_NOT_FOUND", "GET", path)
    await ours.fail(404, "VM_PERMISSION_NOT_FOUND", "PUT", path)

    granted = await ours.succeed("POST", path, {"allowedUsers": ["alice", "bob"]})
    assert granted == {
        "id": granted["id"],
        "vmId": MACHINE,
        "identityId": identity,
        "allowedUsers": ["alice", "bob"],
        "grantedAt": granted["grantedAt"],
        "grantedBy": two_accounts.account,
    }
    assert TIME.fullmatch(granted["grantedAt"])
    assert await ours.succeed("GET", path) == granted
    listed = await ours.succeed("GET", f"/{identity}/permissions/vm?offset=0")
    assert listed == {"permissions": [granted], "offset": 0, "total": 1}
    listed = await ours.succeed("GET", f"/{identity}/permissions/vm?limit=5&offset=1")
    assert listed == {"permissions": [], "offset": 1, "total": 1}
    await ours.fail(409, "PERMISSION_ALREADY_EXISTS", "POST", path)

    assert await ours.succeed("PUT", path, {}) == {**granted, "allowedUsers": None}
    assert await ours.succeed("PUT", path, {"allowedUsers": []}) == {**granted, "allowedUsers": []}
    assert await ours.succeed("DELETE", path) == {}
    await ours.fail(404, "VM_PERMISSION_NOT_FOUND", "DELETE", path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"json": {}},
        {"json": {"allowedUsers": None}},
        {"json": {"something": {"else": 1}}},
        {"content": b"", "headers": {"Content-Type": "application/json"}},
    ],
)
async def test_permission_without_users_allows_every_user(two_accounts: TwoAccounts, options: Any) -> None:
    identity = await two_accounts.ours.identity()
    headers = two_accounts.ours.headers | options.pop("headers", {})
    path = f"{BASE}/{identity}/permissions/vm/{MACHINE}"
    for method in ("POST", "PUT"):
        answer = await two_accounts.http.request(method, path, headers=headers, **options)
        assert answer.status_code == 200, answer.text
        assert answer.json()["allowedUsers"] is None


async def test_vm_of_another_account_cannot_be_granted(two_accounts: TwoAccounts) -> None:
    identity = await two_accounts.ours.identity()
    for machine in (FOREIGN, "nowhere"):
        path = f"/{identity}/permissions/vm/{machine}"
        body = await two_accounts.ours.fail(404, "VM_NOT_FOUND", "POST", path, {})
        assert body["vmId"] == machine
        assert body["message"] == f"VM {machine} not found"


async def test_second_of_two_concurrent_grants_is_a_conflict(two_accounts: TwoAccounts) -> None:
    for _ in range(5):
        path = f"/{await two_accounts.ours.identity()}/permissions/vm/{MACHINE}"
        answers = await asyncio.gather(*(two_accounts.ours.send("POST", path, {}) for _ in range(4)))
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]


async def test_missing_repository_cannot_be_granted(two_accounts: TwoAccounts) -> None:
    ours = two_accounts.ours
    identity = await ours.identity()
    assert await ours.succeed("GET", f"/{identity}/permissions/git?offset=0") == {"repositories": []}
    path = f"/{identity}/permissions/git/{NOWHERE}"
    for method, body in (("GET", None), ("POST", {"permission": "read"}), ("PUT", {"permission": "write"})):
        await ours.fail(404, "GIT_REPOSITORY_NOT_FOUND", method, path, body)
    await ours.fail(404, "GIT_REPOSITORY_NOT_FOUND", "DELETE", path)
    await ours.fail(400, "INVALID_REQUEST", "POST", path, {"permission": "admin"})


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
async def test_only_the_accounts_own_key_may_manage_identities(
    two_accounts: TwoAccounts, method: str, path: str
) -> None:
    """Every endpoint refuses no credentials, a token of the identity itself, and another account."""
    identity = await two_accounts.ours.identity()
    token = await two_accounts.ours.succeed("POST", f"/{identity}/tokens")
    granted = await two_accounts.ours.succeed("POST", f"/{identity}/permissions/vm/{MACHINE}")
    body = {"permission": "read"} if method in ("POST", "PUT") else None
    where = fill(path, identity, token=token["id"])

    await Client(two_accounts.http, {}).fail(401, "UNAUTHORIZED_ERROR", method, where, body)
    for headers in (
        {"X-Freestyle-Identity-Access-Token": token["token"]},
        {"Authorization": f"Bearer {token['token']}"},
    ):
        await Client(two_accounts.http, headers).fail(403, "FORBIDDEN", method, where, body)
    if path:
        messages = []
        for target in (identity, NOWHERE):
            for machine in (MACHINE, FOREIGN):
                where = fill(path, target, machine, token["id"])
                failed = await two_accounts.theirs.fail(404, "IDENTITY_NOT_FOUND", method, where, body)
                messages.append(str(failed).replace(target, "?"))
        assert len(set(messages)) == 1
    else:
        await two_accounts.theirs.succeed(method, path)
        assert (await two_accounts.ours.succeed("GET", ""))["total"] == 1

    assert await two_accounts.ours.succeed("GET", f"/{identity}/permissions/vm/{MACHINE}") == granted
    assert await two_accounts.ours.succeed("GET", f"/{identity}/tokens") == {"tokens": [{"id": token["id"]}]}


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=many",
        "offset=-1",
        "offset=NaN",
        "offset=1.5",
        f"offset={10**30}",
    ],
)
async def test_invalid_pages_are_refused(two_accounts: TwoAccounts, query: str) -> None:
    identity = await two_accounts.ours.identity()
    for path in ("", f"/{identity}/permissions/vm", f"/{identity}/permissions/git"):
        await two_accounts.ours.fail(400, "INVALID_REQUEST", "GET", f"{path}?{query}")


@pytest.mark.parametrize("users", [["a b"], [""], ["a:b"], [1], "alice", {"alice": 1}, ["x"] * 1001])
async def test_invalid_users_are_refused(two_accounts: TwoAccounts, users: Any) -> None:
    path = f"/{await two_accounts.ours.identity()}/permissions/vm/{MACHINE}"
    await two_accounts.ours.fail(400, "INVALID_REQUEST", "POST", path, {"allowedUsers": users})
    await two_accounts.ours.fail(404, "VM_PERMISSION_NOT_FOUND", "GET", path)


@pytest.mark.parametrize("identity", ["x", "a" * 5000, "%00", "%F0%9F%98%80", "%FF", "'", "%25"])
async def test_malformed_ids_are_not_found(two_accounts: TwoAccounts, identity: str) -> None:
    await two_accounts.ours.fail(404, "IDENTITY_NOT_FOUND", "DELETE", f"/{identity}")
    await two_accounts.ours.fail(404, "IDENTITY_NOT_FOUND", "POST", f"/{identity}/permissions/vm/{MACHINE}")
