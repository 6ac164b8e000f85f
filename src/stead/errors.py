"""All errors that Stead reports, each with a stable code and a message that says what to do."""


class SteadError(Exception):
    """Base class of all reported errors."""

    code = "internal"


class HostError(SteadError):
    """The host lacks or refused something: a tool, a privilege, disk space, memory."""

    code = "host"


class ServerStopping(SteadError):
    """The work was cancelled because the server stops, not because its caller left."""

    code = "server_stopping"

    def __init__(self) -> None:
        super().__init__("the Stead server is stopping; try again")


class ImageError(SteadError):
    """The base image cannot be built or used."""

    code = "image"


class TemplateError(SteadError):
    """The template of a VM size cannot be built."""

    code = "template"


class CheckpointUnusable(SteadError):
    """Saved memory does not match this host any more, or is damaged; the disk may still boot."""

    code = "checkpoint_unusable"


class InvalidRequest(SteadError):
    """The request can never succeed as it is."""

    code = "invalid_request"


class MachineNotFound(SteadError):
    code = "machine_not_found"

    def __init__(self, machine_id: str) -> None:
        super().__init__(f"VM {machine_id} not found")
        self.machine_id = machine_id


class SnapshotNotFound(SteadError):
    code = "snapshot_not_found"

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"snapshot {snapshot_id} not found")
        self.snapshot_id = snapshot_id


class WrongSnapshotState(SteadError):
    """The snapshot is not ready yet."""

    code = "wrong_snapshot_state"

    def __init__(self, snapshot_id: str, state: str) -> None:
        super().__init__(f"cannot use snapshot {snapshot_id}: it is {state}")
        self.snapshot_id = snapshot_id
        self.state = state


class WrongState(SteadError):
    """The VM's state does not allow the operation."""

    code = "wrong_state"

    def __init__(self, machine_id: str, operation: str, state: str, detail: str = "") -> None:
        suffix = f" ({detail})" if detail and detail != state else ""
        super().__init__(f"cannot {operation} VM {machine_id}: it is {state}{suffix}")
        self.machine_id = machine_id
        self.operation = operation
        self.state = state


class StartFailed(SteadError):
    """A VM did not come up; everything that the attempt made is removed."""

    code = "start_failed"


class ReadyTimeout(SteadError):
    """A VM is up, but not all of its services were ready in time."""

    code = "ready_timeout"


class CapacityExceeded(SteadError):
    """The host has not enough memory, disk or addresses for the request."""

    code = "capacity_exceeded"


class LimitExceeded(SteadError):
    """The request exceeds a limit of the account."""

    code = "limit_exceeded"

    def __init__(self, what: str, limit: int, current: float, requested: float) -> None:
        words = what.replace("_gib", " (GiB)").replace("_", " ")
        used = f"{current:g} in use, {requested:g} more requested" if current else f"{requested:g} requested"
        super().__init__(f"account limit exceeded: {words} is limited to {limit}, {used}")
        self.what = what
        self.limit = limit
        self.current = current
        self.requested = requested


class GuestUnreachable(SteadError):
    """The agent inside the VM did not answer in time."""

    code = "guest_unreachable"


class GuestError(SteadError):
    """The agent inside the VM refused a request; `code` is the agent's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DiskSpaceExceeded(CapacityExceeded):
    """The host has not enough free disk space for the request."""

    code = "disk_space_exceeded"
