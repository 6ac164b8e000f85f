"""Exceptions: catch a family (`NotFound`) or one case of it (`VmNotFound`).

Every error answer becomes a `SteadApiError`. The error code of the answer selects the class; codes without
their own class are selected by HTTP status. All exceptions derive from `SteadException`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stead.sdk.exceptions import AmbiguousName as AmbiguousName
from stead.sdk.exceptions import ClientClosed as ClientClosed
from stead.sdk.exceptions import CommandFailed as CommandFailed
from stead.sdk.exceptions import InvalidArgument as InvalidArgument
from stead.sdk.exceptions import MissingCredentials as MissingCredentials
from stead.sdk.exceptions import NoAnswerInTime as NoAnswerInTime
from stead.sdk.exceptions import ServerUnreachable as ServerUnreachable
from stead.sdk.exceptions import SessionClosed as SessionClosed
from stead.sdk.exceptions import SteadApiError as SteadApiError
from stead.sdk.exceptions import SteadException as SteadException
from stead.sdk.exceptions import Text
from stead.sdk.exceptions import UnexpectedAnswer as UnexpectedAnswer
from stead.sdk.exceptions import WaitTimedOut as WaitTimedOut

if TYPE_CHECKING:
    from stead.sdk.models import SetupDiagnostics


class InvalidRequest(
    SteadApiError, codes="BAD_REQUEST INVALID_REQUEST VALIDATION_ERROR INVALID_QUERY INVALID_SESSION_ID"
):
    """The request is invalid; repeating it cannot succeed."""


class IdempotencyKeyReused(InvalidRequest, codes="IDEMPOTENCY_KEY_REUSED"):
    """The idempotency key was used for another request in the last 24 hours."""


_SIZE_OPTIONS = {"vcpuCount": "cpu", "memSizeGb": "memory", "rootfsSizeGb": "disk"}
"""What this library calls the fields of a size."""


class InvalidSize(
    InvalidRequest,
    codes="""CREATE_VM_MEM_NOT_POWER_OF_TWO CREATE_VM_VCPU_NOT_POWER_OF_TWO CREATE_VM_MEM_OUT_OF_RANGE
    CREATE_VM_VCPU_OUT_OF_RANGE CREATE_VM_ROOTFS_OUT_OF_RANGE RESIZE_VM_MEM_NOT_POWER_OF_TWO
    RESIZE_VM_VCPU_NOT_POWER_OF_TWO RESIZE_VM_MEM_OUT_OF_RANGE RESIZE_VM_VCPU_OUT_OF_RANGE
    RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED RESIZE_VM_EMPTY_REQUEST ROOTFS_SIZE_TOO_LARGE MEM_SIZE_TOO_LARGE""",
):
    """The size is invalid: not a power of two, out of range, or a disk that would shrink."""

    def __init__(self, message: str, **answer: Any) -> None:
        for field, option in _SIZE_OPTIONS.items():
            message = message.replace(field, option)
        super().__init__(message, **answer)


class InvalidSpec(
    InvalidRequest,
    codes="CONFLICTING_SPEC_SOURCES_ERROR NON_LEAF_LAYER_FIELD_ERROR INVALID_GIT_REPO_SPEC_ERROR",
):
    """The spec is contradictory: two sources for one layer, or a size on an outer layer."""


class InvalidLinuxUser(
    InvalidRequest,
    codes="""DUPLICATE_USER_NAME USER_GROUP_EMPTY USER_SYSTEM_FLAG_MISMATCH USER_UID_OUT_OF_RANGE
    USER_HOME_INVALID USER_SHELL_INVALID DUPLICATE_GROUP_NAME GROUP_NAME_RESERVED GROUP_NAME_INVALID_CHARS
    GROUP_NAME_TOO_LONG GROUP_NAME_EMPTY""",
):
    """The description of a Linux user or group is invalid."""


class InvalidService(
    InvalidRequest,
    codes="""WANTED_BY_EMPTY WORKDIR_EMPTY GROUP_EMPTY USER_EMPTY ON_FAILURE_ARRAY_CONTAINS_EMPTY
    REQUIRES_ARRAY_CONTAINS_EMPTY AFTER_ARRAY_CONTAINS_EMPTY ENV_KEY_CONTAINS_EQUALS ENV_KEY_EMPTY EXEC_EMPTY
    SERVICE_NAME_TOO_LONG SERVICE_NAME_INVALID_PREFIX SERVICE_NAME_INVALID_CHARS SERVICE_NAME_EMPTY""",
):
    """The description of a systemd service is invalid."""


class InvalidFileRequest(InvalidRequest, codes="FILES_BAD_REQUEST"):
    """A file operation failed: the path is a folder, a folder is not empty, or the disk is full."""


class UnsupportedOs(InvalidRequest, codes="UNSUPPORTED_OS"):
    """The server does not support the operating system of the base image."""


class InvalidGitRequest(InvalidRequest, codes="GIT_INVALID_REQUEST SERIALIZATION_ERROR"):
    """Git refused the request: an invalid name, or too much data."""


class InvalidRevision(
    InvalidGitRequest,
    codes="""INVALID_REVISION INVALID AMBIGUOUS INVALID_OBJECT_ID INVALID_RANGE OFFSET_WITH_SELECTOR
    COMMIT_NOT_IN_BRANCH""",
):
    """A revision is invalid: unknown, ambiguous, or an impossible range of commits."""


class InvalidBranchName(InvalidGitRequest, codes="BRANCH_NAME_EMPTY"):
    """The name of the branch is empty."""


class InvalidFileChange(
    InvalidGitRequest, codes="INVALID_FILE_CHANGE INVALID_FILE_PATH INVALID_BASE64_CONTENT"
):
    """A file change of a commit is invalid."""

    path = Text("path")


class InvalidSearch(
    InvalidGitRequest,
    codes="""EMPTY_QUERY INVALID_REGEX INVALID_PATH_PATTERN FILENAME_EMPTY_QUERY FILENAME_INVALID_PATTERN
    COMMIT_EMPTY_QUERY COMMIT_INVALID_REGEX DIFF_EMPTY_QUERY DIFF_INVALID_REGEX DIFF_INVALID_PATH_PATTERN""",
):
    """The query of a search is invalid."""

    reason = Text("reason")
    """Why the pattern is invalid."""


class InvalidSource(
    InvalidGitRequest,
    codes="SOURCE_IMPORT_CONFLICT SOURCE_UNAUTHORIZED SOURCE_NOT_FOUND IMPORT_SUBDIR_NOT_FOUND",
):
    """The source or import of a new repository is not available."""

    @property
    def url(self) -> str | None:
        """The URL of the source."""
        return self._text("url") or self._text("source")


class InvalidDomain(InvalidRequest, codes="INVALID_DOMAIN"):
    """The domain is not a valid host name, or the server keeps it for itself."""

    domain = Text("domain")


class VerificationFailed(InvalidRequest, codes="VERIFICATION_FAILED"):
    """No TXT record of the domain has the verification code yet."""

    domain = Text("domain")
    retryable = True


class Unauthorized(SteadApiError, codes="UNAUTHORIZED UNAUTHORIZED_ERROR PERMISSION_DENIED"):
    """The API key or token is missing, invalid or revoked."""


class Forbidden(SteadApiError, codes="FORBIDDEN NOT_VM_OWNER IDENTITY_ACCESS_DENIED"):
    """The caller has no permission for this request."""


class SessionUserMismatch(Forbidden, codes="SESSION_USER_MISMATCH"):
    """The terminal session or the process belongs to another Linux user."""


class VmAccessDenied(Forbidden, codes="VM_ACCESS_DENIED ACCESS_DENIED"):
    """The Linux user has no permission for this in the VM."""


class DomainNotVerified(Forbidden, codes="DOMAIN_OWNERSHIP_NOT_VERIFIED"):
    """The domain is neither verified by this account nor in a preview zone."""

    domain = Text("domain")


class RepoAccessDenied(Forbidden, codes="REPOSITORY_ACCESS_DENIED GIT_REPOSITORY_ACCESS_DENIED"):
    """The caller has no permission for this change of the repository."""


class ManagedIdentity(Forbidden, codes="CANNOT_DELETE_MANAGED_IDENTITY CANNOT_MODIFY_MANAGED_IDENTITY"):
    """The server uses this identity itself; it cannot be changed."""


class LimitExceeded(Forbidden, codes="LIMIT_EXCEEDED CUSTOM_SIZING_NOT_ALLOWED PERSISTENT_VMS_NOT_ALLOWED"):
    """The request exceeds a limit of the account."""

    @property
    def limit(self) -> float | None:
        """The limit."""
        found = self._number("limit")
        return self._number("max") if found is None else found

    @property
    def current(self) -> float | None:
        """The current usage."""
        return self._number("current")

    @property
    def requested(self) -> float | None:
        """The requested amount."""
        found = self._number("requested")
        return self._number("got") if found is None else found


class VmLimitExceeded(LimitExceeded, codes="VM_LIMIT_EXCEEDED TOTAL_VM_LIMIT_EXCEEDED"):
    """The account reached its limit of VMs, or of running VMs."""


class SnapshotLimitExceeded(LimitExceeded, codes="SNAPSHOT_LIMIT_EXCEEDED"):
    """The account reached its limit of snapshots."""


class RepoLimitExceeded(LimitExceeded, codes="GIT_REPO_LIMIT_EXCEEDED"):
    """The account reached its limit of repositories."""


class SizeLimitExceeded(
    LimitExceeded, codes="ROOTFS_OVER_PLAN_LIMIT MEM_OVER_PLAN_LIMIT VCPU_OVER_PLAN_LIMIT"
):
    """The size exceeds the account's limit for one VM."""


