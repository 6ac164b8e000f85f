"""`stead vm forward`: local ports that lead to ports in a VM."""

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from stead.cli.connection import run_connected
from stead.cli.output import Json, fail, note, print_json, printable_lines
from stead.cli.references import Vm

if TYPE_CHECKING:
    from stead.sdk import AsyncStead
    from stead.sdk.errors import SteadException

_LARGEST = 65535


def forward(
    vm: Vm,
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="PORT[:LOCAL]",
            help="A port in the VM, and the local port: the same number by default, a free one with 0.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Forward ports of 127.0.0.1 to ports in a VM, until Ctrl-C. A connection wakes a suspended VM.

    A server in the VM that listens on its loopback address only is reached too. With `--json`, one line for
    each port says where it listens.
    """
    wanted = [_pair(each) for each in ports]

    async def work(stead: "AsyncStead") -> None:
        import asyncio

        handle = await stead.vms.find(vm)
        async with contextlib.AsyncExitStack() as stack:
            for port, local in wanted:
                listener = handle.forward(port, local=local, on_error=_report)
                try:
                    opened = await stack.enter_async_context(listener)
                except OSError as error:
                    _refuse(local, error)
                if as_json:
                    print_json({"port": port, "local_port": opened.local_port}, line=True)
                else:
                    typer.echo(f"127.0.0.1:{opened.local_port} leads to port {port} of {handle.id}")
            await asyncio.Event().wait()

    run_connected(work)


def _refuse(local: int, error: OSError) -> NoReturn:
    """Say why a local port cannot be used: asyncio's sentence is about addresses."""
    if error.errno == errno.EADDRINUSE:
        hint = "choose another one with PORT:LOCAL, or a free one with PORT:0"
        fail(f"local port {local} is in use: {hint}", code="PORT_IN_USE")
    if error.errno in (errno.EACCES, errno.EPERM):
        fail(f"local port {local} needs root: choose one above 1023 with PORT:LOCAL", code="PORT_DENIED")
    fail(f"cannot listen on local port {local}: {os.strerror(error.errno or 0)}", code="OS_ERROR")


def _report(error: "SteadException") -> None:
    note(printable_lines(f"connection failed: {error}"))


def _pair(text: str) -> tuple[int, int]:
    """`3000:8080`: the port in the VM and the local one."""
    port, _, local = text.partition(":")
    try:
        found = int(port), int(local or port)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= _LARGEST or not 0 <= found[1] <= _LARGEST:
        raise typer.BadParameter(
            f"invalid port {text!r}: expected PORT or PORT:LOCAL, 1 to {_LARGEST}", param_hint="PORT"
        )
    return found
