"""Errors of sessions, files, ports and logs in a guest, which name what they are about."""

from stead.errors import InvalidRequest, SteadError


class SessionError(SteadError):
    """An error about a terminal or a process of a VM."""

    def __init__(self, machine_id: str, session_id: str, message: str) -> None:
        super().__init__(message)
        self.machine_id = machine_id
        self.session_id = session_id


class GuestSessionNotFound(SessionError):
    def __init__(self, machine_id: str, session_id: str) -> None:
        super().__init__(machine_id, session_id, f"no session {session_id} in VM {machine_id}")


class SessionExpired(SessionError):
    """The program has exited, and the guest has dropped the session."""

    def __init__(self, machine_id: str, session_id: str) -> None:
        super().__init__(machine_id, session_id, f"session {session_id} has exited and is no longer held")


class SessionUserMismatch(SessionError):
    def __init__(self, machine_id: str, session_id: str) -> None:
        super().__init__(machine_id, session_id, f"session {session_id} belongs to another Linux user")


class SessionExists(SessionError):
    def __init__(self, machine_id: str, session_id: str) -> None:
        super().__init__(machine_id, session_id, f"session {session_id} exists already in VM {machine_id}")


class ProcessExited(SessionError):
    def __init__(self, machine_id: str, session_id: str) -> None:
        super().__init__(machine_id, session_id, f"process {session_id} has exited: it gets no signals")


class SessionLimitReached(SteadError):
    """The VM has as many terminals as it may have."""

    def __init__(self, machine_id: str, limit: int, message: str) -> None:
        super().__init__(message)
        self.machine_id = machine_id
        self.limit = limit


class InvalidSessionId(SteadError):
    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"invalid session id {session_id!r}: must be 1 to 64 letters, digits, '.', '_' or '-'"
        )
        self.session_id = session_id


class RecordingNotFound(SteadError):
    def __init__(self, machine_id: str, name: str) -> None:
        super().__init__(f"no terminal {name} in VM {machine_id}")
        self.machine_id = machine_id


class PortClosed(SteadError):
    """No program in the VM accepts connections on the port."""

    def __init__(self, machine_id: str, port: int) -> None:
        super().__init__(f"nothing listens on port {port} of VM {machine_id}")
        self.machine_id = machine_id
        self.port = port


class GuestFileNotFound(SteadError):
    def __init__(self, path: str, message: str | None = None) -> None:
        super().__init__(f"no such file or folder: {path}" if message is None else message)
        self.path = path


class InvalidGuestPath(InvalidRequest):
    """No file in a VM can have this path."""


class JournalUnreadable(SteadError):
    def __init__(self, machine_id: str, reason: str) -> None:
        super().__init__(f"cannot read the journal of VM {machine_id}: {reason}")
