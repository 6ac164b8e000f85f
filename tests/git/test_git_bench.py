"""bench/git: which figures it reports."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = ROOT / "bench"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("git_bench", folder / "git.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_top_level_ratios_are_the_worse_of_the_two_repositories(bench: ModuleType) -> None:
    repositories = {
        "1k files": {"clone_ratio": 1.2, "clone_ms": [12, 10], "push_ratio": 0.9, "fetch_ratio": 1.0},
        "50k objects": {"clone_ratio": 1.1, "clone_ms": [11, 10], "push_ratio": 1.3, "fetch_ratio": 0.8},
    }
    assert bench.worst(repositories) == {"clone_ratio": 1.2, "push_ratio": 1.3, "fetch_ratio": 1.0}


def test_transfers_report_a_ratio_and_both_medians(bench: ModuleType, tmp_path: Path) -> None:
    """Two plain copies on this disk stand for the two servers."""
    places = [bench.make(tmp_path / f"{number}.git", 3, 2) for number in range(2)]
    results = bench.transfer(tmp_path, [bench.Side(str(place)) for place in places], 1)
    for name in ("clone", "push", "fetch"):
        ours, plain = results[f"{name}_ms"]
        assert ours > 0 and plain > 0 and results[f"{name}_ratio"] > 0


def test_missing_lighttpd_is_an_error_without_root(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="install the package lighttpd"):
        bench.install_lighttpd()
