"""Authorization: every call by every kind of caller; resources of others look nonexistent."""

import re
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.api.app import create_app
from stead.api.callers import PUBLIC
from stead.machines.records import Properties
from stead.repos.committing import Change, commit
from support.api_calls import new_account
from support.installations import Server

TOKEN = "X-Freestyle-Identity-Access-Token"
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}

# Calls that an identity token may make on granted resources; all others need an API key.
FOR_IDENTITIES = {
    ("get", "/v1/vms"),
    ("get", "/v1/vms/{vm_id}"),
    ("post", "/v1/vms/{vm_id}/start"),
    ("post", "/v1/vms/{vm_id}/await"),
    ("get", "/v1/vms/{vm_id}/build"),
    ("post", "/v1/vms/{vm_id}/exec-await"),
    ("post", "/v1/vms/{vm_id}/exec-stream"),
    ("get", "/v1/vms/{vm_id}/files/{path}"),
    ("put", "/v1/vms/{vm_id}/files/{path}"),
    ("delete", "/v1/vms/{vm_id}/files/{path}"),
    ("get", "/v1/vms/{vm_id}/stat/{path}"),
    ("post", "/v1/vms/{vm_id}/move"),
    ("post", "/v1/vms/{vm_id}/directories/{path}"),
    ("get", "/v1/vms/{vm_id}/archives/{path}"),
    ("put", "/v1/vms/{vm_id}/archives/{path}"),
    ("post", "/v1/vms/{vm_id}/watch-files"),
    ("get", "/v1/vms/{vm_id}/terminals"),
    ("get", "/v1/vms/{vm_id}/terminals/{terminal}/logs"),
    ("get", "/v1/vms/{vm_id}/terminals/{terminal}/xterm-256color"),
    ("get", "/v1/vms/{vm_id}/pty/sessions"),
    ("delete", "/v1/vms/{vm_id}/pty/sessions/{session_id}"),
    ("get", "/v1/vms/{vm_id}/processes"),
    ("post", "/v1/vms/{vm_id}/processes"),
    ("get", "/v1/vms/{vm_id}/processes/{process_id}"),
    ("delete", "/v1/vms/{vm_id}/processes/{process_id}"),
    ("post", "/v1/vms/{vm_id}/processes/{process_id}/signal"),
    ("get", "/v1/vms/{vm_id}/processes/{process_id}/wait"),
    ("post", "/v1/vms/{vm_id}/processes/{process_id}/stdin"),
    ("get", "/v1/vms/{vm_id}/processes/{process_id}/output"),
    ("post", "/v1/vms/{vm_id}/tickets"),
    ("get", "/v1/vms/{vm_id}/systemd/services"),
    ("post", "/v1/vms/{vm_id}/systemd/services"),
    ("delete", "/v1/vms/{vm_id}/systemd/services/{service}"),
    ("get", "/v1/vms/{vm_id}/systemd/services/{service}/status"),
    ("get", "/v1/vms/{vm_id}/systemd/services/{service}/logs"),
    ("post", "/v1/vms/{vm_id}/systemd/start"),
    ("post", "/v1/vms/{vm_id}/systemd/stop"),
    ("post", "/v1/vms/{vm_id}/systemd/restart"),
    ("websocket", "/v1/vms/{vm_id}/pty"),
    ("websocket", "/v1/vms/{vm_id}/pty/sessions/{session_id}"),
    ("websocket", "/v1/vms/{vm_id}/processes/{process_id}/attach"),
    ("websocket", "/v1/vms/{vm_id}/forward/3000"),
    ("get", "/v1/ssh"),
    ("get", "/observability/v1/logs"),
    ("get", "/auth/v1/whoami"),
    ("get", "/auth/v1/background-requests/{request_id}"),
    ("get", "/git/v1/repo"),
    ("get", "/git/v1/repo/{repo_id}"),
    ("get", "/git/v1/repo/{repo_id}/default-branch"),
    ("get", "/git/v1/repo/{repo_id}/git/refs/heads/"),
    ("get", "/git/v1/repo/{repo_id}/git/refs/heads/{branch}"),
    ("post", "/git/v1/repo/{repo_id}/git/refs/heads/{branch}"),
    ("get", "/git/v1/repo/{repo_id}/git/refs/tags/"),
    ("get", "/git/v1/repo/{repo_id}/git/refs/tags/{tag}"),
    ("get", "/git/v1/repo/{repo_id}/git/tags/{sha}"),
    ("get", "/git/v1/repo/{repo_id}/contents/{path}"),
    ("get", "/git/v1/repo/{repo_id}/contents"),
    ("get", "/git/v1/repo/{repo_id}/git/blobs/{sha}"),
    ("get", "/git/v1/repo/{repo_id}/git/trees/{sha}"),
    ("get", "/git/v1/repo/{repo_id}/tarball"),
    ("get", "/git/v1/repo/{repo_id}/zip"),
    ("get", "/git/v1/repo/{repo_id}/git/commits"),
    ("get", "/git/v1/repo/{repo_id}/git/commits/{sha}"),
    ("post", "/git/v1/repo/{repo_id}/commits"),
    ("get", "/git/v1/repo/{repo_id}/compare"),
    ("get", "/git/v1/repo/{repo_id}/search"),
    ("get", "/git/v1/repo/{repo_id}/search/files"),
    ("get", "/git/v1/repo/{repo_id}/search/commits"),
    ("get", "/git/v1/repo/{repo_id}/search/diffs"),
}
BODIES: dict[str, Any] = {
    "exec-await": {"command": "true"},
    "exec-stream": {"command": "true"},
    "/processes": {"command": "true"},
    "/signal": {"signal": "SIGTERM"},
    "/tickets": {"kind": "pty"},
    "files/{path}": {"content": "x"},
    "/move": {"from": "/nothing-here", "to": "/nor-here"},
    "resize": {"vcpuCount": 2},
    "/v1/vms/{vm_id}": {"name": "x"},
    "snapshots/{snapshot_id}": {"name": "x"},
    "systemd/services": {"name": "x", "mode": "oneshot", "exec": ["/bin/true"]},
    "systemd/start": {"services": [{"id": "x"}]},
    "systemd/stop": {"services": [{"id": "x"}]},
    "systemd/restart": {"services": [{"id": "x"}]},
    "permissions/git/{repo}": {"permission": "read"},
    "repo/{repo_id}/commits": {"message": "m", "files": []},
    "default-branch": {"defaultBranch": "trunk"},
    "/verifications": {"domain": "example.com", "verificationCode": "x"},
    "/mappings/{domain}": {"vmId": "nobodys", "vmPort": 80},
    "github-sync": {"githubRepoName": "owner/name"},
    "{repo_id}/trigger": {
        "trigger": {"event": "push"},
        "action": {"action": "webhook", "endpoint": "https://example.org/hook"},
    },
}


