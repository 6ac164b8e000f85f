"""Templates on disk: one for all disk sizes; those that no VM or snapshot needs are removed after days."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from stead.host import templates
from stead.host.image import BaseImage
from stead.host.local import LocalHost
from stead.host.network import Network
from stead.host.qemu import QemuPlatform
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


async def test_one_template_serves_all_disk_sizes(tmp_path: Path) -> None:
    """VMs on templates that older versions built for larger disks can still load them."""
    settings = Settings(data=tmp_path / "data")
    host = LocalHost(settings, cast(Network, None))
    image = BaseImage("image", settings.cache_folder / "images/image")
    image.folder.mkdir(parents=True)
    for path in (image.disk, image.kernel, image.initrd):
        path.touch()
    host._image, host._platform = image, QemuPlatform("tcg", (7, 2, 0), "pc-q35-7.2")
    try:
        inputs = [await host.template_inputs(Size(2, 1024, disk)) for disk in (20, 40, 4096)]
        assert {each.key for each in inputs} == {replace(inputs[0], size=Size(2, 1024, 20)).key}
        assert inputs[0].key != (await host.template_inputs(Size(1, 1024, 20))).key
        before = replace(inputs[0], size=Size(2, 1024, 40))
        old = add_template(host.templates_folder, f"{before.key}-old", 60)
        for name in ("memory", "devices", "disk.qcow2"):
            (old / name).touch()
        facts = {"image": "image", "image_build": templates.image_build(image), "size": before.size.key}
        (old / "template.json").write_text(json.dumps(facts))
        assert await host.templates.find(Size(2, 1024, 40)) is None
        loaded = host.templates.load(old.name)
        assert loaded is not None and loaded.size == Size(2, 1024, 40)
    finally:
        host._spawner.close()


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
