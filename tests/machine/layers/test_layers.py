"""Disk layers: which are merged, adoption and garbage collection."""

import asyncio
import contextlib
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stead.errors import HostError
from stead.machines.chains import how_many_to_merge, needed
from stead.machines.layers import MAX_CHAIN, Collected
from support.layers_on_disk import LayersOnDisk

pytestmark = pytest.mark.usefixtures("root")  # frozen layers are given to root


# Rules


@given(
    sizes=st.lists(st.integers(0, 1 << 40), max_size=60),
    limit=st.integers(1, 12),
)
def test_a_merge_shortens_the_chain_and_spares_large_old_layers(sizes: list[int], limit: int) -> None:
    count = how_many_to_merge(sizes, limit)
    if len(sizes) <= limit:
        assert count == 0
        return
    assert 2 <= count <= len(sizes)
    assert len(sizes) - count + 1 <= limit
    assert count == len(sizes) or sizes[count] > 2 * sum(sizes[:count])
    # One fewer would have left the chain too long, or a layer behind that is no larger than what is merged.
    fewer = count - 1
    assert fewer < 2 or len(sizes) - fewer + 1 > limit or sizes[fewer] <= 2 * sum(sizes[:fewer])


@given(st.integers(2, 600), st.integers(1, 1 << 30), st.sampled_from([6, MAX_CHAIN]))
@settings(max_examples=30, deadline=None)
def test_merging_copies_a_layer_only_a_few_times(appended: int, size: int, limit: int) -> None:
    chain: list[int] = []
    copied = 0
    for _ in range(appended):
        chain.insert(0, size)
        count = how_many_to_merge(chain, limit)
        if count:
            merged = sum(chain[:count])
            copied += merged
            chain[:count] = [merged]
        assert len(chain) <= limit
    assert sum(chain) == appended * size
    assert copied <= size * appended * math.log(appended, 1.5)


def test_layers_below_a_referenced_layer_are_needed() -> None:
    parents = {"a": None, "b": "a", "c": "b", "d": "b", "e": None}
    assert needed(parents, ["d"]) == {"a", "b", "d"}
    assert needed(parents, []) == set()


# Adoption


async def test_a_chain_finishes_an_adoption_which_moves_its_layer_to_root(
    on_disk: LayersOnDisk,
) -> None:
    machine = await on_disk.machine()
    top = on_disk.top(machine, "frozen")
    top.write_bytes(b"disk")
    os.chown(top, 12345, 12345)
    top.chmod(0o644)
    await on_disk.record(machine, "frozen")
    (file,) = await on_disk.chain("frozen")
    for _ in range(2):
        await on_disk.layers.adopt("frozen", machine)
    facts = file.stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (0, 0, 0o600)
    assert file.read_bytes() == b"disk"
    assert not top.exists()


async def test_adopt_refuses_links_and_pipes(on_disk: LayersOnDisk) -> None:
    """A link or a pipe stays in place, and recovery adopts the other layers."""
    secret = on_disk.data / "secret"
    secret.write_text("secret")
    secret.chmod(0o640)
    hostile, honest = await on_disk.machine(), await on_disk.machine()
    on_disk.top(hostile, "link").symlink_to(secret)
    os.mkfifo(on_disk.top(hostile, "pipe"))
    on_disk.top(honest, "disk").write_bytes(b"disk")
    for machine, layer in ((hostile, "link"), (hostile, "pipe"), (honest, "disk")):
        await on_disk.record(machine, layer)
    for layer in ("link", "pipe"):
        with pytest.raises(HostError, match="disk layer"):
            await on_disk.layers.adopt(layer, hostile)
    await on_disk.layers.finish_adoptions()
    assert on_disk.files() == {"disk.qcow2"}
    assert secret.stat().st_mode & 0o777 == 0o640


