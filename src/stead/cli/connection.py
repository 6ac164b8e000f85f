"""The server that commands talk to: where it is, and what its failures mean to whoever typed the command."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import typer

from stead.cli.output import fail, note, shown_lines

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.errors import SetupFailed, SteadApiError

URL_VARIABLES = ["STEAD_API_URL", "FREESTYLE_API_URL"]
KEY_VARIABLES = ["STEAD_API_KEY", "FREESTYLE_API_KEY"]
_COMPLETION_TIMEOUT = 0.7


@dataclass(frozen=True)
class Target:
    """What `--url` and `--key` said, or the environment."""

    url: str | None = None
    key: str | None = None


_target = Target()


def use(url: str | None, key: str | None) -> None:
    global _target
    _target = Target(url or None, key or None)


def target() -> Target:
    return _target


@contextlib.contextmanager
def connected() -> "Iterator[Stead]":
    """A client for the length of a command; whatever fails ends the command with one sentence."""
    from stead.sdk import Stead

    with failures(_target.url or ""):
        try:
            client = Stead(_target.key, base_url=_target.url, max_retries=1)
        except ValueError as error:
            fail(str(error))
    with failures(client.base_url), client as stead:
        yield stead


@contextlib.contextmanager
def failures(url: str) -> Iterator[None]:
    """Whatever fails in the block ends the command with one sentence."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        _explain(error, url)


@contextlib.contextmanager
def for_completion(context: typer.Context) -> "Iterator[Stead]":
    """A client for while somebody waits with a finger on the tab key: quick, or not at all."""
    from stead.sdk import Stead

    given = context.find_root().params
    url, key = given.get("url"), given.get("key")
    with Stead(key, base_url=url, timeout=_COMPLETION_TIMEOUT, max_retries=0) as stead:
        yield stead


def _explain(error: Exception, url: str) -> NoReturn:
    from stead.sdk import errors

    match error:
        case errors.MissingCredentials():
            fail(
                "no API key: give --key or set STEAD_API_KEY."
                " `stead keys create`, on the host that runs the server, makes one"
            )
        case errors.NoAnswerInTime():
            fail(f"no answer from Stead at {url} in time")
        case errors.ServerUnreachable(sent=False):
            fail(f"cannot reach Stead at {url}: is `stead serve` running?")
        case errors.SteadApiError():
            _explain_answer(error)
        case errors.SteadException():
            fail(str(error))
        case OSError():
            fail(f"{error.strerror}: {error.filename}" if error.filename else error.strerror or str(error))
    raise error


def _explain_answer(error: "SteadApiError") -> NoReturn:
    from stead.sdk import errors

    if isinstance(error, errors.SetupFailed):
        _show_diagnostics(error)
    named = ", ".join(filter(None, (error.code, error.trace_id and f"trace {error.trace_id}")))
    hint = ""
    if isinstance(error, errors.Unauthorized):
        hint = ". `stead keys create`, on the host that runs the server, makes a key"
    fail(f"{error.message}{hint}" + (f" ({named})" if named else ""))


def _show_diagnostics(error: "SetupFailed") -> None:
    """What the services of a machine said that could not be set up."""
    found = error.diagnostics
    for log in () if found is None else (*found.failed_service_logs, *found.additional_failed_service_logs):
        note(f"{log.unit_name}:")
        note(shown_lines(log.log))
    if error.snapshot_id:
        note(f"to look into it: stead vm create --snapshot {error.snapshot_id}")
