"""Errors that Stead reports, with messages that say what to do; `api/errors.py` has their codes."""


class SteadError(Exception):
    """Base class of all reported errors."""


class HostError(SteadError):
    """The host lacks or refused something: a tool, a privilege, disk space, memory."""


class ServerStopping(SteadError):
    """The work was cancelled because the server stops, not because its caller left."""

    def __init__(self) -> None:
        super().__init__("the Stead server is stopping; try again")


class ImageError(SteadError):
    """The base image cannot be built or used."""


class TemplateError(SteadError):
    """The template of a VM size cannot be built."""


class CheckpointUnusable(SteadError):
    """Saved memory does not match this host any more, or is damaged; the disk may still boot."""


class InvalidRequest(SteadError):
    """The request can never succeed as it is."""


class MachineNotFound(SteadError):
    def __init__(self, machine_id: str) -> None:
        super().__init__(f"VM {machine_id} not found")
        self.machine_id = machine_id


class AddressTaken(SteadError):
    """Another VM of the VPC has the address."""

    def __init__(self, vpc: str, address: str) -> None:
        text = f"address {address} of VPC {vpc} is in use by another VM"
        super().__init__(f"{text}: choose another one, or none to get a free one")
        self.vpc = vpc
        self.address = address


class SnapshotNotFound(SteadError):
    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"snapshot {snapshot_id} not found")
        self.snapshot_id = snapshot_id


class SnapshotExpired(SnapshotNotFound):
    """The lifetime of the snapshot has ended. It is deleted, or will be in a moment."""

    def __init__(self, snapshot_id: str, expired: str) -> None:
        super().__init__(snapshot_id)
        self.args = (
            f"snapshot {snapshot_id} expired at {expired}: no VM can be created from it any more."
            " Extend a snapshot before it expires, or create it with a longer lifetime",
        )
        self.expired = expired


class SnapshotAlreadyDeleted(SteadError):
    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"snapshot {snapshot_id} is already deleted")
        self.snapshot_id = snapshot_id


class WrongSnapshotState(SteadError):
    """The snapshot is not ready yet."""

    def __init__(self, snapshot_id: str, state: str) -> None:
        super().__init__(f"cannot use snapshot {snapshot_id}: it is {state}")
        self.snapshot_id = snapshot_id
        self.state = state


class WrongState(SteadError):
    """The VM's state does not allow the operation."""

    def __init__(self, machine_id: str, operation: str, state: str, detail: str = "") -> None:
        suffix = f" ({detail})" if detail and detail != state else ""
        super().__init__(f"cannot {operation} VM {machine_id}: it is {state}{suffix}")
        self.machine_id = machine_id
        self.operation = operation
        self.state = state


class StartFailed(SteadError):
    """A VM did not come up; everything that the attempt made is removed."""


class ReadyTimeout(SteadError):
    """A VM is up, but not all of its services were ready in time."""


class CapacityExceeded(SteadError):
    """The host has not enough memory, disk or addresses for the request."""


class TooBusy(CapacityExceeded):
    """The share of the account, or all places, of an operation are in use: the call can be repeated."""

    retryable = True


class GuestUnreachable(SteadError):
    """The agent inside the VM did not answer in time."""


class GuestRestarted(GuestUnreachable):
    """The guest that a client was attached to has ended; another one was booted in its place."""

    def __init__(self, machine_id: str, reason: str | None = None) -> None:
        why = f" ({reason})" if reason else ""
        super().__init__(f"VM {machine_id} has booted again{why}: its programs and connections have ended")


class GuestError(SteadError):
    """The agent inside the VM refused a request; `code` is the agent's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class DiskSpaceExceeded(CapacityExceeded):
    """The host has not enough free disk space for the request."""
