"""The real git as a client, with an isolated configuration."""

import asyncio
import base64
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT = 60.0


@dataclass(frozen=True)
class Ran:
    status: int
    stdout: bytes
    err: str

    @property
    def out(self) -> str:
        return self.stdout.decode(errors="replace")


class GitClient:
    """The real git, with an isolated configuration."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # The client's own disk is not tested: skip fsync.
        (home / ".gitconfig").write_text(
            "[core]\n\tfsync = none\n\tcompression = 0\n\tbigFileThreshold = 1m\n[gc]\n\tauto = 0\n"
        )

    def environment(self) -> dict[str, str]:
        who = {
            f"GIT_{role}_{what}": "tests@stead.invalid"
            for role in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        own = {
            "HOME": str(self.home),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C.UTF-8",
        }
        return {"PATH": os.environ["PATH"], **who, **own}

    async def run(
        self,
        *arguments: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        timeout: float = _TIMEOUT,
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        process = await asyncio.create_subprocess_exec(
            "git",
            *arguments,
            cwd=cwd or self.home,
            env=self.environment() | dict(env or {}),
            stdin=PIPE if stdin else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            async with asyncio.timeout(timeout):
                out, err = await process.communicate(stdin or None)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ran(process.returncode, out, err.decode(errors="replace"))

    async def printed(self, *arguments: str, cwd: Path | None = None, stdin: bytes = b"") -> bytes:
        """The output of git, which must succeed."""
        ran = await self.run(*arguments, cwd=cwd, stdin=stdin)
        assert ran.status == 0, f"git {' '.join(arguments)}: {ran.err}"
        return ran.stdout

    async def __call__(self, *arguments: str, cwd: Path | None = None, stdin: bytes = b"") -> str:
        return (await self.printed(*arguments, cwd=cwd, stdin=stdin)).decode(errors="replace").strip()

    async def work_tree(self, name: str, files: dict[str, str | bytes] | None = None) -> Path:
        """A new repository of the user, with one commit on main."""
        folder = self.home / name
        await self("init", "-q", "-b", "main", str(folder))
        await self.commit(folder, files or {"README": "hello\n"})
        return folder

    async def commit(self, folder: Path, files: dict[str, str | bytes], message: str = "change") -> str:
        for path, content in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.encode() if isinstance(content, str) else content)
        await self("add", "-A", cwd=folder)
        await self("commit", "-q", "--allow-empty", "-m", message, cwd=folder)
        return await self("rev-parse", "HEAD", cwd=folder)


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def gits_of(repository: Path) -> list[str]:
    """Git processes of a repository, except pooled readers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"GIT_DIR={repository}\0".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [each for each in found if "cat-file" not in each]
