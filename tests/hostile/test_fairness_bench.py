"""bench/fairness: what it computes, and one cheap load against a real server."""

import importlib
import json
import subprocess
from types import ModuleType
from typing import Any

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
    assert (found["n"], found["n_alone"], found["lost"]) == (2, 1, 1)


def measured(bench: ModuleType, p50: float, p99: float, health: float, lost: int) -> dict[str, Any]:
    """The result of one load."""
    call = {"p50_ratio": p50, "p99_ratio": p99, "lost": lost}
    return {**dict.fromkeys(bench.WEIGHTS, call), "healthz_ms": {"max": health, "lost": 0}, "load": {}}


def test_summary_is_the_worst_of_all_pairs(bench: ModuleType) -> None:
    good = dict.fromkeys(bench.LOADS, measured(bench, 1.5, 4.0, 50.0, 0))
    assert bench.summary(good)["bars_met"]
    found = bench.summary(good | {"awaits": measured(bench, 1.1, 6.0, 20.0, 0)})
    assert (found["worst_p50_ratio"], found["worst_p99_ratio"]) == (1.5, 6.0)
    assert (found["healthz_max_ms"], found["bars_met"]) == (50.0, False)
    assert not bench.summary(good | {"awaits": measured(bench, 1.0, 1.0, 50.0, 1)})["bars_met"]
    assert not bench.summary(good | {"awaits": measured(bench, 1.0, 1.0, 100.0, 0)})["bars_met"]


def test_bars_are_not_met_without_every_load_and_call(bench: ModuleType) -> None:
    good = dict.fromkeys(bench.LOADS, measured(bench, 1.0, 1.0, 5.0, 0))
    assert bench.summary(good)["complete"]
    without_load = {name: load for name, load in good.items() if name != "awaits"}
    without_call = good | {"awaits": {name: each for name, each in good["awaits"].items() if name != "echo"}}
    for loads in ({}, without_load, without_call):
        found = bench.summary(loads)
        assert (found["complete"], found["bars_met"]) == (False, False)


@pytest.mark.parametrize("rounds", [1, 3, 40])
@pytest.mark.parametrize("weight", [0.01, 0.5, 1.0, 3.0])
def test_calls_are_spread_over_the_rounds(bench: ModuleType, weight: float, rounds: int) -> None:
    counts = [bench.times_in_round(weight, rounds, number) for number in range(rounds)]
    assert counts[0] >= 1
    assert sum(counts) == max(1, round(weight * rounds))
    assert max(counts) - min(counts) <= 1


def test_phases_share_the_time_that_is_left(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(bench.time, "monotonic", lambda: now)
    budget = bench.Budget(10)
    budget.phases = 15
    assert budget.phase() == pytest.approx(30.0)
    budget.phases = 2
    assert budget.phase() == 55.0
    now += 599
    budget.phases = 10
    assert (budget.phase(), budget.is_over) == (15.0, False)
    now += 1
    assert (budget.elapsed, budget.is_over) == (10.0, True)


def test_unknown_loads_are_refused_with_a_list(bench: ModuleType) -> None:
    parse = bench.names(list(bench.LOADS))
    assert parse("searches,awaits") == ["awaits", "searches"]
    with pytest.raises(bench.argparse.ArgumentTypeError, match="no 'nothing': there are awaits, "):
        parse("nothing")


@pytest.mark.slow
@pytest.mark.usefixtures("root")
def test_one_load_without_vms_is_measured() -> None:
    command = ["bench/fairness", "--json", "--samples", "1", "--pool", "0"]
    command += ["--only", "slow_pushes", "--calls", "clone,search"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    load = found["slow_pushes"]
    assert set(load) == {"clone", "search", "healthz_ms", "load"}
    assert load["load"]["sent"] >= 12
    assert found["worst_p50_ratio"] == max(load[call]["p50_ratio"] for call in ("clone", "search"))
    assert (found["left_out"], found["complete"]) == ({}, False)
