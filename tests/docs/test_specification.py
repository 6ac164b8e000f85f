"""What the documents say of tests, benchmarks and packages is true."""

import graphlib
import re
import tomllib

import pytest

from support import ROOT

PAGES = ["SPECIFICATION.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]
SHARED = {
    "settings",
    "limits",
    "logs",
    "tasks",
    "errors",
    "addresses",
    "files",
    "names",
    "processes",
    "deadlines",
    "supervision",
}
"""Modules that every package of the server may import."""


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_and_benchmark_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|bench)/[\w./-]+)(?:::(\w+))?", text)
    assert named or page == "ARCHITECTURE.md"
    for path, test in named:
        assert (ROOT / path).exists(), f"{page} names {path}"
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(), f"{page} names {path}::{test}"


def test_every_row_of_the_comparison_of_clients_names_its_tests() -> None:
    text = (ROOT / "docs/coming-from.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests/agent_clients").glob("test_*.py"))
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    headings = [line for line in rows if line.endswith("| Test |")]
    assert len(headings) == text.count("|---|\n"), "every table has a column of tests"
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2])
        assert named or row in headings, row
        for test in named:
            assert f"def {test}(" in tests, f"docs/coming-from.md names {test}"


def test_the_table_of_packages_is_the_import_contract() -> None:
    """ARCHITECTURE.md lists what each package may import, import-linter who may import each package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Packages")[2].partition("\nImports go")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| .* \| (.*)\|$", section, re.M)
    table = {package: set(re.findall(r"`([\w.]+)`", imports)) for package, imports in rows}
    allowed: dict[str, set[str]] = {package: set() for package in table}
    for contract in contracts:
        for importer in contract["allowed_importers"]:
            modules = {module.removeprefix("stead.") for module in contract["protected_modules"]}
            allowed.setdefault(importer.removeprefix("stead."), set()).update(modules)
        for part in contract.get("ignore_imports", ()):
            # One module of a package, for all modules of another.
            if found := re.fullmatch(r"stead\.(\w+)\.\*\* -> stead\.(\w+\.\w+)", part):
                allowed[found[1]].add(found[2])
    for package, imports in table.items():
        assert allowed[package] == imports | (
            SHARED if package not in {"sdk", "mcp", "agents", "cli"} else set()
        ), package
    graphlib.TopologicalSorter(table).prepare()  # raises CycleError
    entries = [path for path in (ROOT / "src/stead").iterdir() if not path.name.startswith("__")]
    present = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert present == {*table, *SHARED} - {"cli.installation"}
