"""One class, one name: a reader who searches for a class finds one."""

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "stead"
CLIENTS = ("sdk", "agents", "mcp", "cli")


@pytest.mark.parametrize("clients", [False, True], ids=["server", "clients"])
def test_no_two_classes_have_the_same_name(clients: bool) -> None:
    """The SDK calls what it gets over the wire by the names of the server; `_sync` is generated."""
    names: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        if (parts[0] in CLIENTS) == clients and "_sync" not in parts:
            tree = ast.walk(ast.parse(path.read_text()))
            names.update(node.name for node in tree if isinstance(node, ast.ClassDef))
    assert len(names) > 100
    assert {name for name, count in names.items() if count > 1} == set()
