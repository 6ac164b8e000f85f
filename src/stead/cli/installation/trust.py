"""`stead trust`: the root certificate of this installation in the trust store of this host."""

from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.installation.terminal import Json, run, settings
from stead.cli.output import print_json

if TYPE_CHECKING:
    from stead.settings import Settings

app = typer.Typer()


@app.command()
def trust(
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the certificate instead, for another host or a browser.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove it from the trust store.")] = False,
    as_json: Json = False,
) -> None:
    """Make programs of this host accept the certificates of preview domains and of the API.

    Adds the root certificate of this installation's CA to the system's trust store. Needs root.
    Browsers with a store of their own (Firefox, Chromium on Linux) import the output of `--print`.
    """
    run(_trust(settings(), print_only=print_only, remove=remove, as_json=as_json))


async def _trust(settings: "Settings", *, print_only: bool, remove: bool, as_json: bool) -> None:
    from stead.errors import HostError
    from stead.files import write_atomically
    from stead.host.authority import Authority
    from stead.host.commands import run as run_command
    from stead.host.local import require_root
    from stead.host.trust_store import find_store

    require_root()
    authority = Authority.open(settings)
    certificate, fingerprint = authority.certificate.decode(), authority.fingerprint
    if print_only:
        if as_json:
            print_json({"certificate": certificate, "sha256": fingerprint})
        else:
            typer.echo(certificate, nl=False)
        return
    store = find_store()
    if store is None:
        raise HostError("no trust store found: install ca-certificates, or import `stead trust --print`")
    path = store.file(settings)
    if remove:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, authority.certificate, 0o644)
    # Without --fresh, update-ca-certificates keeps the link to a removed certificate.
    fresh = ("--fresh",) if remove and store.update == ("update-ca-certificates",) else ()
    await run_command(*store.update, *fresh)
    if as_json:
        print_json({"path": str(path), "sha256": fingerprint, "trusted": not remove})
    else:
        typer.echo(f"removed {path}" if remove else f"this host trusts {path} (SHA-256 {fingerprint})")
