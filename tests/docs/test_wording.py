"""Texts that users read call a virtual machine a VM, and use words that engineers search for."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stead.api.app import create_app
from stead.cli.commands import ENTRIES, _loaded
from support import ROOT
from support.documents import name_of, pages

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]

OTHER_MACHINES = (
    r"machine-id|machine types?|machine's type|virtual machines?|state machines?|tests?/\S+|`[^`]*`|```.*?```"
)
"""Where "machine" means something else than a VM of Stead, and what is code."""
ODD = r"\b(whoever|nobody|anew|whom|goes on|is told|are told|comes to an end|make room|has room)\b"
DIALECT = (
    r"\b(leads? (in)?to|stands? for|as ever|that (is|are) none|come what may|at no moment|in vain|for good"
    r"|there is no VM|what follows for|ends? by themselves|of no VM)\b"
)
"""Phrases where documents of this field have a plain word: mapped to, instead of, permanently."""


def odd_words(text: str) -> list[str]:
    plain = re.sub(OTHER_MACHINES, "", text, flags=re.S | re.I)
    return re.findall(r"(?i)[^\n]*\bmachines?\b[^\n]*", plain) + [
        found.group() for found in re.finditer(rf"(?i)[^\n]*{ODD}[^\n]*", plain)
    ]


def dialect(text: str) -> list[str]:
    plain = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", text, flags=re.S | re.M)
    return [found.group() for found in re.finditer(rf"(?i)[^\n]*{DIALECT}[^\n]*", plain)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documents_use_plain_words(page: Path) -> None:
    assert odd_words(page.read_text()) == []


@pytest.mark.parametrize(
    "page", [page for page in (*PAGES, ROOT / "bench/RESULTS.md") if page.name != "modules.md"], ids=name_of
)
def test_documents_name_the_mechanism(page: Path) -> None:
    """`modules.md` is generated from docstrings."""
    assert dialect(page.read_text()) == []


@pytest.mark.parametrize("page", [page for page in pages() if "internals" not in page.parts], ids=name_of)
def test_pages_for_users_use_plain_words(page: Path) -> None:
    """Stricter than for other documents: a page of the internals may say when a process begins."""
    text = re.sub(r"machine-id|virtual machine|tests/\S+|`[^`]*`", "", page.read_text())
    found = re.findall(r"\b(machines?|whoever|nobody|anew|told|begun|begins?|goes on|comes to)\b", text, re.I)
    assert found == []


def test_the_api_description_uses_plain_words() -> None:
    texts = list(_descriptions(create_app().openapi()))
    assert len(texts) > 100
    assert [text for text in texts if odd_words(text) or dialect(text)] == []


def _descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("description", "summary") and isinstance(each, str):
                yield each
            else:
                yield from _descriptions(each)
    elif isinstance(value, list):
        for each in value:
            yield from _descriptions(each)


def test_help_texts_use_plain_words() -> None:
    texts = [text for name, entry in ENTRIES.items() for text in (entry.help, *_helps(_loaded(name)))]
    assert len(texts) > 100
    assert [text for text in texts if odd_words(text)] == []


def _helps(command: Any) -> Iterator[str]:
    yield command.help or ""
    for parameter in command.params:
        yield getattr(parameter, "help", None) or ""
    for child in getattr(command, "commands", {}).values():
        yield from _helps(child)


def test_errors_and_log_lines_use_plain_words() -> None:
    found = {
        f"{source.relative_to(ROOT)}:{node.lineno}": text
        for source in sorted((ROOT / "src" / "stead").rglob("*.py"))
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Raise | ast.Call)
        for text in _told(node)
        if odd_words(text)
    }
    assert found == {}


def _told(node: ast.AST) -> Iterator[str]:
    """The texts of exceptions that are raised and of lines that are logged."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from _texts(node.exc)
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("log", "logger")
    ):
        yield from _texts(node)


def _texts(call: ast.Call) -> Iterator[str]:
    for argument in call.args:
        for each in ast.walk(argument):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value
