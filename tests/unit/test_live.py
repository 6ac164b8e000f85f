"""One lock per VM: exclusive, fair, removed after use."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from stead.machines.live import Turns


@given(st.lists(st.sampled_from("ab"), max_size=12))
def test_a_vm_lock_is_exclusive_and_removed_after_use(users: list[str]) -> None:
    """Two tasks never hold the lock of the same VM."""

    async def story() -> None:
        turns = Turns()
        holding: set[str] = set()

        async def use(machine: str) -> None:
            async with turns.of(machine):
                assert machine not in holding
                holding.add(machine)
                await asyncio.sleep(0)
                holding.remove(machine)

        await asyncio.gather(*(use(machine) for machine in users))
        assert turns._locks == {}

    asyncio.run(story())


async def test_a_cancelled_wait_passes_the_lock_on() -> None:
    turns = Turns()
    order: list[str] = []

    async def use(name: str) -> None:
        async with turns.of("m"):
            order.append(name)

    async with turns.of("m"):
        first, second = asyncio.create_task(use("first")), asyncio.create_task(use("second"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await second
    assert order == ["second"]
    assert turns._locks == {}
