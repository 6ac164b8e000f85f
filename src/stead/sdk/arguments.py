"""Checks of arguments: one rule for all methods.

An argument of a wrong type is a `TypeError` that names it. A value that no request can carry (an empty id, a
timeout of zero, text that is not Unicode) is an `InvalidArgument`. Everything else is for the server to
judge.
"""

import codecs
import collections.abc
import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from stead.sdk.exceptions import InvalidArgument

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_TEXT = str | bytes | bytearray | memoryview
_WIDER: dict[object, tuple[type, ...]] = {float: (int, float), bytes: (bytes, bytearray, memoryview)}
"""What is accepted for a type, where that is more than its instances."""
_RENAMED = {
    "vcpu_count": "cpu",
    "mem_size_gb": "memory",
    "rootfs_size_gb": "disk",
    "storage": "disk",
}
"""Arguments that earlier versions took, and their names today."""


class _NotGiven:
    """The default of an option in a signature: it is left out of the request."""

    def __repr__(self) -> str:
        return "..."


def checks_arguments(cls: C) -> C:
    """Check the types of arguments of all public methods of a class."""
    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(cls, name, checked(member))
    return cls


def checked(function: F) -> F:
    """Check the types of arguments by the annotations of a function."""

    @functools.cache
    def expected() -> tuple[inspect.Signature, dict[str, Any]]:
        signature = inspect.signature(function)
        return signature, {
            name: _hint(each.annotation, function) for name, each in signature.parameters.items()
        }

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature, hints = expected()
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return  # Python's own message is better.
        for name, value in given.items():
            kind = signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                for each in value:
                    _check(name, each, hints[name])
            elif kind is inspect.Parameter.VAR_KEYWORD:
                known = options_of(hints[name])
                for option, content in value.items():
                    if option not in known:
                        raise TypeError(_unexpected(function, option))
                    _check(option, content, known[option])
            elif name != "self":
                _check(name, value, hints[name])

    checking: Callable[..., Any]
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checking(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await function(*args, **kwargs)
    else:

        @functools.wraps(function)
        def checking(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return function(*args, **kwargs)

    if function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        checking.__signature__ = _with_options(inspect.signature(function))  # type: ignore[attr-defined]
    return checking  # type: ignore[return-value]


def options_of(hint: Any) -> dict[str, Any]:
    """The names and types of keyword arguments that are annotated with `Unpack[...]`."""
    return get_type_hints(get_args(hint)[0])


def _with_options(signature: inspect.Signature) -> inspect.Signature:
    """The signature with each option as an argument: what `help()` and notebooks show."""
    *named, options = signature.parameters.values()
    each = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_NotGiven(), annotation=hint)
        for name, hint in options_of(options.annotation).items()
    ]
    return signature.replace(parameters=[*named, *each])


def _unexpected(function: Callable[..., Any], option: str) -> str:
    """As Python words it, with the name to use instead."""
    text = f"{function.__qualname__}() got an unexpected keyword argument {option!r}"
    return f"{text}: use {_RENAMED[option]!r}" if option in _RENAMED else text


def seconds(name: str, value: float) -> float:
    """A timeout, which is more than 0 and not infinite."""
    if not math.isfinite(value) or value <= 0:
        raise InvalidArgument(f"{name} must be a number of seconds above 0, not {value!r}")
    return value


def milliseconds(name: str, value: float) -> int:
    """The same for the server."""
    return max(1, round(seconds(name, value) * 1000))


def patience(name: str, value: float | None) -> float | None:
    """How long to wait: 0 is "do not wait", None "without end"."""
    if value is not None and not value >= 0:
        raise InvalidArgument(f"{name} must be 0 or more seconds, not {value!r}")
    return value


def as_bytes(name: str, data: str | bytes) -> bytes:
    """Text as UTF-8; bytes of file names in it as they are."""
    if not isinstance(data, str):
        return bytes(data)
    try:
        return data.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{name} is not Unicode at offset {error.start}") from None


def check_encoding(encoding: str) -> str:
    try:
        codecs.lookup(encoding)
    except (LookupError, ValueError):
        raise InvalidArgument(f"unknown encoding {encoding!r}") from None
    return encoding


def encode_text(text: str, encoding: str) -> bytes:
    try:
        return text.encode(check_encoding(encoding))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"text has characters that {encoding} has not: {error}") from None


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path on this host."""
    try:
        if b"\0" in os.fsencode(path):
            raise InvalidArgument("a local path contains a NUL character")
    except UnicodeEncodeError:
        raise InvalidArgument(f"a local path is not Unicode: {path!r}") from None
    return Path(path)


def _hint(annotation: Any, function: Callable[..., Any]) -> Any:
    if isinstance(annotation, str):
        try:
            return eval(annotation, function.__globals__)  # noqa: S307
        except NameError:  # imported for type checkers alone
            return Any
    return Any if annotation is inspect.Parameter.empty else annotation


def _check(name: str, value: object, hint: Any) -> None:
    if not _matches(value, hint):
        raise TypeError(f"{name} must be {_described(hint)}, not {_kind(value)}")


def _matches(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, each) for each in arguments)
    if origin is Literal:
        return isinstance(value, tuple({type(each) for each in arguments}))
    if hint is None or hint is types.NoneType:
        return value is None
    if is_typeddict(hint):
        return isinstance(value, Mapping)
    if origin is collections.abc.Callable:
        return callable(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _matches(key, arguments[0]) and _matches(each, arguments[1]) for key, each in value.items()
        )
    if isinstance(origin, type) and issubclass(origin, Sequence | Iterable):
        # Any iterable is as good as a list; text is iterable too, and never meant as one.
        if isinstance(value, _TEXT | Mapping) or not isinstance(value, Iterable):
            return False
        return not isinstance(value, list | tuple) or all(_matches(each, arguments[0]) for each in value)
    kind = origin or hint
    if kind is Any or not isinstance(kind, type):
        return True
    return isinstance(value, _WIDER.get(kind, kind))


def _described(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_described(each) for each in arguments))
    if origin is Literal:
        return " or ".join(repr(each) for each in arguments)
    if hint is types.NoneType:
        return "None"
    if origin is collections.abc.Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping of " + " to ".join(_described(each) for each in arguments)
    if isinstance(origin, type) and issubclass(origin, Iterable | collections.abc.AsyncIterable):
        return f"a sequence of {_described(arguments[0])}"
    if origin is os.PathLike or hint is os.PathLike:
        return "a path"
    return str(getattr(hint, "__name__", hint))


def _kind(value: object) -> str:
    if isinstance(value, list | tuple) and value:
        return f"{type(value).__name__} of {' and '.join(sorted({type(each).__name__ for each in value}))}"
    return "None" if value is None else type(value).__name__
