"""Limits on connections, and what is left of the edge after `kill -9`."""

import asyncio
import os
import selectors
import shutil
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import pytest

from stead.edge.connections import limit_rules
from stead.processes import ProcessId
from support.links import CERTAIN, ip, link, namespace
from support.waiting import until

pytestmark = pytest.mark.root
_PORT = 4433


async def test_an_address_may_open_a_limited_number_of_connections(root: None) -> None:
    with namespace("limith") as host, namespace("limitc") as clients:
        link(host, "up0", clients, "up0")
        for side, numbers in ((host, (1,)), (clients, (2, 3))):
            for number in numbers:
                side.ip("addr", "add", f"10.9.9.{number}/24", "dev", "up0")
                side.ip("addr", "add", f"fd09::{number}/64", "dev", "up0", "nodad")
        rules = limit_rules("stead_test_edge", [_PORT, 80], most=5)
        host.load(rules)

        def listen() -> socket.socket:
            return socket.create_server(("", _PORT), family=socket.AF_INET6, dualstack_ipv6=True, backlog=100)

        def opened(source: str, target: str, count: int, wanted: int) -> list[socket.socket]:
            """The connections that are made, out of so many; waits longer if they are too few."""
            made = [socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET) for _ in range(count)]
            with selectors.DefaultSelector() as pending:
                for each in made:
                    each.setblocking(False)
                    each.bind((source, 0))
                    each.connect_ex((target, _PORT))
                    pending.register(each, selectors.EVENT_WRITE)
                found: list[socket.socket] = []
                while ready := pending.select(CERTAIN if len(found) < wanted else 0.5):
                    for key, _ in ready:
                        pending.unregister(key.fileobj)
                        found += [each for each in made if each is key.fileobj]
            for each in set(made).difference(found):
                each.close()
            return found

        with await host.thread.call(listen):
            held = []
            for source, target, wanted in (
                ("10.9.9.2", "10.9.9.1", 5),
                ("10.9.9.3", "10.9.9.1", 5),
                ("fd09::2", "fd09::1", 5),
                # Of the same /64 network as the last.
                ("fd09::3", "fd09::1", 0),
            ):
                made = await clients.thread.call(partial(opened, source, target, 7, wanted))
                assert len(made) == wanted, (source, len(made))
                held += made
            local = await host.thread.call(partial(opened, "127.0.0.1", "127.0.0.1", 20, 20))
            assert len(local) == 20
            for each in (*held, *local):
                each.close()


_DRIVER = """
import asyncio
from support.edge_with_namespaces import edge_with_namespaces

async def main():
    async with edge_with_namespaces() as edge_ns:
        print(edge_ns.edge.caddy.pid, edge_ns.side.name, edge_ns.settings.data.parent, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_caddy_ends_with_a_server_that_is_killed(root: None) -> None:
    driver = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _DRIVER,
        cwd=Path(__file__).parent.parent,
        stdout=asyncio.subprocess.PIPE,
    )
    assert driver.stdout is not None
    pid, side, folder = (await asyncio.wait_for(driver.stdout.readline(), 60)).decode().split()
    try:
        caddy = ProcessId.of(int(pid))
        assert caddy is not None
        assert caddy.alive()
        os.kill(driver.pid, signal.SIGKILL)
        await driver.wait()
        await until(lambda: not caddy.alive(), 60)
    finally:
        ip("netns", "delete", side)
        shutil.rmtree(folder)
