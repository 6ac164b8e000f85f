"""`apply_patch` as a function tool, for models without custom tools, such as those of Chat Completions."""

import json
from typing import Any

from agents.sandbox.capabilities import Filesystem
from agents.sandbox.capabilities.tools import SandboxApplyPatchTool
from agents.sandbox.errors import SandboxError
from agents.tool import FunctionTool, Tool
from agents.tool_context import ToolContext

_DESCRIPTION = """\
Edit files of the workspace. `patch` starts with the line "*** Begin Patch", ends with "*** End Patch", and
has one section for each file between them:
*** Add File: PATH, followed by the new content, each line prefixed with +
*** Delete File: PATH
*** Update File: PATH, optionally the line "*** Move to: PATH", then hunks. A hunk starts with @@, or with @@
and the class or function it is in, and has lines prefixed with a space (context, about 3 lines), - (removed)
or + (added).
Paths are relative to the workspace."""
_SCHEMA = {
    "type": "object",
    "properties": {"patch": {"type": "string", "description": "The whole patch."}},
    "required": ["patch"],
    "additionalProperties": False,
}


class FunctionFilesystem(Filesystem):
    """The `Filesystem` capability with `apply_patch` as a function tool. Use it in place of `Filesystem`."""

    def tools(self) -> list[Tool]:
        return [
            _as_function(tool) if isinstance(tool, SandboxApplyPatchTool) else tool
            for tool in super().tools()
        ]


def _as_function(custom: SandboxApplyPatchTool) -> FunctionTool:
    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        try:
            given = json.loads(arguments)
            patch = given.get("patch") if isinstance(given, dict) else None
            if not isinstance(patch, str):
                return "apply_patch failed: the argument `patch` must be a string"
            return str(await custom.on_invoke_tool(context, patch))
        except (SandboxError, ValueError) as error:
            return f"apply_patch failed: {error}"

    return FunctionTool(
        name=custom.name, description=_DESCRIPTION, params_json_schema=_SCHEMA, on_invoke_tool=invoke
    )
