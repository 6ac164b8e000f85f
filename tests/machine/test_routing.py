"""Forwarding on the host's interfaces: turned on where VMs need it, and off with the last installation."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from stead.host.firewall import ROUTING_SET, ROUTING_TABLE
from stead.host.network import _names
from stead.host.routing import enable_forwarding, read_interfaces, restore_forwarding
from stead.settings import Settings
from support.links import Side, link, namespace
from support.waiting import until

pytestmark = pytest.mark.root


@pytest.fixture
def host(root: None) -> Iterator[Side]:
    """A host with the interfaces eth0 and eth1, to the same other side."""
    with namespace("routeh") as host, namespace("routeo") as other:
        for number in (0, 1):
            link(host, f"eth{number}", other, f"eth{number}")
            host.ip("addr", "add", f"10.9.{number}.1/24", "dev", f"eth{number}")
        yield host


async def _run(host: Side, made: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a function of the host's code there."""
    await host.thread.call(lambda: asyncio.run(made()))


async def _enable(host: Side, *interfaces: str) -> None:
    await _run(host, lambda: enable_forwarding(interfaces))


async def _forwarding(host: Side) -> set[str]:
    def read() -> set[str]:
        folders = Path("/proc/sys/net/ipv4/conf").iterdir()
        found = {each.name for each in folders if (each / "forwarding").read_text().strip() == "1"}
        return found & {"all", "eth0", "eth1"}

    return await host.thread.call(read)


async def _guarded(host: Side) -> set[str]:
    """Interfaces on which only replies to VMs are forwarded."""
    command = ("nft", "-j", "list", "set", "inet", ROUTING_TABLE, ROUTING_SET)
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", host.name, *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await process.communicate()
    return read_interfaces(output) if process.returncode == 0 else set()


async def test_forwarding_is_turned_on_with_a_guard_and_off_again(host: Side) -> None:
    assert await _forwarding(host) == set()
    await _enable(host, "eth0")
    assert (await _forwarding(host), await _guarded(host)) == ({"eth0"}, {"eth0"})
    await _enable(host, "eth1")
    assert (await _forwarding(host), await _guarded(host)) == ({"eth0", "eth1"}, {"eth0", "eth1"})
    await _run(host, restore_forwarding)
    assert (await _forwarding(host), await _guarded(host)) == (set(), set())


async def test_what_the_administrator_forwards_is_neither_guarded_nor_turned_off(host: Side) -> None:
    await host.sysctl("net/ipv4/conf/eth1/forwarding", "1")
    await _enable(host, "eth0", "eth1")
    assert (await _forwarding(host), await _guarded(host)) == ({"eth0", "eth1"}, {"eth0"})
    await _run(host, restore_forwarding)
    assert (await _forwarding(host), await _guarded(host)) == ({"eth1"}, set())


async def test_a_router_stays_a_router(host: Side) -> None:
    await _enable(host, "eth0")
    assert await _guarded(host) == {"eth0"}
    # A container engine was started.
    await host.sysctl("net/ipv4/conf/all/forwarding", "1")
    await _enable(host, "eth0", "eth1")
    assert await _guarded(host) == set()
    await _run(host, restore_forwarding)
    assert await _forwarding(host) == {"all", "eth0", "eth1"}


async def test_an_interface_that_is_gone_does_not_stop_the_restore(host: Side) -> None:
    await _enable(host, "eth0", "eth1")
    host.ip("link", "delete", "eth0")
    await _run(host, restore_forwarding)
    assert (await _forwarding(host), await _guarded(host)) == (set(), set())


_FOLLOW = """
import asyncio, sys
from pathlib import Path
from stead.host import network
from stead.settings import Settings

async def main():
    network._RESURVEY = 0.1
    settings = Settings(data=Path(sys.argv[1]), runtime=Path(sys.argv[1]))
    link = network._names(settings)[1]
    survey = await asyncio.to_thread(network._survey, link, settings.allow_private)
    await network._load_host_rules(settings, survey)
    print("loaded", flush=True)
    await network._follow_changes(settings, survey)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def _following(host: Side, settings: Settings) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", host.name, sys.executable, "-c", _FOLLOW, str(settings.data)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"loaded\n"
        yield
    finally:
        process.kill()
        await process.wait()


async def test_another_default_route_is_followed(host: Side, tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, runtime=tmp_path)
    _, outer, _, table = _names(settings)
    host.ip("link", "add", outer, "type", "veth", "peer", "name", "taps")
    host.ip("link", "set", outer, "up")
    host.ip("addr", "add", "169.254.64.1/30", "dev", outer)
    host.ip("route", "add", "default", "via", "10.9.0.2")

    async def uplinks() -> set[str]:
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", host.name, "nft", "-j", "list", "table", "inet", table),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        rules = json.dumps([each for each in json.loads(output)["nftables"] if "rule" in each])
        return {name for name in ("eth0", "eth1") if f'"{name}"' in rules}

    async with _following(host, settings):
        assert (await uplinks(), await _forwarding(host)) == ({"eth0"}, {"eth0"})
        host.ip("route", "replace", "default", "via", "10.9.1.2")

        async def followed() -> bool:
            return (await uplinks(), await _forwarding(host)) == ({"eth1"}, {"eth0", "eth1"})

        await until(followed, 60)
        assert await _guarded(host) == {"eth0", "eth1"}
