"""The commands of the command line, from its command tree."""

from collections.abc import Collection, Iterator
from typing import Any

from stead.cli.commands import ENTRIES, _loaded


def cli_commands(without: Collection[str] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, with its words, but for those below the names `without`."""

    def below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        children = getattr(command, "commands", None)
        if children is None:
            yield words, command
        for name, child in (children or {}).items():
            yield from below((*words, name), child)

    for name in ENTRIES:
        if name not in without:
            yield from below((name,), _loaded(name))
