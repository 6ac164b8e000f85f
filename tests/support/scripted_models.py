"""Runs with scripted models: their steps, what the models saw, and the settings of a run."""

import itertools
import re
from typing import Any

from agents import RunConfig
from agents.sandbox import SandboxRunConfig
from agents.sandbox.snapshot import NoopSnapshotSpec
from agents.testing import ModelCall, function_call
from openai.types.responses import ResponseCustomToolCall

_NUMBERS = itertools.count(1)


def outputs(call: ModelCall | None) -> list[Any]:
    """The outputs of the tools that a model saw, oldest first."""
    assert call is not None
    items = call.input if isinstance(call.input, list) else []
    return [
        item["output"]
        for item in items
        if isinstance(item, dict) and str(item.get("type")).endswith("_output")
    ]


def command_number(call: ModelCall) -> int:
    """The number under which the command of the last tool call goes on."""
    found = re.search(r"session ID (\d+)", str(outputs(call)[-1]))
    assert found is not None, outputs(call)
    return int(found[1])


def shell(cmd: str, **arguments: Any) -> Any:
    """A call of the tool `exec_command`, which waits long enough for short commands."""
    wanted = {"cmd": cmd, "yield_time_ms": 30000, **arguments}
    return function_call("exec_command", wanted, call_id=_call_id())


def typed(number: int, chars: str = "") -> Any:
    """A call of the tool `write_stdin`."""
    arguments = {"session_id": number, "chars": chars, "yield_time_ms": 30000}
    return function_call("write_stdin", arguments, call_id=_call_id())


def patched(patch: str) -> Any:
    """A call of the custom tool `apply_patch`."""
    return ResponseCustomToolCall(
        type="custom_tool_call", call_id=_call_id(), name="apply_patch", input=patch
    )


def sandboxed(**sandbox: Any) -> RunConfig:
    """The settings of a run in a sandbox; nothing is saved at its end unless `snapshot` says so."""
    return RunConfig(
        tracing_disabled=True, sandbox=SandboxRunConfig(**{"snapshot": NoopSnapshotSpec(), **sandbox})
    )


def _call_id() -> str:
    return f"call-{next(_NUMBERS)}"
