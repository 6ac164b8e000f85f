"""The `stead` command."""

from typing import Annotated

import typer

from stead.cli import connection
from stead.cli.commands import Commands
from stead.cli.output import use_json

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    help="Linux VMs and Git repositories for programs and AI agents.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("stead"))
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(envvar=connection.URL_VARIABLES, show_envvar=False, help=connection.URL_HELP),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=connection.KEY_VARIABLES,
            show_envvar=False,
            help=connection.KEY_HELP,
        ),
    ] = None,
    key_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar=connection.KEY_FILE_VARIABLES,
            show_envvar=False,
            help=connection.KEY_FILE_HELP,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    use_json(False)
    key_is_argument = _is_argument(context, "key")
    if _is_argument(context, "key_file") and not key_is_argument:
        # The option comes before the variable of the key.
        key = None
    connection.set_target(
        connection.Target(url or None, key or None, key_file or None, bool(key) and key_is_argument)
    )


def _is_argument(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


if __name__ == "__main__":
    app()
