"""The `stead` command."""

from typing import Annotated

import typer

from stead.cli import connection
from stead.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    help="Real Linux machines for programs and agents.",
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
        typer.Option(
            envvar=connection.URL_VARIABLES, show_envvar=False, help="The server. Else STEAD_API_URL."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            envvar=connection.KEY_VARIABLES,
            show_envvar=False,
            help="An API key or an identity's token. Else STEAD_API_KEY.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    connection.use(url, key)


if __name__ == "__main__":
    app()
