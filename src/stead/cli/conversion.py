"""Parameters of commands: text is used as it is, and values have readable names in the help.

Typer converts the value of every parameter with pydantic, also when it was not given. Importing pydantic
takes longer than most requests to a server, so values that need no conversion skip it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from typer.core import TyperArgument, TyperOption


class _Option(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _processed(self, ctx, value, super().process_value)


class _Argument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _processed(self, ctx, value, super().process_value)


def adapt(parameters: Iterable[Any]) -> None:
    """Apply the rules of this module to parameters that Typer made."""
    for each in parameters:
        if isinstance(each, TyperArgument):
            each.__class__ = _Argument
        elif isinstance(each, TyperOption):
            each.__class__ = _Option
            if each.metavar is None and each.is_flag:
                each.metavar = ""  # Typer shows `<bool>`.
            elif each.metavar is None and _type(each) is str:
                each.metavar = each.name.upper()  # Typer shows `<str>`.


def _processed(
    parameter: TyperOption | TyperArgument, ctx: Any, value: Any, convert: Callable[[Any, Any], Any]
) -> Any:
    """The value for the command. Typer converts what has another type, and refuses what must be given."""
    several = parameter.nargs != 1 or getattr(parameter, "multiple", False)
    missing = parameter.value_is_missing(value)
    fits = _type(parameter) == list[str] if several else _type(parameter) is type(value)
    if parameter.required if missing else not fits:
        return convert(ctx, value)
    if missing and several:
        value = ()
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _type(parameter: Any) -> Any:
    """The type of its value; None if Typer does not tell it, and then Typer converts and names all values."""
    return getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