class StorageQuotaExceeded(
    LimitExceeded, codes="MEMORY_STORAGE_QUOTA_EXCEEDED ROOTFS_STORAGE_QUOTA_EXCEEDED"
):
    """The account's VMs and snapshots would exceed its storage quota."""


class NotFound(SteadApiError, codes="NOT_FOUND"):
    """It does not exist, or the caller has no access to it."""


class VmNotFound(
    NotFound,
    codes="""VM_NOT_FOUND INTERNAL_VM_NOT_FOUND VM_NOT_FOUND_IN_FS FORK_VM_NOT_FOUND
    INTERNAL_FORK_VM_NOT_FOUND
    INTERNAL_RESIZE_VM_NOT_FOUND VM_ACCESS_DENIED_FOR_MAPPING""",
):
    """The VM does not exist, or it belongs to another account."""

    vm_id = Text("vmId")


class SnapshotNotFound(NotFound, codes="SNAPSHOT_NOT_FOUND NO_DEFAULT_SNAPSHOT_AVAILABLE"):
    """The snapshot does not exist."""

    snapshot_id = Text("snapshotId")


class BuildNotFound(NotFound, codes="BUILD_NOT_FOUND BUILD_NOT_FOUND_FOR_VM BUILD_NOT_FOUND_FOR_SNAPSHOT"):
    """The build does not exist, or the VM or snapshot was not built from a spec."""


