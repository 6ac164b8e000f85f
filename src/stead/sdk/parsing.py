"""Converts JSON to dataclasses and back. Parsing is tolerant, because a newer server may add fields and
values: unknown fields are ignored, missing ones get their default."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from stead.sdk.errors import UnexpectedAnswer

T = TypeVar("T")


def wire_name(name: str) -> str:
    """`vcpu_count` is `vcpuCount` on the wire."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


@functools.cache
def _fields(model: type) -> tuple[tuple[str, str, Any, bool], ...]:
    hints = get_type_hints(model)
    return tuple(
        (
            field.name,
            field.metadata.get("wire", wire_name(field.name)),
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(model)
        if field.init
    )


def parse(model: type[T], data: object) -> T:
    """A dataclass instance from a JSON object. A missing field without a default is an error."""
    if not isinstance(data, Mapping):
        raise UnexpectedAnswer(f"expected an object for {model.__name__}, got {type(data).__name__}")
    values = {}
    kind: Any = model
    for name, key, hint, required in _fields(kind):
        found = data.get(key)
        value = None if found is None else _convert(hint, found)
        if value is not None:
            values[name] = value
        elif required:
            raise UnexpectedAnswer(f"the answer has no valid {key!r}, which {model.__name__} requires")
    return model(**values)


def parse_list(model: type[T], data: object, key: str) -> list[T]:
    """The list of objects under `key`."""
    found = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(found, list):
        raise UnexpectedAnswer(f"the answer has no list {key!r}")
    return [parse(model, entry) for entry in found]


def _convert(hint: Any, value: Any) -> Any:
    """The value converted to the type hint; None if it does not fit."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for option in get_args(hint):
            if option is not types.NoneType and (converted := _convert(option, value)) is not None:
                return converted
        return None
    if origin is Literal:
        return value if isinstance(value, str) else None
    if origin is tuple:
        if not isinstance(value, list):
            return None
        kind = get_args(hint)[0]
        return tuple(item for entry in value if (item := _convert(kind, entry)) is not None)
    if dataclasses.is_dataclass(hint):
        return parse(cast("type[Any]", hint), value) if isinstance(value, Mapping) else None
    if hint is datetime:
        return parse_time(value)
    if hint is float:
        return float(value) if isinstance(value, int | float) else None
    if hint is Any:
        return value
    return value if isinstance(value, origin or hint) else None


def parse_time(value: object) -> datetime | None:
    """A datetime from RFC 3339 text; UTC if it has no zone."""
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def serialise(value: Any) -> Any:
    """A dataclass as a JSON object, without fields that are None; mappings are copied."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = (
            (field.metadata.get("wire", wire_name(field.name)), getattr(value, field.name))
            for field in dataclasses.fields(value)
        )
        return {key: serialise(found) for key, found in pairs if found is not None}
    if isinstance(value, Mapping):
        return {str(key): serialise(found) for key, found in value.items()}
    if isinstance(value, list | tuple):
        return [serialise(entry) for entry in value]
    return value
