"""Sync planner: a three-way comparison of refs. Pure functions without IO.

Each ref has three values: here, there, and in the base (when both were last equal). A ref changed on one side
only is applied to the other. Refs never lose commits: those changed on both sides, rewritten or moved back
are conflicts that a person has to resolve.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from stead.repos.names import is_ref
from stead.repos.transfer.remotes import BRANCHES, TAGS

Refs = Mapping[str, str]
"""Commits of refs by full name."""


class Relation(StrEnum):
    """The relation of the commit here to the one there."""

    AHEAD = "ahead"
    BEHIND = "behind"
    APART = "apart"


class Step(StrEnum):
    KEEP = "keep"
    PULL = "pull"
    """Update the ref here."""
    PUSH = "push"
    DELETE_HERE = "delete_here"
    DELETE_THERE = "delete_there"
    CONFLICT = "conflict"
    """Conflict: needs a person's decision."""


@dataclass(frozen=True)
class TrackedRef:
    """A ref and its commits; None where it does not exist."""

    name: str
    base: str | None
    here: str | None
    there: str | None

    @property
    def is_branch(self) -> bool:
        return self.name.startswith(BRANCHES)

    @property
    def needs_history(self) -> bool:
        """Whether the decision depends on the relation of the two commits."""
        return self.is_branch and self.here is not None and self.there is not None and self.here != self.there


@dataclass(frozen=True)
class Decision:
    ref: TrackedRef
    step: Step
    reason: str | None = None
    """The reason of a conflict."""


def refs_of(base: Refs, here: Refs, there: Refs) -> list[TrackedRef]:
    """All branches and tags of either side or of the base."""
    return [
        TrackedRef(name, base.get(name), here.get(name), there.get(name))
        for name in sorted({*base, *here, *there})
        if name.startswith((BRANCHES, TAGS))
    ]


def was_recreated(base: Refs, here: Refs, there: Refs) -> bool:
    """Whether a side has nothing left of the base: no name, and no commit under another name.

    Then it was emptied or recreated, and missing refs are not deletions. The base is dropped, and both sides
    are joined as in the first sync, which deletes nothing.
    """
    commits = set(base.values())
    return any(
        base and base.keys().isdisjoint(side) and commits.isdisjoint(side.values()) for side in (here, there)
    )


def plan(refs: Iterable[TrackedRef], relations: Mapping[str, Relation], default: str) -> list[Decision]:
    """The decision for each ref; `relations` has those of the refs that need them, by name.

    `default` is the full name of the default branch here, which is never deleted.
    """
    decisions = [_keep_default(_decide(ref, relations.get(ref.name)), default) for ref in refs]
    # Deletions first: they free names.
    here = {each.ref.name for each in decisions if each.ref.here and each.step is not Step.DELETE_HERE}
    there = {each.ref.name for each in decisions if each.ref.there and each.step is not Step.DELETE_THERE}
    return list(_without_name_conflicts(decisions, here, there))


def _decide(ref: TrackedRef, relation: Relation | None) -> Decision:
    if ref.here == ref.there:
        return Decision(ref, Step.KEEP)
    if ref.here == ref.base:
        return _follow_there(ref, relation)
    if ref.there == ref.base:
        return _follow_here(ref, relation)
    if ref.here is None or ref.there is None:
        where, other = ("here", "on GitHub") if ref.here is None else ("on GitHub", "here")
        return Decision(ref, Step.CONFLICT, f"deleted {where} and changed {other}")
    if ref.is_branch and relation is Relation.AHEAD:
        return Decision(ref, Step.PUSH)
    if ref.is_branch and relation is Relation.BEHIND:
        return Decision(ref, Step.PULL)
    return Decision(ref, Step.CONFLICT, "changed on both sides")


def _follow_there(ref: TrackedRef, relation: Relation | None) -> Decision:
    if ref.there is None:
        return Decision(ref, Step.DELETE_HERE)
    if ref.here is None or (ref.is_branch and relation is Relation.BEHIND):
        return Decision(ref, Step.PULL)
    return Decision(ref, Step.CONFLICT, _moved(ref, relation, "on GitHub"))


def _follow_here(ref: TrackedRef, relation: Relation | None) -> Decision:
    if ref.here is None:
        return Decision(ref, Step.DELETE_THERE)
    if ref.there is None or (ref.is_branch and relation is Relation.AHEAD):
        return Decision(ref, Step.PUSH)
    return Decision(ref, Step.CONFLICT, _moved(ref, relation, "here"))


def _moved(ref: TrackedRef, relation: Relation | None, where: str) -> str:
    if not ref.is_branch:
        return f"tag moved {where}"
    return f"{'rewritten' if relation is Relation.APART else 'moved back'} {where}"


def _keep_default(decision: Decision, default: str) -> Decision:
    if decision.step is Step.DELETE_HERE and decision.ref.name == default:
        return Decision(decision.ref, Step.CONFLICT, "deleted on GitHub, but it is the default branch here")
    return decision


def _without_name_conflicts(
    decisions: Iterable[Decision], here: Collection[str], there: Collection[str]
) -> Iterable[Decision]:
    """Turn new refs with a name conflict into conflicts: `a` and `a/b` cannot both exist."""
    folders_here, folders_there = _folders(here), _folders(there)
    for decision in decisions:
        ref = decision.ref
        if decision.step is Step.PULL and not is_ref(ref.name.split("/", 2)[2]):
            yield Decision(ref, Step.CONFLICT, "invalid ref name")
        elif (
            decision.step is Step.PULL
            and ref.here is None
            and _has_name_conflict(ref.name, here, folders_here)
        ):
            yield Decision(ref, Step.CONFLICT, "its name conflicts with another ref here")
        elif (
            decision.step is Step.PUSH
            and ref.there is None
            and _has_name_conflict(ref.name, there, folders_there)
        ):
            yield Decision(ref, Step.CONFLICT, "its name conflicts with another ref on GitHub")
        else:
            yield decision


def _folders(names: Iterable[str]) -> set[str]:
    return {folder for name in names for folder in _parents(name)}


def _has_name_conflict(name: str, names: Collection[str], folders: Collection[str]) -> bool:
    return name in folders or any(folder in names for folder in _parents(name))


def _parents(name: str) -> Iterable[str]:
    parts = name.split("/")
    return ("/".join(parts[:depth]) for depth in range(3, len(parts)))
