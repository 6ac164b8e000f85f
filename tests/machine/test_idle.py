"""Idle timeouts are as long as asked for, and the last traffic is the last traffic."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest_asyncio

from stead.machines import Machine, Machines, State
from stead.machines.records import Properties
from stead.settings import Settings
from support.guests import sh
from support.installations import another_installation
from support.internals import inside
from support.waiting import until

TIMEOUT = 6  # more than the 4 s between two solicitations: if these counted, they would add up
CHECK = 0.5
BUSY = 30
"""Seconds that a busy host may add."""


@pytest_asyncio.fixture(scope="module")
async def others(settings: Settings, machines: Machines) -> AsyncIterator[Machines]:
    async with another_installation(settings, idle_timeout=None, idle_check=CHECK) as other:
        yield other.machines


async def test_an_idle_vm_is_suspended_close_to_its_timeout(others: Machines) -> None:
    """Wall time, because it is the feature. One guest turns IPv6 on again, so that it solicits routers.

    Were that counted, it would be awake about 8 s longer than the other, however slow the host is.
    """
    plain = await others.create(Properties(idle_timeout=None))
    noisy = await others.create(Properties(idle_timeout=None))
    await sh(noisy, "for nic in /proc/sys/net/ipv6/conf/e*; do echo 0 > $nic/disable_ipv6; done")

    async def time_to_sleep(machine: Machine) -> float:
        await machine.start(idle_timeout=TIMEOUT)
        await sh(machine, "true")
        started = time.monotonic()
        async with asyncio.timeout(TIMEOUT + 2 * BUSY):
            await machine.wait_for_exit()
        return time.monotonic() - started

    quiet, soliciting = await asyncio.gather(time_to_sleep(plain), time_to_sleep(noisy))
    assert TIMEOUT <= quiet < TIMEOUT + BUSY
    assert TIMEOUT <= soliciting < quiet + 6
    for machine in (plain, noisy):
        assert (await machine.info()).state is State.SUSPENDED
        await machine.delete()


async def test_last_traffic_is_the_last_network_traffic(others: Machines) -> None:
    machine = await others.create()
    await sh(machine, "echo commands are no network traffic")
    await inside(others).idle.find_idle()
    assert (await machine.info()).last_traffic is None

    async def traffic_after(moment: float) -> float | None:
        last = (await machine.info()).last_traffic
        return last if last is not None and last >= moment else None

    before = time.time()
    await sh(machine, "ping -c 1 -W 5 169.254.0.1")
    first = await until(lambda: traffic_after(before), 60)
    assert first is not None and before <= first <= time.time()
    await sh(machine, "sleep 1")
    await machine.suspend()
    assert (await machine.info()).last_traffic == first, "suspending is no traffic"
    await sh(machine, "true")
    await inside(others).idle.find_idle()
    assert (await machine.info()).last_traffic == first, "waking is no traffic"

    again = time.time()
    await sh(machine, "ping -c 1 -W 5 169.254.0.1")
    await machine.kill()
    second = await until(lambda: traffic_after(again), 60)
    assert second is not None and second > first, "traffic just before a stop is recorded after it"
    await machine.delete()
