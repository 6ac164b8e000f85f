"""VM sizes: `2x4Gx20G` is 2 vCPUs, 4 GiB of memory and a disk of 20 GiB."""

import math
import re
from dataclasses import dataclass
from typing import Any, TypedDict

from stead.sdk.exceptions import InvalidArgument

_WHOLE = re.compile(r"(?P<cpu>\d+)x(?P<memory>[\d.]+[MGT]?)x(?P<disk>[\d.]+[MGT]?)", re.ASCII | re.IGNORECASE)
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[MGT]?)(i?B)?", re.ASCII | re.IGNORECASE)
_IN_GIB = {"M": 1 / 1024, "G": 1, "": 1, "T": 1024}
_MIB_PER_GIB = 1024

Amount = float | str
"""Memory or disk: a number of GiB, or text with a unit such as `512M` or `4G`."""


@dataclass(frozen=True)
class Size:
    """The size of a VM. The server chooses the parts that are None."""

    cpu: int | None = None
    """vCPUs."""
    memory: float | None = None
    """Memory in GiB."""
    disk: float | None = None
    """Disk in GiB."""

    @classmethod
    def parse(cls, text: str) -> "Size":
        """The size that `2x4Gx20G` (vCPUs x memory x disk) stands for."""
        match = _WHOLE.fullmatch(text.strip())
        if match is None:
            raise InvalidArgument(
                f"invalid size {text!r}: expected vCPUs x memory x disk, for example 2x4Gx20G"
            )
        return cls(int(match["cpu"]), gibibytes(match["memory"]), gibibytes(match["disk"]))

    def __bool__(self) -> bool:
        return self != Size()

    def to_wire(self) -> dict[str, Any]:
        """The size as the server takes it, without the parts that are None."""
        wire = {
            "vcpuCount": self.cpu,
            "memSizeGb": _number(self.memory),
            "rootfsSizeGb": _number(self.disk),
        }
        return {key: value for key, value in wire.items() if value is not None}


class SizeParts(TypedDict, total=False):
    """The parts of a size, as arguments."""

    cpu: int | None
    """vCPUs, a power of two."""
    memory: Amount | None
    """GiB, or text such as "512M"; a power of two."""
    disk: Amount | None
    """GiB, or text such as "20G"."""


def wanted_size(size: str | Size | None, parts: SizeParts) -> Size:
    """The size that the arguments of a call ask for: the whole, or its parts."""
    cpu, memory, disk = parts.get("cpu"), parts.get("memory"), parts.get("disk")
    if size is None:
        return Size(
            cpu,
            None if memory is None else gibibytes(memory),
            None if disk is None else gibibytes(disk),
        )
    if (cpu, memory, disk) != (None, None, None):
        raise InvalidArgument("give either size or cpu, memory and disk, not both")
    return size if isinstance(size, Size) else Size.parse(size)


def gibibytes(amount: Amount) -> float:
    """A number of GiB from a number or from text such as `512M`, `4G` or `1T`."""
    if isinstance(amount, int | float):
        if not math.isfinite(amount):
            raise InvalidArgument(f"invalid amount {amount!r}: expected a number of GiB")
        return amount
    match = _AMOUNT.fullmatch(amount.strip())
    if match is None:
        raise InvalidArgument(
            f"invalid amount {amount!r}: expected a number of GiB, or for example 512M or 4G"
        )
    return float(match["number"]) * _IN_GIB[match["unit"].upper()]


def size_text(vcpus: int | None, memory_mib: float | None, disk_mib: float | None) -> str | None:
    """A complete size in the form `2x4Gx20G`; None if a part is unknown."""
    if vcpus is None or memory_mib is None or disk_mib is None:
        return None
    return f"{vcpus}x{_amount(memory_mib)}x{_amount(disk_mib)}"


def _amount(mebibytes: float) -> str:
    whole = mebibytes / _MIB_PER_GIB
    return f"{whole:.0f}G" if whole == int(whole) else f"{mebibytes:g}M"


def _number(amount: float | None) -> float | None:
    """An integer where it is one: that is how other clients write it."""
    return int(amount) if amount is not None and amount == int(amount) else amount
