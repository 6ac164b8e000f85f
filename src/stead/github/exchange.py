"""Two repositories brought into step: what is new on one side goes to the other, and nothing is lost.

Beside a repository's own refs are kept, where no client sees them, those of the other side as they were last
fetched, and those that were in step. The latter move in one transaction with the refs that follow the other
side; after a push they move later, and a crash in between only means that both sides are found to be equal.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from stead.github.plan import Decision, Ref, Refs, Relation, Step, made_anew, plan, refs_of
from stead.repos.errors import TooLarge
from stead.repos.git import TIMEOUT
from stead.repos.lfs_exchange import LfsExchange
from stead.repos.quotas import Writing
from stead.repos.remotes import BRANCHES, TAGS, Remote, Remotes
from stead.repos.repository import MAX_REFS, RefChange, Repository

ASIDE = "refs/stead/github/"
_THERE, _BASE = f"{ASIDE}there/", f"{ASIDE}base/"
_OURS = "refs/"
_ROUNDS = 5
_AT_ONCE = 200
"""Refs in one push: their names are arguments of git."""
_CHANGES_HERE = (Step.PULL, Step.DELETE_HERE)
_MOVED = ("non-fast-forward", "fetch first", "stale info", "already exists", "needs force")
"""Why git does not push when the other side has changed meanwhile."""


@dataclass(frozen=True)
class Left:
    """A ref that is not in step, and that people have to look at."""

    ref: str
    here: str | None
    there: str | None
    reason: str


@dataclass(frozen=True)
class Outcome:
    left: Sequence[Left]
    settled: bool
    """Otherwise one of the sides changed again and again meanwhile."""


@dataclass(frozen=True)
class _Seen:
    """The refs of both sides, and those that were in step."""

    here: Refs
    there: Refs
    base: Refs


async def bring_into_step(
    repository: Repository,
    remotes: Remotes,
    url: str,
    writing: Writing,
    large_files: LfsExchange,
    followed: Callable[[], Awaitable[None]],
) -> Outcome:
    """Follow on each side what the other has changed, until there is nothing more to do.

    `url` has the credentials in it; `followed` is told when something has changed here. The default branch
    of an empty repository becomes the other side's.
    """
    for _ in range(_ROUNDS):
        remote = await remotes.open(repository, url, None)
        seen = await _look(repository, remotes, remote)
        decisions = await _decide(repository, seen)
        # Whoever reads a commit finds its large files: they come first, on both ways.
        taken = [each.ref.there for each in decisions if each.step is Step.PULL and each.ref.there]
        await large_files.take(remote, taken, seen.here.values())
        undisturbed = await _follow(repository, decisions, writing)
        if any(each.step in _CHANGES_HERE for each in decisions):
            await followed()
        if not seen.here and remote.head is not None and f"{BRANCHES}{remote.head}" in seen.there:
            await repository.set_default_branch(remote.head)
        given = [each.ref.here for each in decisions if each.step is Step.PUSH and each.ref.here]
        await large_files.give(remote, given, seen.there.values())
        pushed, rejected = await _push(repository, remotes, remote, decisions)
        if settled := undisturbed and pushed:
            break
    left = [
        Left(each.ref.name, each.ref.here, each.ref.there, each.reason) for each in decisions if each.reason
    ]
    return Outcome([*left, *rejected], settled)


async def forget(repository: Repository) -> None:
    """Remove what is kept beside the repository's own refs."""
    refs = await _refs(repository, ASIDE)
    await repository.change([RefChange(name, None, guarded=False) for name in refs])


async def _look(repository: Repository, remotes: Remotes, remote: Remote) -> _Seen:
    """How both sides are, with all commits of the other at hand."""
    offered = {name: sha for name, sha in remote.refs.items() if name.startswith((BRANCHES, TAGS))}
    if len(offered) > MAX_REFS:
        raise TooLarge(f"{remote.url} has too many branches and tags (max {MAX_REFS})")
    seen = await _seen(repository)
    if offered == seen.there:
        return seen
    refspecs = [f"+{kind}*:{_aside(_THERE, kind)}*" for kind in (BRANCHES, TAGS)]
    await remotes.fetch(repository, remote, refspecs, None, "--no-tags", "--prune")
    return await _seen(repository)