def operations() -> list[tuple[str, str]]:
    paths = create_app().openapi()["paths"]
    known = [(method, path) for path, methods in paths.items() for method in methods]
    absent = [("post", path) for path in ("/v1/vpcs/x/wireguard/peers", "/execute/v3/script")]
    absent += [("get", "/v1/cron/schedules"), ("get", "/dns/v1/records"), ("get", "/web/v1/deployments")]
    return [each for each in known if each[1] not in PUBLIC] + absent


WEBSOCKETS = (
    "/v1/vms/{vm_id}/pty",
    "/v1/vms/{vm_id}/pty/sessions/{session_id}",
    "/v1/vms/{vm_id}/processes/{process_id}/attach",
    "/v1/vms/{vm_id}/forward/3000",
)
OPERATIONS = operations()
OPERATIONS += [("websocket", path) for path in WEBSOCKETS]
NAMING = [(method, path) for method, path in OPERATIONS if "{" in path]


@dataclass(frozen=True)
class AccessMatrix:
    """A VM, a snapshot, a repository and an identity of one account, and callers of every kind."""

    http: httpx2.AsyncClient
    things: dict[str, str]
    callers: dict[str, dict[str, str]]

    async def call(
        self, caller: str, method: str, path: str, things: dict[str, str] | None = None
    ) -> httpx2.Response:
        body = next((body for end, body in BODIES.items() if path.endswith(end)), None)
        filled = path.format_map(defaultdict(lambda: "nobodys", things or self.things))
        headers = self.callers[caller]
        if method == "websocket":
            headers = headers | UPGRADE
            method = "get"
        return await self.http.request(method, filled, headers=headers, json=body)


