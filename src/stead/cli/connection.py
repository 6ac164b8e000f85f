"""The connection to the server: its address, the key, and error messages for the user."""

import contextlib
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
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
KEY_FILE_VARIABLES = ["STEAD_API_KEY_FILE", "FREESTYLE_API_KEY_FILE"]
KEY_HELP = (
    "An API key or the token of an identity. Default: STEAD_API_KEY. Other users of this computer see options"
    " in the list of processes: use the variable or --key-file."
)
KEY_FILE_HELP = "A file with the API key or token. Default: STEAD_API_KEY_FILE."
WAIT_TIMED_OUT = 124
"""The exit code of a command that reached its timeout, the same as that of `timeout`."""
_COMPLETION_TIMEOUT = 0.7
_RETRIES = 3
"""Enough for an overload of some seconds; a server that does not run is reported after about a second."""


@dataclass(frozen=True)
class Target:
    """The values of `--url`, `--key` and `--key-file`, or of their environment variables."""

    url: str | None = None
    key_text: str | None = None
    key_file: str | None = None
    """Used without a `key_text`."""
    key_is_argument: bool = False
    """The key is an option, which other users see in the list of processes."""

    @property
    def key(self) -> str | None:
        """The key, which may have to be read from its file."""
        if self.key_text is not None or self.key_file is None:
            return self.key_text
        from stead.sdk.requests import read_key_file

        with report_errors(self.url or ""):
            return read_key_file(self.key_file)


_target = Target()


def set_target(given: Target) -> None:
    """Set the target of this run, from the options before the command."""
    global _target
    _target = given


def override_target(*, url: str | None = None, key: str | None = None, key_file: str | None = None) -> None:
    """Override the target with the options after the command."""
    global _target
    if url:
        _target = replace(_target, url=url)
    if key_file:
        _target = replace(_target, key_text=None, key_file=key_file, key_is_argument=False)
    if key:
        _target = replace(_target, key_text=key, key_is_argument=True)


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
    _warn_about_arguments()
    with report_errors(_target.url or ""):
        try:
            return kind(_target.key, base_url=_target.url, max_retries=_RETRIES)
        except ValueError as error:
            fail(str(error), code="INVALID_URL")


@functools.cache
def _warn_about_arguments() -> None:
    """Once for each run. With `--json`, standard error is for the one line of an error."""
    if json_wanted():
        logging.getLogger("stead.sdk").setLevel(logging.ERROR)
    elif _target.key_is_argument:
        note("warning: other users can see --key in the list of processes: use STEAD_API_KEY or --key-file")


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
    url = _target.url or given.get("url")
    key = _target.key or given.get("key") or None
    with Stead(key, base_url=url, timeout=_COMPLETION_TIMEOUT, max_retries=0) as stead:
        yield stead


def _report_error(error: Exception, url: str) -> NoReturn:
    from stead.sdk import errors

    match error:
        case errors.MissingCredentials():
            fail(
                "no API key: set STEAD_API_KEY, or give --key-file."
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
