"""The codes of the wire: the status of each, and the code of each exception of Stead.

Clients choose the class of an error by its code alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stead import errors as product
from stead.builds.errors import (
    BaseSnapshotDeleted,
    BuildBudgetExceeded,
    BuildNotFound,
    NotBuilt,
    ProgramFailed,
    Rule,
    SetupFailed,
    SnapshotSetupFailed,
)
from stead.builds.services import ServiceExists, ServiceNotFound, ServicesBusy
from stead.creation.idempotency import IdempotencyKeyReused
from stead.domains import errors as domains
from stead.errors import SteadError
from stead.github.errors import GithubFailed, GithubNotConnected, GithubRefused, LinkConflict, NotLinked
from stead.guest.errors import (
    GuestFileNotFound,
    GuestSessionNotFound,
    InvalidGuestPath,
    InvalidSessionId,
    JournalUnreadable,
    PortClosed,
    ProcessExited,
    RecordingNotFound,
    SessionExists,
    SessionExpired,
    SessionLimitReached,
    SessionUserMismatch,
)
from stead.identity import errors as identity
from stead.identity.tickets import TicketLimitExceeded
from stead.limits import LimitName
from stead.networks import errors as networks
from stead.repos import errors as repos
from stead.repos.access import RepoPermissionExists, RepoPermissionNotFound
from stead.repos.globs import InvalidPattern
from stead.repos.lfs.store import InvalidLfsObject, LfsObjectMismatch, LfsObjectNotFound
from stead.repos.quotas import QuotaExceeded
from stead.repos.search.query import EmptyQuery, InvalidPathPattern, InvalidQuery
from stead.repos.ssrf import AddressRefused, RequestFailed
from stead.repos.transfer.imports import SubdirNotFound
from stead.repos.transfer.remotes import SourceInvalid, SourceNotFound, SourceUnauthorized
from stead.repos.transfer.serving import InvalidStream, TooSlow
from stead.repos.webhooks.triggers import (
    DeliveryNotFound,
    InvalidTrigger,
    TriggerLimitExceeded,
    TriggerNotFound,
)

STATUSES: dict[str, int] = {
    code: status
    for status, codes in {
        400: """BAD_REQUEST INVALID_REQUEST CREATE_VM_BAD_REQUEST CREATE_SNAPSHOT_BAD_REQUEST
            SNAPSHOT_VM_BAD_REQUEST FILES_BAD_REQUEST INVALID_SNAPSHOT_ID VM_NOT_RUNNING BUILD_FAILED
            UNSUPPORTED_OS CONFLICTING_SPEC_SOURCES_ERROR NON_LEAF_LAYER_FIELD_ERROR
            INVALID_GIT_REPO_SPEC_ERROR CREATE_VM_MEM_NOT_POWER_OF_TWO CREATE_VM_VCPU_NOT_POWER_OF_TWO
            CREATE_VM_MEM_OUT_OF_RANGE CREATE_VM_VCPU_OUT_OF_RANGE CREATE_VM_ROOTFS_OUT_OF_RANGE
            RESIZE_VM_MEM_NOT_POWER_OF_TWO RESIZE_VM_VCPU_NOT_POWER_OF_TWO RESIZE_VM_MEM_OUT_OF_RANGE
            RESIZE_VM_VCPU_OUT_OF_RANGE RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED RESIZE_VM_EMPTY_REQUEST
            ROOTFS_SIZE_TOO_LARGE MEM_SIZE_TOO_LARGE VALIDATION_ERROR DUPLICATE_USER_NAME USER_GROUP_EMPTY
            USER_SYSTEM_FLAG_MISMATCH USER_UID_OUT_OF_RANGE USER_HOME_INVALID USER_SHELL_INVALID
            DUPLICATE_GROUP_NAME GROUP_NAME_RESERVED GROUP_NAME_INVALID_CHARS GROUP_NAME_TOO_LONG
            GROUP_NAME_EMPTY DIFF_INVALID_PATH_PATTERN DIFF_INVALID_REGEX DIFF_EMPTY_QUERY
            COMMIT_INVALID_REGEX COMMIT_EMPTY_QUERY FILENAME_INVALID_PATTERN FILENAME_EMPTY_QUERY
            INVALID_REGEX INVALID_PATH_PATTERN EMPTY_QUERY SOURCE_IMPORT_CONFLICT SOURCE_UNAUTHORIZED
            SOURCE_NOT_FOUND IMPORT_SUBDIR_NOT_FOUND INVALID_REVISION INVALID_BASE64_CONTENT
            INVALID_FILE_CHANGE INVALID_FILE_PATH AMBIGUOUS INVALID_RANGE OFFSET_WITH_SELECTOR
            COMMIT_NOT_IN_BRANCH INVALID_OBJECT_ID BRANCH_NAME_EMPTY GIT_INVALID_REQUEST WANTED_BY_EMPTY
            WORKDIR_EMPTY GROUP_EMPTY USER_EMPTY ON_FAILURE_ARRAY_CONTAINS_EMPTY
            REQUIRES_ARRAY_CONTAINS_EMPTY AFTER_ARRAY_CONTAINS_EMPTY ENV_KEY_CONTAINS_EQUALS ENV_KEY_EMPTY
            EXEC_EMPTY SERVICE_NAME_TOO_LONG SERVICE_NAME_INVALID_PREFIX SERVICE_NAME_INVALID_CHARS
            SERVICE_NAME_EMPTY INVALID_QUERY INVALID_SESSION_ID INVALID_DOMAIN DOMAIN_ALREADY_EXISTS
            VERIFICATION_FAILED VPC_FORK_UNSUPPORTED""",
        401: "UNAUTHORIZED_ERROR DOMAIN_OWNERSHIP_NOT_VERIFIED VM_ACCESS_DENIED_FOR_MAPPING",
        403: """FORBIDDEN VM_ACCESS_DENIED VM_LIMIT_EXCEEDED TOTAL_VM_LIMIT_EXCEEDED
            SNAPSHOT_LIMIT_EXCEEDED MEMORY_STORAGE_QUOTA_EXCEEDED ROOTFS_STORAGE_QUOTA_EXCEEDED
            ROOTFS_OVER_PLAN_LIMIT MEM_OVER_PLAN_LIMIT VCPU_OVER_PLAN_LIMIT LIMIT_EXCEEDED
            CANNOT_DELETE_MANAGED_IDENTITY GIT_REPO_LIMIT_EXCEEDED REPOSITORY_ACCESS_DENIED
            SESSION_USER_MISMATCH""",
        404: """NOT_FOUND VM_NOT_FOUND SNAPSHOT_NOT_FOUND BUILD_NOT_FOUND BUILD_NOT_FOUND_FOR_VM
            FILE_NOT_FOUND USER_NOT_FOUND SERVICE_NOT_FOUND IDENTITY_NOT_FOUND VM_PERMISSION_NOT_FOUND
            PERMISSION_NOT_FOUND GIT_REPOSITORY_NOT_FOUND REPO_NOT_FOUND TAG_NOT_FOUND COMMIT_NOT_FOUND
            BLOB_NOT_FOUND TREE_NOT_FOUND BRANCH_NOT_FOUND PATH_NOT_FOUND REFERENCE_NOT_FOUND
            SESSION_NOT_FOUND VERIFICATION_NOT_FOUND""",
        408: "EXEC_TIMED_OUT",
        409: """CONFLICT VM_IS_SUSPENDING STILL_CREATING SNAPSHOT_ALREADY_DELETED SOURCE_SNAPSHOT_BUILDING
            PERMISSION_ALREADY_EXISTS CONFLICTING_PARENT BRANCH_ALREADY_EXISTS GIT_HUB_SYNC_CONFLICT
            SERVICE_ALREADY_EXISTS SESSION_ALREADY_EXISTS""",
        410: "SOURCE_SNAPSHOT_DELETED VM_DELETED SESSION_EXPIRED",
        429: "SESSION_CAP_REACHED",
        500: """INTERNAL INTERNAL_ERROR VM_SETUP_FAILED SNAPSHOT_SETUP_FAILED BUILD_BUDGET_EXCEEDED
            VM_EXIT_DURING_START GIT_ERROR GIT_HUB_SYNC_FAILED RETRIEVE_LOGS_FAILED
            FAILED_TO_VERIFY_DOMAIN""",
        503: "SERVICE_UNAVAILABLE NO_LOCAL_STORAGE_CAPACITY",
        504: "VM_START_TIMEOUT",
    }.items()
    for code in codes.split()
}


OWN_STATUSES = {
    "CONNECTION_REFUSED": 502,
    "IDEMPOTENCY_KEY_REUSED": 422,
    "NAME_NOT_UNIQUE": 409,
    "PROCESS_EXITED": 409,
}
"""Codes that the npm package does not know, for requests that it does not make."""


@dataclass(frozen=True)
class Failure:
    """How an exception is answered."""

    code: str
    status: int | None = None
    """If it is not the one of the code."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further keys of the body, each with the attribute of the exception that is its value."""
    retry_after: int | None = None
    """Seconds, for a 503 that is not to wait for the default."""
    git_status: int | None = None
    """The status for git and git-lfs, which read no code; None: 500, and the text stays in the log."""


