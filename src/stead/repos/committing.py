"""Commits through the API: atomic file changes on a branch with optimistic concurrency control."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stead.repos.errors import ConflictingParent, InvalidChange, RepoNotFound, TooLarge
from stead.repos.fast_import import Author, quoted, signed
from stead.repos.folders import folder_below, names_in
from stead.repos.model import Commit
from stead.repos.names import check_branch, check_path, check_sha
from stead.repos.quotas import QuotaReservation
from stead.repos.repository import ZERO_SHA, Repository

MAX_FILES = 10_000
MAX_BYTES = 256 << 20
_COST = 8192
"""Minimum bytes that a commit uses."""
_ATTEMPTS = 5
_FILE = "100644"
_KEPT_MODES = ("100644", "100755")
_FOLDER = "40000"
_QUARANTINE = "tmp_objdir-commit-"


@dataclass(frozen=True)
class Change:
    """The new content of a file; None deletes it."""

    path: str
    content: bytes | None


async def commit(
    repository: Repository,
    changes: Sequence[Change],
    message: str,
    *,
    branch: str | None = None,
    author: Author | None = None,
    expected: str | None = None,
    quota: QuotaReservation | None = None,
) -> Commit:
    """Commit changes to a branch; a missing branch is created.

    With `expected`, only if the branch is at that commit. The ref update is a compare-and-swap, so a
    concurrent push is never overwritten; without `expected` the commit is retried on top of it.
    """
    target = check_branch(branch or repository.default_branch)
    expected = expected and check_sha(expected)
    _check(changes)
    if quota is not None:
        await quota.reserve(_COST + sum(len(change.content or b"") for change in changes))
    for _ in range(_ATTEMPTS):
        parent = await repository.sha(f"refs/heads/{target}")
        if expected is not None and parent != expected:
            raise ConflictingParent(target, expected, parent)
        if parent is None and quota is not None:
            await quota.reserve_refs(1)
        modes = await _modes(repository, parent, changes)
        sha = await _write(repository, parent, changes, modes, message, author or Author())
        if await repository.move(target, sha, parent):
            return await repository.commit(sha)
        if quota is not None:
            quota.superseded.append((sha, None))
    raise ConflictingParent(target, parent or ZERO_SHA, await repository.sha(f"refs/heads/{target}"))


def _check(changes: Sequence[Change]) -> None:
    if len(changes) > MAX_FILES:
        raise TooLarge(f"too many files in one commit: {len(changes)} (max {MAX_FILES})")
    if sum(len(change.content or b"") for change in changes) > MAX_BYTES:
        raise TooLarge(f"commit too large (max {MAX_BYTES >> 20} MiB): push it with git")
    seen: set[str] = set()
    written = {check_path(change.path) for change in changes if change.content is not None}
    for change in changes:
        path = check_path(change.path)
        if path in seen:
            raise InvalidChange(path, "it is listed twice")
        seen.add(path)
        if change.content is not None and any(folder in written for folder in _parents(path)):
            raise InvalidChange(path, "a parent folder is written as a file in the same commit")


def _parents(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


async def _modes(repository: Repository, parent: str | None, changes: Sequence[Change]) -> dict[str, str]:
    """The current mode of each path. Changes that would implicitly delete other files are refused."""
    deleted = {change.path for change in changes if change.content is None}
    if parent is None:
        if deleted:
            raise InvalidChange(min(deleted), "no such file to delete")
        return {}
    entries: dict[str, dict[str, str]] = {}
    async with repository.reader() as reader:
        for change in changes:
            for folder in ("", *_parents(change.path)):
                if folder not in entries:
                    name = f"{parent}:{folder}" if folder else f"{parent}^{{tree}}"
                    found = (await reader.contents([name]))[0]
                    entries[folder] = _tree(found[1]) if found and found[0].kind == "tree" else {}
    modes: dict[str, str] = {}
    for change in changes:
        folder, _, name = change.path.rpartition("/")
        mode = entries[folder].get(name)
        if mode is not None:
            modes[change.path] = mode
        if change.content is None and (mode is None or mode == _FOLDER):
            raise InvalidChange(change.path, "no such file to delete")
        if change.content is not None and mode == _FOLDER:
            raise InvalidChange(change.path, "it is a folder")
        for above in _parents(change.path):
            outer, _, last = above.rpartition("/")
            if entries[outer].get(last, _FOLDER) != _FOLDER and above not in deleted:
                raise InvalidChange(change.path, f"{above} is a file")
    return modes


def _tree(data: bytes) -> dict[str, str]:
    """Names and modes in a tree object: a sequence of `mode name NUL id`."""
    entries = {}
    position = 0
    while position < len(data):
        end = data.index(b"\0", position)
        mode, _, name = data[position:end].partition(b" ")
        entries[name.decode(errors="surrogateescape")] = mode.decode()
        position = end + 21
    return entries


async def _write(
    repository: Repository,
    parent: str | None,
    changes: Sequence[Change],
    modes: dict[str, str],
    message: str,
    author: Author,
) -> str:
    """Write the commit's objects, all or none. No ref points to them yet."""
    # A temporary ref that fast-import resets before it exits, so it is never written.
    lines = [b"feature done\ncommit refs/stead/commit\nmark :1\n", signed(message, author)]
    if parent is not None:
        lines.append(f"from {parent}\n".encode())
    for change in sorted(changes, key=lambda change: change.content is not None):
        path = quoted(change.path)
        if change.content is None:
            lines.append(b"D " + path + b"\n")
            continue
        mode = modes.get(change.path, _FILE)
        mode = mode if mode in _KEPT_MODES else _FILE
        lines += [b"M ", mode.encode(), b" inline ", path, b"\ndata %d\n" % len(change.content)]
        lines += [change.content, b"\n"]
    lines.append(b"\nget-mark :1\nreset refs/stead/commit\n\ndone\n")
    with _quarantine(repository) as env:
        printed = await repository.run("fast-import", "--quiet", stdin=b"".join(lines), env=env)
    return check_sha(printed.split()[0].decode())


@contextlib.contextmanager
def _quarantine(repository: Repository) -> Iterator[Mapping[str, str]]:
    """Quarantine: objects written in this block are moved into the repository at its end, or removed."""
    objects = repository.path / "objects"
    name = f"{_QUARANTINE}{secrets.token_hex(8)}"
    try:
        with folder_below(repository.path, "objects") as parent:
            try:
                _make_for_owner(name, parent)
                yield {
                    "GIT_OBJECT_DIRECTORY": str(objects / name),
                    "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects),
                }
                with (
                    folder_below(repository.path, "objects", name, "pack") as new,
                    folder_below(repository.path, "objects", "pack") as packs,
                ):
                    # Move the pack before its index: readers that see an index expect its pack.
                    for packed in sorted(names_in(new), key=lambda packed: packed.endswith(".idx")):
                        os.rename(packed, packed, src_dir_fd=new, dst_dir_fd=packs)
            finally:
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
    except FileNotFoundError:
        raise RepoNotFound(repository.id) from None
    except BaseException:
        for report in repository.path.glob("fast_import_crash_*"):
            report.unlink(missing_ok=True)
        raise


def _make_for_owner(name: str, parent: int) -> None:
    """Make a folder that belongs to the owner of the folder above it."""
    owner = os.fstat(parent)
    os.mkdir(name, 0o755, dir_fd=parent)
    made = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        # The owner may have put another folder in its place, but none of the server's user.
        if os.fstat(made).st_uid == os.geteuid():
            os.fchown(made, owner.st_uid, owner.st_gid)
    finally:
        os.close(made)