async def test_a_layer_without_file_or_row_is_reported_as_missing(on_disk: LayersOnDisk) -> None:
    machine = await on_disk.machine()
    below, above = await on_disk.frozen(machine), await on_disk.frozen(machine)
    assert [path.stem for path in await on_disk.chain(above)] == [above, below]
    assert await on_disk.layers.chain(None) == []
    (on_disk.data / "layers" / f"{below}.qcow2").unlink()
    for layer in (above, "unknown"):
        with pytest.raises(HostError, match="a disk layer is missing"):
            await on_disk.layers.chain(layer)
    with pytest.raises(HostError, match="a disk layer is missing"):
        await on_disk.layers.adopt(below, machine)


# Garbage collection


async def test_collect_returns_what_it_removed(on_disk: LayersOnDisk) -> None:
    machine = await on_disk.machine()
    layers = {await on_disk.frozen(machine), await on_disk.frozen(machine)}
    on_disk.host.checkpoints.folder("checkpoint").mkdir()
    assert await on_disk.layers.collect() == Collected(checkpoints=frozenset({"checkpoint"}))
    await on_disk.remove_machine(machine)
    files = frozenset(f"{layer}.qcow2" for layer in layers)
    assert await on_disk.layers.collect() == Collected(layers=frozenset(layers), files=files)
    assert (on_disk.files(), await on_disk.rows()) == (set(), {})


async def test_collect_waits_for_readers(on_disk: LayersOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay while a reader that got them is active; later readers do not delay their removal."""
    machine = await on_disk.machine()
    layer = await on_disk.frozen(machine)
    on_disk.host.checkpoints.folder("checkpoint").mkdir()
    looked = asyncio.Event()
    checkpoints = on_disk.store.checkpoints

    async def look() -> set[str]:
        found = await checkpoints()
        looked.set()
        return found

    monkeypatch.setattr(on_disk.store, "checkpoints", look)
    async with contextlib.AsyncExitStack() as later:
        async with on_disk.layers.reading():
            files = await on_disk.chain(layer)
            await on_disk.remove_machine(machine)
            collecting = asyncio.create_task(on_disk.layers.collect())
            await asyncio.wait_for(looked.wait(), 60)
            await later.enter_async_context(on_disk.layers.reading())
            assert await on_disk.rows() == {}
            assert all(file.exists() for file in files)
            assert on_disk.checkpoints() == {"checkpoint"}
            assert not collecting.done()
        collected = await asyncio.wait_for(collecting, 60)
    assert collected.files == {file.name for file in files}
    assert (on_disk.files(), on_disk.checkpoints()) == (set(), set())


async def test_collect_keeps_a_layer_that_gets_a_reference_meanwhile(
    on_disk: LayersOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot refers to a layer between the query for references and its removal."""
    machine = await on_disk.machine()
    below, above = await on_disk.frozen(machine), await on_disk.frozen(machine)
    await on_disk.remove_machine(machine)
    referenced = on_disk.store.referenced

    async def then_used() -> set[str]:
        found = await referenced()
        await on_disk.snapshot(below)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(on_disk.store, "referenced", then_used)
        assert await on_disk.layers.collect() == Collected()
    assert len(await on_disk.layers.chain(above)) == 2
    assert (await on_disk.layers.collect()).layers == {above}
    assert len(await on_disk.layers.chain(below)) == 1


async def test_collect_keeps_a_checkpoint_that_gets_its_row_meanwhile(
    on_disk: LayersOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = on_disk.store.checkpoints
    building = on_disk.layers.building("memory")

    async def just_before() -> set[str]:
        found = await checkpoints()
        await on_disk.snapshot(None, "memory")
        building.__exit__(None, None, None)
        return found

    building.__enter__()
    on_disk.host.checkpoints.folder("memory").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(on_disk.store, "checkpoints", just_before)
        await on_disk.layers.collect()
    await on_disk.layers.collect()
    assert on_disk.checkpoints() == {"memory"}
