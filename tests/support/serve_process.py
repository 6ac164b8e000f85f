"""`stead serve` as a process of its own."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

from stead.settings import Settings
from support.run_cli import PROGRAM

Process = asyncio.subprocess.Process


def environment(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "STEAD_DATA": str(settings.data),
        "STEAD_CACHE": str(settings.cache_folder),
        "STEAD_CA": str(settings.ca or ""),
        "STEAD_DEFAULT_SIZE": str(settings.default_size),
        "STEAD_DIAL_PRIVATE": " ".join(map(str, settings.dial_private)),
        "STEAD_POOL": "0",
        "STEAD_LISTEN": "127.0.0.1:0",
        "STEAD_HTTPS_LISTEN": "127.0.0.1:0",
        "STEAD_HTTP_LISTEN": "127.0.0.1:0",
        "STEAD_SSH_LISTEN": "127.0.0.1:0",
    }


async def start(settings: Settings, **more: str) -> tuple[Process, dict[str, Any]]:
    """A server that answers, and what it said of itself, with the first key. `more` are variables of it."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "serve",
        "--json",
        env=environment(settings) | more,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    said = json.loads(await asyncio.wait_for(process.stdout.readline(), 300))
    assert said["key"] is None
    if said["keyFile"] is not None:
        said["key"] = Path(said["keyFile"]).read_text().strip()
    return process, said


async def end(process: Process, how: signal.Signals = signal.SIGTERM) -> int:
    if process.returncode is None:
        process.send_signal(how)
    return await asyncio.wait_for(process.wait(), 300)


@contextlib.asynccontextmanager
async def serving(settings: Settings, **more: str) -> AsyncIterator[tuple[Process, dict[str, Any]]]:
    process, said = await start(settings, **more)
    try:
        yield process, said
    finally:
        await end(process)


def client_of(url: str, key: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=120)
