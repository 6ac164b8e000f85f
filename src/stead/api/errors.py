"""Error answers: the status, code and message of every failure on every path.

Clients choose the class of an error by its code alone, and the npm client retries a create without end if the
answer has no code that it knows. So every error answer is made here.
"""

import errno
import sqlite3
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn

import sqlalchemy as sa
from fastapi.exceptions import ValidationException
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse

from stead import errors as product
from stead.api.wire.layers import WIRE_NAMES
from stead.builds.errors import (
    BaseSnapshotDeleted,
    BuildBudgetExceeded,
    BuildNotFound,
    Diagnostics,
    InvalidSpec,
    ProgramFailed,
    Rule,
    SetupFailed,
)
from stead.creation.idempotency import IdempotencyKeyReused
from stead.domains import errors as domains
from stead.github.errors import GithubFailed, GithubNotConnected, GithubRefused, LinkConflict, NotLinked
from stead.identity import errors as identity
from stead.identity.tickets import TicketLimitExceeded
from stead.logs import get_logger
from stead.networks import errors as networks
from stead.repos import errors as repos
from stead.repos.access import RepoPermissionExists, RepoPermissionNotFound
from stead.repos.git import GitFailed
from stead.repos.globs import InvalidPattern
from stead.repos.quotas import QuotaExceeded
from stead.repos.search.query import EmptyQuery, InvalidPathPattern, InvalidQuery
from stead.repos.ssrf import AddressRefused, RequestFailed
from stead.repos.transfer.imports import SubdirNotFound
from stead.repos.transfer.remotes import SourceInvalid, SourceNotFound, SourceUnauthorized
from stead.repos.webhooks.triggers import (
    DeliveryNotFound,
    InvalidTrigger,
    TriggerLimitExceeded,
    TriggerNotFound,
)

log = get_logger("stead.api")

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


OWN_STATUSES = {"IDEMPOTENCY_KEY_REUSED": 422, "NAME_NOT_UNIQUE": 409}
"""Codes that the npm package does not know, for requests that it does not make."""

_RETRY_LATER = {"Retry-After": "10"}
"""Sent with every 503, unless the call may have taken effect."""


class ApiError(Exception):
    """A failure as it goes over the wire; extras go into the body next to code and message."""

    def __init__(
        self,
        code: str,
        message: str,
        status: int | None = None,
        *,
        headers: dict[str, str] | None = None,
        **extras: Any,
    ) -> None:
        # Messages may repeat what a client sent, and JSON cannot encode lone surrogates.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or STATUSES.get(code) or OWN_STATUSES[code]
        if headers is None and self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers = _RETRY_LATER
        self.headers = headers
        self.extras = extras

    def body(self) -> dict[str, Any]:
        known = {"code": self.code, "error": self.code, "message": self.message, "description": self.message}
        return {**self.extras, **known}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


_LIMITS = {
    "vms": "TOTAL_VM_LIMIT_EXCEEDED",
    "running": "VM_LIMIT_EXCEEDED",
    "snapshots": "SNAPSHOT_LIMIT_EXCEEDED",
    "vcpus": "VCPU_OVER_PLAN_LIMIT",
    "memory_gib": "MEM_OVER_PLAN_LIMIT",
    "disk_gib": "ROOTFS_OVER_PLAN_LIMIT",
    "total_memory_gib": "MEMORY_STORAGE_QUOTA_EXCEEDED",
    "total_disk_gib": "ROOTFS_STORAGE_QUOTA_EXCEEDED",
    "domains": "LIMIT_EXCEEDED",
    "mappings": "LIMIT_EXCEEDED",
    "domain_verifications": "LIMIT_EXCEEDED",
    "vpcs": "LIMIT_EXCEEDED",
    "wireguard_sessions": "LIMIT_EXCEEDED",
}

_PASSING = {
    "creating": "STILL_CREATING",
    "starting": "STILL_CREATING",
    "suspending": "VM_IS_SUSPENDING",
    "stopping": "VM_IS_SUSPENDING",
}

