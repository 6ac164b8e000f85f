"""What can go wrong, as classes: catch a family (`NotFound`) or one case of it (`VmNotFound`).

Every answer that is not a success becomes a `SteadApiError`. Its class follows from the code in the answer,
and for codes that have no class of their own from the status. Everything raised here derives from
`SteadException`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stead.sdk.models import ExecResult, SetupDiagnostics


class SteadException(Exception):
    """Base class of all exceptions that this library raises."""

    retryable: bool = False
    """The same call may succeed later, and the failed one had no effect: you can repeat it.

    False once a command may have started or something may have been created.
    """


class MissingCredentials(SteadException):
    """No API key and no access token was given, by argument or by environment."""


class ServerUnreachable(SteadException):
    """The client could not connect to the server, or the connection broke before the answer was complete.

    `sent` is True if the server may have received the request, and so may have executed it. `retryable` is
    True if the request was not sent, or if repeating it has no further effect (reads, writes of a whole file,
    deletes).
    """

    def __init__(self, message: str, *, sent: bool = True, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.sent = sent
        self.retryable = not sent if retryable is None else retryable


class NoAnswerInTime(ServerUnreachable):
    """The server did not answer within the timeout."""


class UnexpectedAnswer(SteadException):
    """The server answered with success, but not in the expected format.

    Check that the base URL points to a Stead server.
    """


class AmbiguousName(SteadException):
    """A name or an id prefix matches more than one thing; `candidates` has the id and name of each."""

    def __init__(self, kind: str, reference: str, candidates: Sequence[tuple[str, str | None]]) -> None:
        listed = ", ".join(f"{found} ({name})" if name else found for found, name in candidates)
        kinds = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        super().__init__(f"{reference!r} matches {len(candidates)} {kinds}: {listed}; use a full id")
        self.kind = kind
        self.reference = reference
        self.candidates = tuple(candidates)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.reference, self.candidates)


class WaitTimedOut(SteadException):
    """Something that was waited for did not happen in the time given."""


class CommandFailed(SteadException):
    """A command that was to be checked did not succeed; `result` has its output."""

    def __init__(self, result: "ExecResult", command: str) -> None:
        ending = f"was ended by {result.signal}" if result.signal else f"exited with {result.status_code}"
        last = (result.stderr.strip() or result.stdout.strip()).rpartition("\n")[2]
        shown = command if len(command) <= 80 else command[:79] + "…"
        super().__init__(f"`{shown}` {ending}" + (f": {last}" if last else ""))
        self.result = result
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.result, self.command)


class SteadApiError(SteadException):
    """The server answered with an error.

    `code` is the server's stable error code; None if a proxy answered instead. `status` is the HTTP status,
    `message` the explanation, `trace_id` the id of the request in the server's log, and `body` the whole
    answer with further fields in camelCase. `retryable` is True if the same call may succeed later and the
    failed one had no effect.
    """

    nothing_done: bool = False
    """The server sends this error only before it starts to execute a request."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int = 0,
        body: Mapping[str, Any] | None = None,
        trace_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.body: Mapping[str, Any] = body or {}
        self.trace_id = trace_id

    def __init_subclass__(cls, *, codes: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        for code in codes.split():
            ERRORS_BY_CODE[code] = cls

    def __str__(self) -> str:
        named = f"{self.code}: {self.message}" if self.code else self.message
        return f"{named} (trace {self.trace_id})" if self.trace_id else named

    def _text(self, key: str) -> str | None:
        value = self.body.get(key)
        return value if isinstance(value, str) else None

    def _number(self, key: str) -> float | None:
        value = self.body.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


ERRORS_BY_CODE: dict[str, type[SteadApiError]] = {}
"""The class of each code that has one."""


class InvalidRequest(SteadApiError, codes="BAD_REQUEST INVALID_REQUEST VALIDATION_ERROR INVALID_QUERY"):
    """The request can never work as it is."""


class InvalidSize(
    InvalidRequest,
    codes="""CREATE_VM_MEM_NOT_POWER_OF_TWO CREATE_VM_VCPU_NOT_POWER_OF_TWO CREATE_VM_MEM_OUT_OF_RANGE
    CREATE_VM_VCPU_OUT_OF_RANGE CREATE_VM_ROOTFS_OUT_OF_RANGE RESIZE_VM_MEM_NOT_POWER_OF_TWO
    RESIZE_VM_VCPU_NOT_POWER_OF_TWO RESIZE_VM_MEM_OUT_OF_RANGE RESIZE_VM_VCPU_OUT_OF_RANGE
    RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED RESIZE_VM_EMPTY_REQUEST ROOTFS_SIZE_TOO_LARGE MEM_SIZE_TOO_LARGE""",
):
    """No machine can have this size: not a power of two, out of range, or a disk that would shrink."""


class InvalidSpec(
    InvalidRequest,
    codes="CONFLICTING_SPEC_SOURCES_ERROR NON_LEAF_LAYER_FIELD_ERROR INVALID_GIT_REPO_SPEC_ERROR",
):
    """A spec contradicts itself: two sources for one layer, or a size on an outer layer."""


class InvalidLinuxUser(
    InvalidRequest,
    codes="""DUPLICATE_USER_NAME USER_GROUP_EMPTY USER_SYSTEM_FLAG_MISMATCH USER_UID_OUT_OF_RANGE
    USER_HOME_INVALID USER_SHELL_INVALID DUPLICATE_GROUP_NAME GROUP_NAME_RESERVED GROUP_NAME_INVALID_CHARS
    GROUP_NAME_TOO_LONG GROUP_NAME_EMPTY""",
):
    """A Linux user or group cannot be made like this."""


class InvalidService(
    InvalidRequest,
    codes="""WANTED_BY_EMPTY WORKDIR_EMPTY GROUP_EMPTY USER_EMPTY ON_FAILURE_ARRAY_CONTAINS_EMPTY
    REQUIRES_ARRAY_CONTAINS_EMPTY AFTER_ARRAY_CONTAINS_EMPTY ENV_KEY_CONTAINS_EQUALS ENV_KEY_EMPTY EXEC_EMPTY
    SERVICE_NAME_TOO_LONG SERVICE_NAME_INVALID_PREFIX SERVICE_NAME_INVALID_CHARS SERVICE_NAME_EMPTY""",
):
    """A systemd service cannot be made like this."""


class InvalidFileRequest(InvalidRequest, codes="FILES_BAD_REQUEST"):
    """A path cannot be read or written like this: it is a folder, it is not empty, the disk is full."""


class UnsupportedOs(InvalidRequest, codes="UNSUPPORTED_OS"):
    """The base image holds a system that the server cannot run."""


class InvalidGitRequest(InvalidRequest, codes="GIT_INVALID_REQUEST SERIALIZATION_ERROR"):
    """Git cannot do this: a name that it does not allow, or too much at once."""


class InvalidRevision(
    InvalidGitRequest,
    codes="""INVALID_REVISION INVALID AMBIGUOUS INVALID_OBJECT_ID INVALID_RANGE OFFSET_WITH_SELECTOR
    COMMIT_NOT_IN_BRANCH""",
):
    """It names no commit or object, more than one, or a range of commits that there cannot be."""


class InvalidBranchName(InvalidGitRequest, codes="BRANCH_NAME_EMPTY"):
    """A branch needs a name."""


class InvalidFileChange(
    InvalidGitRequest, codes="INVALID_FILE_CHANGE INVALID_FILE_PATH INVALID_BASE64_CONTENT"
):
    """A commit cannot change a file like this."""

    @property
    def path(self) -> str | None:
        return self._text("path")


class InvalidSearch(
    InvalidGitRequest,
    codes="""EMPTY_QUERY INVALID_REGEX INVALID_PATH_PATTERN FILENAME_EMPTY_QUERY FILENAME_INVALID_PATTERN
    COMMIT_EMPTY_QUERY COMMIT_INVALID_REGEX DIFF_EMPTY_QUERY DIFF_INVALID_REGEX DIFF_INVALID_PATH_PATTERN""",
):
    """Nothing can be found like this."""

    @property
    def reason(self) -> str | None:
        """What is wrong with the pattern."""
        return self._text("reason")


class InvalidSource(
    InvalidGitRequest,
    codes="SOURCE_IMPORT_CONFLICT SOURCE_UNAUTHORIZED SOURCE_NOT_FOUND IMPORT_SUBDIR_NOT_FOUND",
):
    """What a repository was to begin with cannot be had."""

    @property
    def url(self) -> str | None:
        return self._text("url") or self._text("source")


class Unauthorized(SteadApiError, codes="UNAUTHORIZED UNAUTHORIZED_ERROR PERMISSION_DENIED"):
    """The API key or token is missing, wrong or revoked."""


class Forbidden(SteadApiError, codes="FORBIDDEN NOT_VM_OWNER IDENTITY_ACCESS_DENIED"):
    """The caller is known but may not do this."""


class VmAccessDenied(Forbidden, codes="VM_ACCESS_DENIED ACCESS_DENIED"):
    """The Linux user may not touch this inside the machine."""


class RepoAccessDenied(Forbidden, codes="REPOSITORY_ACCESS_DENIED GIT_REPOSITORY_ACCESS_DENIED"):
    """The repository may be read, but not changed like this."""


class ManagedIdentity(Forbidden, codes="CANNOT_DELETE_MANAGED_IDENTITY CANNOT_MODIFY_MANAGED_IDENTITY"):
    """The identity belongs to the server and cannot be changed."""


class LimitExceeded(Forbidden, codes="LIMIT_EXCEEDED CUSTOM_SIZING_NOT_ALLOWED PERSISTENT_VMS_NOT_ALLOWED"):
    """A limit of the account is reached."""

    @property
    def limit(self) -> float | None:
        """How much the account may have."""
        found = self._number("limit")
        return self._number("max") if found is None else found

    @property
    def current(self) -> float | None:
        """How much it has now."""
        return self._number("current")

    @property
    def requested(self) -> float | None:
        """How much was asked for."""
        found = self._number("requested")
        return self._number("got") if found is None else found


class VmLimitExceeded(LimitExceeded, codes="VM_LIMIT_EXCEEDED TOTAL_VM_LIMIT_EXCEEDED"):
    """The account has as many machines, or as many running ones, as it may have."""


class SnapshotLimitExceeded(LimitExceeded, codes="SNAPSHOT_LIMIT_EXCEEDED"):
    """The account has as many snapshots as it may have."""


class RepoLimitExceeded(LimitExceeded, codes="GIT_REPO_LIMIT_EXCEEDED"):
    """The account has as many repositories as it may have."""


class SizeLimitExceeded(
    LimitExceeded, codes="ROOTFS_OVER_PLAN_LIMIT MEM_OVER_PLAN_LIMIT VCPU_OVER_PLAN_LIMIT"
):
    """The account may not have a machine this large."""


class StorageQuotaExceeded(
    LimitExceeded, codes="MEMORY_STORAGE_QUOTA_EXCEEDED ROOTFS_STORAGE_QUOTA_EXCEEDED"
):
    """The account's machines and snapshots together would take more than they may."""


class NotFound(SteadApiError, codes="NOT_FOUND"):
    """There is no such thing, or the caller may not know of it."""


class VmNotFound(
    NotFound,
    codes="""VM_NOT_FOUND INTERNAL_VM_NOT_FOUND VM_NOT_FOUND_IN_FS FORK_VM_NOT_FOUND
    INTERNAL_FORK_VM_NOT_FOUND
    INTERNAL_RESIZE_VM_NOT_FOUND""",
):
    """There is no such machine, or it is somebody else's."""

    @property
    def vm_id(self) -> str | None:
        return self._text("vmId")


class SnapshotNotFound(NotFound, codes="SNAPSHOT_NOT_FOUND NO_DEFAULT_SNAPSHOT_AVAILABLE"):
    """There is no such snapshot."""

    @property
    def snapshot_id(self) -> str | None:
        return self._text("snapshotId")


class BuildNotFound(NotFound, codes="BUILD_NOT_FOUND BUILD_NOT_FOUND_FOR_VM BUILD_NOT_FOUND_FOR_SNAPSHOT"):
    """There is no such build, or the machine or snapshot was not built."""


class FileNotFound(NotFound, codes="FILE_NOT_FOUND"):
    """There is no such file or folder in the machine."""

    @property
    def path(self) -> str | None:
        return self._text("path")


class LinuxUserNotFound(NotFound, codes="USER_NOT_FOUND GROUP_NOT_FOUND"):
    """The machine has no such Linux user or group."""


class ServiceNotFound(NotFound, codes="SERVICE_NOT_FOUND"):
    """The machine has no such systemd service."""


class SessionNotFound(NotFound, codes="SESSION_NOT_FOUND"):
    """The machine has no such terminal session."""


class IdentityNotFound(NotFound, codes="IDENTITY_NOT_FOUND"):
    """There is no such identity."""


class PermissionNotFound(NotFound, codes="PERMISSION_NOT_FOUND VM_PERMISSION_NOT_FOUND"):
    """The identity was never granted this."""


class RepoNotFound(NotFound, codes="REPO_NOT_FOUND REPOSITORY_NOT_FOUND GIT_REPOSITORY_NOT_FOUND"):
    """There is no such repository."""

    @property
    def repo_id(self) -> str | None:
        return self._text("repoId")


class RevisionNotFound(NotFound, codes="REFERENCE_NOT_FOUND NO_DEFAULT_BRANCH"):
    """There is no such branch, tag or commit, or there is none at all yet."""


class BranchNotFound(RevisionNotFound, codes="BRANCH_NOT_FOUND"):
    """There is no such branch."""

    @property
    def branch(self) -> str | None:
        return self._text("branch")


class TagNotFound(RevisionNotFound, codes="TAG_NOT_FOUND"):
    """There is no such tag."""


class CommitNotFound(RevisionNotFound, codes="COMMIT_NOT_FOUND PARENT_NOT_FOUND"):
    """There is no such commit."""

    @property
    def sha(self) -> str | None:
        return self._text("sha")


class ObjectNotFound(NotFound, codes="BLOB_NOT_FOUND TREE_NOT_FOUND"):
    """There is no such blob or tree."""

    @property
    def sha(self) -> str | None:
        return self._text("hash")


class PathNotFound(NotFound, codes="PATH_NOT_FOUND CONTENT_NOT_FOUND"):
    """The revision has no such file or folder."""

    @property
    def path(self) -> str | None:
        return self._text("path")


class Gone(NotFound, codes="SESSION_EXPIRED"):
    """It was there once."""


class VmDeleted(Gone, codes="VM_DELETED"):
    """The machine was deleted."""


class SourceSnapshotDeleted(Gone, codes="SOURCE_SNAPSHOT_DELETED"):
    """The snapshot to start from was deleted."""


class Conflict(SteadApiError, codes="CONFLICT"):
    """It does not go together with the present state of things."""


class VmNotRunning(Conflict, codes="VM_NOT_RUNNING"):
    """The operation needs a running machine."""


class VmBusy(Conflict, codes="VM_IS_SUSPENDING STILL_CREATING VM_OPERATION_DENIED_DURING_TRANSACTION"):
    """The machine is on its way from one state to another; try again when it has arrived."""

    retryable = True
    nothing_done = True


class VmReactivated(Conflict, codes="VM_REACTIVATED"):
    """The machine was woken while it was being suspended."""


class SnapshotAlreadyDeleted(Conflict, codes="SNAPSHOT_ALREADY_DELETED"):
    """The snapshot was deleted before."""


class SnapshotInUse(Conflict, codes="SNAPSHOT_IS_ACCOUNT_DEFAULT"):
    """The snapshot is what the account's machines start from."""


class SourceSnapshotBuilding(Conflict, codes="SOURCE_SNAPSHOT_BUILDING"):
    """The snapshot to start from is not ready yet."""

    retryable = True
    nothing_done = True


class SourceSnapshotLost(Conflict, codes="SOURCE_SNAPSHOT_LOST SOURCE_SNAPSHOT_CANCELLED"):
    """The snapshot to start from cannot be used any more, or never became ready."""


class AlreadyExists(
    Conflict, codes="USER_ALREADY_EXISTS GROUP_ALREADY_EXISTS SERVICE_ALREADY_EXISTS SESSION_ALREADY_EXISTS"
):
    """Something of this name is there."""


class RepoAlreadyExists(AlreadyExists, codes="REPO_ALREADY_EXISTS"):
    """There is such a repository already."""


class BranchAlreadyExists(AlreadyExists, codes="BRANCH_ALREADY_EXISTS"):
    """There is a branch of this name."""

    @property
    def branch(self) -> str | None:
        return self._text("branch")


class PermissionAlreadyExists(AlreadyExists, codes="PERMISSION_ALREADY_EXISTS"):
    """The identity has a permission on this already; update it instead."""


class ConflictingParent(Conflict, codes="CONFLICTING_PARENT"):
    """The branch is not, or no longer, at the commit that it was expected to be at."""

    @property
    def expected(self) -> str | None:
        return self._text("expected")

    @property
    def actual(self) -> str | None:
        """Where it is; None if there is no such branch."""
        return self._text("actual")


class GithubSyncConflict(Conflict, codes="GIT_HUB_SYNC_CONFLICT"):
    """One of the two repositories is kept in step with another one."""


class ExecTimedOut(SteadApiError, codes="EXEC_TIMED_OUT"):
    """The command was ended because its time was up; what it had printed until then is here."""

    @property
    def stdout(self) -> str:
        return self._text("stdout") or ""

    @property
    def stderr(self) -> str:
        return self._text("stderr") or ""

    @property
    def timeout(self) -> float | None:
        """The time that it had, in seconds."""
        milliseconds = self._number("timeoutMs")
        return None if milliseconds is None else milliseconds / 1000


class SetupFailed(SteadApiError, codes="VM_SETUP_FAILED SNAPSHOT_SETUP_FAILED"):
    """A machine or snapshot was made, but what should have been set up in it failed."""

    @property
    def failed_reason(self) -> str | None:
        return self._text("failedReason")

    @property
    def snapshot_id(self) -> str | None:
        """A snapshot of the failed machine, when the server kept one to look into."""
        return self._text("snapshotId")

    @property
    def diagnostics(self) -> "SetupDiagnostics | None":
        """The states of the services, and the logs of those that failed."""
        from stead.sdk.models import SetupDiagnostics
        from stead.sdk.parsing import parse

        found = self.body.get("diagnostics")
        return parse(SetupDiagnostics, found) if isinstance(found, Mapping) else None


class BuildFailed(SetupFailed, codes="BUILD_FAILED"):
    """A command of the build did not succeed."""

    @property
    def exit_code(self) -> int | None:
        found = self._number("exitCode")
        return None if found is None else int(found)

    @property
    def stderr(self) -> str:
        return self._text("stderr") or ""


class BuildBudgetExceeded(SetupFailed, codes="BUILD_BUDGET_EXCEEDED"):
    """The build took longer than a build may take."""


class TooManyRequests(SteadApiError):
    """The caller asks too often, or has too much open at once."""

    retryable = True
    nothing_done = True


class SessionCapReached(TooManyRequests, codes="SESSION_CAP_REACHED"):
    """The machine has as many terminal sessions as it may have."""

    retryable = False


class ServerError(SteadApiError, codes="INTERNAL INTERNAL_ERROR"):
    """The server failed; it is not the caller's fault. Its log has the trace id."""


class GitError(
    ServerError,
    codes="""GIT_ERROR PACKFILE SEND_ERROR GIT_SERVER_ERROR TRIGGER_ERROR GIT_HUB_SYNC_FAILED DOWNLOAD_FAILED
    GET_CONTENT_FAILED CREATE_REPOSITORY_FAILED DELETE_REPOSITORY_FAILED LIST_REPOSITORIES_FAILED
    GET_REPOSITORY_INFO_FAILED UPDATE_DEFAULT_BRANCH_FAILED""",
):
    """Git failed on the server."""


class ServiceUnavailable(ServerError, codes="SERVICE_UNAVAILABLE UNAVAILABLE"):
    """The server, or something in front of it, cannot take the call now."""

    retryable = True


class NoCapacity(ServiceUnavailable, codes="NO_LOCAL_STORAGE_CAPACITY INSUFFICIENT_SWAP"):
    """The host has no room for this now."""

    nothing_done = True


class VmStartTimeout(ServerError, codes="VM_START_TIMEOUT"):
    """The machine did not become ready in time."""

    retryable = True


_BY_STATUS: dict[int, type[SteadApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    406: NotFound,
    409: Conflict,
    410: Gone,
    429: TooManyRequests,
    502: ServiceUnavailable,
    503: ServiceUnavailable,
    504: ServiceUnavailable,
}


def error_class(code: str | None, status: int) -> type[SteadApiError]:
    """The class for an answer: by its code, else by its status."""
    if code is not None and code in ERRORS_BY_CODE:
        return ERRORS_BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return ServerError
    return InvalidRequest if 400 <= status < 500 else SteadApiError


def api_error(
    status: int, body: object, text: str, trace_id: str | None, *, idempotent: bool = True
) -> SteadApiError:
    """The error for an answer with this body; `text` is shown if it was not JSON.

    After a request that is not idempotent (a command, a create), an error is not retryable if the server may
    have executed the request.
    """
    facts: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    found = facts.get("code")
    code = found if isinstance(found, str) else None
    said = facts.get("message") or facts.get("description") or facts.get("error")
    if not isinstance(said, str):
        said = f"HTTP status {status}"
        if not facts and text.strip():
            said += f": {text.strip()[:200]}"
    error = error_class(code, status)(said, code=code, status=status, body=facts, trace_id=trace_id)
    if not idempotent and not error.nothing_done:
        error.retryable = False
    return error
