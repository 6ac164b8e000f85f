"""How hatch_build.py gives the guest agent the library that the Go toolchain brings along."""

from pathlib import Path

import pytest
from hatch_build import AgentBuildError, fingerprint, vendor

MODULES = """\
# golang.org/x/mod v0.36.0
## explicit; go 1.25.0
golang.org/x/mod/semver
# golang.org/x/sys {version}
## explicit; go 1.25.0
golang.org/x/sys/plan9
golang.org/x/sys/unix
"""


@pytest.fixture
def go(tmp_path: Path) -> str:
    """A `go` whose GOROOT is the folder `toolchain`."""
    command = tmp_path / "go"
    command.write_text(f"#!/bin/sh\necho {tmp_path}/toolchain\n")
    command.chmod(0o755)
    return str(command)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "guest"
    folder.mkdir()
    (folder / "main.go").write_text("package main\n")
    (folder / "go.mod").write_text("module stead/guest\n\ngo 1.27\n\nrequire golang.org/x/sys v0.45.0\n")
    return folder


def toolchain(tmp_path: Path, version: str, *names: str) -> None:
    vendored = tmp_path / "toolchain/src/cmd/vendor"
    unix = vendored / "golang.org/x/sys/unix"
    unix.mkdir(parents=True, exist_ok=True)
    for old in unix.iterdir():
        old.unlink()
    for name in names:
        (unix / name).write_text(f"package unix // {version}\n")
    (vendored / "modules.txt").write_text(MODULES.format(version=version))


def test_vendor_folder_follows_the_toolchain(tmp_path: Path, go: str, source: Path) -> None:
    toolchain(tmp_path, "v0.45.0", "old.go", "both.go")
    before = (source / "go.mod").read_text()
    vendor(go, source)
    unix = source / "vendor/golang.org/x/sys/unix"
    assert (source / "go.mod").read_text() == before
    assert {path.name for path in unix.iterdir()} == {"old.go", "both.go"}
    assert (source / "vendor/modules.txt").read_text() == (
        "# golang.org/x/sys v0.45.0\n## explicit; go 1.25.0\ngolang.org/x/sys/unix\n"
    )

    toolchain(tmp_path, "v0.46.0", "both.go")
    vendor(go, source)
    assert (source / "go.mod").read_text() == before.replace("v0.45.0", "v0.46.0")
    assert [path.read_text() for path in unix.iterdir()] == ["package unix // v0.46.0\n"]


def test_interrupted_copy_is_made_again(tmp_path: Path, go: str, source: Path) -> None:
    toolchain(tmp_path, "v0.45.0", "first.go", "second.go")
    unix = source / "vendor/golang.org/x/sys/unix"
    unix.mkdir(parents=True)
    (unix / "first.go").write_text("")
    vendor(go, source)
    assert (unix / "first.go").stat().st_size > 0
    assert (unix / "second.go").is_file()


def test_toolchain_without_the_library_is_named(tmp_path: Path, go: str, source: Path) -> None:
    with pytest.raises(AgentBuildError, match=f"{tmp_path}/toolchain/src/cmd/vendor has no copy"):
        vendor(go, source)


def test_fingerprint_changes_with_the_version_of_the_library(tmp_path: Path, go: str, source: Path) -> None:
    toolchain(tmp_path, "v0.45.0", "a.go")
    before = fingerprint(source, "go1.27.3", "1")
    vendor(go, source)
    assert fingerprint(source, "go1.27.3", "1") == before
    toolchain(tmp_path, "v0.46.0", "a.go")
    vendor(go, source)
    assert fingerprint(source, "go1.27.3", "1") != before
