"""Sandbox client for the OpenAI Agents SDK: gives a `SandboxAgent` a VM. Extra: `openai-agents`."""

from stead.agents.openai.client import SteadSandboxClient
from stead.agents.openai.options import SteadSandboxClientOptions, SteadSandboxSessionState
from stead.agents.openai.patch_tool import FunctionFilesystem
from stead.agents.openai.session import SteadSandboxSession, SteadSession

__all__ = [
    "FunctionFilesystem",
    "SteadSandboxClient",
    "SteadSandboxClientOptions",
    "SteadSandboxSession",
    "SteadSandboxSessionState",
    "SteadSession",
]
