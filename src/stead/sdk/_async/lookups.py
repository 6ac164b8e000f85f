"""Lookups by reference: a full id, a unique id prefix, or a unique name.

A full id is used without a request. Anything else is looked up in the server's lists, and raises the kind's
`NotFound` or `AmbiguousName`.
"""

from collections.abc import Mapping
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk.creation import snapshot_references, vpc_references, with_ids
from stead.sdk.models import IdentityInfo, IdentityList, SnapshotList, VmInfo, VmList, Vpc
from stead.sdk.parsing import parse, parse_list
from stead.sdk.references import Candidate, needs_lookup, resolve
from stead.sdk.requests import request

_REPO_PAGE = 100
_IDENTITY_PAGE = 1000


async def find_vm(connection: AsyncConnection, reference: str) -> tuple[str, VmInfo | None]:
    """The id of a VM, and its info if it was looked up."""
    if not needs_lookup("VM", reference):
        return reference, None
    call = request("GET", "/v1/vms", query={"search": reference})
    known = {info.id: info for info in parse(VmList, await connection.call(call))}
    found = resolve("VM", reference, [Candidate(info.id, info.name) for info in known.values()])
    return found, known[found]


async def find_snapshot(connection: AsyncConnection, reference: str) -> str:
    """The id of a snapshot."""
    if not needs_lookup("snapshot", reference):
        return reference
    known = parse(SnapshotList, await connection.call(request("GET", "/v1/vms/snapshots")))
    return resolve("snapshot", reference, [Candidate(info.id, info.name) for info in known])


async def find_repo(connection: AsyncConnection, reference: str) -> str:
    """The id of a repository."""
    from stead.sdk.git_models import RepoInfo, RepoList

    if not needs_lookup("repository", reference):
        return reference
    known: list[RepoInfo] = []
    while True:
        query = {"limit": _REPO_PAGE, "offset": len(known), "search": reference}
        page = RepoList.from_wire(await connection.call(request("GET", "/git/v1/repo", query=query)))
        known += page.repos
        if not len(page) or len(known) >= page.total:
            return resolve("repository", reference, [Candidate(info.id, info.name) for info in known])


async def find_identity(connection: AsyncConnection, reference: str) -> tuple[str, IdentityInfo | None]:
    """The id of an identity, and its info if it was looked up."""
    if not needs_lookup("identity", reference):
        return reference, None
    known: list[IdentityInfo] = []
    while True:
        query = {"limit": _IDENTITY_PAGE, "offset": len(known)}
        answer = await connection.call(request("GET", "/identity/v1/identities", query=query))
        page = parse(IdentityList, answer)
        known += page.identities
        if not len(page) or len(known) >= page.total:
            break
    found = resolve("identity", reference, [Candidate(info.id, info.name) for info in known])
    return found, next(info for info in known if info.id == found)


async def find_vpc(connection: AsyncConnection, reference: str) -> str:
    """The id of a VPC."""
    if not needs_lookup("VPC", reference):
        return reference
    known = parse_list(Vpc, await connection.call(request("GET", "/v1/vpcs")), "vpcs")
    return resolve("VPC", reference, [Candidate(each.id, each.name) for each in known])


async def resolve_references(connection: AsyncConnection, body: Mapping[str, Any]) -> dict[str, Any]:
    """A create's body with full ids instead of names and id prefixes of VPCs and snapshots."""
    vpcs = {each: await find_vpc(connection, each) for each in vpc_references(body)}
    snapshots = {each: await find_snapshot(connection, each) for each in snapshot_references(body)}
    return with_ids(body, vpcs=vpcs, snapshots=snapshots)