_SESSION = {"vmId": "machine_id", "sessionId": "session_id"}

FAILURES: Mapping[type[SteadError], Failure] = {
    # VMs and snapshots
    product.MachineNotFound: Failure("VM_NOT_FOUND", fields={"vmId": "machine_id"}),
    product.SnapshotNotFound: Failure("SNAPSHOT_NOT_FOUND", fields={"snapshotId": "snapshot_id"}),
    # A code that every client knows: some repeat a create for ever after any other.
    product.SnapshotExpired: Failure(
        "SOURCE_SNAPSHOT_DELETED", fields={"snapshotId": "snapshot_id", "expiresAt": "expired"}
    ),
    product.SnapshotAlreadyDeleted: Failure("SNAPSHOT_ALREADY_DELETED", fields={"snapshotId": "snapshot_id"}),
    product.WrongSnapshotState: Failure("SOURCE_SNAPSHOT_BUILDING", fields={"snapshotId": "snapshot_id"}),
    product.DiskSpaceExceeded: Failure("NO_LOCAL_STORAGE_CAPACITY"),
    product.CapacityExceeded: Failure("SERVICE_UNAVAILABLE"),
    product.TooBusy: Failure("SERVICE_UNAVAILABLE", fields={"retryable": "retryable"}, retry_after=5),
    product.ServerStopping: Failure("SERVICE_UNAVAILABLE"),
    product.ReadyTimeout: Failure("VM_START_TIMEOUT"),
    product.StartFailed: Failure("VM_EXIT_DURING_START"),
    product.GuestUnreachable: Failure("VM_NOT_RUNNING"),
    # Builds and creates
    BaseSnapshotDeleted: Failure("SOURCE_SNAPSHOT_DELETED", fields={"snapshotId": "snapshot_id"}),
    BuildNotFound: Failure("BUILD_NOT_FOUND", fields={"buildId": "build_id"}),
    NotBuilt: Failure("BUILD_NOT_FOUND_FOR_VM", fields={"vmId": "machine_id"}),
    SetupFailed: Failure("VM_SETUP_FAILED", fields={"snapshotId": "snapshot"}),
    SnapshotSetupFailed: Failure("SNAPSHOT_SETUP_FAILED", fields={"snapshotId": "snapshot"}),
    ProgramFailed: Failure("BUILD_FAILED", fields={"exitCode": "exit_code", "stderr": "stderr"}),
    BuildBudgetExceeded: Failure("BUILD_BUDGET_EXCEEDED", fields={"durationSecs": "seconds"}),
    IdempotencyKeyReused: Failure("IDEMPOTENCY_KEY_REUSED"),
    # Guests
    GuestSessionNotFound: Failure("SESSION_NOT_FOUND", fields=_SESSION),
    SessionExpired: Failure("SESSION_EXPIRED", fields=_SESSION),
    SessionUserMismatch: Failure("SESSION_USER_MISMATCH", fields=_SESSION),
    SessionExists: Failure("SESSION_ALREADY_EXISTS", fields=_SESSION),
    SessionLimitReached: Failure("SESSION_CAP_REACHED", fields={"vmId": "machine_id", "limit": "limit"}),
    InvalidSessionId: Failure("INVALID_SESSION_ID", fields={"sessionId": "session_id"}),
    ProcessExited: Failure("PROCESS_EXITED", fields=_SESSION),
    PortClosed: Failure("CONNECTION_REFUSED", fields={"vmId": "machine_id", "port": "port"}),
    RecordingNotFound: Failure("NOT_FOUND", fields={"vmId": "machine_id"}),
    GuestFileNotFound: Failure("FILE_NOT_FOUND", fields={"path": "path"}),
    InvalidGuestPath: Failure("FILES_BAD_REQUEST"),
    JournalUnreadable: Failure("RETRIEVE_LOGS_FAILED"),
    ServiceNotFound: Failure("SERVICE_NOT_FOUND", fields={"serviceName": "name"}),
    ServiceExists: Failure("SERVICE_ALREADY_EXISTS", fields={"serviceName": "name"}),
    ServicesBusy: Failure("SERVICE_UNAVAILABLE"),
    # Networks
    networks.ForkUnsupported: Failure("VPC_FORK_UNSUPPORTED"),
    product.AddressTaken: Failure("CONFLICT", fields={"vpcId": "vpc", "ipv4": "address"}),
    networks.VpcFull: Failure("CONFLICT", fields={"vpcId": "vpc"}),
    networks.VpcNotFound: Failure("NOT_FOUND", fields={"vpcId": "vpc"}),
    networks.PeerNotFound: Failure("NOT_FOUND", fields={"clientPublicKey": "public_key"}),
    networks.SessionNotFound: Failure("NOT_FOUND", fields={"sessionId": "session"}),
    networks.VpcInUse: Failure("CONFLICT", fields={"vpcId": "vpc", "vmIds": "machines"}),
    # Domains
    domains.InvalidDomain: Failure("INVALID_DOMAIN", fields={"domain": "domain"}),
    domains.DomainTaken: Failure("DOMAIN_ALREADY_EXISTS", fields={"domain": "domain"}),
    domains.DomainNotVerified: Failure("DOMAIN_OWNERSHIP_NOT_VERIFIED", fields={"domain": "domain"}),
    domains.DomainNotFound: Failure("NOT_FOUND", fields={"domain": "domain"}),
    domains.MappingNotFound: Failure("NOT_FOUND", fields={"domain": "domain"}),
    domains.VerificationFailed: Failure("VERIFICATION_FAILED", fields={"domain": "domain"}),
    domains.VerificationNotFound: Failure("VERIFICATION_NOT_FOUND", fields={"domain": "reference"}),
    domains.DnsUnavailable: Failure("FAILED_TO_VERIFY_DOMAIN", 502),
    domains.LookupsBusy: Failure("SERVICE_UNAVAILABLE"),
    # Identities
    identity.IdentityNotFound: Failure("IDENTITY_NOT_FOUND"),
    identity.PermissionNotFound: Failure("VM_PERMISSION_NOT_FOUND"),
    identity.PermissionExists: Failure("PERMISSION_ALREADY_EXISTS"),
    identity.UserNotAllowed: Failure("FORBIDDEN"),
    identity.ManagedIdentity: Failure("CANNOT_DELETE_MANAGED_IDENTITY"),
    identity.TokenNotFound: Failure("NOT_FOUND"),
    TicketLimitExceeded: Failure("LIMIT_EXCEEDED"),
    RepoPermissionNotFound: Failure("PERMISSION_NOT_FOUND"),
    RepoPermissionExists: Failure("PERMISSION_ALREADY_EXISTS"),
    # Repositories
    repos.RepoError: Failure("GIT_ERROR"),
    repos.RepoBusy: Failure("SERVICE_UNAVAILABLE", retry_after=5, git_status=503),
    QuotaExceeded: Failure("LIMIT_EXCEEDED", fields={"limit": "limit", "current": "current"}, git_status=507),
    InvalidStream: Failure("GIT_ERROR", git_status=400),
    TooSlow: Failure("GIT_ERROR", git_status=408),
    LfsObjectNotFound: Failure("GIT_ERROR", git_status=404),
    LfsObjectMismatch: Failure("GIT_ERROR", git_status=422),
    InvalidLfsObject: Failure("GIT_ERROR", git_status=422),
    repos.RepoNotFound: Failure("REPO_NOT_FOUND", fields={"repoId": "repo_id"}, git_status=404),
    repos.RepoLimitExceeded: Failure("GIT_REPO_LIMIT_EXCEEDED"),
    repos.RepoDamaged: Failure("GIT_ERROR"),
    repos.DiskFull: Failure("NO_LOCAL_STORAGE_CAPACITY", git_status=507),
    repos.InvalidRevision: Failure("INVALID_REVISION", fields={"revision": "revision"}),
    repos.AmbiguousRevision: Failure("AMBIGUOUS", fields={"rev": "revision"}),
    repos.ReferenceNotFound: Failure("REFERENCE_NOT_FOUND", fields={"reference": "reference"}),
    repos.BranchNotFound: Failure("BRANCH_NOT_FOUND", fields={"branch": "branch"}),
    repos.BranchExists: Failure("BRANCH_ALREADY_EXISTS", fields={"branch": "branch"}),
    repos.InvalidBranch: Failure("GIT_INVALID_REQUEST"),
    repos.TagNotFound: Failure("TAG_NOT_FOUND", fields={"hash": "tag"}),
    repos.CommitNotFound: Failure("COMMIT_NOT_FOUND", fields={"sha": "sha"}),
    repos.CommitNotInBranch: Failure("COMMIT_NOT_IN_BRANCH", fields={"sha": "sha", "branch": "branch"}),
    repos.InvalidRange: Failure("INVALID_RANGE", fields={"since": "since", "until": "until"}),
    repos.OffsetWithSelector: Failure("OFFSET_WITH_SELECTOR"),
    repos.BlobNotFound: Failure("BLOB_NOT_FOUND", fields={"hash": "sha"}),
    repos.TreeNotFound: Failure("TREE_NOT_FOUND", fields={"hash": "sha"}),
    repos.InvalidObjectId: Failure("INVALID_OBJECT_ID", fields={"hash": "sha"}),
    repos.PathNotFound: Failure("PATH_NOT_FOUND", fields={"path": "path"}),
    repos.TooLarge: Failure("GIT_INVALID_REQUEST", git_status=413),
    repos.InvalidPath: Failure("INVALID_FILE_PATH", fields={"path": "path"}),
    repos.InvalidChange: Failure("INVALID_FILE_CHANGE", fields={"path": "path"}),
    repos.ConflictingParent: Failure(
        "CONFLICTING_PARENT", fields={"expected": "expected", "actual": "actual"}
    ),
    InvalidTrigger: Failure("GIT_INVALID_REQUEST"),
    InvalidPattern: Failure("GIT_INVALID_REQUEST", fields={"pattern": "pattern"}),
    AddressRefused: Failure("GIT_INVALID_REQUEST", fields={"url": "url"}),
    RequestFailed: Failure("SOURCE_NOT_FOUND", fields={"url": "url"}),
    SourceNotFound: Failure("SOURCE_NOT_FOUND", fields={"url": "url"}),
    SourceUnauthorized: Failure("SOURCE_UNAUTHORIZED", fields={"url": "url"}),
    SourceInvalid: Failure("GIT_INVALID_REQUEST", fields={"url": "url"}),
    SubdirNotFound: Failure("IMPORT_SUBDIR_NOT_FOUND", fields={"source": "source", "dir": "folder"}),
    TriggerNotFound: Failure("NOT_FOUND", fields={"triggerId": "trigger_id"}),
    DeliveryNotFound: Failure("NOT_FOUND", fields={"deliveryId": "delivery_id"}),
    TriggerLimitExceeded: Failure("LIMIT_EXCEEDED"),
    GithubNotConnected: Failure("GIT_INVALID_REQUEST"),
    GithubRefused: Failure("GIT_INVALID_REQUEST"),
    GithubFailed: Failure("GIT_HUB_SYNC_FAILED"),
    LinkConflict: Failure("GIT_HUB_SYNC_CONFLICT"),
    NotLinked: Failure("NOT_FOUND"),
    InvalidPathPattern: Failure("INVALID_PATH_PATTERN", fields={"reason": "reason"}),
    InvalidQuery: Failure("INVALID_REGEX", fields={"reason": "reason"}),
}
"""The exceptions whose code depends on their class alone. The nearest class in the MRO counts."""


