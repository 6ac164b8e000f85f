"""The process of the SSH gateway: it imports what it needs, gives up all privileges, then serves.

It has a Linux user of its own, an empty folder as its root, no network but the sockets that it inherits, and
no capability. The imports come first: its user has no access to the folder of Stead, and then to none at all.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
from concurrent.futures import thread  # noqa: F401  # asyncio imports it when it is needed
from encodings import idna  # noqa: F401  # as for this one
from pathlib import Path

from stead.edge.ssh.listener import Listener

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_OOM_SCORE = 500
"""When memory is short, the gateway ends before the server and the VMs."""


def main() -> None:
    options = _arguments()
    listening, control = (socket.socket(fileno=each) for each in (options.listening, options.control))
    confine(options.user, options.root, options.parent)
    asyncio.run(_serve(listening, control))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("stead-ssh-gateway", description=__doc__)
    for name in ("listening", "control", "user", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--root", required=True)
    return parser.parse_args()


def confine(user: int, root: str, parent: int) -> None:
    """Give up all privileges for good. This process ends with its parent."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    # Memory holds the host key.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # The change of the user has removed the death signal.
    for option, value in ((_PR_SET_NO_NEW_PRIVS, 1), (_PR_SET_PDEATHSIG, signal.SIGKILL)):
        if prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl failed")
    if os.getppid() != parent:
        raise SystemExit("the server has ended")


async def _serve(listening: socket.socket, control: socket.socket) -> None:
    serving = asyncio.create_task(Listener(listening, control).serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    main()
