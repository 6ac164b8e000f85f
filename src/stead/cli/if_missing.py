"""`--if-missing` of commands that create something with a name."""

from typing import Annotated

import typer

from stead.cli.output import note

IfMissing = Annotated[
    bool,
    typer.Option("--if-missing", help="Print the existing one of this name, if there is one; needs --name."),
]


def check_if_missing(if_missing: bool, name: str | None) -> None:
    if if_missing and name is None:
        raise typer.BadParameter("needs --name", param_hint="--if-missing")


def note_existing(kind: str, found: str, created: bool | None) -> None:
    if created is False:
        note(f"{kind} {found} existed already")