async def _seen(repository: Repository) -> _Seen:
    found = await _refs(repository, BRANCHES, TAGS, ASIDE)

    def below(prefix: str) -> Refs:
        return {
            _OURS + name.removeprefix(prefix): sha for name, sha in found.items() if name.startswith(prefix)
        }

    here = {name: sha for name, sha in found.items() if not name.startswith(ASIDE)}
    return _Seen(here, below(_THERE), below(_BASE))


async def _refs(repository: Repository, *prefixes: str) -> dict[str, str]:
    form = "--format=%(refname)%00%(objectname)"
    printed = await repository.git.run(repository.path, "for-each-ref", form, *prefixes)
    return dict(line.split("\0") for line in printed.decode().splitlines())


def _aside(prefix: str, name: str) -> str:
    return prefix + name.removeprefix(_OURS)


async def _decide(repository: Repository, seen: _Seen) -> list[Decision]:
    base = seen.base
    if made_anew(base, seen.here, seen.there):
        # Before anything else: what is joined half way must not look as if the rest had been deleted.
        await _change(repository, [RefChange(_aside(_BASE, name), None, guarded=False) for name in base])
        base = {}
    refs = refs_of(base, seen.here, seen.there)
    relations = {ref.name: await _relation(repository, ref) for ref in refs if ref.needs_history}
    return plan(refs, relations, BRANCHES + repository.default_branch)


async def _relation(repository: Repository, ref: Ref) -> Relation:
    """How the commits of a ref are related; the nearer side of a history is walked through, no more."""
    for older, newer, relation in (
        (ref.there, ref.here, Relation.AHEAD),
        (ref.here, ref.there, Relation.BEHIND),
    ):
        arguments = "merge-base", "--is-ancestor", str(older), str(newer)
        finished = await repository.git.finish(repository.path, *arguments, timeout=TIMEOUT)
        if finished.status == 0:
            return relation
    return Relation.APART


async def _follow(repository: Repository, decisions: Sequence[Decision], writing: Writing) -> bool:
    """What the other side has done is done here; tells whether nothing had changed here meanwhile."""
    await writing.make_refs(sum(each.step is Step.PULL and each.ref.here is None for each in decisions))
    changes: list[RefChange] = []
    for decision in decisions:
        ref = decision.ref
        if decision.step in _CHANGES_HERE:
            changes.append(RefChange(ref.name, ref.there, ref.here))
        if decision.step in _CHANGES_HERE or (decision.step is Step.KEEP and ref.base != ref.here):
            changes.append(RefChange(_aside(_BASE, ref.name), ref.there, guarded=False))
        if decision.step is Step.DELETE_HERE and ref.here is not None:
            writing.left_behind.append((ref.here, None))
    return await _change(repository, changes)


async def _push(
    repository: Repository, remotes: Remotes, remote: Remote, decisions: Sequence[Decision]
) -> tuple[bool, list[Left]]:
    """What was done here is done on the other side.

    Tells whether nothing had changed there meanwhile, and what is not taken there.
    """
    given = [each.ref for each in decisions if each.step is Step.PUSH]
    deleted = [each.ref for each in decisions if each.step is Step.DELETE_THERE]
    told: dict[str, str | None] = {}
    for some in _parts(deleted):
        # The lease is the opposite of force here: a branch that has moved meanwhile is not deleted.
        leases = [f"--force-with-lease={ref.name}:{ref.there}" for ref in some]
        told |= await remotes.push(repository, remote, [f":{ref.name}" for ref in some], *leases)
    for some in _parts(given):
        told |= await remotes.push(repository, remote, [f"{ref.here}:{ref.name}" for ref in some])
    still = True
    left: list[Left] = []
    taken: list[RefChange] = []
    for ref in (*deleted, *given):
        why = told.get(ref.name, "no answer")
        if why is None:
            taken += [RefChange(_aside(side, ref.name), ref.here, guarded=False) for side in (_BASE, _THERE)]
        elif any(words in why for words in _MOVED):
            still = False
        else:
            left.append(Left(ref.name, ref.here, ref.there, f"GitHub rejected it: {why}"))
    return await _change(repository, taken) and still, left


def _parts(refs: Sequence[Ref]) -> Iterator[Sequence[Ref]]:
    return (refs[start : start + _AT_ONCE] for start in range(0, len(refs), _AT_ONCE))


async def _change(repository: Repository, changes: Sequence[RefChange]) -> bool:
    """Deletions go first: names that were in the way are then not there any more."""
    parts = [each for each in changes if each.new is None], [each for each in changes if each.new is not None]
    done = [await repository.change(part) for part in parts if part]
    return all(done)
