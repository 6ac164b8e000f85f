"""The public names of the SDK have docstrings, and docs/python-sdk.md lists them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

SDK = ROOT / "src" / "stead" / "sdk"
MODULES = sorted(path for path in SDK.rglob("*.py") if "_sync" not in path.parts)
SCRIPT = ROOT / "scripts" / "sdk-reference"
INTERNAL = {"AsyncConnection", "AsyncReconnecting", "AsyncRepoPart", "AsyncRepoSearch", "AsyncStream"}
"""Classes that are not handed out, or have the methods of a Python protocol alone."""
CONTAINERS = {"AsyncGit", "AsyncPermissions"}
"""Classes that have other objects as attributes, and no methods."""


def definitions(path: Path) -> Iterator[ast.ClassDef]:
    for each in ast.parse(path.read_text()).body:
        if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
            yield each


def undocumented(definition: ast.ClassDef) -> Iterator[str]:
    """The class, its public methods, and the keys of a `TypedDict`, if they have no docstring."""
    if not ast.get_docstring(definition):
        yield definition.name
    for each, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            public = not each.name.startswith("_")
            if public and not ast.get_docstring(each) and not is_overload(each):
                yield f"{definition.name}.{each.name}"
        elif isinstance(each, ast.AnnAssign) and definition.keywords and is_total_false(definition):
            described = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not described:
                yield f"{definition.name}.{ast.unparse(each.target)}"


def is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each) == "overload" for each in function.decorator_list)


def is_total_false(definition: ast.ClassDef) -> bool:
    return any(each.arg == "total" for each in definition.keywords)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SDK)))
def test_public_names_have_docstrings(path: Path) -> None:
    assert [name for each in definitions(path) for name in undocumented(each)] == []


def test_missing_docstrings_are_found() -> None:
    source = """
class Options(TypedDict, total=False):
    first: int
    second: int
    '''Described.'''
    def method(self): pass
    def _private(self): pass
"""
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    assert list(undocumented(definition)) == ["Options", "Options.first", "Options.method"]


def test_the_page_has_the_methods_and_options_of_today() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "run make fix"


def test_the_page_lists_every_class_of_the_client() -> None:
    script = SCRIPT.read_text()
    classes = {each.name for path in (SDK / "_async").glob("*.py") for each in definitions(path)}
    listed = {name for name in classes if f"{name.removeprefix('Async')}, " in script}
    assert classes - listed - INTERNAL - CONTAINERS == set()
