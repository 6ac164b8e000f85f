"""Errors of builds: invalid specs, and failures while a spec is applied."""

from typing import Any, TypedDict

from stead.errors import SnapshotNotFound, SteadError

_MAX_OUTPUT = 500


class InvalidSpec(SteadError):
    """A spec that breaks a rule. `problem` names the rule, `facts` are the values that break it."""

    code = "invalid_spec"

    def __init__(self, problem: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.problem = problem
        self.facts = facts


class SnapshotDeleted(SnapshotNotFound):
    """The snapshot that a spec names as its base has been deleted."""

    code = "snapshot_deleted"


class BuildNotFound(SteadError):
    code = "build_not_found"

    def __init__(self, build_id: str) -> None:
        super().__init__(f"build {build_id} not found")
        self.build_id = build_id


class ServiceStates(TypedDict):
    """Services of a VM that are in the same state."""

    activeState: str
    subState: str
    services: list[str]


class ServiceLog(TypedDict):
    unitName: str
    log: str


class Diagnostics(TypedDict):
    """States of a VM's services, and logs of those that failed."""

    serviceStates: list[ServiceStates]
    failedServiceLogs: list[ServiceLog]


def last_line(output: str) -> str:
    """The last line of a program's output that is not blank, limited in length."""
    found = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return found if len(found) <= _MAX_OUTPUT else f"{found[:_MAX_OUTPUT]}..."


class BuildError(SteadError):
    """A failure while a spec was applied.

    `phase` is the step that failed, `snapshot` the VM as it was then, kept for debugging, `build` the id of
    the build record.
    """

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.phase = phase
        self.snapshot: str | None = None
        self.build: str | None = None


class SetupFailed(BuildError):
    """A step of the set-up failed in the guest."""

    code = "setup_failed"

    def __init__(self, phase: str, reason: str, diagnostics: Diagnostics | None = None) -> None:
        super().__init__(phase, f"{phase}: {reason}")
        self.reason = reason
        self.diagnostics = diagnostics


class CommandFailed(BuildError):
    """A program of the set-up failed in the guest; `stderr` is the end of its output."""

    code = "command_failed"

    def __init__(self, phase: str, what: str, exit_code: int | None, stderr: str) -> None:
        last = last_line(stderr)
        ending = "was killed" if exit_code is None else f"exited with {exit_code}"
        super().__init__(phase, f"{phase}: {what} {ending}" + (f": {last}" if last else ""))
        self.exit_code = -1 if exit_code is None else exit_code
        self.stderr = stderr


class BuildBudgetExceeded(BuildError):
    """The set-up of a layer exceeded its time limit."""

    code = "build_budget_exceeded"

    def __init__(self, phase: str, seconds: float) -> None:
        super().__init__(phase, f"{phase}: the set-up of one layer is limited to {seconds:g} s")
        self.seconds = seconds
