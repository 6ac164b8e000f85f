"""The first five minutes of a newcomer, with the times."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator

import typer
from rich.console import Console

from stead.host.image import Progress
from stead.machines import Machine, Machines
from stead.settings import Settings


async def demo(
    settings: Settings, count: int, report: Callable[[Progress], None], console: Console, as_json: bool
) -> None:
    """Create, exec, write, read, create more; delete everything whatever happens."""
    times: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str, words: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        times[name] = round((time.perf_counter() - start) * 1000, 1)
        console.print(f"  {words:<44} [bold]{times[name]:>9.1f} ms[/bold]")

    async with Machines.open(settings) as machines:
        owned: list[Machine] = []
        try:
            with timed("template_ms", f"image and template of {settings.default_size} ready"):
                await machines.template(report=report)
            with timed("pool_ms", f"{settings.pool} machines prepared ahead"):
                await machines.pool.filled(60)
            with timed("create_ms", "create a machine"):
                machine = await machines.create(name="demo")
            owned.append(machine)
            with timed("exec_ms", "run `uname -sr`"):
                result = await machine.exec("uname -sr")
            console.print(f"    [dim]{result.stdout.decode().strip()}[/dim]")
            with timed("write_ms", "write /root/hello.txt"):
                await machine.files().write("/root/hello.txt", b"hello from the host\n")
            with timed("read_ms", "read it back"):
                content = await machine.files().read("/root/hello.txt")
            console.print(f"    [dim]{content.decode().strip()}[/dim]")
            if count:
                with timed("create_more_ms", f"create {count} more, all at once"):
                    owned += await _create_many(machines, count)
                with timed("exec_all_ms", f"run a command in all {len(owned)}"):
                    results = await asyncio.gather(*(one.exec("cat /etc/machine-id") for one in owned))
                distinct = {result.stdout for result in results}
                console.print(f"    [dim]{len(distinct)} different machine ids[/dim]")
        finally:
            with timed("delete_ms", "delete everything"):
                await asyncio.gather(*(one.delete() for one in owned))
    if as_json:
        typer.echo(json.dumps(times))


async def _create_many(machines: Machines, count: int) -> list[Machine]:
    results = await asyncio.gather(*(machines.create() for _ in range(count)), return_exceptions=True)
    created = [result for result in results if isinstance(result, Machine)]
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        await asyncio.gather(*(machine.delete() for machine in created))
        raise failures[0]
    return created