_IDENTITY: dict[type[product.SteadError], str] = {
    identity.IdentityNotFound: "IDENTITY_NOT_FOUND",
    identity.PermissionNotFound: "VM_PERMISSION_NOT_FOUND",
    identity.PermissionExists: "PERMISSION_ALREADY_EXISTS",
    identity.UserNotAllowed: "FORBIDDEN",
    identity.ManagedIdentity: "CANNOT_DELETE_MANAGED_IDENTITY",
    identity.TokenNotFound: "NOT_FOUND",
    TicketLimitExceeded: "LIMIT_EXCEEDED",
    RepoPermissionNotFound: "PERMISSION_NOT_FOUND",
    RepoPermissionExists: "PERMISSION_ALREADY_EXISTS",
}

_DOMAINS: dict[type[product.SteadError], str] = {
    domains.InvalidDomain: "INVALID_DOMAIN",
    domains.DomainTaken: "DOMAIN_ALREADY_EXISTS",
    domains.DomainNotVerified: "DOMAIN_OWNERSHIP_NOT_VERIFIED",
    domains.DomainNotFound: "NOT_FOUND",
    domains.MappingNotFound: "NOT_FOUND",
    domains.VerificationFailed: "VERIFICATION_FAILED",
}
"""Errors about one domain, which the answer names."""

_REPOS: dict[type[repos.RepoError], tuple[str, dict[str, str]]] = {
    repos.RepoNotFound: ("REPO_NOT_FOUND", {"repoId": "repo_id"}),
    repos.RepoLimitExceeded: ("GIT_REPO_LIMIT_EXCEEDED", {}),
    repos.RepoDamaged: ("GIT_ERROR", {}),
    repos.DiskFull: ("NO_LOCAL_STORAGE_CAPACITY", {}),
    repos.InvalidRevision: ("INVALID_REVISION", {"revision": "revision"}),
    repos.AmbiguousRevision: ("AMBIGUOUS", {"rev": "revision"}),
    repos.ReferenceNotFound: ("REFERENCE_NOT_FOUND", {"reference": "reference"}),
    repos.BranchNotFound: ("BRANCH_NOT_FOUND", {"branch": "branch"}),
    repos.BranchExists: ("BRANCH_ALREADY_EXISTS", {"branch": "branch"}),
    repos.InvalidBranch: ("GIT_INVALID_REQUEST", {}),
    repos.TagNotFound: ("TAG_NOT_FOUND", {"hash": "tag"}),
    repos.CommitNotFound: ("COMMIT_NOT_FOUND", {"sha": "sha"}),
    repos.CommitNotInBranch: ("COMMIT_NOT_IN_BRANCH", {"sha": "sha", "branch": "branch"}),
    repos.InvalidRange: ("INVALID_RANGE", {"since": "since", "until": "until"}),
    repos.OffsetWithSelector: ("OFFSET_WITH_SELECTOR", {}),
    repos.BlobNotFound: ("BLOB_NOT_FOUND", {"hash": "sha"}),
    repos.TreeNotFound: ("TREE_NOT_FOUND", {"hash": "sha"}),
    repos.InvalidObjectId: ("INVALID_OBJECT_ID", {"hash": "sha"}),
    repos.PathNotFound: ("PATH_NOT_FOUND", {"path": "path"}),
    repos.TooLarge: ("GIT_INVALID_REQUEST", {}),
    repos.InvalidPath: ("INVALID_FILE_PATH", {"path": "path"}),
    repos.InvalidChange: ("INVALID_FILE_CHANGE", {"path": "path"}),
    repos.ConflictingParent: ("CONFLICTING_PARENT", {"expected": "expected", "actual": "actual"}),
    InvalidTrigger: ("GIT_INVALID_REQUEST", {}),
    InvalidPattern: ("GIT_INVALID_REQUEST", {"pattern": "pattern"}),
    AddressRefused: ("GIT_INVALID_REQUEST", {"url": "url"}),
    RequestFailed: ("SOURCE_NOT_FOUND", {"url": "url"}),
    SourceNotFound: ("SOURCE_NOT_FOUND", {"url": "url"}),
    SourceUnauthorized: ("SOURCE_UNAUTHORIZED", {"url": "url"}),
    SourceInvalid: ("GIT_INVALID_REQUEST", {"url": "url"}),
    SubdirNotFound: ("IMPORT_SUBDIR_NOT_FOUND", {"source": "source", "dir": "folder"}),
    TriggerNotFound: ("NOT_FOUND", {"triggerId": "trigger_id"}),
    DeliveryNotFound: ("NOT_FOUND", {"deliveryId": "delivery_id"}),
    TriggerLimitExceeded: ("LIMIT_EXCEEDED", {}),
    GithubNotConnected: ("GIT_INVALID_REQUEST", {}),
    GithubRefused: ("GIT_INVALID_REQUEST", {}),
    GithubFailed: ("GIT_HUB_SYNC_FAILED", {}),
    LinkConflict: ("GIT_HUB_SYNC_CONFLICT", {}),
    NotLinked: ("NOT_FOUND", {}),
    InvalidPathPattern: ("INVALID_PATH_PATTERN", {"reason": "reason"}),
    InvalidQuery: ("INVALID_REGEX", {"reason": "reason"}),
}
"""Code, and what an answer has beside code and message: the key on the wire, and the error's field."""


