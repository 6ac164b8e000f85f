"""References that people type: a full id, a unique id prefix, or a unique name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stead.sdk.errors import (
    AmbiguousName,
    IdentityNotFound,
    NotFound,
    RepoNotFound,
    SnapshotNotFound,
    VmNotFound,
)

Kind = Literal["VM", "snapshot", "identity", "repository", "token", "VPC"]

SHORTEST_PREFIX = 4
"""The minimum length of an id prefix."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_FULL_ID = {
    "VM": re.compile(r"[a-z0-9]{20}"),
    "snapshot": re.compile(r"sc-[a-z0-9]{20}"),
    "identity": _UUID,
    "repository": _UUID,
    "token": _UUID,
    "VPC": re.compile(r"vpc-[a-z0-9]{20}"),
}
_ID_PREFIX = {"snapshot": "sc-", "VPC": "vpc-"}
"""Ids of this kind start with this text, which may be left out of a reference."""
_MISSING: dict[str, tuple[type[NotFound], str]] = {
    "VM": (VmNotFound, "VM_NOT_FOUND"),
    "snapshot": (SnapshotNotFound, "SNAPSHOT_NOT_FOUND"),
    "identity": (IdentityNotFound, "IDENTITY_NOT_FOUND"),
    "repository": (RepoNotFound, "REPO_NOT_FOUND"),
    "token": (NotFound, "NOT_FOUND"),
    "VPC": (NotFound, "NOT_FOUND"),
}


@dataclass(frozen=True)
class Candidate:
    """Something that a reference may stand for."""

    id: str
    name: str | None = None


def needs_lookup(kind: Kind, reference: str) -> bool:
    """Whether a reference is not a complete id. A complete id is used without a request.

    An empty reference is refused here, as no name and no id is empty.
    """
    if not reference:
        raise _missing(kind, "the reference is empty: is a variable not set?")
    if "\0" in reference or not _is_unicode(reference):
        raise _missing(kind, f"no {kind} {reference!r}: no name has such characters")
    return _FULL_ID[kind].fullmatch(reference) is None


def resolve(kind: Kind, reference: str, known: Iterable[Candidate]) -> str:
    """The id of the one candidate that a reference stands for.

    A reference matches an id that is equal, a name that is equal, or an id that starts with it
    (`SHORTEST_PREFIX` characters or more). No match raises the kind's `NotFound`, several raise
    `AmbiguousName`.
    """
    start = _ID_PREFIX.get(kind, "")
    prefix = reference if reference.startswith(start) else start + reference
    long_enough = len(prefix) >= len(start) + SHORTEST_PREFIX
    found = []
    for each in known:
        if each.id == reference:
            return each.id
        if each.name == reference or (long_enough and each.id.startswith(prefix)):
            found.append(each)
    if not found:
        hint = "" if long_enough else f"; an id prefix needs at least {SHORTEST_PREFIX} characters"
        raise _missing(kind, f"no {kind} {reference!r}{hint}")
    if len(found) > 1:
        raise AmbiguousName(kind, reference, [(each.id, each.name) for each in found])
    return found[0].id


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates, as arguments of a command line have for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _missing(kind: Kind, text: str) -> NotFound:
    error, code = _MISSING[kind]
    return error(text, code=code, status=404)
