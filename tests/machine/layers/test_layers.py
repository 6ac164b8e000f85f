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
from support.layer_stage import Stage

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
    stage: Stage,
) -> None:
    machine = await stage.machine()
    top = stage.top(machine, "frozen")
    top.write_bytes(b"disk")
    os.chown(top, 12345, 12345)
    top.chmod(0o644)
    await stage.record(machine, "frozen")
    (file,) = await stage.chain("frozen")
    for _ in range(2):
        await stage.layers.adopt("frozen", machine)
    facts = file.stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (0, 0, 0o600)
    assert file.read_bytes() == b"disk"
    assert not top.exists()


async def test_adopt_refuses_links_and_pipes(stage: Stage) -> None:
    """A link or a pipe stays in place, and recovery adopts the other layers."""
    secret = stage.data / "secret"
    secret.write_text("secret")
    secret.chmod(0o640)
    hostile, honest = await stage.machine(), await stage.machine()
    stage.top(hostile, "link").symlink_to(secret)
    os.mkfifo(stage.top(hostile, "pipe"))
    stage.top(honest, "disk").write_bytes(b"disk")
    for machine, layer in ((hostile, "link"), (hostile, "pipe"), (honest, "disk")):
        await stage.record(machine, layer)
    for layer in ("link", "pipe"):
        with pytest.raises(HostError, match="disk layer"):
            await stage.layers.adopt(layer, hostile)
    await stage.layers.finish_adoptions()
    assert stage.files() == {"disk.qcow2"}
    assert secret.stat().st_mode & 0o777 == 0o640


async def test_a_layer_without_file_or_row_is_reported_as_missing(stage: Stage) -> None:
    machine = await stage.machine()
    below, above = await stage.frozen(machine), await stage.frozen(machine)
    assert [path.stem for path in await stage.chain(above)] == [above, below]
    assert await stage.layers.chain(None) == []
    (stage.data / "layers" / f"{below}.qcow2").unlink()
    for layer in (above, "unknown"):
        with pytest.raises(HostError, match="a disk layer is missing"):
            await stage.layers.chain(layer)
    with pytest.raises(HostError, match="a disk layer is missing"):
        await stage.layers.adopt(below, machine)


# Garbage collection


async def test_collect_returns_what_it_removed(stage: Stage) -> None:
    machine = await stage.machine()
    layers = {await stage.frozen(machine), await stage.frozen(machine)}
    stage.host.checkpoints.folder("checkpoint").mkdir()
    assert await stage.layers.collect() == Collected(checkpoints=frozenset({"checkpoint"}))
    await stage.remove_machine(machine)
    files = frozenset(f"{layer}.qcow2" for layer in layers)
    assert await stage.layers.collect() == Collected(layers=frozenset(layers), files=files)
    assert (stage.files(), await stage.rows()) == (set(), {})


async def test_collect_waits_for_readers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay while a reader that got them is active; later readers do not delay their removal."""
    machine = await stage.machine()
    layer = await stage.frozen(machine)
    stage.host.checkpoints.folder("checkpoint").mkdir()
    looked = asyncio.Event()
    checkpoints = stage.store.checkpoints

    async def look() -> set[str]:
        found = await checkpoints()
        looked.set()
        return found

    monkeypatch.setattr(stage.store, "checkpoints", look)
    async with contextlib.AsyncExitStack() as later:
        async with stage.layers.reading():
            files = await stage.chain(layer)
            await stage.remove_machine(machine)
            collecting = asyncio.create_task(stage.layers.collect())
            await asyncio.wait_for(looked.wait(), 60)
            await later.enter_async_context(stage.layers.reading())
            assert await stage.rows() == {}
            assert all(file.exists() for file in files)
            assert stage.checkpoints() == {"checkpoint"}
            assert not collecting.done()
        collected = await asyncio.wait_for(collecting, 60)
    assert collected.files == {file.name for file in files}
    assert (stage.files(), stage.checkpoints()) == (set(), set())


async def test_collect_keeps_a_layer_that_gets_a_reference_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot refers to a layer between the query for references and its removal."""
    machine = await stage.machine()
    below, above = await stage.frozen(machine), await stage.frozen(machine)
    await stage.remove_machine(machine)
    referenced = stage.store.referenced

    async def then_used() -> set[str]:
        found = await referenced()
        await stage.snapshot(below)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "referenced", then_used)
        assert await stage.layers.collect() == Collected()
    assert len(await stage.layers.chain(above)) == 2
    assert (await stage.layers.collect()).layers == {above}
    assert len(await stage.layers.chain(below)) == 1


async def test_collect_keeps_a_checkpoint_that_gets_its_row_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = stage.store.checkpoints
    building = stage.layers.building("memory")

    async def just_before() -> set[str]:
        found = await checkpoints()
        await stage.snapshot(None, "memory")
        building.__exit__(None, None, None)
        return found

    building.__enter__()
    stage.host.checkpoints.folder("memory").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "checkpoints", just_before)
        await stage.layers.collect()
    await stage.layers.collect()
    assert stage.checkpoints() == {"memory"}