class FileNotFound(NotFound, codes="FILE_NOT_FOUND"):
    """The file or folder does not exist in the VM."""

    path = Text("path")


class LinuxUserNotFound(NotFound, codes="USER_NOT_FOUND GROUP_NOT_FOUND"):
    """The Linux user or group does not exist in the VM."""


class ServiceNotFound(NotFound, codes="SERVICE_NOT_FOUND"):
    """The systemd service does not exist in the VM."""


class SessionNotFound(NotFound, codes="SESSION_NOT_FOUND"):
    """The terminal session or the process does not exist in the VM."""


class IdentityNotFound(NotFound, codes="IDENTITY_NOT_FOUND"):
    """The identity does not exist."""


class PermissionNotFound(NotFound, codes="PERMISSION_NOT_FOUND VM_PERMISSION_NOT_FOUND"):
    """The identity does not have this permission."""


class RepoNotFound(NotFound, codes="REPO_NOT_FOUND REPOSITORY_NOT_FOUND GIT_REPOSITORY_NOT_FOUND"):
    """The repository does not exist."""

    repo_id = Text("repoId")


class VerificationNotFound(NotFound, codes="VERIFICATION_NOT_FOUND"):
    """There is no pending verification of the domain."""


class RevisionNotFound(NotFound, codes="REFERENCE_NOT_FOUND NO_DEFAULT_BRANCH"):
    """The branch, tag or commit does not exist, or the repository is empty."""


