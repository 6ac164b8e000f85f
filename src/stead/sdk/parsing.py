"""Decodes answers into typed models by msgspec. A newer server may add fields and values: unknown fields are
ignored, missing ones get their default, and values of `Open` types are not checked."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

import msgspec

from stead.sdk.errors import InvalidArgument, UnexpectedAnswer

T = TypeVar("T")
Time = Annotated[datetime, msgspec.Meta(tz=True)]

if TYPE_CHECKING:
    Open = Annotated[T, "known values"]
else:

    class Open:
        """`Open[Literal[...]]` lists the values known today; a newer server may send others."""

        def __class_getitem__(cls, known: object) -> type:
            return str


class Model(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Immutable data of the API: `vcpu_count` is `vcpuCount` on the wire. A default value is not sent."""

    _hidden: ClassVar[str] = ""
    """A field that is secret or long: `repr` leaves it out."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != self._hidden]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"
        )


class Listing(Model, Generic[T], frozen=True):
    """Items, which are its first field, and facts about them. Iterates over the items."""

    def __iter__(self) -> Iterator[T]:
        return iter(getattr(self, self.__struct_fields__[0]))

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))


def parse(model: type[T], data: object) -> T:
    """A model from a JSON object. UnexpectedAnswer has the path of the field that is missing or invalid."""
    try:
        return msgspec.convert(data, model)
    except msgspec.ValidationError as error:
        raise UnexpectedAnswer(f"the answer is not a valid {model.__name__}: {error}") from None


def parse_object(data: object) -> Mapping[str, Any]:
    """A JSON object as it is."""
    if not isinstance(data, Mapping):
        raise UnexpectedAnswer("the answer is not an object")
    return data


def parse_list(model: type[T], data: object, key: str) -> list[T]:
    """The list of objects under `key`."""
    found = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(found, list):
        raise UnexpectedAnswer(f"the answer has no list {key!r}")
    return [parse(model, entry) for entry in found]


def parse_array(model: type[T], data: object) -> list[T]:
    """The objects of an answer that is a list."""
    if not isinstance(data, list):
        raise UnexpectedAnswer("the answer is not a list")
    return [parse(model, entry) for entry in data]


def wire_name(name: str) -> str:
    """`vcpu_count` as `vcpuCount`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def serialise(value: Any) -> Any:
    """A model, or models in mappings and sequences, as JSON types."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_as_builtin))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"an argument is not Unicode: {error.object!r}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"an argument cannot be sent as JSON: {error}") from None


def _as_builtin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an argument cannot be sent as JSON: {value!r} is a {type(value).__name__}")
