"""One setting scales the deadlines of guests, QEMU and host commands."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

from stead import builds, guest, host, machines

DEADLINE = re.compile(r"_?[A-Z_]*(TIMEOUT|TIMEOUTS|DEADLINE|GRACE|LONGEST|LONGEST_WAIT|STUCK_AFTER|BUDGET)")


def deadlines() -> dict[str, list[float]]:
    """All constants of the packages that are deadlines by their names."""
    names = [
        module.name
        for package in (guest, host, machines, builds)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    found = [(name, *item) for name in names for item in vars(importlib.import_module(name)).items()]
    return {
        f"{module}.{name}": list(value) if isinstance(value, tuple) else [value]
        for module, name, value in found
        if DEADLINE.fullmatch(name)
    }


def _with(**variables: str) -> dict[str, list[float]]:
    command = [sys.executable, __file__]
    return dict(json.loads(subprocess.check_output(command, env={**os.environ, **variables})))


def test_every_deadline_is_scaled_by_the_setting(tmp_path: Path) -> None:
    usual, longer, invalid = (_with(STEAD_DEADLINE_SCALE=scale) for scale in ("1", "2.5", "slow"))
    assert {
        "stead.host.accelerator._DEADLINE": [10.0],
        "stead.host.vm.QMP_TIMEOUT": [20.0],
        "stead.machines.stop.STOP_TIMEOUT": [60.0],
    }.items() <= usual.items()
    assert longer == {name: [2.5 * value for value in values] for name, values in usual.items()}
    assert invalid == usual  # a server refuses to start with it: Settings.load
    file = tmp_path / "stead.toml"
    file.write_text("deadline_scale = 2.5")
    assert _with(STEAD_CONFIG=str(file)) == longer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(deadlines()))
