"""Sync planner, as pure functions."""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.github.plan import Relation, Step, TrackedRef, plan, refs_of, was_recreated

MAIN, TOPIC, TAG = "refs/heads/main", "refs/heads/topic", "refs/tags/v1"
PLACES = (None, "a", "b", "c")
MIRRORED = {
    Step.PULL: Step.PUSH,
    Step.PUSH: Step.PULL,
    Step.DELETE_HERE: Step.DELETE_THERE,
    Step.DELETE_THERE: Step.DELETE_HERE,
}


def step(name: str, base: str | None, here: str | None, there: str | None, relation: Relation) -> Step:
    ref = TrackedRef(name, base, here, there)
    (decision,) = plan([ref], {name: relation}, MAIN)
    assert (decision.reason is not None) == (decision.step is Step.CONFLICT)
    return decision.step


ALL = list(itertools.product(PLACES, PLACES, PLACES, Relation))


@pytest.mark.parametrize("name", [TOPIC, TAG])
def test_plan_never_loses_commits(name: str) -> None:
    for base, here, there, relation in ALL:
        match step(name, base, here, there, relation):
            case Step.PULL if here is not None:
                assert name == TOPIC and relation is Relation.BEHIND
            case Step.PUSH if there is not None:
                assert name == TOPIC and relation is Relation.AHEAD


@pytest.mark.parametrize("name", [TOPIC, TAG])
def test_plan_deletes_only_synced_refs(name: str) -> None:
    for base, here, there, relation in ALL:
        match step(name, base, here, there, relation):
            case Step.DELETE_HERE:
                assert there is None and here == base and base is not None
            case Step.DELETE_THERE:
                assert here is None and there == base and base is not None


@pytest.mark.parametrize("name", [TOPIC, TAG])
def test_one_sided_change_is_applied(name: str) -> None:
    for base, here, there, relation in ALL:
        found = step(name, base, here, there, relation)
        if here == there:
            assert found is Step.KEEP
        elif here == base and (there is None or here is None):
            assert found is (Step.DELETE_HERE if there is None else Step.PULL)
        elif here == base and name == TOPIC:
            assert found is (Step.PULL if relation is Relation.BEHIND else Step.CONFLICT)


@pytest.mark.parametrize("name", [TOPIC, TAG])
def test_plan_is_symmetric(name: str) -> None:
    other = {Relation.AHEAD: Relation.BEHIND, Relation.BEHIND: Relation.AHEAD, Relation.APART: Relation.APART}
    for base, here, there, relation in ALL:
        found = step(name, base, here, there, relation)
        mirrored = step(name, base, there, here, other[relation])
        assert mirrored is MIRRORED.get(found, found)


def decided(base: dict[str, str], here: dict[str, str], there: dict[str, str]) -> dict[str, tuple[Step, str]]:
    found = plan(refs_of(base, here, there), {}, MAIN)
    return {each.ref.name: (each.step, each.reason or "") for each in found}


def test_plan_keeps_the_default_branch() -> None:
    there = {TOPIC: "a"}
    found = decided({MAIN: "a", TOPIC: "a"}, {MAIN: "a", TOPIC: "a"}, there)
    assert found[MAIN][0] is Step.CONFLICT and "default branch" in found[MAIN][1]


def test_emptied_side_resets_the_base() -> None:
    full = {MAIN: "a", TOPIC: "b", TAG: "b"}
    for side in ({}, {MAIN.replace("main", "trunk"): "z"}):
        assert was_recreated(full, full, side) and was_recreated(full, side, full)
    for side in (full, {TOPIC: "z"}, {MAIN.replace("main", "renamed"): "a"}):
        assert not was_recreated(full, full, side) and not was_recreated(full, side, full)
    assert not was_recreated({}, {}, full)


