"""`stead vm create`: a machine, and perhaps one command in it."""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stead.cli.connection import connected
from stead.cli.git import find_repo
from stead.cli.output import Json, fail, note, print_json, working
from stead.cli.references import SnapshotOption, find_snapshot
from stead.cli.remote import Command, Ending, run
from stead.cli.signals import signals_as_exits, undisturbed
from stead.cli.sizes import Cpu, Disk, Memory, Size, SizeOption, wanted_size

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk import Vm as Handle

IdleTimeout = Annotated[
    str | None,
    typer.Option(metavar="SECONDS|never", help="Let it sleep after this time without activity."),
]
Repos = Annotated[
    list[str] | None,
    typer.Option(
        "--repo",
        metavar="REPO[#REV]:PATH",
        help="Clone a Git repository, by its id, name or URL, to a path in it; repeatable.",
    ),
]
Spec = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        metavar="FILE",
        allow_dash=True,
        help="What it should be like, as JSON; - for standard input.",
    ),
]


def create(
    name: Annotated[str | None, typer.Option("--name", "-n", help="A label.")] = None,
    snapshot: SnapshotOption = None,
    apt: Annotated[
        list[str] | None, typer.Option("--apt", metavar="PACKAGE", help="A Debian package; repeatable.")
    ] = None,
    repo: Repos = None,
    size: SizeOption = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    idle_timeout: IdleTimeout = None,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Delete it when it stops.")] = False,
    workdir: Annotated[str | None, typer.Option(help="Where commands run unless they say otherwise.")] = None,
    spec: Spec = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until its services are ready.")] = False,
    command: Annotated[
        str | None, typer.Option("--exec", "-e", metavar="LINE", help="Run this in it, as if it ran here.")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete it after the command, however that ends.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a machine and print its id; with `--exec`, run a command in it and end as that ends.

    `stead vm create --exec 'uname -a' --delete` leaves nothing but the command's output.
    """
    if delete and command is None:
        raise typer.BadParameter("deletes after a command: give --exec with it", param_hint="--delete")
    clones = [_parted(each) for each in repo or ()]
    options: dict[str, Any] = {
        "name": name,
        "apt_deps": apt or None,
        "workdir": workdir,
        "persistence": "ephemeral" if ephemeral else None,
        "wait_for_ready_signal": wait or None,
        "spec": None if spec is None else read_spec(spec),
        **_size_options(wanted_size(size, cpu, memory, disk)),
    }
    if idle_timeout is not None:
        options["idle_timeout_seconds"] = seconds_or_never(idle_timeout)
    with connected() as stead, signals_as_exits():
        if snapshot is not None:
            options["snapshot_id"] = find_snapshot(stead, snapshot)
        if clones:
            options["git"] = {"config": {}, "repos": [_named(stead, each) for each in clones]}
        vm, taken = _make(stead, options)
        if command is None:
            _tell(vm, taken, as_json)
            return
        ending = _run_in(vm, command, delete=delete, collect=as_json)
    if as_json:
        print_json({"id": vm.id, "deleted": delete, "exec": ending})
    raise typer.Exit(ending.exit_code)


def _parted(given: str) -> dict[str, str | None]:
    """`site#main:/srv/site` taken apart. What comes after `://` is an address and no path."""
    name, _, path = given.rpartition(":")
    name, _, rev = name.partition("#")
    if not name or not path.startswith("/") or path.startswith("//"):
        raise typer.BadParameter(
            f"is a repository and a path, as site:/srv/site, not {given!r}", param_hint="--repo"
        )
    return {"repo": name, "path": path, "rev": rev or None}


def _named(stead: "Stead", clone: dict[str, str | None]) -> dict[str, str | None]:
    name = clone["repo"] or ""
    return clone if ":" in name else {**clone, "repo": find_repo(stead, name)}


def _size_options(size: Size) -> dict[str, Any]:
    return {
        "vcpu_count": size.vcpus,
        "mem_size_gb": size.memory_gb,
        "rootfs_size_gb": size.disk_gb,
    }


def _make(stead: "Stead", options: dict[str, Any]) -> "tuple[Handle, float]":
    """The machine, and how long it took. What is built is told line by line."""
    built = options["spec"] is not None or options["apt_deps"] is not None or "git" in options
    start = time.perf_counter()
    try:
        with working("building a machine" if built else "creating a machine") as report:
            vm = stead.vms.create(**options, progress=report if built else None)
    except (KeyboardInterrupt, SystemExit):
        if built:
            note("what was asked for may still be made: look at `stead vm list`")
        raise
    return vm, time.perf_counter() - start


def _tell(vm: "Handle", taken: float, as_json: bool) -> None:
    if as_json:
        print_json({"id": vm.id, "domains": vm.domains, "seconds": round(taken, 3)})
        return
    typer.echo(vm.id)
    if sys.stdout.isatty():
        note(f"running after {taken:.2f} s; `stead vm exec {vm.id[:6]} ...` runs a command in it")


def _run_in(vm: "Handle", command: str, *, delete: bool, collect: bool) -> Ending:
    if not delete:
        note(f"machine {vm.id}")
        return run(vm, Command(command), collect=collect)
    try:
        return run(vm, Command(command), collect=collect)
    finally:
        _delete(vm)


def _delete(vm: "Handle") -> None:
    from stead.sdk.errors import NotFound

    try:
        # An ephemeral machine may have ended with its command.
        with undisturbed(), contextlib.suppress(NotFound):
            vm.delete()
    except BaseException:
        note(f"machine {vm.id} may still be there: `stead vm delete {vm.id}`")
        raise


def read_spec(path: Path) -> dict[str, Any]:
    """A spec from a file, in the server's own words; `{"spec": {...}}` is taken as well."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        spec = json.loads(text)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}", code="SPEC_UNREADABLE")
    except ValueError as error:
        fail(f"{path} is not valid JSON: {error}", code="SPEC_INVALID")
    if isinstance(spec, dict) and isinstance(spec.get("spec"), dict):
        spec = spec["spec"]
    if not isinstance(spec, dict):
        fail(f"{path} is not a spec: it must hold a JSON object", code="SPEC_INVALID")
    return spec


def seconds_or_never(text: str) -> int | None:
    if text.lower() == "never":
        return None
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise typer.BadParameter(
            f"is a number of seconds or `never`, not {text!r}", param_hint="--idle-timeout"
        )
    return int(text)