def from_product(error: product.SteadError, invalid: str = "BAD_REQUEST") -> ApiError:
    """The error answer for an exception of Stead; `invalid` is the path's code for bad requests."""
    text = str(error)
    match error:
        case InvalidSpec():
            return _invalid_spec(error)
        case product.MachineNotFound():
            return ApiError("VM_NOT_FOUND", text, vmId=error.machine_id)
        case product.SnapshotExpired():
            # A code that every client knows: some repeat a create for ever after any other.
            return ApiError(
                "SOURCE_SNAPSHOT_DELETED", text, snapshotId=error.snapshot_id, expiresAt=error.expired
            )
        case BaseSnapshotDeleted():
            return ApiError("SOURCE_SNAPSHOT_DELETED", text, snapshotId=error.snapshot_id)
        case BuildNotFound():
            return ApiError("BUILD_NOT_FOUND", text, buildId=error.build_id)
        case product.SnapshotNotFound():
            return ApiError("SNAPSHOT_NOT_FOUND", text, snapshotId=error.snapshot_id)
        case product.WrongSnapshotState():
            return ApiError("SOURCE_SNAPSHOT_BUILDING", text, snapshotId=error.snapshot_id)
        case product.WrongState():
            if error.state == "deleted":
                return ApiError("VM_DELETED", text, vmId=error.machine_id)
            return ApiError(_PASSING.get(error.state, "VM_NOT_RUNNING"), text, vmId=error.machine_id)
        case product.LimitExceeded():
            return _limit(error)
        case QuotaExceeded():
            return ApiError("LIMIT_EXCEEDED", text, limit=error.limit, current=error.current)
        case repos.RepoBusy():
            return ApiError("SERVICE_UNAVAILABLE", text, headers={"Retry-After": "5"})
        case product.DiskSpaceExceeded():
            return ApiError("NO_LOCAL_STORAGE_CAPACITY", text)
        case product.CapacityExceeded() | product.ServerStopping():
            return ApiError("SERVICE_UNAVAILABLE", text)
        case product.ReadyTimeout():
            return ApiError("VM_START_TIMEOUT", text)
        case product.StartFailed():
            return ApiError("VM_EXIT_DURING_START", text)
        case product.GuestError():
            return _guest(error)
        case product.GuestUnreachable():
            return ApiError("VM_NOT_RUNNING", text)
        case IdempotencyKeyReused():
            return ApiError("IDEMPOTENCY_KEY_REUSED", text)
        case networks.ForkUnsupported():
            return ApiError("VPC_FORK_UNSUPPORTED", text)
        case product.AddressTaken():
            return ApiError("CONFLICT", text, vpcId=error.vpc, ipv4=error.address)
        case networks.VpcFull():
            return ApiError("CONFLICT", text, vpcId=error.vpc)
        case product.InvalidRequest():
            return ApiError(invalid, text)
        case SetupFailed():
            found = None if error.diagnostics is None else _diagnostics(error.diagnostics)
            code = "SNAPSHOT_SETUP_FAILED" if invalid == "CREATE_SNAPSHOT_BAD_REQUEST" else "VM_SETUP_FAILED"
            extras = {"failedReason": text, "snapshotId": error.snapshot, "diagnostics": found}
            return ApiError(code, text, **_given(extras))
        case ProgramFailed():
            return ApiError("BUILD_FAILED", text, exitCode=error.exit_code, stderr=error.stderr)
        case BuildBudgetExceeded():
            return ApiError("BUILD_BUDGET_EXCEEDED", text, durationSecs=error.seconds)
        case domains.VerificationNotFound():
            return ApiError("VERIFICATION_NOT_FOUND", text, domain=error.reference)
        case domains.DnsUnavailable():
            return ApiError("FAILED_TO_VERIFY_DOMAIN", text, HTTPStatus.BAD_GATEWAY)
        case networks.VpcNotFound():
            return ApiError("NOT_FOUND", text, vpcId=error.vpc)
        case networks.PeerNotFound():
            return ApiError("NOT_FOUND", text, clientPublicKey=error.public_key)
        case networks.SessionNotFound():
            return ApiError("NOT_FOUND", text, sessionId=error.session)
        case networks.VpcInUse():
            return ApiError("CONFLICT", text, vpcId=error.vpc, vmIds=error.machines)
        case domains.LookupsBusy():
            return ApiError("SERVICE_UNAVAILABLE", text)
    if isinstance(error, repos.RepoError):
        return _repo(error)
    for kind, code in _DOMAINS.items():
        if isinstance(error, kind):
            return ApiError(code, text, domain=getattr(error, "domain", None))
    for kind, code in _IDENTITY.items():
        if isinstance(error, kind):
            return ApiError(code, text)
    log.error("call failed", error=text, kind=type(error).__name__)
    return ApiError("INTERNAL_ERROR", text)


