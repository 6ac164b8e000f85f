"""Threads inside a network namespace, for sockets, taps and processes that belong there."""

import asyncio
import ctypes
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from pathlib import Path
from typing import Self, TypeVar

from stead.errors import HostError
from stead.tasks import finished

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def namespace_of(name: str) -> Path:
    return Path("/run/netns") / name


def is_namespace(path: Path) -> bool:
    """Whether a namespace is mounted there; a crash inside `ip netns add` leaves a bare file."""
    try:
        return path.stat().st_dev == Path("/proc/self/ns/net").stat().st_dev
    except FileNotFoundError:
        return False


class NamespaceThread:
    """One thread inside a network namespace. Sockets, taps and child processes made by it stay inside."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="netns", initializer=enter)

    @classmethod
    def named(cls, path: Path) -> Self:
        """Enter the namespace that is mounted at `path`."""

        def enter() -> None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
                    raise HostError(f"cannot enter {path}: {os.strerror(ctypes.get_errno())}")
            finally:
                os.close(descriptor)

        return cls(enter)

    @classmethod
    def empty(cls) -> Self:
        """Create an empty namespace; it ends with the last process in it."""

        def enter() -> None:
            if _libc.unshare(_CLONE_NEWNET) != 0:
                raise HostError(f"cannot create a network namespace: {os.strerror(ctypes.get_errno())}")

        return cls(enter)

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread; waits for its end even when cancelled."""
        return await finished(asyncio.get_running_loop().run_in_executor(self._executor, function))

    async def dial(self, address: IPv4Address, port: int) -> socket.socket:
        """A TCP connection from the namespace, as a socket that does not block. Raises OSError."""
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        made: list[socket.socket] = []
        try:
            # Into a list: the answer of a cancelled call is lost.
            await self.call(lambda: made.append(socket.socket(socket.AF_INET, kind)))
            (link,) = made
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(link, (str(address), port))
        except BaseException:
            for link in made:
                link.close()
            raise
        return link

    def close(self) -> None:
        self._executor.shutdown(wait=True)
