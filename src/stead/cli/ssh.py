"""`stead vm ssh`: the local ssh client, connected to a VM through the gateway."""

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from typer.core import TyperCommand, TyperOption

from stead.cli.connection import connected, target
from stead.cli.output import fail
from stead.cli.references import Vm
from stead.cli.signals import ignore_repeated_signals, signals_as_exits
from stead.cli.temporary_identity import temporary_identity

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.models import SshGateway

_CONFIG = """\
Host {vm}
    HostName {host}
    Port {port}
    User {user}
    HostKeyAlias stead
    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    UpdateHostKeys no
    PreferredAuthentications none
    PubkeyAuthentication no
    ServerAliveInterval 30
"""


class SshCommand(TyperCommand):
    """Everything after the VM belongs to ssh: `stead vm ssh VM -L 8080:localhost:80 ls -l`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not each.is_flag
            for each in self.params
            if isinstance(each, TyperOption)
            for name in (*each.opts, *each.secondary_opts)
        }
        position = 0
        while position < len(args) and args[position] != "--":
            word = args[position]
            if not word.startswith("-"):
                args = [*args[: position + 1], "--", *args[position + 1 :]]
                break
            position += 1 + takes_value.get(word, False)
        return super().parse_args(ctx, args)


def ssh(
    vm: Vm,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SSH ARGUMENTS]", help="Options of ssh and a command, as after a host name."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="The Linux user. Default: root.")] = None,
) -> None:
    """Run the local ssh client, connected to a VM. A suspended or stopped VM is started first.

    An identity with a token for this VM is created for the length of the call. Everything after the VM is
    passed to ssh: options such as `-L 8080:localhost:80`, then a command. The exit code is that of ssh.
    """
    with connected() as stead:
        gateway = stead.ssh_gateway()
        vm_id = stead.vms.find(vm).id
        with signals_as_exits(), _token(stead, vm_id) as token, tempfile.TemporaryDirectory() as folder:
            name = vm_id if user is None else f"{vm_id}+{user}"
            config = _write_config(Path(folder), stead.base_url, gateway, vm_id, f"{name},{token}")
            code = _run(["ssh", "-F", str(config), vm_id, *(arguments or ())])
    raise typer.Exit(code)


@contextlib.contextmanager
def _token(stead: "Stead", vm_id: str) -> Iterator[str]:
    """A token for one VM, removed after the block."""
    if stead.whoami().identity_id is not None:
        # An identity cannot create identities: use its own token.
        yield target().key or ""
        return
    with temporary_identity(stead, f"stead vm ssh {vm_id}") as identity:
        identity.permissions.vms.grant(vm_id)
        yield identity.tokens.create().token


def _write_config(folder: Path, url: str, gateway: "SshGateway", vm_id: str, user: str) -> Path:
    """A configuration file for ssh: all users of this computer could read a token in the command line."""
    known_hosts, config = folder / "known_hosts", folder / "config"
    known_hosts.write_text(f"stead {gateway.host_key}\n")
    host = gateway.host or urlsplit(url).hostname
    config.touch(mode=0o600)
    config.write_text(
        _CONFIG.format(vm=vm_id, host=host, port=gateway.port, user=user, known_hosts=known_hosts)
    )
    return config


def _run(command: list[str]) -> int:
    try:
        process = subprocess.Popen(command)
    except FileNotFoundError:
        fail("ssh is not installed: install OpenSSH's client and try again")
    with process:
        # Ctrl-C is for the program in the VM; ssh ends when it has to.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            code = process.wait()
        except BaseException:
            with ignore_repeated_signals():
                process.terminate()
                process.wait()
            raise
        finally:
            signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
