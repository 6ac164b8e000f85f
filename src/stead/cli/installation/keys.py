"""`stead keys` and `stead accounts`: for the operator of the installation; no server is needed."""

import contextlib
import inspect
from collections.abc import AsyncIterator
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from stead.cli.installation.terminal import run, settings
from stead.cli.output import Json, note, print_json, print_table
from stead.errors import InvalidRequest
from stead.host.resources import measure
from stead.identity.accounts import Account, Accounts, KeyInfo
from stead.identity.first_key import remove_revoked_first_key
from stead.limits import Limits
from stead.store.installation_id import open_beside_server

keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
accounts = typer.Typer(no_args_is_help=True, help="Accounts and their limits.")

AccountName = Annotated[str | None, typer.Option("--account", help="The name of an account.")]


@contextlib.asynccontextmanager
async def open_accounts() -> AsyncIterator[Accounts]:
    """The accounts in the database of the installation. A running server may use it at the same time."""
    chosen = settings()
    data = chosen.data
    with contextlib.suppress(FileExistsError):
        data.mkdir(parents=True, mode=0o711)
        # Independent of the umask: VMs run as other users, and their files are below this directory.
        data.chmod(0o711)
    database = await open_beside_server(chosen)
    try:
        yield Accounts(database, chosen.account_limits(measure(chosen)))
    finally:
        await database.dispose()


@keys.command("create")
def create_key(
    account: AccountName = None,
    name: Annotated[str | None, typer.Option(help="A name that says what the key is for.")] = None,
    as_json: Json = False,
) -> None:
    """Create an API key and print it; it cannot be shown again. Without --account it is for `default`."""

    async def work() -> None:
        async with open_accounts() as opened:
            owner = await opened.default() if account is None else await opened.by_name(account)
            info, secret = await opened.create_key(owner.id, name)
        if as_json:
            print_json(_key_facts(info, owner.name) | {"key": secret})
            return
        typer.echo(secret)
        note(f"key {info.id} of account {owner.name}; it cannot be shown again")

    run(work())


@keys.command("list")
def list_keys(
    account: AccountName = None,
    everything: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False,
    as_json: Json = False,
) -> None:
    """List API keys with their first characters and their last use."""

    async def work() -> None:
        async with open_accounts() as opened:
            owner = None if account is None else (await opened.by_name(account)).id
            found = await opened.keys(owner, revoked=everything)
            names = {each.id: each.name for each in await opened.list()}
        if as_json:
            print_json({"keys": [_key_facts(each, names[each.account]) for each in found]})
            return
        rows = [
            (
                each.id,
                f"{each.hint}…",
                names[each.account],
                each.name or "",
                _time(each.created_at) or "",
                _time(each.used_at) or "never",
                *([_time(each.revoked_at) or ""] if everything else []),
            )
            for each in found
        ]
        headings = ["id", "key", "account", "name", "created", "last used"]
        print_table([*headings, *(["revoked"] if everything else [])], rows, "no keys")

    run(work())


@keys.command("revoke")
def revoke_key(
    key: Annotated[str, typer.Argument(help="The id of the key, or an id prefix of 4 or more characters.")],
    as_json: Json = False,
) -> None:
    """Revoke an API key. The next call with it is refused."""

    async def work() -> None:
        async with open_accounts() as opened:
            info = await opened.revoke_key(key)
            await remove_revoked_first_key(opened, settings().data)
            owner = await opened.get(info.account)
        if as_json:
            print_json(_key_facts(info, owner.name))
        else:
            typer.echo(f"revoked key {info.id} ({info.hint}…) of account {owner.name}")

    run(work())


@accounts.command("create")
def create_account(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the account.")],
    as_json: Json = False,
) -> None:
    """Create an account and print its id. Every VM, snapshot, repository and identity belongs to one."""

    async def work() -> None:
        async with open_accounts() as opened:
            account = await opened.create(name)
        if as_json:
            print_json(_account_facts(account))
        else:
            typer.echo(account.id)

    run(work())


@accounts.command("delete")
def delete_account(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the account.")],
    as_json: Json = False,
) -> None:
    """Delete an account with its API keys. It must own no VMs, snapshots, repositories or identities."""

    async def work() -> None:
        async with open_accounts() as opened:
            account = await opened.by_name(name)
            await opened.delete(account.id)
            await remove_revoked_first_key(opened, settings().data)
        if as_json:
            print_json({"id": account.id, "name": account.name, "deleted": True})
        else:
            typer.echo(f"deleted account {account.name}")

    run(work())


@accounts.command("list")
def list_accounts(as_json: Json = False) -> None:
    """List accounts."""

    async def work() -> None:
        async with open_accounts() as opened:
            found = await opened.list()
        if as_json:
            print_json({"accounts": [_account_facts(each) for each in found]})
            return
        rows = [(each.id, each.name, _time(each.created_at) or "", _limits_line(each)) for each in found]
        print_table(["id", "name", "created", "limits"], rows, "no accounts")

    run(work())


def limits(name: str, as_json: bool = False, **given: str | None) -> None:
    """Show or change the limits of an account.

    A limit is a number, `unlimited`, or `default`, which removes the account's own limit: then the limit of
    the installation applies.
    """

    async def work() -> None:
        wanted = {key: value for key, value in given.items() if value is not None}
        unset = [key for key, value in wanted.items() if value == "default"]
        changes = {key: _limit(key, value) for key, value in wanted.items() if key not in unset}
        async with open_accounts() as opened:
            account = await opened.by_name(name)
            if wanted:
                account = await opened.set_limits(account.id, changes, unset=unset)
        if as_json:
            print_json(_account_facts(account))
            return
        rows = [
            (
                key,
                "unlimited" if value is None else str(value),
                "own" if key in account.own_limits else "default",
            )
            for key, value in asdict(account.limits).items()
        ]
        print_table(["limit", "value", "from"], rows, "")

    run(work())


def _limits_signature() -> inspect.Signature:
    """The account, an option for each limit, and `--json`."""
    account = Annotated[str, typer.Argument(metavar="NAME", help="The name of the account.")]
    types = {
        each.name: Annotated[str | None, typer.Option(metavar="N", help=each.metadata["help"])]
        for each in fields(Limits)
    }
    return inspect.Signature(
        [
            inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, annotation=account),
            *(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for name, annotation in types.items()
            ),
            inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json),
        ]
    )


limits.__signature__ = _limits_signature()  # type: ignore[attr-defined]
accounts.command("limits")(limits)


def _limit(name: str, text: str) -> int | None:
    if text == "unlimited":
        return None
    if not (text.isascii() and text.isdigit()):
        option = f"--{name.replace('_', '-')}"
        raise InvalidRequest(f"invalid {option} {text!r}: expected a number, unlimited, or default")
    return int(text)


def _key_facts(info: KeyInfo, account: str) -> dict[str, Any]:
    return {
        "id": info.id,
        "account": account,
        "account_id": info.account,
        "name": info.name,
        "hint": info.hint,
        "created_at": _time(info.created_at),
        "used_at": _time(info.used_at),
        "revoked_at": _time(info.revoked_at),
    }


def _account_facts(account: Account) -> dict[str, Any]:
    return {
        "id": account.id,
        "name": account.name,
        "created_at": _time(account.created_at),
        "limits": asdict(account.limits),
        "own_limits": dict(account.own_limits),
    }


def _limits_line(account: Account) -> str:
    own = account.own_limits.items()
    return ", ".join(f"{key} {'unlimited' if value is None else value}" for key, value in own) or "default"


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
