"""Where Stead starts processes: a new place needs a reason in the list, or one of those that exist."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "stead"

REASONS = {
    "processes.py": "`spawn`: QEMU and supervised processes, collected through a pidfd",
    "host/commands.py": "`run`: every command that is awaited, with a deadline and its process group killed",
    "repos/git.py": "git with streams: as the user of repositories, with limits and its configuration",
    "repos/prefork.py": "launchers that are started before the request for the git that they become",
    "cli/cloning.py": "the user's own git, on the user's terminal",
    "cli/ssh.py": "the user's own ssh, on the user's terminal",
    "cli/networks.py": "wg-quick on the user's computer",
    "cli/installation/demo_server.py": "`stead serve` for the length of `stead demo`",
}

SITES = Counter(dict.fromkeys(REASONS, 1) | {"cli/cloning.py": 2})

_STARTS = {
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp"},
    "pty": {"fork", "spawn"},
    "multiprocessing": {"Process", "Pool"},
    "concurrent.futures": {"ProcessPoolExecutor"},
}
_PREFIXES = {"os": ("exec", "spawn")}
_METHODS = {"subprocess_exec", "subprocess_shell"}
"""Of event loops."""


def test_processes_are_started_in_the_listed_places_only() -> None:
    found = Counter(
        {
            str(path.relative_to(ROOT)): count
            for path in ROOT.rglob("*.py")
            if (count := len(spawn_calls(path.read_text())))
        }
    )
    assert found == SITES


def test_the_search_finds_each_way_to_start_a_process() -> None:
    for text in (
        "import subprocess\nsubprocess.run(['a'])",
        "import subprocess as s\ns.Popen(['a'])",
        "from subprocess import Popen as Start\nStart(['a'])",
        "import asyncio\nasyncio.create_subprocess_exec('a')",
        "from asyncio.subprocess import create_subprocess_shell\ncreate_subprocess_shell('a')",
        "import asyncio.subprocess\nasyncio.subprocess.create_subprocess_exec('a')",
        "import os\nos.posix_spawn('a', [], {})",
        "import os\nos.fork()",
        "import os\nos.execvp('a', [])",
        "import os\nstart = os.system",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
        "loop.subprocess_exec(f, 'a')",
    ):
        assert spawn_calls(text), text
    for text in (
        "import subprocess\nsubprocess.PIPE",
        "import os\nos.environ",
        "async def run(): ...\nrun()",
        "import subprocess\nx: subprocess.Popen[str]",
    ):
        assert not spawn_calls(text), text


def spawn_calls(text: str) -> list[int]:
    """The lines of a module that name a function that starts a process, other than in annotations."""
    tree = ast.parse(text)
    names = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    typing = {id(each) for node in ast.walk(tree) for each in _annotations(node)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in typing
        if _starts(_dotted(node, names))
    ]


def _annotations(node: ast.AST) -> list[ast.AST]:
    given = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [each for part in given if isinstance(part, ast.AST) for each in ast.walk(part)]


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        if node.attr in _METHODS:
            return node.attr
        return f"{_dotted(node.value, names)}.{node.attr}"
    return ""


def _starts(dotted: str) -> bool:
    if dotted in _METHODS:
        return True
    module, _, name = dotted.replace("asyncio.subprocess.", "asyncio.").rpartition(".")
    return name in _STARTS.get(module, ()) or name.startswith(_PREFIXES.get(module, ("\0",)))
