"""One sync run between a repository and its remote: fetch, plan, update refs here, push there.

Hidden refs record the remote's refs as last fetched, and the base: the refs as they were when both sides were
last equal. The base is updated in one transaction with the refs that follow the remote; after a push it is
updated later, and a crash in between only means that both sides are found equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stead.github.plan import Decision, Refs, Relation, Step, TrackedRef, plan, refs_of, was_recreated
from stead.repos.errors import TooLarge
from stead.repos.git import TIMEOUT
from stead.repos.git_messages import GitMessage
from stead.repos.lfs.client import LfsClient
from stead.repos.quotas import QuotaReservation
from stead.repos.repository import MAX_REFS, RefChange, Repository
from stead.repos.transfer.remotes import BRANCHES, TAGS, Remote, Remotes
from stead.repos.writer import Write

HIDDEN = "refs/stead/github/"
_THERE, _BASE = f"{HIDDEN}there/", f"{HIDDEN}base/"
_OURS = "refs/"
_ROUNDS = 5
_AT_ONCE = 200
"""Refs per push: their names are arguments of git."""
_CHANGES_HERE = (Step.PULL, Step.DELETE_HERE)


@dataclass(frozen=True)
class RefConflict:
    """A ref that could not be synced and needs a person's decision."""

    ref: str
    here: str | None
    there: str | None
    reason: str


@dataclass(frozen=True)
class SyncResult:
    conflicts: Sequence[RefConflict]
    settled: bool
    """False if one side kept changing during the run."""


@dataclass(frozen=True)
class _SyncState:
    """The refs of both sides and of the base."""

    here: Refs
    there: Refs
    base: Refs


async def sync_refs(
    repository: Repository,
    remotes: Remotes,
    url: str,
    write: Write,
    large_files: LfsClient,
) -> SyncResult:
    """Sync both sides until there is nothing left to do.

    `url` has the credentials in it. The default branch of an empty repository becomes the remote's.
    """
    for _ in range(_ROUNDS):
        remote = await remotes.open(repository, url, None)
        seen = await _fetch_state(repository, remotes, remote)
        decisions = await _decide(repository, seen)
        # LFS objects first, in both directions: a visible commit must have its objects.
        pulled = [each.ref.there for each in decisions if each.step is Step.PULL and each.ref.there]
        await large_files.download(remote, pulled, seen.here.values())
        unmoved_here = await _apply_here(repository, decisions, write.quota)
        if any(each.step in _CHANGES_HERE for each in decisions):
            await write.refs_changed()
        if not seen.here and remote.head is not None and f"{BRANCHES}{remote.head}" in seen.there:
            await repository.set_default_branch(remote.head)
        to_push = [each.ref.here for each in decisions if each.step is Step.PUSH and each.ref.here]
        await large_files.upload(remote, to_push, seen.there.values())
        pushed, rejected = await _push(repository, remotes, remote, decisions)
        if settled := unmoved_here and pushed:
            break
    conflicts = [
        RefConflict(each.ref.name, each.ref.here, each.ref.there, each.reason)
        for each in decisions
        if each.reason
    ]
    return SyncResult([*conflicts, *rejected], settled)


async def remove_hidden_refs(repository: Repository) -> None:
    """Remove what syncs recorded in the repository."""
    refs = await _refs(repository, HIDDEN)
    await repository.change([RefChange(name, None, guarded=False) for name in refs])


async def _fetch_state(repository: Repository, remotes: Remotes, remote: Remote) -> _SyncState:
    """Fetch, and read the refs of both sides."""
    offered = {name: sha for name, sha in remote.refs.items() if name.startswith((BRANCHES, TAGS))}
    if len(offered) > MAX_REFS:
        raise TooLarge(f"{remote.url} has too many branches and tags (max {MAX_REFS})")
    seen = await _read_state(repository)
    if offered == seen.there:
        return seen
    refspecs = [f"+{kind}*:{_hidden_ref(_THERE, kind)}*" for kind in (BRANCHES, TAGS)]
    await remotes.fetch(repository, remote, refspecs, None, "--no-tags", "--prune")
    return await _read_state(repository)


async def _read_state(repository: Repository) -> _SyncState:
    found = await _refs(repository, BRANCHES, TAGS, HIDDEN)

    def below(prefix: str) -> Refs:
        return {
            _OURS + name.removeprefix(prefix): sha for name, sha in found.items() if name.startswith(prefix)
        }

    here = {name: sha for name, sha in found.items() if not name.startswith(HIDDEN)}
    return _SyncState(here, below(_THERE), below(_BASE))


