"""Templates that no VM or snapshot needs are removed days after their last use."""

import os
import time
from pathlib import Path
from typing import cast

import pytest

from stead.host import templates
from stead.host.image import BaseImage
from stead.host.local import LocalHost
from stead.host.network import Network
from stead.host.templates import RETENTION, LocalTemplate
from stead.settings import Settings, Size


def add_template(folder: Path, name: str, age: float) -> Path:
    """A template that was made so many seconds ago."""
    path = folder / name
    path.mkdir(parents=True)
    facts = path / "template.json"
    facts.write_text("{}")
    os.utime(facts, (time.time() - age,) * 2)
    return path


def test_templates_are_unused_when_no_row_refers_to_them_and_they_are_old(tmp_path: Path) -> None:
    for name, age in (("new", 60), ("old", RETENTION + 60), ("needed", RETENTION + 60)):
        add_template(tmp_path, name, age)
    (tmp_path / ".building-x").mkdir()
    (tmp_path / ".x.lock").touch()
    assert [path.name for path in templates.unused(tmp_path, {"needed"})] == ["old"]


def test_a_use_postpones_the_removal(tmp_path: Path) -> None:
    path = add_template(tmp_path, "old", RETENTION + 60)
    templates.note_use(LocalTemplate("old", path, Size(), BaseImage("image", tmp_path / "image")))
    assert templates.unused(tmp_path, set()) == []


@pytest.mark.parametrize("own", [True, False], ids=["own cache", "shared cache"])
async def test_only_the_templates_of_an_own_cache_are_removed(tmp_path: Path, own: bool) -> None:
    """VMs of other installations may need those of a shared cache."""
    settings = Settings(data=tmp_path / "data", cache=None if own else tmp_path / "cache")
    host = LocalHost(settings, cast(Network, None))
    path = add_template(host.templates_folder, "old", RETENTION + 60)
    try:
        assert await host.templates.remove_unused({"another"}) == (["old"] if own else [])
        assert path.exists() is not own
    finally:
        host._spawner.close()
