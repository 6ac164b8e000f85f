"""Threads for network namespaces, here without one of their own."""

import asyncio
import socket
import threading
from ipaddress import IPv4Address

import pytest

from stead.host.namespaces import NamespaceThread


async def test_a_cancelled_dial_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    class Recorded(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            made.append(self)

    entered = threading.Event()

    def enter() -> None:
        entered.wait(10)

    thread = NamespaceThread(enter)
    monkeypatch.setattr(socket, "socket", Recorded)
    try:
        dialling = asyncio.create_task(thread.dial(IPv4Address("127.0.0.1"), 9))
        await asyncio.sleep(0.05)
        dialling.cancel()
        await asyncio.sleep(0.05)
        assert not made
        entered.set()
        with pytest.raises(asyncio.CancelledError):
            await dialling
    finally:
        thread.close()
    assert [each.fileno() for each in made] == [-1]
