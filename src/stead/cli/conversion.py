"""Changes to Typer: lazy conversion of option values, and their names in the help.

Typer converts every option with pydantic, also those that were not given. Importing pydantic takes longer
than most requests to a server, so values that need no conversion skip it.
"""

from dataclasses import dataclass
from typing import Any

from typer._coercion import RuntimeParam, build_runtime_param
from typer.core import TyperOption, _TyperParameter


@dataclass(frozen=True)
class _WhenGiven(RuntimeParam):
    """Use strings as they are; convert other types with pydantic."""

    def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
        if self.annotation is type(value) and not param.type_descriptor.is_path:
            return value
        if self.annotation == list[str]:
            return list(value)
        return build_runtime_param(param.type_descriptor).coerce(value, param, ctx)


def _runtime_param(param: _TyperParameter) -> RuntimeParam:
    descriptor = param.type_descriptor
    return _WhenGiven(descriptor.parameter_info, descriptor.annotation)


def convert_when_given() -> None:
    """Patch Typer so that options without a value are not converted."""
    _TyperParameter.get_runtime_param = _runtime_param  # type: ignore[method-assign, assignment]


_display_type = TyperOption.display_type_rich


def _value_name(option: TyperOption, ctx: Any) -> str | None:
    """Nothing for flags, where Typer shows `<bool>`; the option's name instead of `<str>`."""
    if option.metavar is None and option.is_flag:
        return ""
    if option.metavar is None and option.type_descriptor.annotation is str:
        return option.name.upper()
    return _display_type(option, ctx)


def name_values() -> None:
    """Patch Typer so that the help shows no value for flags, and a readable one for text."""
    TyperOption.display_type_rich = _value_name  # type: ignore[method-assign, assignment]
