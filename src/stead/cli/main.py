"""The `stead` command."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from stead.cli.demo import demo
from stead.errors import HostError, SteadError
from stead.host import doctor as host_doctor
from stead.host.image import Progress as Step
from stead.machines import Machines
from stead.settings import Settings, Size

app = typer.Typer(
    no_args_is_help=True, add_completion=True, help="Real Linux machines for programs and agents."
)
console = Console()
errors = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except SteadError as error:
        _fail(error)
    except OSError as error:
        _fail(HostError(f"{error.strerror}: {error.filename}" if error.filename else str(error)))
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None


def _fail(error: SteadError) -> NoReturn:
    errors.print(f"[red]error[/red] ({error.code}): {error}", soft_wrap=True)
    raise typer.Exit(1)


def _settings() -> Settings:
    try:
        return Settings.from_environment()
    except SteadError as error:
        _fail(error)


class _Display:
    """A progress bar for image and template building; it appears only when there is something to wait for."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __call__(self, step: Step) -> None:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[detail]}"),
                console=errors,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=1.0, detail="")
        self._progress.update(
            self._task, description=step.phase, detail=step.detail[:60], completed=step.fraction or 0.0
        )
        if step.fraction == 1.0:
            self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _with_display(work: Callable[[Callable[[Step], None]], Coroutine[Any, Any, None]]) -> None:
    display = _Display()
    try:
        _run(work(display))
    finally:
        display.close()


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this host has, what each missing thing costs, and how to get it."""

    async def work() -> None:
        findings = await host_doctor.examine(_settings())
        if as_json:
            typer.echo(host_doctor.to_json(findings))
        else:
            host_doctor.render(findings, console)
        if any(finding.status == "missing" for finding in findings):
            raise typer.Exit(1)

    _run(work())


@app.command()
def prepare(
    size: Annotated[str | None, typer.Option(help="Machine size, for example 4x8Gx20G.")] = None,
    as_json: Json = False,
) -> None:
    """Build the base image and the template of a size, so that creates are quick from then on."""

    async def work(report: Callable[[Step], None]) -> None:
        settings = _settings()
        async with Machines.open(settings) as machines:
            wanted = Size.parse(size) if size else settings.default_size
            template = await machines.template(wanted, report)
        facts = {"template": template.id, "image": template.image.key, "size": str(template.size)}
        typer.echo(json.dumps(facts) if as_json else f"ready: template {template.id} of {template.size}")

    _with_display(work)


@app.command(name="demo")
def demo_command(
    count: Annotated[int, typer.Option(min=0, max=100, help="How many more machines to create.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the main job: create a machine, run a command, write and read a file, create ten more."""

    async def work(report: Callable[[Step], None]) -> None:
        await demo(_settings(), count, report, Console(quiet=as_json), as_json)

    _with_display(work)


if __name__ == "__main__":
    app()
