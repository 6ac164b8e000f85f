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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    use_json(False)
    connection.set_target(url, key)


if __name__ == "__main__":
    app()
