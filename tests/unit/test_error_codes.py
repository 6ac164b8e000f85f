"""The table of error codes: complete, and of codes that clients know."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields

import pytest

import stead
from stead.api.error_codes import FAILURES, LIMITS, OWN_STATUSES, SIZE_LIMITS, STATUSES, failure_of
from stead.api.errors import from_product, to_git
from stead.builds.errors import SetupFailed, SnapshotSetupFailed
from stead.errors import GuestError, InvalidRequest, SteadError, WrongState
from stead.limits import LimitExceeded, LimitName, Limits
from stead.repos.errors import RepoBusy, RepoNotFound
from stead.repos.quotas import QuotaExceeded

BY_VALUE = {"InvalidSpec", "WrongState", "LimitExceeded", "GuestError", "InvalidRequest"}
"""Their code depends on a field or on the route."""

BASES = {"BuildError", "SessionError"}
"""Only subclasses are raised."""

INTERNAL = {
    "CheckpointUnusable",
    "CommandFailed",
    "HostError",
    "ImageError",
    "LayerMissing",
    "LockTimeout",
    "SealingError",
    "StillWritten",
    "TemplateError",
    "TemplateUnreadable",
}
"""Failures of the server, which the client cannot do anything about."""

NOT_IN_THE_API = {
    "AccountExists",
    "AccountNotEmpty",
    "AccountNotFound",
    "AcmeError",
    "KeyNotFound",
    "TooManyConnections",
    "VmLoginFailed",
    "VmUnreachable",
}
"""Of the administration on the host, of certificates, and of the SSH gateway."""


def all_errors() -> set[type[SteadError]]:
    clients = ("stead.sdk", "stead.cli", "stead.mcp", "stead.agents", "stead.store.migrations")
    for module in pkgutil.walk_packages(stead.__path__, "stead."):
        if not module.name.startswith(clients):
            importlib.import_module(module.name)

    def below(kind: type[SteadError]) -> Iterator[type[SteadError]]:
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    return {kind for kind in below(SteadError) if kind.__module__.startswith("stead.")}


def test_every_exception_has_a_code_or_is_a_failure_of_the_server() -> None:
    names = {
        kind.__name__
        for kind in all_errors()
        if not any(each in FAILURES or each.__name__ in BY_VALUE for each in kind.__mro__)
    }
    assert names == BASES | INTERNAL | NOT_IN_THE_API


def test_every_code_of_the_table_has_a_status() -> None:
    for failure in FAILURES.values():
        assert failure.status or failure.code in STATUSES.keys() | OWN_STATUSES.keys(), failure


@pytest.mark.parametrize("name", LimitName)
def test_every_limit_has_an_answer(name: LimitName) -> None:
    """A new limit without a code would be an internal error."""
    answer = from_product(LimitExceeded(name, 4, 3, 2))
    assert (answer.code, answer.status) == (LIMITS[name], 403)
    assert set(answer.extras) == (
        {"got", "max"} if name in SIZE_LIMITS else {"limit", "current", "requested"}
    )


def test_every_limit_of_an_account_has_a_name() -> None:
    of_repositories = {"repos", "repo_mib", "total_repos_mib"}
    assert {field.name for field in fields(Limits)} - of_repositories <= {*LimitName}


def test_the_nearest_class_decides() -> None:
    class Missing(RepoNotFound):
        pass

    failure = failure_of(Missing("x"))
    assert failure is not None and failure.code == "REPO_NOT_FOUND"
    assert from_product(Missing("x")).extras == {"repoId": "x"}


def test_invalid_requests_have_the_code_of_their_route() -> None:
    assert from_product(InvalidRequest("no"), "FILES_BAD_REQUEST").code == "FILES_BAD_REQUEST"
    assert from_product(InvalidRequest("no")).code == "BAD_REQUEST"


def test_a_failed_set_up_is_of_a_vm_or_of_a_snapshot() -> None:
    failed = SetupFailed("services", "app exited")
    failed.snapshot, failed.build = "sc-1", "bd-1"
    of_snapshot = SnapshotSetupFailed(failed)
    assert (of_snapshot.phase, of_snapshot.build, str(of_snapshot)) == ("services", "bd-1", str(failed))
    # The code does not depend on the route.
    for invalid in ("CREATE_VM_BAD_REQUEST", "CREATE_SNAPSHOT_BAD_REQUEST"):
        for error, code in ((failed, "VM_SETUP_FAILED"), (of_snapshot, "SNAPSHOT_SETUP_FAILED")):
            answer = from_product(error, invalid)
            assert (answer.code, answer.status) == (code, 500)
            assert answer.extras == {"failedReason": "services: app exited", "snapshotId": "sc-1"}


@pytest.mark.parametrize(
    ("state", "code"),
    [("deleted", "VM_DELETED"), ("starting", "STILL_CREATING"), ("stopped", "VM_NOT_RUNNING")],
)
def test_a_wrong_state_has_its_own_code(state: str, code: str) -> None:
    assert from_product(WrongState("vm-1", "stop", state)).code == code


def test_git_gets_a_status_and_the_text() -> None:
    busy = to_git(RepoBusy("pushes"))
    assert (busy.status, busy.headers) == (503, {"Retry-After": "5"})
    full = to_git(QuotaExceeded("quota exceeded", 4, 3))
    assert (full.status, str(full), full.headers) == (507, "quota exceeded", {})
    unknown = to_git(GuestError("internal", "a secret"))
    assert unknown.status == 500 and "secret" not in str(unknown)
