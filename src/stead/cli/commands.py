"""The commands by name. What is behind a name is imported when it is called, so that all are quick."""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from stead.cli.conversion import convert_when_given

convert_when_given()

MACHINES = "Machines"
REPOSITORIES = "Repositories"
INSTALLATION = "This installation"


@dataclass(frozen=True)
class Entry:
    """Where a command is: `module:app`, and in which part of the help it stands."""

    place: str
    help: str
    panel: str
    alone: bool = False
    """It is one command of its app and not the whole app."""


ENTRIES = {
    "vm": Entry("stead.cli.vms:app", "Machines: make them, use them, put them to sleep.", MACHINES),
    "snapshot": Entry("stead.cli.snapshots:app", "Snapshots: kept machines to make others from.", MACHINES),
    "git": Entry("stead.cli.git:app", "Git repositories: make, clone, search them.", REPOSITORIES),
    "identity": Entry("stead.cli.identities:app", "Identities: who else may use a machine.", MACHINES),
    "whoami": Entry("stead.cli.identities:alone", "Say whose key this is.", MACHINES, alone=True),
    "serve": Entry("stead.cli.server:app", "Serve the API until Ctrl-C.", INSTALLATION, alone=True),
    "keys": Entry("stead.cli.keys:keys", "API keys: what programs show to be let in.", INSTALLATION),
    "accounts": Entry("stead.cli.keys:accounts", "Accounts: who has machines, and how many.", INSTALLATION),
    "github": Entry(
        "stead.cli.github:app", "The GitHub App by which repositories are kept in step.", INSTALLATION
    ),
    "doctor": Entry(
        "stead.cli.host:app",
        "Say what this host has, what each missing thing costs, and how to get it.",
        INSTALLATION,
        alone=True,
    ),
    "prepare": Entry(
        "stead.cli.host:app", "Build image and template ahead of the first create.", INSTALLATION, alone=True
    ),
    "demo": Entry(
        "stead.cli.demo:app", "Show the main job, step by step with the times.", INSTALLATION, alone=True
    ),
}


class Commands(TyperGroup):
    """A group whose commands are found in `ENTRIES`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: _described(name, entry) for name, entry in ENTRIES.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Only what is really called, or completed, is loaded; for the list of commands a line is enough."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _loaded(name), rest


def _described(name: str, entry: Entry) -> TyperCommand:
    return TyperCommand(name, help=entry.help, rich_help_panel=entry.panel)


@functools.cache
def _loaded(name: str) -> Any:
    entry = ENTRIES[name]
    module, _, attribute = entry.place.partition(":")
    group = get_group(getattr(importlib.import_module(module), attribute))
    found = group.commands[name] if entry.alone else group
    found.name = name
    return found