def invented() -> dict[str, str]:
    """Well-formed ids of resources that do not exist."""
    names = "abcdefghijklmnopqrst"
    ids = {name: str(uuid.uuid4()) for name in ("identity", "token", "repo", "repo_id")}
    ids |= {"vm_id": names, "vm": names, "snapshot_id": f"sc-{names}", "build_id": f"bld-{names}"}
    return ids | {"request_id": f"ri-{names}", "path": "etc%2Fhostname"}


@pytest_asyncio.fixture(scope="module")
async def matrix(server: Server) -> AsyncIterator[AccessMatrix]:
    installation = server.installation
    machine = await installation.machines.create(Properties(account=server.account))
    snapshot = await machine.snapshot()
    identities = installation.identities
    identity = await identities.create(server.account)
    token, granted = await identities.create_token(server.account, identity.id)
    await identities.grant(server.account, identity.id, machine.id)
    repo = (await installation.repos.create(server.account, default_branch="trunk")).id
    made = await commit(installation.repos.repository(repo), [Change("etc/hostname", b"here")], "first")
    await installation.access.grant(server.account, identity.id, repo, "read")
    bystander = await identities.create(server.account)
    _, ungranted = await identities.create_token(server.account, bystander.id)
    gone = await identities.create(server.account)
    _, of_gone = await identities.create_token(server.account, gone.id)
    await identities.delete(server.account, gone.id)
    _, foreign = await new_account(server, "strangers")
    info, revoked = await installation.accounts.create_key(server.account)
    await installation.accounts.revoke_key(info.id)

    def bearer(secret: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {secret}"}

    callers = {
        "nobody": {},
        "garbage": bearer("stead_" + "x" * 43),
        "not a key": bearer("hello"),
        "revoked key": bearer(revoked),
        "token of a deleted identity": {TOKEN: of_gone},
        "owner": bearer(server.key),
        "stranger": bearer(foreign),
        "ungranted": {TOKEN: ungranted},
        "granted": {TOKEN: granted},
    }
    things = invented() | {
        "vm_id": machine.id,
        "vm": machine.id,
        "snapshot_id": snapshot.id,
        "identity": identity.id,
        "token": token.id,
        "repo_id": repo,
        "repo": repo,
        "branch": "trunk",
        "sha": made.sha,
    }
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        yield AccessMatrix(http, things, callers)
    await installation.machines.snapshots.delete(snapshot.id)
    await installation.repos.delete(repo)
    await machine.delete()


def test_access_table_names_existing_calls() -> None:
    """Compares paths without the names of their parameters."""

    def shape(path: str) -> str:
        return re.sub(r"{\w+(:path)?}", "{}", path)

    known = {(method, shape(path)) for method, path in OPERATIONS}
    assert {(method, shape(path)) for method, path in FOR_IDENTITIES} <= known


def test_public_routes() -> None:
    """Those that are called without a credential: an addition to them is a decision."""
    pages = {"/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon-32x32.png"}
    keys, webhooks = "/.well-known/jwks.json", "/github/webhooks"
    assert {"/healthz", "/metrics", "/openapi.json", keys, webhooks, *pages} == PUBLIC


@pytest.mark.parametrize(
    "caller", ["nobody", "garbage", "not a key", "revoked key", "token of a deleted identity"]
)
async def test_unauthenticated_calls_are_refused(matrix: AccessMatrix, caller: str) -> None:
    for method, path in OPERATIONS:
        answer = await matrix.call(caller, method, path)
        assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED_ERROR"), (method, path)


async def test_resources_of_other_accounts_look_nonexistent(matrix: AccessMatrix) -> None:
    """Another account gets the same answer for real ids as for invented ones."""
    nobodys = invented()
    for method, path in NAMING:
        real = await matrix.call("stranger", method, path)
        missing = await matrix.call("stranger", method, path, nobodys)
        assert real.status_code == missing.status_code >= 400, (method, path, real.text)
        assert neutral(real, matrix.things) == neutral(missing, nobodys), (method, path)


def neutral(answer: httpx2.Response, things: dict[str, str]) -> str:
    text = answer.text
    for thing in sorted(things.values(), key=len, reverse=True):
        text = text.replace(thing, "*")
    return text


async def test_lists_hold_only_own_resources(matrix: AccessMatrix) -> None:
    for path in ("/v1/vms?includeDeleted=true", "/v1/vms/snapshots?includeDeleted=true"):
        assert matrix.things["vm_id"] in (await matrix.call("owner", "get", path)).text
        for caller in ("stranger", "ungranted"):
            text = (await matrix.call(caller, "get", path)).text
            assert matrix.things["vm_id"] not in text, (caller, path)
    assert matrix.things["repo_id"] in (await matrix.call("owner", "get", "/git/v1/repo")).text
    for caller in ("stranger", "ungranted"):
        assert (await matrix.call(caller, "get", "/git/v1/repo")).json()["repositories"] == []
    listed = (await matrix.call("stranger", "get", "/identity/v1/identities?offset=0")).json()
    assert listed["identities"] == []
    logs = await matrix.call("stranger", "get", f"/observability/v1/logs?vmId={matrix.things['vm_id']}")
    assert logs.json()["logs"] == []


def allowed_to_identities(method: str, path: str) -> bool:
    shapes = {(one, re.sub(r"{\w+}", "{}", other)) for one, other in FOR_IDENTITIES}
    return (method, re.sub(r"{\w+(:path)?}", "{}", path)) in shapes


async def test_identity_tokens_cannot_manage_resources(matrix: AccessMatrix) -> None:
    for method, path in OPERATIONS:
        if not allowed_to_identities(method, path) and path.startswith(
            ("/v1/vms", "/v1/vpcs", "/identity", "/git", "/domains")
        ):
            for caller in ("granted", "ungranted"):
                answer = await matrix.call(caller, method, path)
                assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), (method, path)


