"""Ids as people type them: whole, by how they begin, or by a name that only one thing has."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import for_completion
from stead.cli.output import fail

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.models import IdentityInfo

SHORTEST = 4
"""Characters of an id that have to be given at least."""
_VM = re.compile(r"[a-z0-9]{20}")
_SNAPSHOT = re.compile(r"sc-[a-z0-9]{20}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAGE = 1000


@dataclass(frozen=True)
class Candidate:
    id: str
    name: str | None = None
    about: str = ""


def find_vm(stead: "Stead", given: str) -> str:
    """The id of a machine. A whole id is believed; whoever uses it hears if there is none."""
    if _VM.fullmatch(given):
        return given
    return only_one("machine", given, _vms(stead))


def find_vms(stead: "Stead", given: Sequence[str]) -> list[str]:
    """The ids of machines, all known before anything is done to the first."""
    known = [] if all(_VM.fullmatch(each) for each in given) else list(_vms(stead))
    found = [each if _VM.fullmatch(each) else only_one("machine", each, known) for each in given]
    return list(dict.fromkeys(found))


def find_snapshot(stead: "Stead", given: str) -> str:
    if _SNAPSHOT.fullmatch(given):
        return given
    return only_one("snapshot", given, _snapshots(stead), prefix="sc-")


def find_identity(stead: "Stead", given: str) -> str:
    if _UUID.fullmatch(given):
        return given
    return only_one("identity", given, (Candidate(each.id) for each in all_identities(stead)))


def find_token(stead: "Stead", identity: str, given: str) -> str:
    tokens = stead.identities.ref(identity).tokens.list()
    return given if given in tokens else only_one("token", given, map(Candidate, tokens))


def all_identities(stead: "Stead") -> "Iterator[IdentityInfo]":
    """Every identity, page by page."""
    offset = 0
    while True:
        page = stead.identities.list(limit=_PAGE, offset=offset)
        yield from page
        offset += len(page)
        if not len(page) or offset >= page.total:
            return


def _vms(stead: "Stead") -> Iterator[Candidate]:
    return (Candidate(each.id, each.name, each.state) for each in stead.vms.list())


def _snapshots(stead: "Stead") -> Iterator[Candidate]:
    return (Candidate(each.id, each.name, each.state) for each in stead.vms.snapshots.list())


def only_one(kind: str, given: str, known: Iterable[Candidate], prefix: str = "") -> str:
    """The one thing that is meant. Of two that could be, none is: nobody wants to delete the wrong one."""
    begins = given if given.startswith(prefix) else prefix + given
    long_enough = len(begins) >= len(prefix) + SHORTEST
    found = [each for each in known if each.name == given or (long_enough and each.id.startswith(begins))]
    if not found:
        hint = "" if long_enough else f"; of an id give at least {SHORTEST} characters"
        fail(f"no {kind} {given!r}{hint}")
    if len(found) > 1:
        listed = ", ".join(f"{each.id} ({each.name})" if each.name else each.id for each in found)
        fail(f"{given!r} could be {len(found)} {_plural(kind)}: {listed}")
    return found[0].id


def _plural(kind: str) -> str:
    return "identities" if kind == "identity" else f"{kind}s"


# Completion


def matching(incomplete: str, known: Iterable[Candidate]) -> Iterator[tuple[str, str]]:
    for each in known:
        about = ", ".join(filter(None, (each.name, each.about)))
        if each.id.startswith(incomplete):
            yield each.id, about
        elif incomplete and each.name and each.name.startswith(incomplete):
            yield each.name, each.id


def _complete_vm(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    try:
        with for_completion(context) as stead:
            return list(matching(incomplete, _vms(stead)))
    except Exception:
        return []


def _complete_snapshot(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    try:
        with for_completion(context) as stead:
            return list(matching(incomplete, _snapshots(stead)))
    except Exception:
        return []


def _complete_identity(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    try:
        with for_completion(context) as stead:
            return list(matching(incomplete, (Candidate(each.id) for each in all_identities(stead))))
    except Exception:
        return []


_HELP = f"Its id, how the id begins ({SHORTEST} characters or more), or its name."

Vm = Annotated[str, typer.Argument(metavar="VM", help=_HELP, autocompletion=_complete_vm)]
Vms = Annotated[list[str], typer.Argument(metavar="VM", help=_HELP, autocompletion=_complete_vm)]
SnapshotArgument = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help=_HELP, autocompletion=_complete_snapshot)
]
SnapshotOption = Annotated[
    str | None,
    typer.Option("--snapshot", "-s", help="Begin with this snapshot.", autocompletion=_complete_snapshot),
]
Identity = Annotated[
    str,
    typer.Argument(
        metavar="IDENTITY",
        help=f"Its id, or how the id begins ({SHORTEST} characters or more).",
        autocompletion=_complete_identity,
    ),
]