def failure_of(error: SteadError) -> Failure | None:
    return next((FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES), None)


LIMITS: Mapping[LimitName, str] = {
    LimitName.VMS: "TOTAL_VM_LIMIT_EXCEEDED",
    LimitName.RUNNING: "VM_LIMIT_EXCEEDED",
    LimitName.SNAPSHOTS: "SNAPSHOT_LIMIT_EXCEEDED",
    LimitName.VCPUS: "VCPU_OVER_PLAN_LIMIT",
    LimitName.MEMORY_GIB: "MEM_OVER_PLAN_LIMIT",
    LimitName.DISK_GIB: "ROOTFS_OVER_PLAN_LIMIT",
    LimitName.TOTAL_MEMORY_GIB: "MEMORY_STORAGE_QUOTA_EXCEEDED",
    LimitName.TOTAL_DISK_GIB: "ROOTFS_STORAGE_QUOTA_EXCEEDED",
    LimitName.DOMAINS: "LIMIT_EXCEEDED",
    LimitName.MAPPINGS: "LIMIT_EXCEEDED",
    LimitName.DOMAIN_VERIFICATIONS: "LIMIT_EXCEEDED",
    LimitName.VPCS: "LIMIT_EXCEEDED",
    LimitName.WIREGUARD_SESSIONS: "LIMIT_EXCEEDED",
    LimitName.WIREGUARD_VPCS: "LIMIT_EXCEEDED",
    LimitName.IDENTITIES: "LIMIT_EXCEEDED",
    LimitName.TOKENS: "LIMIT_EXCEEDED",
    LimitName.TEMPLATES: "LIMIT_EXCEEDED",
}
SIZE_LIMITS = frozenset({LimitName.VCPUS, LimitName.MEMORY_GIB, LimitName.DISK_GIB})
"""Limits of one VM: nothing is in use of them."""

