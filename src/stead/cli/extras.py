"""The extras of the package. Without one, Stead is installed as the client: the SDK and the CLI."""

import re
from typing import Literal

Extra = Literal["server", "mcp", "openai-agents"]

_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?\s*([^;]*);\s*extra == ['\"]([\w-]+)['\"]")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


class MissingExtra(Exception):
    """Packages of an extra are missing or too old."""

    def __init__(self, what: str, extra: Extra) -> None:
        super().__init__(
            f"{what} needs the extra `{extra}`: run pip install 'PATH[{extra}]', where PATH is the wheel or"
            " the checkout of Stead"
        )


def is_installed(extra: Extra) -> bool:
    """Whether the packages of the extra are there, in versions that Stead works with."""
    from importlib.metadata import requires

    found = filter(None, map(_REQUIREMENT.match, requires("stead") or ()))
    return all(_is_satisfied(name, bounds) for name, bounds, of in map(re.Match.groups, found) if of == extra)


def _is_satisfied(name: str, bounds: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        present = _release(version(name))
    except PackageNotFoundError:
        return False
    limits = [(operator, _release(limit)) for operator, limit in _BOUND.findall(bounds)]
    return all(present >= limit if operator == ">=" else present < limit for operator, limit in limits)


def _release(version: str) -> list[int]:
    """The numbers of a version, without zeros at the end: 2.3 and 2.3.0 are equal."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(each) for each in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers
