"""`--size`, or `--cpu`, `--memory` and `--disk`: the options for the size of a VM."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stead.sdk.sizes import Size

SizeOption = Annotated[
    str | None, typer.Option(metavar="SIZE", help="vCPUs x memory x disk, for example 2x4Gx20G.")
]
Cpu = Annotated[int | None, typer.Option(min=1, metavar="N", help="vCPUs, a power of two.")]
Memory = Annotated[
    str | None, typer.Option(metavar="AMOUNT", help="Memory, a power of two: 4G, 512M, or a number of GiB.")
]
Disk = Annotated[str | None, typer.Option(metavar="AMOUNT", help="Disk: 40G, or a number of GiB.")]


def wanted_size(size: str | None, cpu: int | None, memory: str | None, disk: str | None) -> "Size | None":
    """The size that the options ask for; None if none of them was given."""
    if (size, cpu, memory, disk) == (None, None, None, None):
        return None
    from stead.sdk import sizes

    if size is not None and (cpu, memory, disk) != (None, None, None):
        raise typer.BadParameter("give either --size or --cpu, --memory and --disk", param_hint="--size")
    option = "--size"
    try:
        if size is not None:
            return sizes.Size.parse(size)
        option = "--memory"
        memory_gib = None if memory is None else sizes.gibibytes(memory)
        option = "--disk"
        return sizes.Size(cpu, memory_gib, None if disk is None else sizes.gibibytes(disk))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
