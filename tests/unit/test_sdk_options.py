"""Options as keyword arguments: type checkers and `help()` know them, and a wrong one is refused.

mypy checks this file: a `type: ignore` that is no longer needed is an error, so each one states that mypy
refuses its line.
"""

import inspect
from typing import Any, assert_type

import pytest

from stead.sdk import AsyncStead, LogQuery, SnapshotOptions, StartOptions, Stead, Vm, VmOptions, VmSpec
from stead.sdk._async.vms import AsyncVms
from stead.sdk._sync.logs import Logs
from stead.sdk._sync.snapshots import Snapshots
from stead.sdk._sync.vms import Vms
from stead.sdk.creation import snapshot_references, vm_body, vpc_references, with_ids
from stead.sdk.sizes import SizeParts


def accepted(stead: Stead) -> None:
    """Never called: for the type checker."""
    options: VmOptions = {"name": "web", "cpu": 2, "memory": "4G"}
    assert_type(stead.vms.create(**options, if_missing=True), Vm)
    stead.vms.create(size="2x4Gx20G", idle_timeout_seconds=None)
    stead.vms.ref("x").start(idle_timeout_seconds=60)
    stead.vms.snapshots.ensure(VmSpec(), name="tools", ttl=60)
    stead.logs.list(vm_id="x", page_size=10)


def refused(stead: Stead) -> None:
    """Never called: for the type checker."""
    stead.vms.create(nmae="web")  # type: ignore[call-arg]
    stead.vms.create(vcpu_count=2)  # type: ignore[call-arg]
    stead.vms.create(cpu="2")  # type: ignore[arg-type]
    stead.vms.ref("x").resize(storage=40)  # type: ignore[call-arg]
    stead.vms.ref("x").start(name="web")  # type: ignore[call-arg]
    stead.vms.snapshots.ensure(cpu=2)  # type: ignore[call-arg]
    stead.logs.stream(start_time="now")  # type: ignore[call-arg]
    VmSpec().size(mem_size_gb=4)  # type: ignore[call-arg]
    options: VmOptions = {"nmae": "web"}  # type: ignore[typeddict-unknown-key]
    stead.vms.create(**options)


async def refused_by_the_asynchronous_client(stead: AsyncStead) -> None:
    """Never called: for the type checker."""
    await stead.vms.create(nmae="web")  # type: ignore[call-arg]
    await stead.vms.ref("x").resize(vcpu_count=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Vms.create, VmOptions),
        (AsyncVms.create, VmOptions),
        (Vm.start, StartOptions),
        (Vm.resize, SizeParts),
        (VmSpec.size, SizeParts),
        (Snapshots.ensure, SnapshotOptions),
        (Logs.list, LogQuery),
    ],
)
def test_signatures_show_every_option(method: Any, options: Any) -> None:
    shown = inspect.signature(method).parameters
    assert options.__annotations__.keys() <= shown.keys()
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in shown.values())
    assert str(shown[next(iter(options.__annotations__))]).endswith("= ...")


def test_options_of_a_caller_are_not_changed() -> None:
    inner = {"snapshotId": "tools"}
    options: VmOptions = {"spec": {"snapshot": inner}, "nics": [{"vpc": "backend"}], "cpu": 2, "disk": None}
    before = repr(options)
    body = vm_body(options)
    sent = repr(body)
    resolved = with_ids(body, vpcs={"backend": "vpc-1"}, snapshots={"tools": "sc-1"})
    assert (repr(options), repr(body)) == (before, sent)
    assert snapshot_references(body) == ["tools"] and vpc_references(body) == ["backend"]
    assert snapshot_references(resolved) == ["sc-1"] and vpc_references(resolved) == ["vpc-1"]
    assert resolved["spec"]["snapshot"] == {"snapshotId": "sc-1", "vcpuCount": 2}


def test_none_is_left_out_except_for_the_idle_timeout() -> None:
    assert vm_body({"name": None, "users": None, "additional_files": {}}) == {}
    assert vm_body({"idle_timeout_seconds": None}) == {"idleTimeoutSeconds": None}
    assert vm_body({"idle_timeout_seconds": 60, "workdir": "/"}) == {
        "idleTimeoutSeconds": 60,
        "workdir": "/",
    }
