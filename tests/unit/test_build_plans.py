"""Layers of a spec: their cache keys, and what is built of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.builds.errors import InvalidSpec
from stead.builds.plan import Base, plan_machine, plan_snapshot
from stead.builds.setup import planned
from stead.builds.spec import Clone, File, GitUser, Layer, Port, Service, User, combine, layer_hash
from stead.settings import Size

SNAPSHOT = "sc-" + "a" * 20


# Cache keys
LAYERS = st.builds(
    Layer,
    files=st.lists(st.builds(File, st.sampled_from(["/a", "/b"]), st.binary(max_size=4), st.booleans())).map(
        tuple
    ),
    packages=st.lists(st.sampled_from(["git", "tree"]), max_size=2).map(tuple),
    users=st.lists(st.builds(User, st.sampled_from(["a", "b"]), st.none() | st.integers(0, 9))).map(tuple),
    discriminator=st.none() | st.text(max_size=2),
)


@given(LAYERS, LAYERS)
def test_equal_layers_and_no_others_have_the_same_hash(one: Layer, other: Layer) -> None:
    same = layer_hash("account", "base", one) == layer_hash("account", "base", other)
    assert same == (one == other)


def test_layer_hash_covers_content_and_nothing_else() -> None:
    layer = Layer(
        packages=("git",),
        files=(File("/a", b"b"),),
        services=(Service("web", exec=("a",), env={"B": "1", "A": "2"}),),
        workdir="/srv",
    )
    own = layer_hash("account", "base", layer)
    assert own != layer_hash("another", "base", layer)
    assert own != layer_hash("account", "base built anew", layer)
    different: list[dict[str, Any]] = [
        {"packages": ("tree",)},
        {"files": (File("/a", b"c"),)},
        {"files": (File("/a", b"b", executable=True),)},
        {"services": (Service("web", exec=("a",), env={"B": "1"}),)},
        {"services": (*layer.services, Service("db", exec=("a",)))},
        {"workdir": "/"},
        {"git_user": GitUser("a")},
        {"repositories": (Clone("https://a/b", "/a"),)},
        {"repositories": (Clone("https://a/b", "/a", "main"),)},
        {"discriminator": "x"},
        {"commands": ("true",)},
    ]
    hashes = {layer_hash("account", "base", replace(layer, **each)) for each in different}
    assert len(hashes | {own}) == len(different) + 1
    alike: list[dict[str, Any]] = [
        {"skip_cache": True},
        {"ports": (Port(443, 1),)},
        {"idle_timeout": 7},
        {"wait_for_ready": True},
        {"ready_timeout": 7.0},
        {"services": (Service("web", exec=("a",), env={"A": "2", "B": "1"}),)},
    ]
    for each in alike:
        assert layer_hash("account", "base", replace(layer, **each)) == own


# Plans


def test_all_layers_of_a_spec_but_the_outermost_are_built() -> None:
    inner = Layer(vcpus=2, packages=("git",), workdir="/inner", idle_timeout=10)
    middle = Layer(snapshot=inner, users=(User("a"),))
    outer = Layer(snapshot=middle, users=(User("b"), User("c", 7)), ready_timeout=5)
    top = Layer(users=(User("c", 8),), vcpus=8, idle_timeout=None, wait_for_ready=True)
    plan = plan_machine(outer, None, top)
    assert plan.base == Base(None, vcpus=2)
    assert plan.base.size(Size(4, 1024, 20)) == Size(2, 1024, 20)
    assert [planned(layer) for layer in plan.layers] == [("packages", "repositories"), ("users",)]
    assert plan.own.users == (User("b"), User("c", 8))
    assert (plan.workdir, plan.idle_timeout) == ("/inner", None)
    assert (plan.wait_for_ready, plan.ready_timeout) == (True, 5)


def test_all_layers_of_a_template_are_built() -> None:
    template = Layer(snapshot_id=SNAPSHOT, vcpus=2, packages=("git",), workdir="/t")
    plan = plan_machine(None, template, Layer(files=(File("/a"),)))
    assert plan.base == Base(SNAPSHOT, vcpus=2)
    assert [planned(layer) for layer in plan.layers] == [("packages", "repositories")]
    assert planned(plan.own) == ("files",)
    assert plan.workdir == "/t"
    assert [
        planned(layer) for layer in plan_snapshot(Layer(snapshot=template, users=(User("a"),))).layers
    ] == [
        ("packages", "repositories"),
        ("users",),
    ]


def test_the_base_snapshot_can_be_given_in_three_places() -> None:
    for spec, template, top in (
        (None, None, Layer(snapshot_id=SNAPSHOT)),
        (Layer(snapshot_id=SNAPSHOT), None, Layer()),
        (Layer(), None, Layer(snapshot_id=SNAPSHOT)),
        (None, Layer(snapshot_id=SNAPSHOT), Layer(snapshot_id=SNAPSHOT)),
        (Layer(snapshot=Layer(snapshot_id=SNAPSHOT)), None, Layer()),
    ):
        plan = plan_machine(spec, template, top)
        assert plan.base.snapshot == SNAPSHOT
        assert not plan.own.work
    for spec, template, top in (
        (Layer(), Layer(), Layer()),
        (Layer(snapshot_id=SNAPSHOT), None, Layer(snapshot_id="sc-" + "b" * 20)),
        (Layer(base_image="FROM debian:trixie-slim"), None, Layer(snapshot_id=SNAPSHOT)),
    ):
        with pytest.raises(InvalidSpec) as raised:
            plan_machine(spec, template, top)
        assert raised.value.rule == "conflicting_sources"


def test_the_upper_layer_wins_when_layers_are_combined() -> None:
    below = Layer(
        files=(File("/a", b"1"), File("/b", b"1")), packages=("git",), workdir="/below", skip_cache=True
    )
    above = Layer(files=(File("/b", b"2"),), packages=("git", "tree"))
    both = combine(below, above)
    assert both.files == (File("/a", b"1"), File("/b", b"2"))
    assert both.packages == ("git", "tree")
    assert (both.workdir, both.skip_cache) == ("/below", True)


def test_a_layer_without_changes_has_no_phases() -> None:
    for layer in (
        Layer(),
        Layer(workdir="/", git_user=GitUser(), discriminator="x", skip_cache=True, ports=(), idle_timeout=5),
    ):
        assert not layer.work
        assert planned(layer) == ()