STATES: Mapping[str, str] = {
    "deleted": "VM_DELETED",
    "creating": "STILL_CREATING",
    "starting": "STILL_CREATING",
    "suspending": "VM_IS_SUSPENDING",
    "stopping": "VM_IS_SUSPENDING",
}
"""Codes of operations that a VM's state does not allow; of all other states: VM_NOT_RUNNING."""

RULES: dict[Rule, str] = {
    "conflicting_sources": "CONFLICTING_SPEC_SOURCES_ERROR",
    "misplaced_field": "NON_LEAF_LAYER_FIELD_ERROR",
    "unsupported_image": "UNSUPPORTED_OS",
    "vcpus_out_of_range": "CREATE_VM_VCPU_OUT_OF_RANGE",
    "vcpus_not_power_of_two": "CREATE_VM_VCPU_NOT_POWER_OF_TWO",
    "memory_out_of_range": "CREATE_VM_MEM_OUT_OF_RANGE",
    "memory_not_power_of_two": "CREATE_VM_MEM_NOT_POWER_OF_TWO",
    "memory_too_large": "MEM_SIZE_TOO_LARGE",
    "disk_out_of_range": "CREATE_VM_ROOTFS_OUT_OF_RANGE",
    "disk_too_large": "ROOTFS_SIZE_TOO_LARGE",
    "invalid_value": "VALIDATION_ERROR",
    "invalid_file": "FILES_BAD_REQUEST",
    "invalid_repository": "INVALID_GIT_REPO_SPEC_ERROR",
    "service_exists": "SERVICE_ALREADY_EXISTS",
    "after_unit_empty": "AFTER_ARRAY_CONTAINS_EMPTY",
    "requires_unit_empty": "REQUIRES_ARRAY_CONTAINS_EMPTY",
    "on_failure_unit_empty": "ON_FAILURE_ARRAY_CONTAINS_EMPTY",
}
"""Rules of specs whose code on the wire is not their own name in capitals."""

SEARCHES = {
    EmptyQuery: {"content": "EMPTY_QUERY", "files": "FILENAME_EMPTY_QUERY"},
    InvalidPathPattern: {"content": "INVALID_PATH_PATTERN", "files": "FILENAME_INVALID_PATTERN"},
    InvalidQuery: {"content": "INVALID_REGEX", "files": "FILENAME_INVALID_PATTERN"},
}
"""Codes by kind of search; those of commit and diff searches have a prefix."""
