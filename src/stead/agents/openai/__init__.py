"""Sandbox client for the OpenAI Agents SDK: gives a `SandboxAgent` a VM. Extra: `openai-agents`."""

try:
    from stead.agents.openai.client import SteadSandboxClient
    from stead.agents.openai.options import SteadSandboxClientOptions, SteadSandboxSessionState
    from stead.agents.openai.patch_tool import FunctionFilesystem
    from stead.agents.openai.session import SteadSandboxSession, SteadSession
except ImportError as error:
    raise ImportError(
        "stead.agents.openai needs the extra `openai-agents`: run pip install 'PATH[openai-agents]', where"
        f" PATH is the wheel or the checkout of Stead ({error})"
    ) from error

__all__ = [
    "FunctionFilesystem",
    "SteadSandboxClient",
    "SteadSandboxClientOptions",
    "SteadSandboxSession",
    "SteadSandboxSessionState",
    "SteadSession",
]
