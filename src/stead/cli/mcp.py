"""`stead mcp`: the tools of Stead for MCP clients."""

import asyncio
from typing import Annotated

import typer

from stead.cli.connection import report_errors, run_connected, target
from stead.cli.output import fail, note

app = typer.Typer()


@app.command()
def mcp(
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve streamable HTTP at this address, at the path /mcp. Each client sends its own API key"
            " or token as `Authorization: Bearer`.",
        ),
    ] = None,
) -> None:
    """Serve VMs, files, processes and repositories as tools of the Model Context Protocol.

    An MCP client starts this command and speaks to it over standard input and output, with the key of
    `STEAD_API_KEY`. With `--http`, clients connect over the network.
    """
    from stead.mcp.server import PATH, serve_http, serve_stdio
    from stead.sdk.requests import is_loopback

    if http is None:
        run_connected(serve_stdio)
        return
    host, separator, port = http.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        fail(
            f"invalid address {http!r}: must be HOST:PORT, for example 127.0.0.1:8700", code="INVALID_ADDRESS"
        )
    url = target().url
    with report_errors(url or ""):
        if not is_loopback(host.strip("[]")):
            note(
                f"warning: clients send their keys to {http} unencrypted: serve loopback, with a TLS proxy"
                " in front"
            )
        note(f"MCP server at http://{http}{PATH}")
        asyncio.run(serve_http(host.strip("[]"), int(port), url))
