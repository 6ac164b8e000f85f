"""Stead: real Linux VMs and Git repositories for AI agents, on hosts you own.

`from stead import Stead, AsyncStead` imports the client library, which is loaded on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stead.sdk import (
        AmbiguousName,
        AsyncStead,
        AsyncVm,
        CommandFailed,
        Conflict,
        ExecResult,
        ExecTimedOut,
        Exited,
        FileNotFound,
        Forbidden,
        InvalidRequest,
        LimitExceeded,
        Nic,
        NotFound,
        Output,
        Persistence,
        ServerUnreachable,
        Service,
        SetupFailed,
        Stead,
        SteadApiError,
        SteadException,
        Unauthorized,
        User,
        Vm,
        VmNotFound,
        VmSpec,
    )

__all__ = [
    "AmbiguousName",
    "AsyncStead",
    "AsyncVm",
    "CommandFailed",
    "Conflict",
    "ExecResult",
    "ExecTimedOut",
    "Exited",
    "FileNotFound",
    "Forbidden",
    "InvalidRequest",
    "LimitExceeded",
    "Nic",
    "NotFound",
    "Output",
    "Persistence",
    "ServerUnreachable",
    "Service",
    "SetupFailed",
    "Stead",
    "SteadApiError",
    "SteadException",
    "Unauthorized",
    "User",
    "Vm",
    "VmNotFound",
    "VmSpec",
]

if not TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise take any name for one of this module's.
    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'stead' has no attribute {name!r}")
        from stead import sdk

        found = getattr(sdk, name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