def test_name_conflicts_are_left() -> None:
    inner = "refs/heads/topic/inner"
    found = decided({}, {TOPIC: "a"}, {inner: "a"})
    assert found[TOPIC][0] is found[inner][0] is Step.CONFLICT
    assert "conflicts with" in found[inner][1]
    # A deletion frees its name at once.
    base = {MAIN: "a", TOPIC: "a"}
    found = decided(base, base, {MAIN: "a", inner: "a"})
    assert (found[TOPIC][0], found[inner][0]) == (Step.DELETE_HERE, Step.PULL)


def test_invalid_ref_names_are_left() -> None:
    odd = f"refs/heads/{'x' * 260}"
    found = decided({}, {}, {MAIN: "a", odd: "a"})
    assert found[odd][0] is Step.CONFLICT and found[MAIN][0] is Step.PULL


# Random sequences of changes


@dataclass
class Sides:
    """Two repositories with a shared history; commits are numbers with one parent each."""

    parents: dict[str, str | None] = field(default_factory=lambda: {"0": None})
    here: dict[str, str] = field(default_factory=dict)
    there: dict[str, str] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)

    def ancestors(self, commit: str | None) -> set[str]:
        found = set()
        while commit is not None:
            found.add(commit)
            commit = self.parents[commit]
        return found

    def relation(self, ref: TrackedRef) -> Relation:
        if ref.there in self.ancestors(ref.here):
            return Relation.AHEAD
        return Relation.BEHIND if ref.here in self.ancestors(ref.there) else Relation.APART

    def sync(self) -> set[str]:
        """Apply the plan; returns the names of conflicts."""
        if was_recreated(self.base, self.here, self.there):
            self.base = {}
        refs = refs_of(self.base, self.here, self.there)
        relations = {ref.name: self.relation(ref) for ref in refs if ref.needs_history}
        left = set()
        for each in plan(refs, relations, MAIN):
            name = each.ref.name
            match each.step:
                case Step.CONFLICT:
                    left.add(name)
                    continue
                case Step.PULL:
                    self.move(self.here, name, self.there[name])
                case Step.PUSH:
                    self.move(self.there, name, self.here[name])
                case Step.DELETE_HERE:
                    del self.here[name]
                case Step.DELETE_THERE:
                    del self.there[name]
            self.base.pop(name, None)
            if name in self.here:
                self.base[name] = self.here[name]
        return left

    def move(self, side: dict[str, str], name: str, commit: str) -> None:
        """Sync moves a ref: it must not lose commits."""
        if name in side:
            assert name.startswith("refs/heads/") and side[name] in self.ancestors(commit)
        side[name] = commit


CHANGES = st.tuples(
    st.sampled_from(["here", "there"]),
    st.sampled_from([MAIN, TOPIC, TAG]),
    st.sampled_from(["commit", "reset", "delete", "copy", "sync"]),
    st.integers(0, 20),
)


@given(st.lists(CHANGES, max_size=25))
def test_sync_converges_after_any_changes(
    changes: list[tuple[str, str, str, int]],
) -> None:
    sides = Sides()
    for place, name, what, number in changes:
        side = sides.here if place == "here" else sides.there
        match what:
            case "commit":
                commit = str(len(sides.parents))
                sides.parents[commit] = side.get(name)
                side[name] = commit
            case "reset":
                side[name] = list(sides.parents)[number % len(sides.parents)]
            case "delete":
                side.pop(name, None)
            case "copy" if side:
                side[name] = side[sorted(side)[number % len(side)]]
            case "sync":
                sides.sync()
    for _ in range(3):
        before = dict(sides.here), dict(sides.there)
        left = sides.sync()
        both = sides.here.keys() | sides.there.keys()
        assert {name for name in both if sides.here.get(name) != sides.there.get(name)} == left
        if (sides.here, sides.there) == before:
            break
    # Deleting the last branch empties a side: then the two are joined, and nothing more is applied.
    assert (sides.here, sides.there) == before
    assert sides.sync() == left
    assert (sides.here, sides.there) == before