_RULES: dict[Rule, str] = {
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


def _invalid_spec(error: InvalidSpec) -> ApiError:
    def wire(name: str | None) -> str | None:
        return None if name is None else WIRE_NAMES.get(name, name)

    extras = {
        "depth": error.depth,
        "gotGb" if error.rule in ("memory_too_large", "disk_too_large") else "got": error.got,
        "min": error.lowest,
        "max": error.highest,
        "serviceName": error.service,
        "os": error.image,
    }
    if error.rule == "misplaced_field":
        extras["field"] = wire(error.field)
    elif error.other is not None:
        extras |= {"fieldA": wire(error.field), "fieldB": wire(error.other)}
    code = _RULES.get(error.rule, error.rule.upper())
    return ApiError(code, error.worded(lambda name: WIRE_NAMES.get(name, name)), **_given(extras))


def _given(extras: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in extras.items() if value is not None}


def _diagnostics(found: Diagnostics) -> dict[str, Any]:
    states = [
        {"activeState": each.active_state, "subState": each.sub_state, "services": each.services}
        for each in found.states
    ]
    logs = [{"unitName": each.unit, "log": each.log} for each in found.failed_logs]
    return {"serviceStates": states, "failedServiceLogs": logs}


_SEARCH = {
    EmptyQuery: {"content": "EMPTY_QUERY", "files": "FILENAME_EMPTY_QUERY"},
    InvalidPathPattern: {"content": "INVALID_PATH_PATTERN", "files": "FILENAME_INVALID_PATTERN"},
    InvalidQuery: {"content": "INVALID_REGEX", "files": "FILENAME_INVALID_PATTERN"},
}
"""Codes by kind of search; those of commit and diff searches have a prefix."""


def _repo(error: repos.RepoError) -> ApiError:
    code, fields = next(
        (known for kind, known in _REPOS.items() if isinstance(error, kind)), ("GIT_ERROR", dict[str, str]())
    )
    if isinstance(error, EmptyQuery | InvalidPathPattern | InvalidQuery):
        codes = next(codes for kind, codes in _SEARCH.items() if isinstance(error, kind))
        prefix = {"commits": "COMMIT_", "diffs": "DIFF_"}.get(error.scope)
        code = codes[error.scope] if prefix is None else f"{prefix}{codes['content']}"
    extras = _given({key: getattr(error, field) for key, field in fields.items()})
    if code == "GIT_ERROR":
        log.error("repository unusable", error=str(error))
    if isinstance(error, GitFailed):
        # The output of Git may hold paths of the host.
        return ApiError(code, "git failed; see the server's log", **extras)
    # The npm package looks for the number in this message.
    text = f"404: {error}" if isinstance(error, NotLinked) else str(error)
    return ApiError(code, text, **extras)


def _limit(error: product.LimitExceeded) -> ApiError:
    code = _LIMITS[error.what]
    if error.what in ("vcpus", "memory_gib", "disk_gib"):
        return ApiError(code, str(error), got=error.requested, max=error.limit)
    return ApiError(code, str(error), limit=error.limit, current=error.current, requested=error.requested)


def _guest(error: product.GuestError) -> ApiError:
    text = str(error)
    match error.code:
        case "user_not_found":
            return ApiError("USER_NOT_FOUND", text)
        case "permission_denied":
            return ApiError("VM_ACCESS_DENIED", text)
        case "not_found":
            return ApiError("FILE_NOT_FOUND", text)
        case "no_space":
            return ApiError("FILES_BAD_REQUEST", f"disk of the VM is full: {text}", 507)
        case "internal":
            return ApiError("INTERNAL_ERROR", text)
        case _:
            return ApiError("FILES_BAD_REQUEST", text)


def from_anything(error: Exception) -> ApiError:
    """The answer for an unexpected exception; details go to the log only."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, sa.exc.OperationalError) and isinstance(error.orig, sqlite3.Error):
        full = error.orig.sqlite_errorcode == sqlite3.SQLITE_FULL
    if full:
        return ApiError("NO_LOCAL_STORAGE_CAPACITY", "disk of the host is full")
    log.error("unexpected exception", error=repr(error), exc_info=error)
    return ApiError("INTERNAL", "internal error: search the server's log for the trace id of this answer")


def path_code(path: str, method: str = "POST") -> str:
    """The code for a bad request on this path."""
    if path == "/v1/vms":
        return "CREATE_VM_BAD_REQUEST" if method == "POST" else "INVALID_REQUEST"
    if path == "/v1/vms/snapshots":
        return "CREATE_SNAPSHOT_BAD_REQUEST" if method == "POST" else "INVALID_REQUEST"
    if path.endswith("/snapshot"):
        return "SNAPSHOT_VM_BAD_REQUEST"
    if "/files/" in path or path.endswith("/move"):
        return "FILES_BAD_REQUEST"
    if path.startswith("/observability/"):
        return "INVALID_QUERY"
    if path.startswith("/v1/vpcs"):
        return "BAD_REQUEST"
    return "INVALID_REQUEST"


async def on_product_error(request: HTTPConnection, error: Exception) -> JSONResponse:
    assert isinstance(error, product.SteadError)  # noqa: S101
    return from_product(error, _code_of(request)).response()


async def on_api_error(_: HTTPConnection, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)  # noqa: S101
    return error.response()


async def on_invalid(request: HTTPConnection, error: Exception) -> JSONResponse:
    """A request that does not match its schema: names the field and the problem."""
    assert isinstance(error, ValidationException)  # noqa: S101
    problems = [
        f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}" for each in error.errors()
    ]
    text = "; ".join(problem.removeprefix(": ") for problem in problems[:5])
    return ApiError(_code_of(request), f"invalid request: {text}").response()


def _code_of(request: HTTPConnection) -> str:
    return path_code(request.url.path, request.scope.get("method", "GET"))


async def on_anything(_: HTTPConnection, error: Exception) -> NoReturn:
    """Leave unexpected exceptions to the outer middleware; Starlette would answer in plain text."""
    raise error


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Errors of the router: no such path, no such method."""
    assert isinstance(error, HTTPException)  # noqa: S101
    if isinstance(error.__cause__, ApiError):
        # FastAPI wraps every exception during the reading of a body.
        return error.__cause__.response()
    path, status = request.url.path, error.status_code
    headers = dict(error.headers or {})
    if status == HTTPStatus.NOT_FOUND:
        return ApiError("NOT_FOUND", f"no such path: {path}", headers=headers).response()
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        text = f"method {request.method} not allowed on {path}"
        return ApiError("BAD_REQUEST", text, status, headers=headers).response()
    return ApiError("BAD_REQUEST", str(error.detail), status, headers=headers).response()