async def test_ungranted_vms_look_nonexistent(matrix: AccessMatrix) -> None:
    nobodys = invented()
    for method, path in NAMING:
        if allowed_to_identities(method, path) and "{vm_id}" in path:
            real = await matrix.call("ungranted", method, path)
            missing = await matrix.call("ungranted", method, path, nobodys)
            assert (real.status_code, real.json()["code"]) == (404, "VM_NOT_FOUND"), (method, path)
            assert neutral(real, matrix.things) == neutral(missing, nobodys), (method, path)


@pytest.mark.parametrize("caller", ["owner", "granted"])
async def test_granted_vms_can_be_used(matrix: AccessMatrix, caller: str) -> None:
    for method, path, status in (
        ("get", "/v1/vms/{vm_id}", 200),
        ("post", "/v1/vms/{vm_id}/start", 200),
        ("post", "/v1/vms/{vm_id}/exec-await", 200),
        ("post", "/v1/vms/{vm_id}/exec-stream", 200),
        ("get", "/v1/vms/{vm_id}/files/{path}", 200),
        ("get", "/v1/vms/{vm_id}/stat/{path}", 200),
        ("get", "/v1/vms/{vm_id}/terminals", 200),
        ("get", "/v1/vms/{vm_id}/pty/sessions", 200),
        ("get", "/v1/vms/{vm_id}/processes", 200),
        ("post", "/v1/vms/{vm_id}/tickets", 200),
        ("websocket", "/v1/vms/{vm_id}/pty", 101),
        ("websocket", "/v1/vms/{vm_id}/pty/sessions/{session_id}", 404),
        ("websocket", "/v1/vms/{vm_id}/forward/3000", 502),
        ("get", "/v1/vms/{vm_id}/build", 404),
    ):
        answer = await matrix.call(caller, method, path)
        assert answer.status_code == status, (method, path, answer.text)
    listed = (await matrix.call(caller, "get", "/v1/vms")).json()
    assert matrix.things["vm_id"] in [vm["id"] for vm in listed["vms"]]


async def test_identity_tokens_start_a_vm_and_do_not_change_its_settings(
    matrix: AccessMatrix, server: Server
) -> None:
    machines, vm = server.installation.machines, matrix.things["vm_id"]
    before = await machines.info(vm)
    await machines.suspend(vm)
    start = f"/v1/vms/{vm}/start"
    for settings in ({"idleTimeoutSeconds": None}, {"activityThresholdBytes": 5}):
        answer = await matrix.http.post(start, headers=matrix.callers["granted"], json=settings)
        assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN"), settings
    after = await machines.info(vm)
    assert (after.state, after.idle_timeout, after.activity_threshold) == (
        *("suspended", before.idle_timeout, before.activity_threshold),
    )
    waiting = {"waitForReadySignal": False, "readySignalTimeoutSeconds": 60}
    started = await matrix.http.post(start, headers=matrix.callers["granted"], json=waiting)
    assert started.status_code == 200, started.text
    changed = await matrix.http.post(
        start, headers=matrix.callers["owner"], json={"activityThresholdBytes": 5}
    )
    assert changed.status_code == 200, changed.text
    assert (await machines.info(vm)).activity_threshold == 5


