"""`stead vm create`: create a VM, and optionally run one command in it."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.if_missing import IfMissing, check_if_missing, note_existing
from stead.cli.output import Json, ProgressLine, fail, note, print_json, show_progress
from stead.cli.references import SnapshotOption
from stead.cli.remote import CommandResult, RemoteCommand, run
from stead.cli.signals import first_signal_exits, ignore_repeated_signals, signals_as_exits
from stead.cli.sizes import Cpu, Disk, Memory, SizeOption, wanted_size
from stead.cli.times import parse_span

if TYPE_CHECKING:
    from stead.sdk import Nic, Stead
    from stead.sdk import Vm as Handle
    from stead.sdk.models import LogEntry
    from stead.sdk.vm_options import JsonSpec, VmOptions

_DEFAULT_PORT = 3000
_OF_A_TEMPLATE = "template"
"""The source of log lines on the build of a template."""
IdleTimeout = Annotated[
    str | None,
    typer.Option(
        metavar="TIME|never",
        help="Suspend the VM after this time without network traffic: 300, 5m, 2h. Default: the server's.",
    ),
]
Repos = Annotated[
    list[str] | None,
    typer.Option(
        "--repo",
        metavar="REPO[#REV]:PATH",
        help="Clone a Git repository (id, name or URL) to a path in the VM; repeatable.",
    ),
]
DomainsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--domain",
        "-d",
        metavar="NAME[:PORT]",
        help="Map a host name to a port of the VM, 3000 by default; repeatable.",
    ),
]
GitAccess = Annotated[
    str | None,
    typer.Option(
        "--git-access",
        metavar="REPO",
        help="Let git in the VM fetch from and push to this repository (id or name) until it is deleted.",
    ),
]
VpcOption = Annotated[
    str | None,
    typer.Option(
        "--vpc",
        metavar="VPC[:ADDRESS]",
        help="Put the VM into a VPC (id or name), with this address or a free one.",
    ),
]
Spec = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        metavar="FILE",
        allow_dash=True,
        help="The description of the VM, as JSON; - for standard input.",
    ),
]


def create(
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the VM.")] = None,
    snapshot: SnapshotOption = None,
    apt: Annotated[
        list[str] | None,
        typer.Option("--apt", metavar="PACKAGE", help="Install a Debian package; repeatable."),
    ] = None,
    repo: Repos = None,
    git_access: GitAccess = None,
    run_: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            metavar="COMMAND",
            help="Run a set-up command with bash as root, after --apt and --repo; repeatable, in order.",
        ),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run --apt, --repo and --run again; reuse no snapshot of them.")
    ] = False,
    size: SizeOption = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    idle_timeout: IdleTimeout = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Delete the VM when it is suspended (falls asleep) or stops.")
    ] = False,
    workdir: Annotated[
        str | None, typer.Option(metavar="PATH", help="The default working directory of commands.")
    ] = None,
    spec: Spec = None,
    domain: DomainsOption = None,
    vpc: VpcOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the services are ready.")] = False,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec", "-e", metavar="LINE", help="Run this command line in the VM and exit with its code."
        ),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the VM after the --exec command, also after Ctrl-C.")
    ] = False,
    if_missing: IfMissing = False,
    as_json: Json = False,
) -> None:
    """Create a VM and print its id; with `--exec`, run a command in it.

    The result of `--apt`, `--repo` and `--run` is saved as a snapshot, and the next create with the same
    values reuses it instead of running them again.

    `stead vm create --exec 'uname -a' --delete` runs one command in a new VM and leaves nothing behind.
    """
    if delete and command is None:
        raise typer.BadParameter("needs --exec: the VM is deleted after that command", param_hint="--delete")
    if delete and if_missing:
        raise typer.BadParameter("cannot be combined with --if-missing", param_hint="--delete")
    check_if_missing(if_missing, name)
    setup = _Setup(apt or [], [_CloneOption.parse(each) for each in repo or ()], run_ or [], no_cache)
    options: VmOptions = {
        "name": name,
        "snapshot_id": snapshot,
        "workdir": workdir,
        "persistence": "ephemeral" if ephemeral else None,
        "wait_for_ready_signal": wait or None,
        "size": wanted_size(size, cpu, memory, disk),
        "domains": dict(_domain_and_port(each) for each in domain) if domain else None,
        "nics": None if vpc is None else [_nic(vpc)],
    }
    if idle_timeout is not None:
        options["idle_timeout_seconds"] = seconds_or_never(idle_timeout)
    given = None if spec is None else read_spec(spec)
    with connected() as stead, signals_as_exits():
        if git_access is not None:
            options["git_access"] = stead.git.repos.find(git_access).id
        options["spec"] = setup.applied_to(stead, given)
        vm, seconds = _make(stead, options, if_missing=if_missing)
        if command is None:
            _print_created(vm, seconds, as_json)
            return
        ending = _run_in(vm, command, delete=delete, collect=as_json)
    if as_json:
        print_json({"id": vm.id, "deleted": delete, "exec": ending})
    raise typer.Exit(ending.exit_code)


def _nic(option: str) -> "Nic":
    from stead.sdk import Nic

    vpc, _, address = option.partition(":")
    return Nic(vpc, address or True)


def _domain_and_port(text: str) -> tuple[str, int]:
    name, _, port = text.partition(":")
    if not port:
        return name, _DEFAULT_PORT
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise typer.BadParameter(f"invalid port in {text!r}: must be from 1 to 65535", param_hint="--domain")
    return name, int(port)


@dataclass(frozen=True)
class _CloneOption:
    """A repository and the path in the VM to clone it to."""

    repo: str
    path: str
    rev: str | None

    @classmethod
    def parse(cls, text: str) -> "_CloneOption":
        """The parts of `site#main:/srv/site`. The `:` of `https://` does not separate a path."""
        repo, _, path = text.rpartition(":")
        repo, _, rev = repo.partition("#")
        if not repo or not path.startswith("/") or path.startswith("//"):
            raise typer.BadParameter(
                f"invalid value {text!r}: expected REPO:PATH, for example site:/srv/site", param_hint="--repo"
            )
        return cls(repo, path, rev or None)

    def repo_id(self, stead: "Stead") -> str:
        """The URL, or the id of the repository that has this name."""
        return self.repo if ":" in self.repo else stead.git.repos.find(self.repo).id


_OF_THE_VM = ("name", "persistence", "waitForReadySignal", "readySignalTimeoutSeconds")
"""Keys of a spec's outermost layer that are about the VM, not about the content of a snapshot."""


