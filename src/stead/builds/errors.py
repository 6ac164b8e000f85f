"""What can go wrong between a spec and the machine or snapshot that it describes."""

from typing import Any, TypedDict

from stead.errors import SnapshotNotFound, SteadError


class InvalidSpec(SteadError):
    """A spec that can never be built. `problem` says which rule it breaks, `facts` with what."""

    code = "invalid_spec"

    def __init__(self, problem: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.problem = problem
        self.facts = facts


class SnapshotDeleted(SnapshotNotFound):
    """The snapshot that something was to be built on was there once."""

    code = "snapshot_deleted"


class BuildNotFound(SteadError):
    code = "build_not_found"

    def __init__(self, build_id: str) -> None:
        super().__init__(f"no build {build_id}")
        self.build_id = build_id


class ServiceStates(TypedDict):
    """Services of a guest that are in the same state."""

    activeState: str
    subState: str
    services: list[str]


class ServiceLog(TypedDict):
    unitName: str
    log: str


class Diagnostics(TypedDict):
    """What a guest says of its services after some of them failed."""

    serviceStates: list[ServiceStates]
    failedServiceLogs: list[ServiceLog]


class BuildError(SteadError):
    """A spec was applied and something failed on the way.

    `phase` is where; `snapshot` is the machine as it was then, kept to be looked at; `build` has the record.
    """

    def __init__(self, phase: str, message: str) -> None:
        super().__init__(message)
        self.phase = phase
        self.snapshot: str | None = None
        self.build: str | None = None


class SetupFailed(BuildError):
    """The guest could not be made what the spec says."""

    code = "setup_failed"

    def __init__(self, phase: str, reason: str, diagnostics: Diagnostics | None = None) -> None:
        super().__init__(phase, f"{phase}: {reason}")
        self.reason = reason
        self.diagnostics = diagnostics


class CommandFailed(BuildError):
    """A program that the set-up runs in the guest failed; `stderr` is the end of what it printed."""

    code = "command_failed"

    def __init__(self, phase: str, what: str, exit_code: int | None, stderr: str) -> None:
        last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
        ending = "was ended" if exit_code is None else f"exited with {exit_code}"
        super().__init__(phase, f"{phase}: {what} {ending}" + (f": {last}" if last else ""))
        self.exit_code = -1 if exit_code is None else exit_code
        self.stderr = stderr


class BuildBudgetExceeded(BuildError):
    """The work took longer than it may."""

    code = "build_budget_exceeded"

    def __init__(self, phase: str, seconds: float) -> None:
        super().__init__(phase, f"{phase}: not done within the {seconds:g} s that a build may take")
        self.seconds = seconds
