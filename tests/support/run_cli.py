"""Run the `stead` command in tests."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stead.settings import Settings

PROGRAM = Path(sys.executable).parent / "stead"
Result = subprocess.CompletedProcess[str]


def environment_of(settings: Settings, **more: str) -> dict[str, str]:
    """The environment of a command on an installation."""
    return _own_environment() | {
        "STEAD_DATA": str(settings.data),
        "STEAD_CACHE": str(settings.cache_folder),
        "STEAD_CA": str(settings.ca or ""),
        "STEAD_DEFAULT_SIZE": str(settings.default_size),
        "STEAD_POOL": "1",
        **more,
    }


def _own_environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("STEAD_", "FREESTYLE_"))
    }


def stead(*arguments: str, settings: Settings, **environment: str) -> Result:
    """Run a command on an installation."""
    return subprocess.run(
        [PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
        env=environment_of(settings, **environment),
    )


@dataclass(frozen=True)
class Shell:
    """Runs commands as a user of a server."""

    url: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        return _own_environment() | {"STEAD_API_URL": self.url, "STEAD_API_KEY": self.key}

    async def try_(
        self, *arguments: str | Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a command that may fail. Output that is not UTF-8 is decoded with surrogate escapes."""
        result = await asyncio.to_thread(
            subprocess.run,
            [PROGRAM, *arguments],
            input=stdin,
            capture_output=True,
            timeout=300,
            check=False,
            env=self.environment | dict(environment or {}),
        )
        out, errors = (data.decode(errors="surrogateescape") for data in (result.stdout, result.stderr))
        assert "Traceback" not in errors, errors
        return Result(result.args, result.returncode, out, errors)

    async def run(self, *arguments: str | Path, stdin: bytes = b"") -> str:
        """Run a command that succeeds; returns its output."""
        result = await self.try_(*arguments, stdin=stdin)
        assert result.returncode == 0, result.stderr
        return result.stdout

    async def ask(self, *arguments: str | Path, stdin: bytes = b"") -> Any:
        """Run a command that succeeds; returns the JSON document that it prints."""
        return json.loads(await self.run(*arguments, "--json", stdin=stdin))

    async def vm_ids(self) -> list[str]:
        return (await self.run("vm", "list", "--quiet")).split()

    async def refused(self, *arguments: str | Path, code: int = 1) -> str:
        """Run a command that fails without output; returns its standard error."""
        result = await self.try_(*arguments)
        assert result.returncode == code, result
        assert result.stdout == ""
        return result.stderr

    async def start(
        self, *arguments: str | Path, stdin: int = asyncio.subprocess.DEVNULL
    ) -> asyncio.subprocess.Process:
        """Start a command and do not wait for it."""
        pipe = asyncio.subprocess.PIPE
        options: dict[str, Any] = {"stdin": stdin, "stdout": pipe, "stderr": pipe}
        return await asyncio.create_subprocess_exec(PROGRAM, *arguments, **options, env=self.environment)
