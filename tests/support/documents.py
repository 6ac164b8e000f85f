"""The documents as the tests see them: pages, blocks, and a shell session that runs the blocks of one page.

Rules for the examples in README.md and docs/:

- `python` blocks are whole programs. They run as they stand, in the folder of the page's shell session.
- `console` blocks are typed into one bash session for each page. A line with the prompt `$ ` (or `# `, as
  root on the host) is a command; it continues on the next line after a backslash. Other lines are its output.
- A command must succeed, unless a line of its output starts with `error:` or `{"error":`. Without output
  lines the output is not compared.
- Output is compared line by line. `...` stands for any text, and on a line of its own for any lines. Ids,
  keys, tokens, commits, times, sizes, addresses and the server's URL stand for any other of their kind (see
  `_KINDS`), runs of spaces for one space; spaces between the parts of JSON do not count.
- `json` blocks say what they are in a comment before them: `<!-- file: NAME -->` is saved in the session's
  folder, `<!-- body: POST /v1/vms -->` must be a valid body of that call without unknown keys, and
  `<!-- answer: GET /v1/vms -->` must have no keys that the call does not answer with.
- `text` blocks after `<!-- output -->` are what the block before them prints.
- `<!-- part of: FILE -->`: the block is a part of a file of this project, which has tests of its own.
- `<!-- run by: TEST -->`: this file of tests/ reads the block (`run_by`) and runs or compares it, with what
  a page lacks: a keyboard, an account at GitHub, a model, a network of its own.
- Everything else has the comment `<!-- not run: REASON -->` before it, and is counted in `test_docs.py`.
"""

import asyncio
import base64
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from support import ROOT

_FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>[a-z ]+?)(?:: (?P<text>[^>]*?))? -->\n+ *)?"
    r"```(?P<language>[\w-]*)\n(?P<body>.*?)^ *```$",
    re.S | re.M,
)


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comment right before it."""

    language: str
    body: str
    line: int
    mark: str | None
    text: str

    @property
    def not_run(self) -> bool:
        return self.mark == "not run"

    @property
    def is_run(self) -> bool:
        return self.language in {"python", "console"} and self.mark not in {"not run", "part of", "run by"}

    def __str__(self) -> str:
        return f"line {self.line} ({self.language})"


@dataclass(frozen=True)
class Command:
    """A command of a console block and the output that the page shows."""

    line: str
    output: tuple[str, ...]

    @property
    def fails(self) -> bool:
        return any(line.startswith(("error:", '{"error":')) for line in self.output)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match["language"], body, line, match["mark"], match["text"] or ""))
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.M)), f"{page.name}: a fence is not closed"
    return found


def run_by(test: str, page: str) -> list[Block]:
    """The blocks of a page that leave it to a file of tests, its `__file__`, to run them."""
    name = str(Path(test).relative_to(ROOT))
    return [block for block in blocks(ROOT / page) if block.mark == "run by" and block.text == name]


def commands(body: str) -> list[Command]:
    """The commands of a console block."""
    found: list[tuple[str, list[str]]] = []
    lines = iter(body.splitlines())
    for line in lines:
        if line[:2] in {"$ ", "# "}:
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines)
            found.append((command, []))
        else:
            assert found, f"output before the first command: {line!r}"
            found[-1][1].append(line)
    return [Command(command, tuple(output)) for command, output in found]


_KINDS = [
    (r"\b(sc|bld|req)-[a-z0-9]{8,}\b", "<id>"),
    (r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
    (r"\bstead_[\w-]+…?", "<key>"),
    (r"\bstid_[\w-]+", "<token>"),
    (r"\b[0-9a-f]{40}\b", "<commit>"),
    (r"\b[a-z0-9]{20}\b", "<id>"),
    (r"\b[0-9a-f]{32}\b", "<trace>"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d| [A-Z]+)?", "<time>"),
    (r"\b\d+[smhd] ago\b", "<time>"),
    (r"\b\d+x\d+[MG]x\d+G\b", "<size>"),
    (r"http://127\.0\.0\.1:\d+", "<url>"),
    (r"\b100\.(6[4-9]|[7-9]\d|1[01]\d|12[0-7])\.\d+\.\d+\b", "<address>"),
    (r'("duration_?[mM]s"): ?[\d.]+', r"\1:<duration>"),
    (r"[ \t]+", " "),
]


def normalised(text: str) -> str:
    for pattern, kind in _KINDS:
        text = re.sub(pattern, kind, text)
    if text.startswith(("{", "[")):
        text = re.sub(r"([:,]) ", r"\1", text)
    return text.strip()


def matches(shown: list[str], printed: str) -> bool:
    """Whether what was printed is what a page shows."""
    parts = []
    for line in shown:
        if line.strip() == "...":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(re.escape(normalised(line)).replace(r"\.\.\.", r"[^\n]*?") + "\n")
    lines = "".join(normalised(line) + "\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch("".join(parts), lines) is not None


class Session:
    """One bash that the commands of a page are typed into, without a terminal."""

    _END = "end-of-command-7c1f"

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self.folder = folder

    @classmethod
    async def open(cls, folder: Path, environment: dict[str, str]) -> "Session":
        process = await asyncio.create_subprocess_exec(
            "bash",
            "--noprofile",
            "--norc",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
            limit=1 << 24,
        )
        return cls(process, folder)

    async def run(self, command: str, limit: float = 300) -> tuple[int, str]:
        """Type a command and wait for its end; its exit status and everything it printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        encoded = base64.b64encode(command.encode()).decode()
        line = f"eval \"$(base64 -d <<< {encoded})\" < /dev/null; printf '\\n%s %s\\n' {self._END} $?\n"
        self._process.stdin.write(line.encode())
        await self._process.stdin.drain()
        printed: list[str] = []
        started = time.monotonic()
        async with asyncio.timeout(limit):
            while True:
                got = await self._process.stdout.readline()
                assert got, f"the shell ended: {command}\n{''.join(printed)}"
                text = got.decode(errors="replace")
                if text.startswith(self._END):
                    print(f"{time.monotonic() - started:6.2f} s  {command}")  # for `pytest -s`
                    return int(text.split()[1]), "".join(printed).removesuffix("\n")
                printed.append(text)

    async def close(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        # The transport is closed here, not by the garbage collector of a later test.
        self._process._transport.close()  # type: ignore[attr-defined]
