"""SDK lookups by id, id prefix or name, against a scripted server, with both clients."""

import pickle
from typing import Any

import pytest

from stead import VmSpec
from stead.sdk import errors
from stead.sdk.references import Candidate, resolve
from support.scripted_server import Reply
from support.sdk_clients import Client, attempt

VM = "abcdefghij0123456789"
TWIN = "abcdezzzzz0123456789"
SNAPSHOT = "sc-abcdefghij0123456789"
IDENTITY = "0f8fad5b-d9cb-469f-a165-70867728950e"
REPO = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
CREATED = Reply(content={"id": VM, "domains": []})


def vm(vm_id: str, name: str | None) -> dict[str, Any]:
    return {"id": vm_id, "state": "running", "name": name}


def snapshots(*rows: tuple[str, str | None]) -> Reply:
    return Reply(content={"snapshots": [{"snapshotId": each, "name": name} for each, name in rows]})


async def test_full_id_is_used_without_a_request(client: Client) -> None:
    found, seen = await attempt(client, lambda stead: stead.vms.find(VM))
    assert found.id == VM and seen == []
    found, seen = await attempt(client, lambda stead: stead.identities.find(IDENTITY))
    assert found.id == IDENTITY and seen == []
    found, seen = await attempt(client, lambda stead: stead.git.repos.find(REPO))
    assert found.id == REPO and seen == []


@pytest.mark.parametrize("reference", ["web", "abcdef"])
async def test_vm_is_found_by_name_and_by_id_prefix(client: Client, reference: str) -> None:
    rows = Reply(content={"vms": [vm(VM, "web"), vm(TWIN, "web-2")]})
    found, seen = await attempt(client, lambda stead: stead.vms.find(reference), rows)
    assert found.id == VM and found.name == "web" and found.last_info.state == "running"
    assert seen[0].target == f"/v1/vms?search={reference}"


async def test_ambiguous_reference_lists_the_candidates(client: Client) -> None:
    rows = Reply(content={"vms": [vm(VM, "web"), vm(TWIN, None)]})
    error, _ = await attempt(client, lambda stead: stead.vms.find("abcd"), rows)
    assert isinstance(error, errors.AmbiguousName)
    assert error.candidates == ((VM, "web"), (TWIN, None))
    assert str(error) == f"'abcd' matches 2 VMs: {VM} (web), {TWIN}; use a full id"
    assert pickle.loads(pickle.dumps(error)).candidates == error.candidates


async def test_missing_vm_is_vm_not_found_and_says_how_short_a_prefix_may_be(client: Client) -> None:
    error, _ = await attempt(client, lambda stead: stead.vms.find("nothing"), Reply(content={"vms": []}))
    assert isinstance(error, errors.VmNotFound)
    assert (error.code, error.status, error.message) == ("VM_NOT_FOUND", 404, "no VM 'nothing'")
    rows = Reply(content={"vms": [vm(VM, "web")]})
    error, _ = await attempt(client, lambda stead: stead.vms.find("abc"), rows)
    assert error.message == "no VM 'abc'; an id prefix needs at least 4 characters"


async def test_get_and_delete_take_a_name(client: Client) -> None:
    rows = Reply(content={"vms": [vm(VM, "web")]})
    found, seen = await attempt(
        client, lambda stead: stead.vms.get("web"), rows, Reply(content=vm(VM, "web"))
    )
    assert found.last_info.id == VM and seen[1].target == f"/v1/vms/{VM}"
    _, seen = await attempt(client, lambda stead: stead.vms.delete("web"), rows, Reply())
    assert (seen[1].method, seen[1].target) == ("DELETE", f"/v1/vms/{VM}")


async def test_create_takes_the_name_of_a_snapshot(client: Client) -> None:
    rows = snapshots((SNAPSHOT, "tools"), ("sc-zzzzzzzzzz0123456789", "other"))
    _, seen = await attempt(client, lambda stead: stead.vms.create(snapshot_id="tools"), rows, CREATED)
    assert seen[1].json == {"snapshotId": SNAPSHOT}
    spec = VmSpec().from_snapshot("abcdef").apt("git").snapshot().run("make")
    _, seen = await attempt(client, lambda stead: stead.vms.create(spec=spec), rows, CREATED)
    assert seen[1].json["spec"]["snapshot"]["snapshotId"] == SNAPSHOT
    template = {"snapshotId": "tools"}
    _, seen = await attempt(client, lambda stead: stead.vms.create(template=template), rows, CREATED)
    assert seen[1].json["template"] == {"snapshotId": SNAPSHOT} and template == {"snapshotId": "tools"}


async def test_snapshot_methods_take_a_name(client: Client) -> None:
    rows, row = snapshots((SNAPSHOT, "tools")), Reply(content={"snapshotId": SNAPSHOT, "sizeBytes": 4096})
    found, seen = await attempt(client, lambda stead: stead.vms.snapshots.find("tools"), rows, row)
    assert found.id == SNAPSHOT and found.size_bytes == 4096
    _, seen = await attempt(client, lambda stead: stead.vms.snapshots.delete("tools"), rows, Reply())
    assert (seen[1].method, seen[1].target) == ("DELETE", f"/v1/vms/snapshots/{SNAPSHOT}")
    error, _ = await attempt(client, lambda stead: stead.vms.snapshots.find("other"), rows)
    assert isinstance(error, errors.SnapshotNotFound)


async def test_identity_is_found_by_name_on_a_later_page(client: Client) -> None:
    pages = [
        Reply(content={"identities": [{"id": REPO, "name": "first"}], "total": 2}),
        Reply(content={"identities": [{"id": IDENTITY, "name": "ci", "vmGrants": 3}], "total": 2}),
    ]
    found, seen = await attempt(client, lambda stead: stead.identities.find("ci"), *pages)
    assert found.id == IDENTITY and found.name == "ci" and found.last_info.vm_grants == 3
    assert "offset=1" in seen[1].target


async def test_permissions_take_names(client: Client) -> None:
    repos = Reply(content={"repositories": [{"id": REPO, "name": "app"}], "total": 1, "offset": 0})
    _, seen = await attempt(
        client,
        lambda stead: stead.identities.ref(IDENTITY).permissions.git.grant("app", "write"),
        repos,
        Reply(),
    )
    assert seen[0].target == "/git/v1/repo?limit=100&offset=0&search=app"
    assert seen[1].target == f"/identity/v1/identities/{IDENTITY}/permissions/git/{REPO}"
    assert seen[1].json == {"permission": "write"}
    vms = Reply(content={"vms": [vm(VM, "web")]})
    _, seen = await attempt(
        client, lambda stead: stead.identities.ref(IDENTITY).permissions.vms.revoke("web"), vms, Reply()
    )
    assert seen[1].target == f"/identity/v1/identities/{IDENTITY}/permissions/vm/{VM}"


async def test_identity_is_created_with_a_name(client: Client) -> None:
    answer = Reply(
        content={"id": IDENTITY, "managed": False, "name": "ci", "createdAt": "2026-01-31T12:00:00Z"}
    )
    made, seen = await attempt(client, lambda stead: stead.identities.create(name="ci"), answer)
    assert seen[0].json == {"name": "ci"} and made.name == "ci"
    _, seen = await attempt(client, lambda stead: stead.identities.create(), answer)
    assert seen[0].body == b""


async def test_exact_id_wins_over_another_ones_name(client: Client) -> None:
    """A name can look like the id of something else; the id means one thing only."""
    known = [Candidate(TWIN, VM), Candidate(VM, None)]
    assert resolve("VM", VM, known) == VM
