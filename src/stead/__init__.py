"""Stead: real Linux computers for programs and AI agents, on machines you own.

The client library is here: `from stead import Stead, AsyncStead`. It is loaded when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stead.sdk import (
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