class BranchNotFound(RevisionNotFound, codes="BRANCH_NOT_FOUND"):
    """The branch does not exist."""

    branch = Text("branch")


class TagNotFound(RevisionNotFound, codes="TAG_NOT_FOUND"):
    """The tag does not exist."""


class CommitNotFound(RevisionNotFound, codes="COMMIT_NOT_FOUND PARENT_NOT_FOUND"):
    """The commit does not exist."""

    sha = Text("sha")


class ObjectNotFound(NotFound, codes="BLOB_NOT_FOUND TREE_NOT_FOUND"):
    """The blob or tree does not exist."""

    sha = Text("hash")


class PathNotFound(NotFound, codes="PATH_NOT_FOUND CONTENT_NOT_FOUND"):
    """The file or folder does not exist in the revision."""

    path = Text("path")


class Gone(NotFound, codes="SESSION_EXPIRED"):
    """It existed, but was deleted or has expired."""


class VmDeleted(Gone, codes="VM_DELETED"):
    """The VM was deleted."""


class SourceSnapshotDeleted(Gone, codes="SOURCE_SNAPSHOT_DELETED"):
    """The source snapshot was deleted, or has expired."""


class Conflict(SteadApiError, codes="CONFLICT"):
    """The request conflicts with the current state."""


class NameNotUnique(Conflict, codes="NAME_NOT_UNIQUE"):
    """Several have the name, so a create with `if_missing` cannot tell which one is meant."""


class ProcessExited(Conflict, codes="PROCESS_EXITED"):
    """The background process has exited: it gets no signals."""


class VmNotRunning(Conflict, codes="VM_NOT_RUNNING"):
    """The operation needs a running VM."""


class VmBusy(Conflict, codes="VM_IS_SUSPENDING STILL_CREATING VM_OPERATION_DENIED_DURING_TRANSACTION"):
    """The VM is changing its state; repeat the request later."""

    retryable = True
    nothing_done = True


class VmReactivated(Conflict, codes="VM_REACTIVATED"):
    """The VM was woken while it was being suspended."""


class SnapshotAlreadyDeleted(Conflict, codes="SNAPSHOT_ALREADY_DELETED"):
    """The snapshot is already deleted."""


class SnapshotInUse(Conflict, codes="SNAPSHOT_IS_ACCOUNT_DEFAULT"):
    """The snapshot is the account's default and cannot be deleted."""


class SourceSnapshotBuilding(Conflict, codes="SOURCE_SNAPSHOT_BUILDING"):
    """The source snapshot is still being built."""

    retryable = True
    nothing_done = True


class SourceSnapshotLost(Conflict, codes="SOURCE_SNAPSHOT_LOST SOURCE_SNAPSHOT_CANCELLED"):
    """The source snapshot is lost, or its build was cancelled."""


class AlreadyExists(
    Conflict, codes="USER_ALREADY_EXISTS GROUP_ALREADY_EXISTS SERVICE_ALREADY_EXISTS SESSION_ALREADY_EXISTS"
):
    """Something with this name exists already."""


class RepoAlreadyExists(AlreadyExists, codes="REPO_ALREADY_EXISTS"):
    """The repository exists already."""


class BranchAlreadyExists(AlreadyExists, codes="BRANCH_ALREADY_EXISTS"):
    """A branch with this name exists already."""

    branch = Text("branch")


class PermissionAlreadyExists(AlreadyExists, codes="PERMISSION_ALREADY_EXISTS"):
    """The identity has this permission already; update it instead."""


