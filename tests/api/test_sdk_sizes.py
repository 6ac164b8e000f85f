"""Sizes: one vocabulary for create, resize, specs and answers."""

from typing import Any

import pytest

from stead import VmSpec
from stead.sdk import Size
from stead.sdk.models import Snapshot, VmInfo
from stead.sdk.parsing import parse
from stead.sdk.sizes import size_text, wanted_size
from support.scripted_server import Reply
from support.sdk_clients import Client, attempt

VM = "abcdefghij0123456789"
CREATED = Reply(content={"id": VM, "domains": []})
WIRE = {"vcpuCount": 2, "memSizeGb": 4, "rootfsSizeGb": 20}

SAME = [
    {"size": "2x4Gx20G"},
    {"size": "2X4096mX20g"},
    {"size": Size(2, 4, 20)},
    {"cpu": 2, "memory": "4G", "disk": "20G"},
    {"cpu": 2, "memory": 4, "disk": 20.0},
    {"cpu": 2, "memory": "4GiB", "disk": "20"},
]


@pytest.mark.parametrize("given", SAME)
def test_one_size_in_every_spelling(given: dict[str, Any]) -> None:
    assert VmSpec().size(**given).to_wire() == WIRE


def test_parts_of_a_size() -> None:
    assert wanted_size(None, {"memory": "512M"}).to_wire() == {"memSizeGb": 0.5}
    assert wanted_size(None, {"disk": 40}).to_wire() == {"rootfsSizeGb": 40}
    assert wanted_size(None, {"disk": "1T"}).to_wire() == {"rootfsSizeGb": 1024}
    assert not wanted_size(None, {})


@pytest.mark.parametrize(
    ("name", "today"),
    [("vcpu_count", "cpu"), ("mem_size_gb", "memory"), ("rootfs_size_gb", "disk"), ("storage", "disk")],
)
async def test_earlier_names_of_parts_name_the_argument_of_today(
    client: Client, name: str, today: str
) -> None:
    for call in (
        lambda stead: stead.vms.create(**{name: 2}),
        lambda stead: stead.vms.ref(VM).resize(**{name: 2}),
        lambda stead: VmSpec().size(**{name: 2}),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}': use '{today}'$"):
            await attempt(client, call)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "2x4G"}, "invalid size '2x4G': expected vCPUs x memory x disk, for example 2x4Gx20G"),
        ({"size": "large"}, "invalid size 'large'"),
        ({"memory": "4 apples"}, "invalid amount '4 apples'"),
        ({"size": "2x4Gx20G", "cpu": 4}, "give either size or cpu, memory and disk"),
    ],
)
def test_invalid_sizes_say_what_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        VmSpec().size(**given)
    assert message in str(caught.value)


def test_infos_show_the_size_that_create_takes() -> None:
    sizing = {"vcpuCount": 2, "memSizeMib": 4096, "rootfsSizeMb": 20480}
    info = parse(VmInfo, {"id": VM, "state": "running", "sizing": sizing, "address": "10.0.0.2"})
    assert info.size == "2x4Gx20G" and info.address == "10.0.0.2"
    assert parse(VmInfo, {"id": VM, "state": "running"}).size is None
    snapshot = parse(Snapshot, {"snapshotId": "sc-1", **sizing, "memSizeMib": 512})
    assert snapshot.size == "2x512Mx20G"
    assert wanted_size(snapshot.size, {}) == Size(2, 0.5, 20)
    assert size_text(1, 1536, 10240) == "1x1536Mx10G"


async def test_create_and_resize_send_a_size(client: Client) -> None:
    _, seen = await attempt(client, lambda stead: stead.vms.create(size="2x4Gx20G"), CREATED)
    assert seen[0].json == {"template": WIRE}
    _, seen = await attempt(client, lambda stead: stead.vms.create(spec=VmSpec(), memory="8G"), CREATED)
    assert seen[0].json["spec"]["memSizeGb"] == 8
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).resize("2x4Gx20G"), Reply())
    assert seen[0].json == WIRE
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).resize(memory="8G", disk=40), Reply())
    assert seen[0].json == {"memSizeGb": 8, "rootfsSizeGb": 40}
