"""bench/fairness: what it computes, and one cheap load against a real server."""

import importlib
import json
import subprocess
from types import ModuleType

import pytest

from support import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("fairness")


def test_ratios_are_to_the_mean_of_both_measurements_without_the_load(bench: ModuleType) -> None:
    before = bench.Phase(times={"exec": [10.0]})
    during = bench.Phase(times={"exec": [60.0, 60.0]}, lost={"exec": ["refused"]})
    after = bench.Phase(times={"exec": [30.0]})
    (found,) = bench.ratios(before, during, after).values()
    assert (found["p50_ratio"], found["p50_ms"], found["p50_alone_ms"]) == (3.0, 60.0, 20.0)
    assert (found["n"], found["lost"]) == (2, 1)


def test_summary_is_the_worst_of_all_pairs(bench: ModuleType) -> None:
    def load(p50: float, p99: float, health: float, lost: int) -> dict[str, object]:
        call = {"p50_ratio": p50, "p99_ratio": p99, "lost": lost}
        return {"calls": {"exec": call}, "healthz_ms": {"max": health, "lost": 0}}

    good, bad = load(1.5, 4.0, 50.0, 0), load(1.1, 6.0, 20.0, 0)
    assert bench.summary({"a": good})["bars_met"]
    found = bench.summary({"a": good, "b": bad})
    assert (found["worst_p50_ratio"], found["worst_p99_ratio"]) == (1.5, 6.0)
    assert (found["healthz_max_ms"], found["bars_met"]) == (50.0, False)
    assert not bench.summary({"a": load(1.0, 1.0, 50.0, 1)})["bars_met"]
    assert not bench.summary({"a": load(1.0, 1.0, 100.0, 0)})["bars_met"]


def test_unknown_loads_are_refused_with_a_list(bench: ModuleType) -> None:
    parse = bench.names(list(bench.LOADS))
    assert parse("searches,awaits") == ["awaits", "searches"]
    with pytest.raises(bench.argparse.ArgumentTypeError, match="no 'nothing': there are awaits, "):
        parse("nothing")


@pytest.mark.slow
@pytest.mark.usefixtures("root")
def test_one_load_without_vms_is_measured() -> None:
    command = [
        "bench/fairness",
        "--json",
        "--samples",
        "1",
        "--only",
        "slow_pushes",
        "--calls",
        "clone,search",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["slow_pushes"]["calls"]) == {"clone", "search"}
    assert found["slow_pushes"]["load"]["sent"] >= 12
    assert found["worst_p50_ratio"] == max(
        call["p50_ratio"] for call in found["slow_pushes"]["calls"].values()
    )
