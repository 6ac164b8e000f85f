"""Programs of Debian packages that are unpacked into the cache, not installed: their services would start."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path


def unpacked(cache: Path, *packages: str) -> Path:
    """The folder with the files of packages; it has the name of the first."""
    folder = cache / packages[0]
    if not folder.exists():
        making = cache / f".{packages[0]}-{os.getpid()}"
        making.mkdir(parents=True, exist_ok=True)
        download = ["apt-get", "-qq", "download", *packages]
        if subprocess.run(download, cwd=making, timeout=120).returncode != 0:
            # The package lists are missing or old.
            subprocess.run(["apt-get", "-qq", "update"], check=True, timeout=300)
            subprocess.run(download, cwd=making, check=True, timeout=120)
        for package in making.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, making], check=True)
            package.unlink()
        with contextlib.suppress(OSError):
            making.rename(folder)
        shutil.rmtree(making, ignore_errors=True)
    return folder
