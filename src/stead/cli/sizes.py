"""Sizes of machines as people type them."""

import re
from dataclasses import dataclass
from typing import Annotated

import typer

_WHOLE = re.compile(r"(?P<cpu>\d+)x(?P<memory>\d+[MG])x(?P<disk>\d+G)", re.ASCII | re.IGNORECASE)
_AMOUNT = re.compile(r"(?P<number>\d+)(?P<unit>[MGT]?)(i?B)?", re.ASCII | re.IGNORECASE)
_IN_GB = {"M": 1 / 1024, "G": 1, "": 1, "T": 1024}

SizeOption = Annotated[str | None, typer.Option(help="Virtual CPUs x memory x disk, like 2x4Gx20G.")]
Cpu = Annotated[int | None, typer.Option(min=1, help="Virtual CPUs: a power of two.")]
Memory = Annotated[str | None, typer.Option(help="Memory, like 4G or 512M: a power of two.")]
Disk = Annotated[str | None, typer.Option(help="Disk, like 40G.")]


@dataclass(frozen=True)
class Size:
    """What was said of a size; the rest is the server's to choose."""

    vcpus: int | None = None
    memory_gb: float | None = None
    disk_gb: int | None = None

    def __bool__(self) -> bool:
        return self != Size()


def wanted_size(size: str | None, cpu: int | None, memory: str | None, disk: str | None) -> Size:
    """The size that `--size`, or the options for its parts, ask for."""
    if size is None:
        return Size(cpu, _gigabytes(memory, "--memory"), _whole_gigabytes(disk))
    if (cpu, memory, disk) != (None, None, None):
        raise typer.BadParameter("give the parts of a size or the whole, not both", param_hint="--size")
    match = _WHOLE.fullmatch(size)
    if match is None:
        text = f"a size is virtual CPUs x memory x disk, like 2x4Gx20G, not {size!r}"
        raise typer.BadParameter(text, param_hint="--size")
    memory_gb, disk_gb = _gigabytes(match["memory"], "--size"), _whole_gigabytes(match["disk"])
    return Size(int(match["cpu"]), memory_gb, disk_gb)


def _gigabytes(text: str | None, option: str) -> float | None:
    if text is None:
        return None
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"an amount looks like 4G or 512M, not {text!r}", param_hint=option)
    amount = int(match["number"]) * _IN_GB[match["unit"].upper()]
    return int(amount) if amount == int(amount) else amount


def _whole_gigabytes(text: str | None) -> int | None:
    amount = _gigabytes(text, "--disk")
    if amount is not None and amount != int(amount):
        raise typer.BadParameter(f"a disk has whole gigabytes, not {text}", param_hint="--disk")
    return None if amount is None else int(amount)
