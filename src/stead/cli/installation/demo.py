"""`stead demo`: create, use, fork, suspend and snapshot a VM, let an agent use one, and print the times."""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from stead.cli.connection import report_errors, target
from stead.cli.creation import log_reporter
from stead.cli.extras import MissingExtra, is_installed
from stead.cli.installation.demo_server import DemoServer, server
from stead.cli.output import Json, duration_text, fail, print_json, show_progress
from stead.cli.signals import ignore_repeated_signals, signals_as_exits

if TYPE_CHECKING:
    from stead.sdk import Stead, Vm

app = typer.Typer()

_HELLO = "hello from the host"


@app.command()
def demo(
    as_json: Json = False,
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Leave out the agent.")] = False,
) -> None:
    """Create a VM, use it, fork it, suspend it, snapshot it, let an agent use one, and delete everything.

    The agent is one of the OpenAI Agents SDK (package openai-agents). Without OPENAI_API_KEY its model is
    scripted: it needs no key and no network.

    The demo uses the server of STEAD_API_URL and STEAD_API_KEY. If there is none, it starts a server on the
    data directory of this installation (as root), and stops it at the end.
    """
    steps = _Steps(quiet=as_json)
    with signals_as_exits(), server(target()) as found, _client(found) as stead:
        if found.own:
            with steps.timed("prepare", "prepare the image and the template"):
                found.prepared.wait()
        else:
            steps.say(f"using the server at {found.url}")
        _show(stead, steps)
        if no_agent:
            pass
        elif not is_installed("openai-agents"):
            steps.say(f"no agent: {MissingExtra('it', 'openai-agents')}")
        else:
            from stead.cli.installation.demo_agent import show_agent

            asyncio.run(show_agent(found.url, found.key, steps.timed, steps.say, _fetch))
    if as_json:
        print_json(steps.times)


@contextlib.contextmanager
def _client(found: DemoServer) -> "Iterator[Stead]":
    from stead.sdk import Stead

    with report_errors(found.url), Stead(found.key, base_url=found.url) as stead:
        yield stead


class _Steps:
    """Prints each step with its time, and records the times."""

    def __init__(self, *, quiet: bool) -> None:
        self.times: dict[str, float] = {}
        self._quiet = quiet

    @contextlib.contextmanager
    def timed(self, name: str, words: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.times[f"{name}_ms"] = round(seconds * 1000, 1)
        if not self._quiet:
            typer.echo(f"  {words:<44} {typer.style(f'{duration_text(seconds):>12}', bold=True)}")

    def say(self, text: str) -> None:
        if not self._quiet:
            typer.secho(f"    {text}", dim=True)


def _show(stead: "Stead", steps: _Steps) -> None:
    """Run all steps; the VMs and snapshots are deleted also after an error."""
    vms: list[Vm] = []
    snapshots: list[str] = []
    try:
        with steps.timed("create", "create a VM"), show_progress("creating a VM") as line:
            vms.append(stead.vms.create(name="demo", progress=log_reporter(line, builds=False)))
        first = vms[0]
        with steps.timed("exec", "run `uname -sr`"):
            kernel = first.exec("uname -sr", check=True).stdout.strip()
        steps.say(kernel)
        with steps.timed("write", "write /root/hello.txt"):
            first.fs.write_text("/root/hello.txt", _HELLO)
        with steps.timed("read", "read it back"):
            content = first.fs.read_text("/root/hello.txt")
        steps.say(content)
        with steps.timed("fork", "fork it twice while it runs"):
            vms += first.fork(count=2)
        _check_forks(vms, steps)
        with steps.timed("suspend", "suspend it"):
            first.suspend()
        with steps.timed("wake", "wake it by running a command"):
            first.exec("true", check=True)
        with steps.timed("snapshot", "save it as a snapshot"):
            snapshots.append(first.snapshot(name="demo").id)
        with steps.timed("create_from_snapshot", "create a VM from the snapshot"):
            vms.append(stead.vms.create(snapshot_id=snapshots[0]))
        _check(
            vms[-1].fs.read_text("/root/hello.txt") == _HELLO,
            "the VM from the snapshot lacks the file that was saved",
        )
        steps.say("the file is there, and the programs are still running")
    finally:
        with ignore_repeated_signals(), steps.timed("delete", "delete everything"):
            for vm in vms:
                vm.delete()
            for snapshot in snapshots:
                stead.vms.snapshots.delete(snapshot)


def _check_forks(vms: "list[Vm]", steps: _Steps) -> None:
    """Forks have the same files, and a machine-id each."""
    with steps.timed("exec_all", f"run a command in all {len(vms)} VMs"):
        answers = [vm.exec("cat /etc/machine-id /root/hello.txt", check=True).stdout for vm in vms]
    _check(all(answer.endswith(_HELLO) for answer in answers), "a fork lacks the file of its parent")
    ids = {answer.partition("\n")[0] for answer in answers}
    steps.say(f"{len(ids)} different machine-ids, the same file in each")


def _fetch(address: str) -> str:
    """What a URL of a VM's port shows. Names below `localhost` are of this host, also without a resolver."""
    import httpx2

    from stead.host.authority import CERTIFICATE_FILE
    from stead.settings import Settings

    trust = ssl.create_default_context()
    settings = Settings.load()
    certificate = (settings.ca or settings.data / "ca") / CERTIFICATE_FILE
    if certificate.exists():
        trust.load_verify_locations(certificate)
    parts = urlsplit(address)
    name = parts.hostname or ""
    place = f"https://127.0.0.1:{parts.port or 443}/" if name.endswith(".localhost") else address
    with httpx2.Client(verify=trust, timeout=60) as client:
        answer = client.get(place, headers={"Host": parts.netloc}, extensions={"sni_hostname": name})
    return answer.raise_for_status().text


def _check(right: bool, text: str) -> None:
    if not right:
        fail(text)