@dataclass(frozen=True)
class _Setup:
    """`--apt`, `--repo` and `--run`: a layer that the server builds once and caches as a snapshot."""

    packages: list[str]
    clones: list[_CloneOption]
    commands: list[str]
    no_cache: bool = False

    def applied_to(self, stead: "Stead", spec: "JsonSpec | None") -> "JsonSpec | None":
        """The spec of the VM: the layer of these options on top of the layers of `--spec`."""
        from stead.sdk import VmSpec

        if not (self.packages or self.clones or self.commands):
            return spec
        layer = VmSpec().apt(*self.packages).run(*self.commands)
        for clone in self.clones:
            layer = layer.repo(clone.repo_id(stead), clone.path, rev=clone.rev)
        if self.no_cache:
            layer = layer.skip_cache()
        inner, outer = layer.to_wire(), {}
        if spec is not None:
            outer = {key: value for key, value in spec.items() if key in _OF_THE_VM}
            inner["snapshot"] = {key: value for key, value in spec.items() if key not in _OF_THE_VM}
        return {**outer, "snapshot": inner}


def _make(stead: "Stead", options: "VmOptions", *, if_missing: bool) -> "tuple[Handle, float]":
    """The VM and the seconds that its creation took. The log of a build is printed as it comes."""
    built = options["spec"] is not None
    start = time.perf_counter()
    try:
        with show_progress("building a VM" if built else "creating a VM") as line, first_signal_exits():
            reporter = log_reporter(line, builds=built)
            vm = stead.vms.create(**options, progress=reporter, if_missing=if_missing)
    except (KeyboardInterrupt, SystemExit) as interruption:
        for text in getattr(interruption, "__notes__", ()):
            note(f"{text}: see `stead vm list`")
        raise
    return vm, time.perf_counter() - start


def log_reporter(line: ProgressLine, *, builds: bool) -> "Callable[[LogEntry], None]":
    """Reports the log of a call: the build of a template, and with `builds` that of the call itself."""

    def report(entry: "LogEntry") -> None:
        if entry.source == _OF_A_TEMPLATE:
            line.wait_for(entry)
        elif builds:
            line(entry)

    return report


def _print_created(vm: "Handle", seconds: float, as_json: bool) -> None:
    if as_json:
        facts = {"id": vm.id, "domains": vm.domains, "seconds": round(seconds, 3), "created": vm.created}
        print_json(facts)
        return
    typer.echo(vm.id)
    note_existing("VM", vm.id, vm.created)
    if vm.created and sys.stdout.isatty():
        note(f"running after {seconds:.2f} s; run a command in it: stead vm exec {vm.id[:6]} uname -a")


def _run_in(vm: "Handle", command: str, *, delete: bool, collect: bool) -> CommandResult:
    if not delete:
        if not collect:
            note(f"VM {vm.id}")
        return run(vm, RemoteCommand(command), collect=collect)
    try:
        return run(vm, RemoteCommand(command), collect=collect)
    finally:
        _delete(vm)


def _delete(vm: "Handle") -> None:
    from stead.sdk.errors import NotFound

    try:
        # An ephemeral VM may already be gone.
        with ignore_repeated_signals(), contextlib.suppress(NotFound):
            vm.delete()
    except BaseException:
        note(f"VM {vm.id} may still exist: stead vm delete {vm.id}")
        raise


def read_spec(path: Path) -> "JsonSpec":
    """A spec from a JSON file; `{"spec": {...}}` is accepted too."""
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
    span = parse_span(f"{text}s" if text.isdigit() else text)
    if not span:
        wrong = f"invalid value {text!r}: expected a number of seconds, a duration such as 5m, or never"
        raise typer.BadParameter(wrong, param_hint="--idle-timeout")
    return int(span.total_seconds())