async def _refs(repository: Repository, *prefixes: str) -> dict[str, str]:
    form = "--format=%(refname)%00%(objectname)"
    printed = await repository.run("for-each-ref", form, *prefixes)
    return dict(line.split("\0") for line in printed.decode().splitlines())


def _hidden_ref(prefix: str, name: str) -> str:
    return prefix + name.removeprefix(_OURS)


async def _decide(repository: Repository, seen: _SyncState) -> list[Decision]:
    base = seen.base
    if was_recreated(base, seen.here, seen.there):
        # Reset the base before anything else: an interrupted join must not look like deletions.
        await _apply(repository, [RefChange(_hidden_ref(_BASE, name), None, guarded=False) for name in base])
        base = {}
    refs = refs_of(base, seen.here, seen.there)
    relations = {ref.name: await _relation(repository, ref) for ref in refs if ref.needs_history}
    return plan(refs, relations, BRANCHES + repository.default_branch)


async def _relation(repository: Repository, ref: TrackedRef) -> Relation:
    """The relation of a ref's two commits; walks the history only as far as needed."""
    for older, newer, relation in (
        (ref.there, ref.here, Relation.AHEAD),
        (ref.here, ref.there, Relation.BEHIND),
    ):
        arguments = "merge-base", "--is-ancestor", str(older), str(newer)
        finished = await repository.finish(*arguments, timeout=TIMEOUT)
        if finished.status == 0:
            return relation
    return Relation.APART


async def _apply_here(repository: Repository, decisions: Sequence[Decision], quota: QuotaReservation) -> bool:
    """Apply the remote's changes here; returns whether nothing had changed here meanwhile."""
    await quota.reserve_refs(sum(each.step is Step.PULL and each.ref.here is None for each in decisions))
    changes: list[RefChange] = []
    for decision in decisions:
        ref = decision.ref
        if decision.step in _CHANGES_HERE:
            changes.append(RefChange(ref.name, ref.there, ref.here))
        if decision.step in _CHANGES_HERE or (decision.step is Step.KEEP and ref.base != ref.here):
            changes.append(RefChange(_hidden_ref(_BASE, ref.name), ref.there, guarded=False))
        if decision.step is Step.DELETE_HERE and ref.here is not None:
            quota.superseded.append((ref.here, None))
    return await _apply(repository, changes)


async def _push(
    repository: Repository, remotes: Remotes, remote: Remote, decisions: Sequence[Decision]
) -> tuple[bool, list[RefConflict]]:
    """Push local changes to the remote.

    Returns whether nothing had changed there meanwhile, and the rejected refs.
    """
    to_push = [each.ref for each in decisions if each.step is Step.PUSH]
    to_delete = [each.ref for each in decisions if each.step is Step.DELETE_THERE]
    rejections: dict[str, str | None] = {}
    for batch in _batches(to_delete):
        # The lease prevents the deletion of a branch that moved meanwhile.
        leases = [f"--force-with-lease={ref.name}:{ref.there}" for ref in batch]
        rejections |= await remotes.push(repository, remote, [f":{ref.name}" for ref in batch], *leases)
    for batch in _batches(to_push):
        rejections |= await remotes.push(repository, remote, [f"{ref.here}:{ref.name}" for ref in batch])
    unmoved = True
    conflicts: list[RefConflict] = []
    synced: list[RefChange] = []
    for ref in (*to_delete, *to_push):
        why = rejections.get(ref.name, "no answer")
        if why is None:
            synced += [
                RefChange(_hidden_ref(side, ref.name), ref.here, guarded=False) for side in (_BASE, _THERE)
            ]
        elif GitMessage.REMOTE_REF_MOVED.found_in(why):
            unmoved = False
        else:
            conflicts.append(RefConflict(ref.name, ref.here, ref.there, f"GitHub rejected it: {why}"))
    return await _apply(repository, synced) and unmoved, conflicts


def _batches(refs: Sequence[TrackedRef]) -> Iterator[Sequence[TrackedRef]]:
    return (refs[start : start + _AT_ONCE] for start in range(0, len(refs), _AT_ONCE))


async def _apply(repository: Repository, changes: Sequence[RefChange]) -> bool:
    """Apply ref changes, deletions first: they resolve name conflicts."""
    parts = [each for each in changes if each.new is None], [each for each in changes if each.new is not None]
    done = [await repository.change(part) for part in parts if part]
    return all(done)