async def test_ungranted_repositories_look_nonexistent(matrix: AccessMatrix) -> None:
    nobodys = invented()
    for method, path in NAMING:
        if allowed_to_identities(method, path) and "{repo_id}" in path:
            real = await matrix.call("ungranted", method, path)
            missing = await matrix.call("ungranted", method, path, nobodys)
            assert (real.status_code, real.json()["code"]) == (404, "REPO_NOT_FOUND"), (method, path)
            assert neutral(real, matrix.things) == neutral(missing, nobodys), (method, path)


async def test_read_permission_does_not_allow_writes(matrix: AccessMatrix, server: Server) -> None:
    """Until write permission is granted too."""
    repo, commits = matrix.things["repo_id"], "/git/v1/repo/{repo_id}/commits"
    for path in ("/git/v1/repo/{repo_id}", "/git/v1/repo/{repo_id}/contents/{path}", "/git/v1/repo"):
        read = await matrix.call("granted", "get", path)
        assert read.status_code == 200, (path, read.text)
        assert repo in read.text or "hostname" in read.text
    for path in (commits, "/git/v1/repo/{repo_id}/git/refs/heads/{branch}"):
        refused = await matrix.call("granted", "post", path)
        assert (refused.status_code, refused.json()["code"]) == (403, "REPOSITORY_ACCESS_DENIED"), path
    await server.installation.access.change(matrix.things["identity"], repo, "write")
    assert (await matrix.call("granted", "post", commits)).status_code == 200
    await server.installation.access.change(matrix.things["identity"], repo, "read")


async def test_tokens_act_and_read_logs_as_their_allowed_users(matrix: AccessMatrix, server: Server) -> None:
    """One allowed user is the default; of several, the caller names one. Logs show that user's journal."""
    identities = server.installation.identities
    account, identity, vm = server.account, matrix.things["identity"], matrix.things["vm_id"]
    owner = matrix.callers["owner"]
    path = f"/v1/vms/{vm}/exec-await"
    for name in ("alice", "bob"):
        made = await matrix.http.post(path, headers=owner, json={"command": f"useradd -m {name}"})
        assert made.json()["statusCode"] == 0

    async def who(user: str | None = None) -> str:
        headers = matrix.callers["granted"] | ({"X-Freestyle-Vm-Linux-User-Id": user} if user else {})
        answer = await matrix.http.post(path, headers=headers, json={"command": "id -un"})
        said = answer.json()
        return str(said.get("stdout", said.get("code"))).strip()

    async def journal(user: str | None = None) -> set[str] | str:
        """The messages that the token reads from the guest, or why it may not."""
        headers = matrix.callers["granted"] | ({"X-Freestyle-Vm-Linux-User-Id": user} if user else {})
        answer = await matrix.http.get(f"/observability/v1/logs?vmId={vm}&search=secret", headers=headers)
        said = answer.json()
        return str(said["code"]) if "code" in said else {line["message"] for line in said["logs"]}

    await matrix.http.post(path, headers=owner, json={"command": "logger secret of root; journalctl --sync"})
    try:
        assert await who() == "root"
        assert await journal() == {"secret of root"}
        await identities.update(account, identity, vm, ["alice"])
        assert [await journal(), await journal("root")] == [set(), "FORBIDDEN"]
        assert [await who(), await who("alice"), await who("bob"), await who("root")] == [
            "alice",
            "alice",
            "FORBIDDEN",
            "FORBIDDEN",
        ]
        await identities.update(account, identity, vm, ["alice", "bob"])
        assert [await who(), await who("bob")] == ["FORBIDDEN", "bob"]
        assert [await journal(), await journal("bob")] == ["FORBIDDEN", set()]
        # What a user sees is the guest's to decide: members of this group read the whole journal.
        member = {"command": "usermod -aG systemd-journal bob"}
        assert (await matrix.http.post(path, headers=owner, json=member)).json()["statusCode"] == 0
        assert [await journal("alice"), await journal("bob")] == [set(), {"secret of root"}]
    finally:
        await identities.update(account, identity, vm, None)
    assert await who("nosuchuser") == "USER_NOT_FOUND"
