"""The rules of VM sizes, and the codes that clients get when a create or a resize breaks them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stead.api.errors import ApiError, from_product
from stead.api.vms import resize_vm
from stead.api.wire.vms import Resize
from stead.builds.errors import InvalidSpec
from stead.builds.spec import Layer
from stead.builds.validation import check
from stead.errors import InvalidRequest
from stead.settings import Size, SizeProblem

VCPUS, MEMORY, DISK = (1, 64), (512, 512 * 1024), (20, 4096)


def test_sizes_within_the_limits_have_no_problems() -> None:
    for size in (Size(1, 512, 20), Size(64, 512 * 1024, 4096), Size(8, 8192, 21)):
        assert Size.problems(size.vcpus, size.memory_mib, size.disk_gib) == []
    assert Size.problems() == []


def test_each_part_has_its_problem() -> None:
    assert Size.problems(3, 513.0, 20.5) == [
        SizeProblem("vcpus", "not_power_of_two", 3, *VCPUS),
        SizeProblem("memory", "not_power_of_two", 513.0, *MEMORY),
        SizeProblem("disk", "not_whole", 20.5, *DISK),
    ]
    assert [each.kind for each in Size.problems(0, 256, 4097)] == ["out_of_range"] * 3
    assert [each.kind for each in Size.problems(-2, 2.0**40, -1)] == ["out_of_range"] * 3


@pytest.mark.parametrize("parts", [(3, 512, 20), (0, 512, 20), (1, 768, 20), (1, 512, 19), (128, 512, 20)])
def test_size_with_a_problem_cannot_be_made(parts: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        Size(*parts)


@pytest.mark.parametrize(
    ("parts", "create", "resize"),
    [
        ({"vcpus": 0}, "CREATE_VM_VCPU_OUT_OF_RANGE", "RESIZE_VM_VCPU_OUT_OF_RANGE"),
        ({"vcpus": 128}, "CREATE_VM_VCPU_OUT_OF_RANGE", "RESIZE_VM_VCPU_OUT_OF_RANGE"),
        ({"vcpus": 3}, "CREATE_VM_VCPU_NOT_POWER_OF_TWO", "RESIZE_VM_VCPU_NOT_POWER_OF_TWO"),
        ({"memory_gb": 0.25}, "CREATE_VM_MEM_OUT_OF_RANGE", "RESIZE_VM_MEM_OUT_OF_RANGE"),
        ({"memory_gb": 1024.0}, "CREATE_VM_MEM_OUT_OF_RANGE", "RESIZE_VM_MEM_OUT_OF_RANGE"),
        ({"memory_gb": 1.7}, "CREATE_VM_MEM_NOT_POWER_OF_TWO", "RESIZE_VM_MEM_NOT_POWER_OF_TWO"),
        ({"memory_gb": 2.0**22}, "MEM_SIZE_TOO_LARGE", "RESIZE_VM_MEM_OUT_OF_RANGE"),
        ({"disk_gb": 10}, "CREATE_VM_ROOTFS_OUT_OF_RANGE", "RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED"),
        ({"disk_gb": 5000}, "CREATE_VM_ROOTFS_OUT_OF_RANGE", "ROOTFS_SIZE_TOO_LARGE"),
        ({"disk_gb": 2**22}, "ROOTFS_SIZE_TOO_LARGE", "ROOTFS_SIZE_TOO_LARGE"),
    ],
)
async def test_codes_of_create_and_resize(parts: dict[str, Any], create: str, resize: str) -> None:
    with pytest.raises(InvalidSpec) as invalid:
        check(Layer(**parts))
    assert from_product(invalid.value).code == create
    wanted = Resize(
        vcpu_count=parts.get("vcpus"),
        mem_size_gb=parts.get("memory_gb"),
        rootfs_size_gb=parts.get("disk_gb"),
    )
    with pytest.raises(ApiError) as refused:
        await resize_vm(cast("Any", SimpleNamespace(id="x", size=Size())), cast("Any", None), wanted)
    assert refused.value.code == resize
