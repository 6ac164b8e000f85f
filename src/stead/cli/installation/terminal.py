"""Shared by the commands that work on this installation: settings, error handling, consoles."""

import asyncio
import re
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console

from stead.cli import output
from stead.cli.output import Json as Json
from stead.errors import HostError, SteadError

if TYPE_CHECKING:
    from stead.settings import Settings

# Without a terminal, do not wrap the lines of a table.
console = Console(width=None if sys.stdout.isatty() else 1000)
errors = Console(stderr=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command to its end; an error is one line and an exit code."""
    try:
        asyncio.run(work)
    except SteadError as error:
        fail(error)
    except OSError as error:
        fail(HostError(f"{error.strerror}: {error.filename}" if error.filename else str(error)))
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None


def fail(error: SteadError) -> NoReturn:
    code = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__.removesuffix("Error")).upper()
    output.fail(str(error), code=code, named=True)


def settings() -> "Settings":
    from stead.settings import Settings  # pydantic is slow to import, and `--help` does without

    try:
        return Settings.load()
    except SteadError as error:
        fail(error)
