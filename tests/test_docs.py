"""The examples in the documents run as they stand, against real machines."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from conftest import Server

from stead.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(match[1], id=f"{page.name}-{number}")
    for page in PAGES
    for number, match in enumerate(re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
]


@pytest.mark.parametrize("source", EXAMPLES)
async def test_an_example_runs(
    source: str, settings: Settings, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEAD_API_URL", server.url)
    monkeypatch.setenv("STEAD_API_KEY", server.key)
    monkeypatch.setenv("STEAD_DATA", str(tmp_path))
    monkeypatch.setenv("STEAD_CACHE", str(settings.cache_folder))
    monkeypatch.setenv("STEAD_DEFAULT_SIZE", str(settings.default_size))
    monkeypatch.setenv("STEAD_POOL", "0")
    code = compile(source, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, {"__name__": "example"})
    assert inspect.iscoroutine(result), "an example that awaits nothing shows nothing"
    await result


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
