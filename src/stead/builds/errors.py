"""Errors of builds: invalid specs, and failures while a spec is applied."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stead.errors import SnapshotNotFound, SteadError

_MAX_OUTPUT = 500


_Source = Literal["conflicting_sources", "misplaced_field", "invalid_snapshot_id", "unsupported_image"]
_Vcpus = Literal["vcpus_out_of_range", "vcpus_not_power_of_two"]
_Memory = Literal["memory_out_of_range", "memory_not_power_of_two", "memory_too_large"]
_Disk = Literal["disk_out_of_range", "disk_too_large"]
_Content = Literal["invalid_value", "invalid_file", "invalid_repository", "workdir_empty"]
_Group = Literal["group_name_empty", "group_name_too_long", "group_name_invalid_chars"]
_GroupTaken = Literal["group_name_reserved", "duplicate_group_name"]
_User = Literal["user_group_empty", "user_uid_out_of_range", "user_system_flag_mismatch"]
_UserPath = Literal["duplicate_user_name", "user_home_invalid", "user_shell_invalid"]
_Service = Literal["service_name_empty", "service_name_too_long", "service_name_invalid_chars"]
_ServiceTaken = Literal["service_name_invalid_prefix", "service_exists", "exec_empty"]
_Identity = Literal["user_empty", "group_empty", "env_key_empty", "env_key_contains_equals"]
_Units = Literal["after_unit_empty", "requires_unit_empty", "on_failure_unit_empty", "wanted_by_empty"]
_Accounts = _Group | _GroupTaken | _User | _UserPath
_Services = _Service | _ServiceTaken | _Identity | _Units
Rule = _Source | _Vcpus | _Memory | _Disk | _Content | _Accounts | _Services


@dataclass(eq=False, repr=False)
class InvalidSpec(SteadError):
    """A spec that breaks a rule.

    `{field}` and `{other}` in the template stand for fields of the spec, which clients know by other names.
    `got`, `lowest` and `highest` are MiB for memory and disk, but for `got` of sizes that are too large: GB.
    """

    rule: Rule
    template: str
    field: str | None = None
    other: str | None = None
    depth: int | None = None
    got: float | None = None
    lowest: int | None = None
    highest: int | None = None
    service: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.worded(str))

    def worded(self, name_of: Callable[[str], str]) -> str:
        """The message, with the fields named by this function."""
        text = self.template
        for mark, name in (("{field}", self.field), ("{other}", self.other)):
            text = text if name is None else text.replace(mark, name_of(name), 1)
        return text


class BaseSnapshotDeleted(SnapshotNotFound):
    """The snapshot that a spec names as its base has been deleted."""


class BuildNotFound(SteadError):
    def __init__(self, build_id: str) -> None:
        super().__init__(f"build {build_id} not found")
        self.build_id = build_id


class NotBuilt(SteadError):
    """The VM has no build: it was created without a spec."""

    def __init__(self, machine_id: str) -> None:
        super().__init__(f"VM {machine_id} was not built from a spec")
        self.machine_id = machine_id


@dataclass(frozen=True)
class ServiceStates:
    """Services of a VM that are in the same state."""

    active_state: str
    sub_state: str
    services: list[str]


@dataclass(frozen=True)
class ServiceLog:
    unit: str
    log: str


@dataclass(frozen=True)
class Diagnostics:
    """States of a VM's services, and logs of those that failed."""

    states: list[ServiceStates]
    failed_logs: list[ServiceLog]


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

    def __init__(self, phase: str, reason: str, diagnostics: Diagnostics | None = None) -> None:
        super().__init__(phase, f"{phase}: {reason}")
        self.reason = reason
        self.diagnostics = diagnostics


class SnapshotSetupFailed(SetupFailed):
    """A step of the set-up failed, and a snapshot was asked for, not a VM."""

    def __init__(self, cause: SetupFailed) -> None:
        super().__init__(cause.phase, cause.reason, cause.diagnostics)
        self.snapshot, self.build = cause.snapshot, cause.build


class ProgramFailed(BuildError):
    """A program of the set-up failed in the guest; `stderr` is the end of its output."""

    def __init__(self, phase: str, what: str, exit_code: int | None, stderr: str) -> None:
        last = last_line(stderr)
        ending = "was killed" if exit_code is None else f"exited with {exit_code}"
        super().__init__(phase, f"{phase}: {what} {ending}" + (f": {last}" if last else ""))
        self.exit_code = -1 if exit_code is None else exit_code
        self.stderr = stderr


class BuildBudgetExceeded(BuildError):
    """The set-up of a layer exceeded its time limit."""

    def __init__(self, phase: str, seconds: float) -> None:
        super().__init__(phase, f"{phase}: the set-up of one layer is limited to {seconds:g} s")
        self.seconds = seconds
