"""Processes of this test run alone: others on the host may do the same at the same time."""

import contextlib
import os
from collections import defaultdict
from pathlib import Path

from stead.processes import command_lines


def descendants() -> set[int]:
    """Processes that this process started, directly or through others."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        new = children.pop(waiting.pop(), [])
        found.update(new)
        waiting.extend(new)
    return found


def own_command_lines() -> dict[int, bytes]:
    """The arguments of all descendants of this process, joined by spaces."""
    own = descendants()
    return {pid: b" ".join(arguments) for pid, arguments in command_lines() if pid in own}
