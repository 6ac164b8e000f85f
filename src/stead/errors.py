"""Every failure that Stead reports, each with a stable code and a sentence a person can act on."""


class SteadError(Exception):
    """Base of all reported failures."""

    code = "internal"


class HostError(SteadError):
    """The host lacks something or refused something: a tool, a privilege, disk, memory."""

    code = "host"


class ImageError(SteadError):
    """The base image could not be built or is not usable."""

    code = "image"


class TemplateError(SteadError):
    """A prepared template could not be made for a machine size."""

    code = "template"


class CheckpointUnusable(SteadError):
    """The memory part of a checkpoint does not fit this host any more, or was damaged.

    Its disk part may still boot.
    """

    code = "checkpoint_unusable"


class InvalidRequest(SteadError):
    """The caller asked for something that can never work."""

    code = "invalid_request"


class MachineNotFound(SteadError):
    code = "machine_not_found"

    def __init__(self, machine_id: str) -> None:
        super().__init__(f"no machine {machine_id}")
        self.machine_id = machine_id


class SnapshotNotFound(SteadError):
    code = "snapshot_not_found"

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"no snapshot {snapshot_id}")
        self.snapshot_id = snapshot_id


class WrongSnapshotState(SteadError):
    """The snapshot is not ready yet."""

    code = "wrong_snapshot_state"

    def __init__(self, snapshot_id: str, state: str) -> None:
        super().__init__(f"snapshot {snapshot_id} cannot be used: it is {state}")
        self.snapshot_id = snapshot_id
        self.state = state


class WrongState(SteadError):
    """The operation does not apply to the machine's state."""

    code = "wrong_state"

    def __init__(self, machine_id: str, operation: str, state: str, detail: str = "") -> None:
        suffix = f": {detail}" if detail else ""
        super().__init__(f"cannot {operation} machine {machine_id}: it is {state}{suffix}")
        self.machine_id = machine_id
        self.operation = operation
        self.state = state


class StartFailed(SteadError):
    """A machine could not be brought up; nothing of the attempt is left behind."""

    code = "start_failed"


class ReadyTimeout(SteadError):
    """A machine is up, but not all of its services were ready in time."""

    code = "ready_timeout"


class CapacityExceeded(SteadError):
    """The host has no room for one more machine of this size."""

    code = "capacity_exceeded"


class LimitExceeded(SteadError):
    """An account has as much as it may have."""

    code = "limit_exceeded"

    def __init__(self, what: str, limit: int, current: float, requested: float) -> None:
        words = what.replace("_gib", " (GiB)").replace("_", " ")
        have = f"{current:g} in use, {requested:g} more asked for" if current else f"{requested:g} asked for"
        super().__init__(f"this account's limit for {words} is {limit}: {have}")
        self.what = what
        self.limit = limit
        self.current = current
        self.requested = requested


class GuestUnreachable(SteadError):
    """The agent inside the machine did not answer in time."""

    code = "guest_unreachable"


class GuestError(SteadError):
    """The agent inside the machine refused a request; `code` is the agent's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DiskSpaceExceeded(CapacityExceeded):
    """The host has not enough free disk space for the request."""

    code = "disk_space_exceeded"
