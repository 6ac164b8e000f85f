"""The commands by name. The module of a command is imported when the command is called, which keeps the
start-up of all others short."""

import contextlib
import errno
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from stead.cli import connection
from stead.cli.conversion import adapt
from stead.cli.extras import Extra, MissingExtra, is_installed
from stead.cli.output import fail, os_error_text, print_json_error, use_json
from stead.cli.streams import flush_output, prepare_streams

VMS = "VMs"
REPOSITORIES = "Repositories"
INSTALLATION = "This installation"
GLOBAL = "Global options"


@dataclass(frozen=True)
class LazyApp:
    """The place of a command as `module:app`, and its panel in the help."""

    place: str
    help: str
    panel: str
    alone: bool = False
    """The entry is one command of the app, not the whole app."""
    remote: bool = True
    """The command talks to a server, so `--url`, `--key` and `--key-file` apply to it."""
    extra: Extra | None = None
    """The extra of the package that has the libraries of the command."""


def _local(place: str, text: str, *, alone: bool = False) -> LazyApp:
    return LazyApp(place, text, INSTALLATION, alone, remote=False, extra="server")


ENTRIES = {
    "vm": LazyApp("stead.cli.vms:app", "Create, use, fork and suspend VMs.", VMS),
    "snapshot": LazyApp("stead.cli.snapshots:app", "Snapshots: saved VMs to create others from.", VMS),
    "build": LazyApp("stead.cli.builds:app", "Builds of VMs and snapshots: state, phases and logs.", VMS),
    "domains": LazyApp(
        "stead.cli.domains:app", "Domains: verify them, and map host names to ports of VMs.", VMS
    ),
    "vpc": LazyApp("stead.cli.networks:app", "VPCs: private networks between VMs.", VMS),
    "git": LazyApp("stead.cli.git:app", "Create, clone and search Git repositories.", REPOSITORIES),
    "identity": LazyApp(
        "stead.cli.identities:app", "Identities: access for others to some VMs and repositories.", VMS
    ),
    "mcp": LazyApp(
        "stead.cli.mcp:app", "Serve tools for MCP clients: VMs, files, Git.", VMS, alone=True, extra="mcp"
    ),
    "whoami": LazyApp("stead.cli.identities:alone", "Show the account of the API key.", VMS, alone=True),
    "serve": _local("stead.cli.installation.serve:app", "Run the API server until Ctrl-C.", alone=True),
    "keys": _local("stead.cli.installation.keys:keys", "Create, list and revoke API keys."),
    "accounts": _local("stead.cli.installation.keys:accounts", "Accounts and their limits."),
    "trust": _local(
        "stead.cli.installation.trust:app", "Trust the CA of preview domains on this host.", alone=True
    ),
    "github": _local("stead.cli.installation.github:app", "The GitHub App that syncs repositories."),
    "secrets": _local("stead.cli.installation.secrets:app", "Rotate the key of secrets in the database."),
    "doctor": _local(
        "stead.cli.installation.host:app", "Check this host and say how to fix what is missing.", alone=True
    ),
    "prepare": _local(
        "stead.cli.installation.host:app",
        "Build the image and the template before the first create.",
        alone=True,
    ),
    "demo": LazyApp(
        "stead.cli.installation.demo:app",
        "Create, fork, suspend and snapshot a VM, and print the times.",
        INSTALLATION,
        alone=True,
        extra="server",
    ),
}


class UsageError(typer.BadParameter):
    """A usage error that is not about one option."""

    def format_message(self) -> str:
        return self.message


