"""What the documents say of packages and modules is true, and ARCHITECTURE.md stays short."""

import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support import ROOT
from support.documents import name_of

PAGE = ROOT / "ARCHITECTURE.md"
MAX_WORDS = 2_500
INTERNALS = [PAGE, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
EDGE = re.compile(r' {4}\w+(\["[^"]+"\])? --> \w+(\["[^"]+"\])?')
"""A line of a flow chart. Mermaid has much more syntax; these lines are valid in every version of it."""
SHARED = {
    "settings",
    "limits",
    "logs",
    "tasks",
    "errors",
    "addresses",
    "files",
    "disk_marks",
    "names",
    "processes",
    "deadlines",
    "shares",
    "supervision",
    "landlock",
    "launcher",
}
"""Modules that every package of the server may import."""


def test_architecture_is_short() -> None:
    words = len(PAGE.read_text().split())
    assert words <= MAX_WORDS, f"ARCHITECTURE.md has {words} words: move details to docs/internals/"


def test_flow_charts_are_plain() -> None:
    charts = re.findall(r"^```mermaid\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    assert len(charts) == PAGE.read_text().count("\n### ")
    for chart in charts:
        first, *lines = chart.splitlines()
        assert first == "flowchart LR"
        assert lines
        assert [line for line in lines if not EDGE.fullmatch(line)] == []
        # A node has its text where it is first named.
        named = [
            node for line in lines for node in re.findall(r"(\w+)(?:\[|$| -->)", re.sub(r'"[^"]*"', "", line))
        ]
        texts = re.findall(r'(\w+)\["', chart)
        assert sorted(texts) == sorted(set(named))


def test_list_of_modules_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "module-tables", "--check"], check=True)


def test_every_module_says_what_it_is() -> None:
    rows = re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", (ROOT / "docs/internals/modules.md").read_text(), re.M)
    assert len(rows) > 100
    assert [name for name, text in rows if not text] == []


@pytest.mark.parametrize("page", INTERNALS, ids=name_of)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    if page.name == "modules.md":
        return  # generated
    for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|go))`", text):
        places = [ROOT / name, ROOT / "src" / "stead" / name]
        assert any(place.exists() for place in places), f"{name_of(page)} names {name}"


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
