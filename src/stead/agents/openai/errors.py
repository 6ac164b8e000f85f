"""Errors of the SDK for the agent framework: retryable exactly if a repetition is safe and may succeed."""

from collections.abc import Sequence
from pathlib import Path

from agents.sandbox.errors import ExecTimeoutError, ExecTransportError

from stead.agents.openai.guest import Finished
from stead.sdk import SteadException


def transport_error(command: Sequence[str | Path], error: SteadException) -> ExecTransportError:
    """The command could not be run, or its result was lost. `retry_safe` says that it did not start."""
    return ExecTransportError(
        command=command,
        context={"backend": "stead", "reason": type(error).__name__, "retry_safe": error.retryable},
        cause=error,
        message=f"cannot run the command: {error}",
        retryable=error.retryable,
    )


def timeout_error(command: Sequence[str | Path], seconds: float | None, end: Finished) -> ExecTimeoutError:
    """The command was killed after its timeout; the context has its output so far."""
    output = {"stdout": end.stdout.decode(errors="replace"), "stderr": end.stderr.decode(errors="replace")}
    failure = ExecTimeoutError(command=command, timeout_s=seconds, context=output)
    failure.message = f"command timed out after {seconds:g} seconds and was killed"
    failure.args = (failure.message,)
    return failure
