"""Python 3.14 evaluates annotations late: in a class with a method `list`, `list[Vm]` is that method."""

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

SDK = Path(__file__).parents[2] / "src/stead/sdk"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def annotations(function: Function) -> Iterator[ast.expr]:
    arguments = function.args
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        if each.annotation:
            yield each.annotation
    if function.returns:
        yield function.returns


@pytest.mark.parametrize("path", sorted(SDK.rglob("*.py")), ids=lambda path: str(path.relative_to(SDK)))
def test_annotations_do_not_name_methods_of_their_class(path: Path) -> None:
    for defined in ast.walk(ast.parse(path.read_text())):
        if not isinstance(defined, ast.ClassDef):
            continue
        methods = [each for each in defined.body if isinstance(each, Function)]
        hidden = {each.name for each in methods}.intersection(dir(builtins))
        for method in methods:
            for annotation in annotations(method):
                named = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
                assert not named & hidden, (
                    f"{defined.name}.{method.name}: write builtins.{min(named & hidden)}"
                )
