"""VMs, snapshots, identities and repositories as users type them: an id, an id prefix, or a name.

The SDK resolves them. This module has the arguments of the commands and their shell completion.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import for_completion

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk import Vm as Handle
    from stead.sdk.models import IdentityInfo

SHORTEST = 4
"""The minimum length of an id prefix, as in the SDK."""
_PAGE = 1000


@dataclass(frozen=True)
class Suggestion:
    """Something that shell completion offers."""

    id: str
    name: str | None = None
    about: str = ""


def find_vms(stead: "Stead", references: Iterable[str]) -> "list[Handle]":
    """Handles on VMs, without duplicates. All are resolved before the caller changes the first."""
    found = [stead.vms.find(each) for each in references]
    return list({vm.id: vm for vm in found}.values())


def find_token(stead: "Stead", identity_id: str, reference: str) -> str:
    """The id of an identity's token, by its id or an id prefix."""
    from stead.sdk.references import Candidate, resolve

    tokens = stead.identities.ref(identity_id).tokens.list()
    return resolve("token", reference, [Candidate(each) for each in tokens])


def all_identities(stead: "Stead") -> "Iterator[IdentityInfo]":
    """Every identity, page by page."""
    offset = 0
    while True:
        page = stead.identities.list(limit=_PAGE, offset=offset)
        yield from page
        offset += len(page)
        if not len(page) or offset >= page.total:
            return


# Completion


def matching(incomplete: str, known: Iterable[Suggestion]) -> Iterator[tuple[str, str]]:
    """The candidates whose id or name starts with a text, each with a description."""
    for each in known:
        about = ", ".join(filter(None, (each.name, each.about)))
        if each.id.startswith(incomplete):
            yield each.id, about
        elif incomplete and each.name and each.name.startswith(incomplete):
            yield each.name, each.id


Completion = Callable[[typer.Context, str], list[tuple[str, str]]]


def completion(candidates: "Callable[[Stead, str], Iterable[Suggestion]]") -> Completion:
    """A completion function from one that lists candidates. Errors complete nothing."""

    def complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
        try:
            with for_completion(context) as stead:
                return list(matching(incomplete, candidates(stead, incomplete)))
        except Exception:
            return []

    return complete


def _vms(stead: "Stead", _: str) -> Iterator[Suggestion]:
    return (Suggestion(each.id, each.name, each.state) for each in stead.vms.list())


def _snapshots(stead: "Stead", _: str) -> Iterator[Suggestion]:
    return (Suggestion(each.id, each.name, each.state) for each in stead.vms.snapshots.list())


def _identities(stead: "Stead", _: str) -> Iterator[Suggestion]:
    return (Suggestion(each.id, each.name) for each in all_identities(stead))


def _repos(stead: "Stead", incomplete: str) -> Iterator[Suggestion]:
    found = stead.git.repos.list(limit=100, search=incomplete or None)
    return (Suggestion(each.id, each.name, each.visibility or "") for each in found)


def _help(kind: str) -> str:
    return f"The {kind}: its id, an id prefix of {SHORTEST} or more characters, or its name."


complete_vm = completion(_vms)
complete_snapshot = completion(_snapshots)

VM_HELP = _help("VM")
Vm = Annotated[str, typer.Argument(metavar="VM", help=VM_HELP, autocompletion=complete_vm)]
Vms = Annotated[list[str], typer.Argument(metavar="VM", help=VM_HELP, autocompletion=complete_vm)]
SnapshotArgument = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help=_help("snapshot"), autocompletion=complete_snapshot)
]
SnapshotArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="SNAPSHOT", help=_help("snapshot"), autocompletion=complete_snapshot),
]
SnapshotOption = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        "-s",
        metavar="SNAPSHOT",
        help="Restore this snapshot, memory included, instead of booting the base image. An id or a name.",
        autocompletion=complete_snapshot,
    ),
]
Identity = Annotated[
    str,
    typer.Argument(metavar="IDENTITY", help=_help("identity"), autocompletion=completion(_identities)),
]
Identities = Annotated[
    list[str],
    typer.Argument(metavar="IDENTITY", help=_help("identity"), autocompletion=completion(_identities)),
]
RepoArgument = Annotated[
    str, typer.Argument(metavar="REPO", help=_help("repository"), autocompletion=completion(_repos))
]
