"""The watchdog of the event loop: it measures the lag, and names the call that held the loop."""

import asyncio
import logging
import time
from dataclasses import dataclass

import pytest

from stead.guest.watchdog import Watchdog, works_on


@dataclass
class Work:
    trace: str

    def __str__(self) -> str:
        return "POST /v1/hold"


async def test_a_call_that_holds_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []
    watchdog = Watchdog(slow_after=0.3, measured=lags.append)

    async def hold() -> None:
        works_on(Work("0123"))
        await asyncio.sleep(0.1)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass

    with caplog.at_level(logging.WARNING, "stead.watchdog"):
        watchdog.start()
        try:
            await asyncio.create_task(hold())
            await asyncio.sleep(0.2)
        finally:
            await watchdog.close()
    assert max(lags) > 1
    lines = [record.getMessage() for record in caplog.records if "event loop was held" in record.getMessage()]
    assert any('call="POST /v1/hold"' in line and "trace=0123" in line for line in lines), lines


async def test_a_loop_that_turns_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    lags: list[float] = []
    watchdog = Watchdog(slow_after=10, measured=lags.append)
    with caplog.at_level(logging.WARNING, "stead.watchdog"):
        watchdog.start()
        try:
            for _ in range(20):
                await asyncio.sleep(0.02)
        finally:
            await watchdog.close()
    assert lags and not caplog.records
