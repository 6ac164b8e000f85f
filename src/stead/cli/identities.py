"""`stead identity` and `stead whoami`: access for others to some VMs and repositories."""

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.if_missing import IfMissing, check_if_missing, note_existing
from stead.cli.output import Json, ago, note, print_facts, print_json, print_table
from stead.cli.references import Identities, Identity, RepoArgument, Vm, all_identities, find_token

if TYPE_CHECKING:
    from stead.sdk import VmPermission
    from stead.sdk.models import GrantedRepo

app = typer.Typer(no_args_is_help=True, help="Identities: access for others to some VMs and repositories.")
tokens = typer.Typer(no_args_is_help=True, help="Access tokens of an identity.")
app.add_typer(tokens, name="token")
alone = typer.Typer()

_PAGE = 1000


class Access(enum.StrEnum):
    READ = "read"
    WRITE = "write"


@alone.command()
def whoami(as_json: Json = False) -> None:
    """Show the account, the identity and the server of the API key or token."""
    with connected() as stead:
        me = stead.whoami()
        url = stead.base_url
    if as_json:
        print_json({"account_id": me.account_id, "identity_id": me.identity_id, "url": url})
    else:
        print_facts([("account", me.account_id), ("identity", me.identity_id), ("server", url)])


@app.command("create")
def create_identity(
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the identity.")] = None,
    if_missing: IfMissing = False,
    as_json: Json = False,
) -> None:
    """Create an identity and print its id. It has no permissions until you grant some."""
    check_if_missing(if_missing, name)
    with connected() as stead:
        made = stead.identities.create(name=name, if_missing=if_missing)
    if as_json:
        print_json({"id": made.id, "name": made.name, "created": made.created})
    else:
        typer.echo(made.id)
        note_existing("identity", made.id, made.created)


@app.command("list")
def list_identities(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List identities with their names, and how many VMs and repositories each may use."""
    with connected() as stead:
        found = list(all_identities(stead))
    if as_json:
        print_json({"identities": found})
    elif quiet:
        for each in found:
            typer.echo(each.id)
    else:
        rows = [
            (each.id, each.name, each.vm_grants, each.repo_grants, ago(each.created_at)) for each in found
        ]
        print_table(("id", "name", "VMs", "repos", "created"), rows, "no identities")


@app.command("delete")
def delete_identities(identities: Identities, as_json: Json = False) -> None:
    """Delete identities with their tokens and permissions."""
    with connected() as stead:
        # All are found before the first is deleted.
        found = {each.id: each for each in map(stead.identities.find, identities)}
        for each in found.values():
            each.delete()
            if not as_json:
                typer.echo(f"deleted {each.id}")
    if as_json:
        print_json({"identities": [{"id": each, "deleted": True} for each in found]})


@app.command()
def grant(
    identity: Identity,
    vm: Vm,
    users: Annotated[
        list[str] | None,
        typer.Option("--user", "-u", help="Allow only this Linux user; repeatable. Default: all users."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Let an identity use a VM. An earlier permission for the VM is replaced."""
    from stead.sdk.errors import PermissionAlreadyExists

    with connected() as stead:
        permissions = stead.identities.find(identity).permissions.vms
        vm_id = stead.vms.find(vm).id
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
    """Revoke the permission of an identity for a VM."""
    with connected() as stead:
        found, vm_id = stead.identities.find(identity), stead.vms.find(vm).id
        found.permissions.vms.revoke(vm_id)
    if as_json:
        print_json({"identity_id": found.id, "vm_id": vm_id, "revoked": True})
    else:
        typer.echo(f"revoked {vm_id}")


@app.command("grant-repo")
def grant_repo(
    identity: Identity,
    repo: RepoArgument,
    permission: Annotated[
        Access, typer.Option("--permission", "-p", help="`write` includes reading.")
    ] = Access.READ,
    as_json: Json = False,
) -> None:
    """Let an identity read, or read and write, a repository. An earlier permission is replaced."""
    from stead.sdk.errors import PermissionAlreadyExists

    with connected() as stead:
        found, repo_id = stead.identities.find(identity), stead.git.repos.find(repo).id
        try:
            found.permissions.git.grant(repo_id, permission.value)
        except PermissionAlreadyExists:
            found.permissions.git.update(repo_id, permission.value)
    if as_json:
        print_json({"identity_id": found.id, "repo_id": repo_id, "permission": permission.value})
    else:
        typer.echo(f"granted {permission.value} on {repo_id}")


@app.command("revoke-repo")
def revoke_repo(identity: Identity, repo: RepoArgument, as_json: Json = False) -> None:
    """Revoke the permission of an identity for a repository."""
    with connected() as stead:
        found, repo_id = stead.identities.find(identity), stead.git.repos.find(repo).id
        found.permissions.git.revoke(repo_id)
    if as_json:
        print_json({"identity_id": found.id, "repo_id": repo_id, "revoked": True})
    else:
        typer.echo(f"revoked {repo_id}")


@app.command("permissions")
def list_permissions(identity: Identity, as_json: Json = False) -> None:
    """List the VMs and repositories that an identity may use."""
    with connected() as stead:
        permissions = stead.identities.find(identity).permissions
        vms: list[VmPermission] = []
        while page := permissions.vms.list(limit=_PAGE, offset=len(vms)):
            vms += page
        repos: list[GrantedRepo] = []
        while granted := permissions.git.list(limit=_PAGE, offset=len(repos)):
            repos += granted
        names = {vm.id: vm.name for vm in stead.vms.list()} if vms and not as_json else {}
    if as_json:
        print_json({"permissions": vms, "repositories": repos})
        return
    rows: list[tuple[object, ...]] = [
        ("VM", each.vm_id, names.get(each.vm_id), _users(each.allowed_users), ago(each.granted_at))
        for each in vms
    ]
    rows += [("repo", each.id, each.name, each.permissions, "") for each in repos]
    print_table(("kind", "id", "name", "access", "granted"), rows, "no permissions")


def _users(names: tuple[str, ...] | None) -> str:
    return "any user" if names is None else ", ".join(names)


# Tokens


@tokens.command("create")
def create_token(identity: Identity, as_json: Json = False) -> None:
    """Create a token and print it. It cannot be shown again."""
    with connected() as stead:
        created = stead.identities.find(identity).tokens.create()
    if as_json:
        print_json({"id": created.id, "token": created.token})
        return
    typer.echo(created.token)
    note(f"token {created.id}; it cannot be shown again")


@tokens.command("list")
def list_tokens(identity: Identity, as_json: Json = False) -> None:
    """List the ids of an identity's tokens."""
    with connected() as stead:
        found = stead.identities.find(identity).tokens.list()
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
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="The id of the token, or an id prefix.")],
    as_json: Json = False,
) -> None:
    """Revoke a token. The next call with it is refused."""
    with connected() as stead:
        found = stead.identities.find(identity)
        token_id = find_token(stead, found.id, token)
        found.tokens.revoke(token_id)
    if as_json:
        print_json({"id": token_id, "revoked": True})
    else:
        typer.echo(f"revoked {token_id}")
