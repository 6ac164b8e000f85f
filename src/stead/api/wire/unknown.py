"""Unknown keys in a request body: kept while it is parsed, then reported with their path."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from stead.api.wire import Wire
from stead.errors import InvalidRequest

HEADER = "x-stead-unknown-keys"
"""`refuse`: answer 400 for unknown keys. Otherwise they are ignored, with a warning in the log."""
MAX_REPORTED = 20
_MAX_KEY = 80
_OTHER_NAMES = {
    "cpu": "vcpuCount",
    "cpus": "vcpuCount",
    "vcpus": "vcpuCount",
    "memory": "memSizeGb",
    "disk": "rootfsSizeGb",
    "storage": "rootfsSizeGb",
    "apt": "aptDeps",
    "packages": "aptDeps",
    "files": "additionalFiles",
    "repos": "git",
    "services": "systemd",
    "bash": "exec",
    "command": "exec",
}


class Tracked(Wire):
    """A model that keeps unknown keys, for `unknown_keys` to report."""

    model_config = ConfigDict(extra="allow")

    def ignored_keys(self, *, refuse: bool) -> tuple[str, ...]:
        """Warnings for the log about unknown keys; with `refuse`, InvalidRequest if there are any."""
        found = unknown_keys(self)
        if found and refuse:
            raise InvalidRequest("; ".join(found))
        return tuple(f"{each} (ignored)" for each in found)


def unknown_keys(body: BaseModel) -> list[str]:
    """One message for each unknown key: its path and the known key that is most like it."""
    found = []
    for message in _of_model(body, ""):
        found.append(message)
        if len(found) == MAX_REPORTED:
            break
    return found


def _of_model(model: BaseModel, path: str) -> Iterator[str]:
    names = {name: field.alias or name for name, field in type(model).model_fields.items()}
    for key in model.model_extra or ():
        text = f"unknown key {path}{_shown(key)}"
        nearest = _nearest(key, list(names.values()))
        yield text if nearest is None else f"{text}: did you mean {nearest}?"
    for name, alias in names.items():
        yield from _of_value(getattr(model, name), f"{path}{alias}")


def _of_value(value: Any, path: str) -> Iterator[str]:
    match value:
        case BaseModel():
            yield from _of_model(value, f"{path}.")
        case list():
            for number, each in enumerate(value):
                yield from _of_value(each, f"{path}[{number}]")
        case dict():
            for key, each in value.items():
                yield from _of_value(each, f'{path}["{_shown(str(key))}"]')


def _shown(key: str) -> str:
    """A key for messages and logs: escaped if it has control characters or lone surrogates, and cut."""
    return (key if key.isprintable() else ascii(key)[1:-1])[:_MAX_KEY]


def _nearest(key: str, known: list[str]) -> str | None:
    plain = {_plain(name): name for name in known}
    other = _OTHER_NAMES.get(_plain(key))
    if other in known:
        return other
    matches = difflib.get_close_matches(_plain(key[:_MAX_KEY]), plain, n=1)
    return plain[matches[0]] if matches else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
