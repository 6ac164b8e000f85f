"""The connection to the server: its address, the key, and error messages for the user."""

import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from stead.cli.output import fail, json_wanted, note, os_error_text, printable_lines

if TYPE_CHECKING:
    from stead.sdk import AsyncStead, Stead
    from stead.sdk.errors import SetupFailed, SteadApiError

    Client = TypeVar("Client", Stead, AsyncStead)

T = TypeVar("T")

URL_VARIABLES = ["STEAD_API_URL", "FREESTYLE_API_URL"]
KEY_VARIABLES = ["STEAD_API_KEY", "FREESTYLE_API_KEY"]
URL_HELP = "The address of the server. Default: STEAD_API_URL, or http://127.0.0.1:8600."
KEY_HELP = "An API key or the token of an identity. Default: STEAD_API_KEY."
WAIT_TIMED_OUT = 124
"""The exit code of a command that reached its timeout, the same as that of `timeout`."""
_COMPLETION_TIMEOUT = 0.7
_RETRIES = 3
"""Enough for an overload of some seconds; a server that does not run is reported after about a second."""


@dataclass(frozen=True)
class Target:
    """The values of `--url` and `--key`, or of their environment variables."""

    url: str | None = None
    key: str | None = None


_target = Target()


def set_target(url: str | None, key: str | None) -> None:
    """Set the target of this run, from the options before the command."""
    global _target
    _target = Target(url or None, key or None)


def override_target(*, url: str | None = None, key: str | None = None) -> None:
    """Override the target with the options after the command."""
    global _target
    _target = Target(url or _target.url, key or _target.key)


def target() -> Target:
    return _target


@contextlib.contextmanager
def connected() -> "Iterator[Stead]":
    """A client for one command; an error ends the command with an error message."""
    from stead.sdk import Stead

    client = _client(Stead)
    with report_errors(client.base_url), client as stead:
        yield stead


def run_connected(work: "Callable[[AsyncStead], Awaitable[T]]") -> T:
    """Run a coroutine function with a client, for a command that does several things at once."""
    import asyncio

    from stead.sdk import AsyncStead

    client = _client(AsyncStead)

    async def main() -> T:
        async with client as stead:
            return await work(stead)

    with report_errors(client.base_url):
        return asyncio.run(main())


def _client(kind: "type[Client]") -> "Client":
    with report_errors(_target.url or ""):
        try:
            return kind(_target.key, base_url=_target.url, max_retries=_RETRIES)
        except ValueError as error:
            fail(str(error), code="INVALID_URL")


@contextlib.contextmanager
def report_errors(url: str) -> Iterator[None]:
    """Turn errors of the block into an error message and an exit code."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        _report_error(error, url)


@contextlib.contextmanager
def for_completion(context: typer.Context) -> "Iterator[Stead]":
    """A client for shell completion, with a short timeout and no retries."""
    from stead.sdk import Stead

    given = context.find_root().params
    url, key = _target.url or given.get("url"), _target.key or given.get("key")
    with Stead(key, base_url=url, timeout=_COMPLETION_TIMEOUT, max_retries=0) as stead:
        yield stead


def _report_error(error: Exception, url: str) -> NoReturn:
    from stead.sdk import errors

    match error:
        case errors.MissingCredentials():
            fail(
                "no API key: give --key or set STEAD_API_KEY."
                " Create a key with `stead keys create` on the host that runs the server",
                code="MISSING_CREDENTIALS",
            )
        case errors.WaitTimedOut():
            fail(str(error), code="WAIT_TIMED_OUT", exit_code=WAIT_TIMED_OUT)
        case errors.NoAnswerInTime():
            fail(f"no answer from Stead at {url} within the timeout", code="NO_ANSWER_IN_TIME")
        case errors.ServerUnreachable(sent=False):
            fail(f"cannot reach Stead at {url}: {error.reason}", code="SERVER_UNREACHABLE")
        case errors.SteadApiError():
            _report_api_error(error)
        case errors.SteadException():
            fail(str(error), code=_code_of(error))
        case OSError():
            fail(os_error_text(error), code="OS_ERROR")
    raise error


def _code_of(error: Exception) -> str:
    """`WaitTimedOut` is `WAIT_TIMED_OUT`: errors of the SDK have no code of the server."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).upper()


def _report_api_error(error: "SteadApiError") -> NoReturn:
    from stead.sdk import errors

    details: dict[str, object] = {}
    if isinstance(error, errors.SetupFailed):
        if json_wanted():
            details = {"snapshotId": error.snapshot_id, "diagnostics": error.diagnostics}
        else:
            _show_diagnostics(error)
    hint = ""
    if isinstance(error, errors.Unauthorized):
        hint = ". Create a key with `stead keys create` on the host that runs the server"
    fail(
        f"{error.message}{hint}",
        code=error.code or f"HTTP_{error.status}",
        trace_id=error.trace_id,
        named=True,
        details=details,
    )


def _show_diagnostics(error: "SetupFailed") -> None:
    """Print the logs of the services that failed in a VM that could not be set up."""
    found = error.diagnostics
    for log in () if found is None else (*found.failed_service_logs, *found.additional_failed_service_logs):
        note(f"{log.unit_name}:")
        note(printable_lines(log.log))
    if error.snapshot_id:
        note(f"to inspect it: stead vm create --snapshot {error.snapshot_id}")