class DomainAlreadyExists(AlreadyExists, codes="DOMAIN_ALREADY_EXISTS"):
    """The domain, or one that it is part of, belongs to another account."""

    domain = Text("domain")


class ConflictingParent(Conflict, codes="CONFLICTING_PARENT"):
    """The branch is not at the expected commit."""

    expected = Text("expected")
    actual = Text("actual")
    """The commit at its head; None if the branch does not exist."""


class GithubSyncConflict(Conflict, codes="GIT_HUB_SYNC_CONFLICT"):
    """One of the two repositories is already synchronised with another one."""


class ExecTimedOut(SteadApiError, codes="EXEC_TIMED_OUT"):
    """The VM killed the command after its timeout; `stdout` and `stderr` have the output so far."""

    @property
    def stdout(self) -> str:
        """The standard output until then."""
        return self._text("stdout") or ""

    @property
    def stderr(self) -> str:
        """The standard error until then."""
        return self._text("stderr") or ""

    @property
    def timeout(self) -> float | None:
        """The timeout in seconds."""
        milliseconds = self._number("timeoutMs")
        return None if milliseconds is None else milliseconds / 1000


class SetupFailed(SteadApiError, codes="VM_SETUP_FAILED SNAPSHOT_SETUP_FAILED"):
    """The setup of a VM or snapshot failed."""

    failed_reason = Text("failedReason")
    snapshot_id = Text("snapshotId")
    """A snapshot of the failed VM for debugging, if the server saved one."""

    @property
    def diagnostics(self) -> "SetupDiagnostics | None":
        """The states of the services, and the logs of those that failed."""
        from stead.sdk.models import SetupDiagnostics
        from stead.sdk.parsing import parse

        found = self.body.get("diagnostics")
        return parse(SetupDiagnostics, found) if isinstance(found, Mapping) else None


class BuildFailed(SetupFailed, codes="BUILD_FAILED"):
    """A command of the build failed."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command; None if there is none."""
        found = self._number("exitCode")
        return None if found is None else int(found)

    @property
    def stderr(self) -> str:
        """The end of its standard error."""
        return self._text("stderr") or ""


class BuildBudgetExceeded(SetupFailed, codes="BUILD_BUDGET_EXCEEDED"):
    """The build exceeded the time limit of builds."""


class TooManyRequests(SteadApiError):
    """The caller exceeds a rate limit, or has too many requests open."""

    retryable = True
    nothing_done = True


class SessionCapReached(TooManyRequests, codes="SESSION_CAP_REACHED"):
    """The VM reached its limit of terminal sessions."""

    retryable = False


class ServerError(SteadApiError, codes="INTERNAL INTERNAL_ERROR"):
    """The server failed. Its log has details under the trace id."""


class GitError(
    ServerError,
    codes="""GIT_ERROR PACKFILE SEND_ERROR GIT_SERVER_ERROR TRIGGER_ERROR GIT_HUB_SYNC_FAILED DOWNLOAD_FAILED
    GET_CONTENT_FAILED CREATE_REPOSITORY_FAILED DELETE_REPOSITORY_FAILED LIST_REPOSITORIES_FAILED
    GET_REPOSITORY_INFO_FAILED UPDATE_DEFAULT_BRANCH_FAILED""",
):
    """Git failed on the server."""


class ServiceUnavailable(ServerError, codes="SERVICE_UNAVAILABLE UNAVAILABLE"):
    """The server, or a proxy in front of it, cannot handle the request now."""

    retryable = True


class NoCapacity(ServiceUnavailable, codes="NO_LOCAL_STORAGE_CAPACITY INSUFFICIENT_SWAP"):
    """The host has too little free disk or memory."""

    nothing_done = True


class DnsLookupFailed(ServiceUnavailable, codes="FAILED_TO_VERIFY_DOMAIN"):
    """The server could not look up a TXT record."""


class ConnectionRefused(ServerError, codes="CONNECTION_REFUSED"):
    """Nothing listens on this port in the VM."""


class VmStartTimeout(ServerError, codes="VM_START_TIMEOUT"):
    """The VM did not become ready within the timeout."""

    retryable = True
