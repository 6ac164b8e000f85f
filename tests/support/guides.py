"""Published guides, run as their readers run them: the samples of a page, one after the other, in Node.js."""

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_SOURCE = re.compile(r"^Source: \S+/guides/(\S+)$", re.MULTILINE)
_SAMPLE = re.compile(r"^```ts$(.*?)^```$", re.MULTILINE | re.DOTALL)
_THROWS = "// throws: "
_INDENTATION = {"def ": 4, "self.": 8, "httpd.": 4}
"""Of the Python program in the guide about Python: the text of the guides has lost it."""


@dataclass(frozen=True)
class Guide:
    """The samples of a guide, and what its program prints, as patterns, in this order."""

    name: str
    prints: tuple[str, ...]

    def program(self, folder: Path) -> str | None:
        """The samples as one module, from the text files in a folder; None if the guide is not in them."""
        for path in sorted(folder.glob("*.txt")):
            parts = _SOURCE.split(path.read_text())
            if self.name in parts:
                page = parts[parts.index(self.name) + 1]
                return "\n".join(_runnable(sample) for sample in _SAMPLE.findall(page))
        return None


def _runnable(sample: str) -> str:
    """A sample that says that its last call throws would end the module before the next sample."""
    if "import http.server" in sample:
        sample = "\n".join(_indented(line) for line in sample.splitlines())
    if _THROWS in sample:
        return f"try {{ {sample} }} catch (error) {{ console.log('threw:', error.message); }}"
    return sample


def _indented(line: str) -> str:
    return next((" " * by + line for start, by in _INDENTATION.items() if line.startswith(start)), line)


def published(pattern: str) -> str:
    """The first text of published pages that matches a pattern; its first group. Skips without the text."""
    folder = os.environ.get("STEAD_GUIDES")
    if not folder:
        pytest.skip("needs the text of the guides: set STEAD_GUIDES to a folder with it")
    for path in sorted(Path(folder).glob("*.txt")):
        if found := re.search(pattern, path.read_text(), re.MULTILINE | re.DOTALL):
            return found[1]
    pytest.skip(f"no text in {folder} has this program")


async def run_until_printed(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    patterns: Sequence[str],
    limit: float,
) -> str:
    """Run a program that does not end by itself, until it has printed all patterns in order."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed, wanted, start = "", list(patterns), 0
    try:
        async with asyncio.timeout(limit):
            while wanted and (piece := await process.stdout.read(65536)):
                print(piece.decode(errors="replace"), end="", flush=True)
                printed += piece.decode(errors="replace")
                while wanted and (found := re.compile(wanted[0], re.MULTILINE).search(printed, start)):
                    start = found.end()
                    wanted.pop(0)
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert not wanted, f"not printed in {limit:g} s: {wanted}\nin\n{printed}"
    return printed
