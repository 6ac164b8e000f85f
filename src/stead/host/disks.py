"""Disk layers: qcow2 files, each standing on frozen ones below it."""

import os
from pathlib import Path

from stead.errors import HostError
from stead.host.commands import run
from stead.tasks import in_thread


async def make_layer(path: Path, backing: Path, size_gib: int) -> None:
    """An empty layer over `backing`. QEMU is told the chain, so the path inside does not matter."""
    kind = "raw" if backing.suffix == ".raw" else "qcow2"
    arguments = ("-f", "qcow2", "-F", kind, "-b", str(backing))
    await run("qemu-img", "create", "-q", *arguments, str(path), f"{size_gib}G")


async def copy_layer(source: Path, target: Path, uid: int) -> None:
    """Copy an empty layer for the QEMU that will write it: quicker than making one."""
    await in_thread(_copy, source, target, uid)


def _copy(source: Path, target: Path, uid: int) -> None:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as layer:
            layer.write(source.read_bytes())
            os.fchown(descriptor, uid, uid)
    except OSError as error:
        raise HostError(f"cannot make a disk layer: {error.strerror}") from error
