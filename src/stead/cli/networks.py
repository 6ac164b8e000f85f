"""`stead vpc`: private networks between VMs."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.if_missing import IfMissing, check_if_missing, note_existing
from stead.cli.output import Json, ago, fail, local_time, note, print_facts, print_json, print_table
from stead.cli.signals import ignore_repeated_signals, signals_as_exits

if TYPE_CHECKING:
    from stead.sdk.models import WireGuardSession

app = typer.Typer(no_args_is_help=True, help="VPCs: private networks between VMs.")

VpcArgument = Annotated[
    str, typer.Argument(metavar="VPC", help="The VPC: its id, an id prefix, or its name.")
]

_CONFIG_NAME = re.compile(r"[A-Za-z0-9_=+.-]{1,15}\.conf")
"""What `wg-quick` accepts; the name of the interface is that of the file."""


@app.command()
def create(
    cidr: Annotated[
        str, typer.Argument(metavar="CIDR", help="Its private IPv4 range.", show_default=True)
    ] = "10.0.0.0/16",
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the VPC.")] = None,
    if_missing: IfMissing = False,
    as_json: Json = False,
) -> None:
    """Create a VPC and print its id. Its range may overlap that of another VPC."""
    check_if_missing(if_missing, name)
    with connected() as stead:
        made = stead.vpcs.create(cidr, name=name, if_missing=if_missing)
    if as_json:
        print_json(made)
    else:
        typer.echo(made.id)
        note_existing("VPC", made.id, made.created)


@app.command("list")
def list_vpcs(as_json: Json = False) -> None:
    """List VPCs."""
    with connected() as stead:
        found = stead.vpcs.list()
    if as_json:
        print_json({"vpcs": found})
        return
    rows = [(each.id, each.name or "", each.cidr, ago(each.created_at)) for each in found]
    print_table(("id", "name", "cidr", "created"), rows, "no VPCs")


@app.command()
def get(vpc: VpcArgument, as_json: Json = False) -> None:
    """Show a VPC and the VMs in it."""
    with connected() as stead:
        found = stead.vpcs.get(vpc)
    if as_json:
        print_json(found)
        return
    print_facts(
        [
            ("id", found.id),
            ("name", found.name),
            ("cidr", found.cidr),
            ("created", ago(found.created_at)),
            *((f"VM {each.vm_id}", " ".join((each.ipv4, *each.names))) for each in found.vms),
        ]
    )


@app.command()
def delete(vpc: VpcArgument, as_json: Json = False) -> None:
    """Delete a VPC. It must have no VMs."""
    with connected() as stead:
        found = stead.vpcs.get(vpc)
        stead.vpcs.delete(found.id)
    if as_json:
        print_json({"id": found.id, "deleted": True})
    else:
        typer.echo(f"deleted {found.id}")


@app.command()
def connect(
    vpc: VpcArgument,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Only write the configuration to this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Join a VPC with WireGuard until Ctrl-C: runs `wg-quick` as root, or with sudo.

    With `--json`, one line says which session it is and when it ends.
    """
    if file is None and shutil.which("wg-quick") is None:
        fail("wg-quick is not installed: install wireguard-tools, or use --file", code="NOT_INSTALLED")
    if file is not None and not _CONFIG_NAME.fullmatch(file.name):
        raise typer.BadParameter(
            f"wg-quick refuses the file name {file.name!r}: must be NAME.conf,"
            " with a NAME of at most 15 letters, digits and _=+.-",
            param_hint="--file",
        )
    if file is not None and not force and file.exists():
        fail(
            f"{file} exists, with the key of another session: choose another name, or --force",
            code="FILE_EXISTS",
        )
    with connected() as stead:
        if file is not None:
            session = stead.vpcs.connect(vpc)
            _warn_of_loopback(session)
            try:
                _write(file, session.client_config)
            except OSError:
                stead.vpcs.disconnect(session)
                raise
            if as_json:
                print_json({"file": str(file.absolute()), **_described(session)}, line=True)
                return
            end = local_time(session.expires_at)
            typer.echo(
                f"wrote {file}: run wg-quick up {file.absolute()}; the session {session.id} ends {end}"
            )
            return
        with signals_as_exits(), tempfile.TemporaryDirectory(prefix="stead-vpc-") as folder:
            session = stead.vpcs.connect(vpc)
            _warn_of_loopback(session)
            path = Path(folder) / f"wg-{session.id}.conf"
            try:
                _write(path, session.client_config)
                started = _wg_quick("up", path)
                if started.returncode:
                    fail(f"wg-quick up failed: {started.stderr.strip()}", code="WG_QUICK_FAILED")
                if as_json:
                    print_json(_described(session), line=True)
                else:
                    way = f"{session.vpc_cidr} leads into {session.vpc_id}"
                    note(f"connected: {way} until {local_time(session.expires_at)}. Ctrl-C disconnects")
                while True:
                    signal.pause()
            finally:
                with ignore_repeated_signals():
                    # Also after a failure or Ctrl-C: the device may be there.
                    _wg_quick("down", path)
                    stead.vpcs.disconnect(session)


def _warn_of_loopback(session: "WireGuardSession") -> None:
    host = session.endpoint_host or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        note(
            f"the endpoint {host}:{session.endpoint_port} works on the host of Stead only: set"
            " STEAD_WIREGUARD_HOST there to a name or address that other computers reach, and connect again"
        )


@app.command()
def clients(vpc: VpcArgument, as_json: Json = False) -> None:
    """List the computers that may join a VPC with WireGuard."""
    with connected() as stead:
        found = stead.vpcs.clients(vpc)
    if as_json:
        print_json({"clients": found})
        return
    rows = [
        (
            each.session_id or each.client_public_key,
            each.client_tunnel_ip,
            each.gateway_vm_id or "",
            ago(each.created_at),
            local_time(each.expires_at) if each.expires_at else "never",
        )
        for each in found
    ]
    print_table(("client", "address", "gateway", "created", "expires"), rows, "no clients")


@app.command()
def disconnect(
    vpc: VpcArgument,
    client: Annotated[
        str, typer.Argument(metavar="CLIENT", help="As `stead vpc clients` names it: a session or a key.")
    ],
    as_json: Json = False,
) -> None:
    """End the access of a computer to a VPC: its tunnel is closed at once."""
    with connected() as stead:
        found = next(
            (each for each in stead.vpcs.clients(vpc) if client in (each.session_id, each.client_public_key)),
            None,
        )
        if found is None:
            fail(f"VPC {vpc} has no client {client!r}: see `stead vpc clients {vpc}`", code="NOT_FOUND")
        stead.vpcs.disconnect(found)
    if as_json:
        print_json({"client": client, "disconnected": True})
    else:
        typer.echo(f"disconnected {client}")


def _described(session: "WireGuardSession") -> dict[str, object]:
    """The session without its configuration, which contains a private key."""
    return {
        "session_id": session.id,
        "vpc_id": session.vpc_id,
        "vpc_cidr": session.vpc_cidr,
        "client_tunnel_ip": session.client_tunnel_ip,
        "expires_at": session.expires_at,
    }


def _write(path: Path, config: str) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(config)


def _wg_quick(action: str, path: Path) -> subprocess.CompletedProcess[str]:
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    command = [*sudo, "wg-quick", action, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
