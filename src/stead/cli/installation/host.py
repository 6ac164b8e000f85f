"""`stead doctor` and `stead prepare`: check and prepare this host."""

import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stead.cli.installation.terminal import console, errors, run, settings
from stead.cli.log_lines import Level, write_logs
from stead.cli.output import Json, note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from stead.host.interface import Progress as Step

app = typer.Typer()


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this host: what works, what a missing part costs, and how to fix it.

    The exit code is 1 if VMs cannot run.
    """
    from stead.cli.installation.sealing_check import sealing_key
    from stead.host import doctor as host_doctor
    from stead.settings import sources

    async def work() -> None:
        findings = [*await host_doctor.examine(settings()), await sealing_key(settings())]
        if as_json:
            typer.echo(host_doctor.to_json(findings))
        else:
            host_doctor.render(findings, console)
            for name, source in sorted(sources().items()):
                console.print(f"setting {name} from {source}", style="dim", highlight=False, markup=False)
        if not host_doctor.healthy(findings):
            raise typer.Exit(1)

    run(work())


@app.command()
def prepare(
    size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="vCPUs x memory x disk, for example 4x8Gx20G.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build the base image, and the template for a size, before the first create needs them.

    A server does this when it starts.
    """
    from stead.installation import open_machines
    from stead.machines.templates import TemplateLines
    from stead.settings import Size

    write_logs(Level.WARNING)

    async def work(display: "ProgressDisplay") -> None:
        given = settings()
        async with open_machines(given) as machines:
            wanted = Size.parse(size) if size else given.default_size
            report = display if errors.is_terminal else TemplateLines(wanted, note)
            template = await machines.template(wanted, report)
        facts = {"template": template.id, "image": template.image_key, "size": str(wanted)}
        typer.echo(json.dumps(facts) if as_json else f"ready: template {template.id}, size {wanted}")

    with_display(work)


class ProgressDisplay:
    """A progress bar for the builds of image and template; it appears with the first progress report.

    Without a terminal, each phase is a line.
    """

    def __init__(self) -> None:
        self._title = ""
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, step: "Step") -> None:
        self.show(step.title, step.detail, step.fraction)

    def show(self, title: str, detail: str, fraction: float | None) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        if not errors.is_terminal:
            if title != self._title:
                note(title)
            self._title = title
            return
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[detail]}", markup=False),
                console=errors,
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=1.0, detail="")
        if self._task is not None:
            self._progress.update(
                self._task, description=title, detail=detail[:60], completed=fraction or 0.0
            )
        if fraction == 1.0:
            self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def with_display(work: Callable[[ProgressDisplay], Coroutine[Any, Any, None]]) -> None:
    display = ProgressDisplay()
    try:
        run(work(display))
    finally:
        display.close()
