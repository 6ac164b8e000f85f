"""Values of the command line: Typer converts only those that need it."""

import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from stead.cli.conversion import adapt

PROGRAM = """
import contextlib, sys
from stead.cli.main import app
sys.argv = ["stead", *sys.argv[1:], "--url", "ftp://nowhere", "--key", "key"]
with contextlib.suppress(SystemExit):
    app()
print("pydantic" in sys.modules, file=sys.stderr)
"""


class Adapted(TyperGroup):
    """A group whose commands have adapted parameters."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> object:  # type: ignore[override]
        name, command, rest = super().resolve_command(ctx, args)
        assert command is not None
        adapt(command.get_params(typer.Context(command, parent=ctx)))
        return name, command, rest


app = typer.Typer(cls=Adapted, add_completion=False)


@app.callback()
def root() -> None:
    pass


@app.command()
def show(
    first: str,
    others: Annotated[list[str] | None, typer.Argument()] = None,
    number: Annotated[int, typer.Option(min=1)] = 1,
    many: Annotated[list[int] | None, typer.Option()] = None,
    words: Annotated[list[str] | None, typer.Option("--word")] = None,
    text: Annotated[str | None, typer.Option(callback=lambda value: value and value.upper())] = None,
    flag: Annotated[bool, typer.Option("--flag")] = False,
) -> None:
    print((first, others, number, many, words, text, flag))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (["a"], ("a", None, 1, None, None, None, False)),
        (["a", "b", "c"], ("a", ["b", "c"], 1, None, None, None, False)),
        (["a", "--number", "2", "--flag"], ("a", None, 2, None, None, None, True)),
        (["a", "--many", "1", "--many", "2"], ("a", None, 1, [1, 2], None, None, False)),
        (["a", "--word", "1", "--text", "x"], ("a", None, 1, None, ["1"], "X", False)),
        (["", "--text", ""], ("", None, 1, None, None, "", False)),
    ],
)
def test_values_have_the_types_of_the_function(line: list[str], values: tuple[object, ...]) -> None:
    result = CliRunner().invoke(app, ["show", *line])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == repr(values)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "Missing argument 'first'"),
        (["a", "--number", "x"], "Invalid value for '--number'"),
        (["a", "--number", "0"], "Invalid value for '--number'"),
        (["a", "--many", "x"], "Invalid value for '--many'"),
        (["a", "--nope"], "No such option"),
    ],
)
def test_wrong_values_are_refused_by_name(line: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["show", *line])
    assert result.exit_code == 2 and words in result.stderr


def test_help_names_values_by_their_option() -> None:
    shown = CliRunner().invoke(app, ["show", "--help"], env={"COLUMNS": "100"}).output
    assert "TEXT" in shown and "<int range>" in shown
    assert "<bool>" not in shown and "<str>" not in shown.partition("Options")[2]


@pytest.mark.parametrize(
    "line", [("vm", "fork", "web"), ("vm", "create", "--apt", "git", "--name", "web"), ("vm", "list")]
)
def test_text_and_defaults_need_no_pydantic(line: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *line], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[-1] == "False", done.stderr
    assert "ftp://nowhere" in done.stderr
