"""A network namespace without interfaces, for git processes that talk to no other server.

Hostile packs are parsed inside: who breaks git there reaches neither private networks nor the server's port.
"""

import ctypes
import os
import threading
from typing import Self

from stead.logs import get_logger

_CLONE_NEWNET = 0x40000000

log = get_logger("stead.repos")


class EmptyNetwork:
    """One namespace for all git processes; it ends with the server and the last process inside."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls) -> Self | None:
        """Create it; None where the server may not, as in some containers."""
        made: list[int | OSError] = []

        def make() -> None:
            # Of this thread alone, which ends here; the descriptor keeps the namespace.
            libc = ctypes.CDLL(None, use_errno=True)
            try:
                if libc.unshare(_CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "cannot create a network namespace")
                made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=make, name="stead-git-network")
        thread.start()
        thread.join()
        (found,) = made
        if isinstance(found, OSError):
            log.warning("git runs in the network of the host", error=str(found))
            return None
        return cls(found)

    @property
    def enter(self) -> list[str]:
        """The command prefix that starts a program inside; it needs root."""
        # The path of the server's descriptor: git inherits none.
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._descriptor}", "--"]

    def close(self) -> None:
        os.close(self._descriptor)
