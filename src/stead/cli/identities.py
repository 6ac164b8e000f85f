"""`stead identity` and `stead whoami`: who may use what."""

from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.output import Json, ago, note, print_facts, print_json, print_table
from stead.cli.references import Identity, Vm, all_identities, find_identity, find_token, find_vm

if TYPE_CHECKING:
    from stead.sdk import VmPermission

app = typer.Typer(no_args_is_help=True, help="Identities: who else may use a machine.")
tokens = typer.Typer(no_args_is_help=True, help="What an identity shows to be let in.")
app.add_typer(tokens, name="token")
alone = typer.Typer()

_PAGE = 1000


@alone.command()
def whoami(as_json: Json = False) -> None:
    """Say whose key this is."""
    with connected() as stead:
        me = stead.whoami()
        url = stead.base_url
    if as_json:
        print_json({"account_id": me.account_id, "identity_id": me.identity_id, "url": url})
    else:
        print_facts([("account", me.account_id), ("identity", me.identity_id), ("server", url)])


@app.command("create")
def create_identity(as_json: Json = False) -> None:
    """Make an identity and print its id. It may do nothing until it is granted something."""
    with connected() as stead:
        made = stead.identities.create()
    if as_json:
        print_json({"id": made.id})
    else:
        typer.echo(made.id)


@app.command("list")
def list_identities(as_json: Json = False) -> None:
    """Show the identities."""
    with connected() as stead:
        found = list(all_identities(stead))
    if as_json:
        print_json({"identities": found})
    elif found:
        for each in found:
            typer.echo(each.id)
    else:
        note("no identities")


@app.command("delete")
def delete_identity(identity: Identity, as_json: Json = False) -> None:
    """Remove an identity with its tokens and permissions."""
    with connected() as stead:
        identity_id = find_identity(stead, identity)
        stead.identities.delete(identity_id)
    if as_json:
        print_json({"id": identity_id, "deleted": True})
    else:
        typer.echo(f"deleted {identity_id}")


@app.command()
def grant(
    identity: Identity,
    vm: Vm,
    users: Annotated[
        list[str] | None, typer.Option("--user", "-u", help="Only as this Linux user; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let an identity use a machine. What it was granted before on it is replaced."""
    from stead.sdk.errors import PermissionAlreadyExists

    with connected() as stead:
        permissions = stead.identities.ref(find_identity(stead, identity)).permissions.vms
        vm_id = find_vm(stead, vm)
        try:
            granted = permissions.grant(vm_id, allowed_users=users or None)
        except PermissionAlreadyExists:
            granted = permissions.update(vm_id, allowed_users=users or None)
    if as_json:
        print_json(granted)
    else:
        typer.echo(f"granted {vm_id} as {_users(granted.allowed_users)}")


@app.command()
def revoke(identity: Identity, vm: Vm, as_json: Json = False) -> None:
    """Take a machine away from an identity."""
    with connected() as stead:
        identity_id, vm_id = find_identity(stead, identity), find_vm(stead, vm)
        stead.identities.ref(identity_id).permissions.vms.revoke(vm_id)
    if as_json:
        print_json({"identity_id": identity_id, "vm_id": vm_id, "revoked": True})
    else:
        typer.echo(f"revoked {vm_id}")


@app.command("permissions")
def list_permissions(identity: Identity, as_json: Json = False) -> None:
    """Show the machines that an identity may use."""
    with connected() as stead:
        permissions = stead.identities.ref(find_identity(stead, identity)).permissions.vms
        found: list[VmPermission] = []
        while page := permissions.list(limit=_PAGE, offset=len(found)):
            found += page
    if as_json:
        print_json({"permissions": found})
        return
    rows = [(each.vm_id, _users(each.allowed_users), ago(each.granted_at)) for each in found]
    print_table(("machine", "as", "granted"), rows, "no permissions")


def _users(names: tuple[str, ...] | None) -> str:
    return "any user" if names is None else ", ".join(names)


# Tokens


@tokens.command("create")
def create_token(identity: Identity, as_json: Json = False) -> None:
    """Make a token and print it, this once."""
    with connected() as stead:
        made = stead.identities.ref(find_identity(stead, identity)).tokens.create()
    if as_json:
        print_json({"id": made.id, "token": made.token})
        return
    typer.echo(made.token)
    note(f"token {made.id}; it is not shown again")


@tokens.command("list")
def list_tokens(identity: Identity, as_json: Json = False) -> None:
    """Show the ids of an identity's tokens."""
    with connected() as stead:
        found = stead.identities.ref(find_identity(stead, identity)).tokens.list()
    if as_json:
        print_json({"tokens": [{"id": each} for each in found]})
    elif found:
        for each in found:
            typer.echo(each)
    else:
        note("no tokens")


@tokens.command("revoke")
def revoke_token(
    identity: Identity,
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Its id, or how the id begins.")],
    as_json: Json = False,
) -> None:
    """End a token. From the next call on it is refused."""
    with connected() as stead:
        identity_id = find_identity(stead, identity)
        token_id = find_token(stead, identity_id, token)
        stead.identities.ref(identity_id).tokens.revoke(token_id)
    if as_json:
        print_json({"id": token_id, "revoked": True})
    else:
        typer.echo(f"revoked {token_id}")
