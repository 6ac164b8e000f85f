"""Values of options, converted when there are any.

Typer has pydantic convert every option, given or not. To load it takes longer than most calls to a server.
"""

from dataclasses import dataclass
from typing import Any

from typer._coercion import RuntimeParam, build_runtime_param
from typer.core import _TyperParameter


@dataclass(frozen=True)
class _WhenGiven(RuntimeParam):
    """Texts are texts already; pydantic is asked for the rest."""

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
    """From now on options that were not given cost nothing."""
    _TyperParameter.get_runtime_param = _runtime_param  # type: ignore[method-assign, assignment]
