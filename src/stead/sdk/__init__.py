"""The client library: `Stead` and `AsyncStead`, and everything that they take and give.

It speaks to a server over HTTP and uses nothing else of this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from stead.sdk._sync.client import Stead
from stead.sdk._sync.identities import Identity
from stead.sdk._sync.streams import Stream
from stead.sdk._sync.vm import Vm
from stead.sdk.errors import (
    AlreadyExists,
    BuildFailed,
    CommandFailed,
    Conflict,
    ExecTimedOut,
    FileNotFound,
    Forbidden,
    Gone,
    InvalidRequest,
    LimitExceeded,
    MissingCredentials,
    NoAnswerInTime,
    NotFound,
    ServerError,
    ServerUnreachable,
    ServiceUnavailable,
    SetupFailed,
    SnapshotNotFound,
    SteadApiError,
    SteadException,
    TooManyRequests,
    Unauthorized,
    UnexpectedAnswer,
    VmBusy,
    VmNotFound,
    VmNotRunning,
    WaitTimedOut,
)
from stead.sdk.models import (
    Build,
    BuildPhase,
    DirEntry,
    ExecEvent,
    ExecResult,
    Exited,
    FileEvent,
    FileStat,
    GitPermission,
    LogEntry,
    LogPage,
    Output,
    Persistence,
    Snapshot,
    SnapshotRef,
    Token,
    VmInfo,
    VmList,
    VmPermission,
    Whoami,
)
from stead.sdk.parts import FileContent, Git, Group, RepoRef, RestartPolicy, Service, User
from stead.sdk.spec import VmSpec

if TYPE_CHECKING:
    from stead.sdk._async.client import AsyncStead
    from stead.sdk._async.identities import AsyncIdentity
    from stead.sdk._async.streams import AsyncStream
    from stead.sdk._async.vm import AsyncVm

__all__ = [
    "AlreadyExists",
    "AsyncIdentity",
    "AsyncStead",
    "AsyncStream",
    "AsyncVm",
    "Build",
    "BuildFailed",
    "BuildPhase",
    "CommandFailed",
    "Conflict",
    "DirEntry",
    "ExecEvent",
    "ExecResult",
    "ExecTimedOut",
    "Exited",
    "FileContent",
    "FileEvent",
    "FileNotFound",
    "FileStat",
    "Forbidden",
    "Git",
    "GitPermission",
    "Gone",
    "Group",
    "Identity",
    "InvalidRequest",
    "LimitExceeded",
    "LogEntry",
    "LogPage",
    "MissingCredentials",
    "NoAnswerInTime",
    "NotFound",
    "Output",
    "Persistence",
    "RepoRef",
    "RestartPolicy",
    "ServerError",
    "ServerUnreachable",
    "Service",
    "ServiceUnavailable",
    "SetupFailed",
    "Snapshot",
    "SnapshotNotFound",
    "SnapshotRef",
    "Stead",
    "SteadApiError",
    "SteadException",
    "Stream",
    "Token",
    "TooManyRequests",
    "Unauthorized",
    "UnexpectedAnswer",
    "User",
    "Vm",
    "VmBusy",
    "VmInfo",
    "VmList",
    "VmNotFound",
    "VmNotRunning",
    "VmPermission",
    "VmSpec",
    "WaitTimedOut",
    "Whoami",
]

_ASYNC = {"AsyncIdentity": "identities", "AsyncStead": "client", "AsyncStream": "streams", "AsyncVm": "vm"}

if not TYPE_CHECKING:
    # The command line uses the synchronous client, and is not to wait for the other.
    def __getattr__(name: str) -> object:
        if name not in _ASYNC:
            raise AttributeError(f"module 'stead.sdk' has no attribute {name!r}")
        found = getattr(import_module(f"stead.sdk._async.{_ASYNC[name]}"), name)
        globals()[name] = found
        return found