class Commands(TyperGroup):
    """The root command. Its subcommands come from `ENTRIES`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: _described(name, entry) for name, entry in ENTRIES.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load only the command that is called or completed; the list of commands needs one line of each."""
        _hint_at_group(args)
        name, command, rest = super().resolve_command(ctx, args)
        _check_text(name, rest)
        if name is not None:
            command = _loaded(name)
            for each in _all_commands(command):
                adapt(each.get_params(typer.Context(each, parent=ctx)))
        return name, command, rest

    def get_params(self, ctx: Any) -> list[Any]:
        found = super().get_params(ctx)
        adapt(found)
        return found

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command and exit. After `--json`, usage errors are JSON like all others."""
        prepare_streams()
        given = list(sys.argv[1:] if args is None else args)
        try:
            try:
                code = self._run(given, *rest, **options)
            finally:
                flush_output()
        except MissingExtra as error:
            use_json("--json" in given)
            code = _reported(str(error), "USAGE", UsageError.exit_code)
        except OSError as error:
            # The program that reads the output has exited.
            code = 1 if error.errno == errno.EPIPE else _reported(os_error_text(error), "OS_ERROR", 1)
        sys.exit(code)

    def _run(self, given: list[str], *rest: Any, **options: Any) -> Any:
        if "--json" not in given:
            return super().main(given, *rest, **options)
        try:
            return super().main(given, *rest, **{**options, "standalone_mode": False})
        except typer.TyperException as error:
            print_json_error(error.format_message(), "USAGE")
            return error.exit_code


def _check_text(name: str | None, words: Sequence[str]) -> None:
    """Refuse bytes that are not UTF-8 where they cannot be passed on: only files of a VM have such names."""
    local = name in ENTRIES and not ENTRIES[name].remote
    for word in words:
        if "\0" in word:
            raise UsageError("an argument contains a NUL character")
        try:
            word.encode(errors="strict" if local else "surrogateescape")
        except UnicodeEncodeError:
            raise UsageError(f"an argument is not UTF-8: {word!a}") from None


def _hint_at_group(args: Sequence[str]) -> None:
    """`stead exec` is `stead vm exec`: name the groups that have a command of this name."""
    wanted = args[0] if args else ""
    if wanted in ENTRIES or wanted.startswith("-"):
        return
    groups = [group for group in ("vm", "git", "snapshot") if wanted in _loaded(group).commands]
    if groups:
        places = " or ".join(f"`stead {group} {wanted}`" for group in groups)
        raise UsageError(f"no such command {wanted!r}: did you mean {places}?")


def _reported(message: str, code: str, exit_code: int) -> int:
    """Print an error, as far as that is possible: the output itself may have failed, on a full disk."""
    with contextlib.suppress(OSError, typer.Exit):
        fail(message, code=code)
    return exit_code


def _described(name: str, entry: LazyApp) -> TyperCommand:
    return TyperCommand(name, help=entry.help, rich_help_panel=entry.panel)


@functools.cache
def _loaded(name: str) -> Any:
    entry = ENTRIES[name]
    if entry.extra is not None and not is_installed(entry.extra):
        raise MissingExtra(f"`stead {name}`", entry.extra)
    module, _, attribute = entry.place.partition(":")
    group = get_group(getattr(importlib.import_module(module), attribute))
    found = group.commands[name] if entry.alone else group
    found.name = name
    for command in _all_commands(found):
        command.help = _reflowed(command.help or "")
        if entry.remote:
            command.params.extend(copy(each) for each in _connection_options())
    return found


def _all_commands(command: Any) -> Iterator[Any]:
    """A command or a group, and everything below it."""
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _all_commands(each)


def _reflowed(text: str) -> str:
    """The text with one line for each paragraph: the terminal wraps them."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


@functools.cache
def _connection_options() -> list[Any]:
    """The options of `connection` as those of a subcommand. They override those before the command."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def options(
        url: Annotated[
            str | None,
            typer.Option(
                callback=_use_url, expose_value=False, help=connection.URL_HELP, rich_help_panel=GLOBAL
            ),
        ] = None,
        key: Annotated[
            str | None,
            typer.Option(
                callback=_use_key, expose_value=False, help=connection.KEY_HELP, rich_help_panel=GLOBAL
            ),
        ] = None,
        key_file: Annotated[
            str | None,
            typer.Option(
                metavar="FILE",
                callback=_use_key_file,
                expose_value=False,
                help=connection.KEY_FILE_HELP,
                rich_help_panel=GLOBAL,
            ),
        ] = None,
    ) -> None:
        pass

    return [each for each in get_command(app).params if each.param_type_name == "option"]


def _use_url(value: str | None) -> None:
    connection.override_target(url=value)


def _use_key_file(value: str | None) -> None:
    connection.override_target(key_file=value)


def _use_key(value: str | None) -> None:
    connection.override_target(key=value)
