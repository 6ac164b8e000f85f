"""`stead github`: the GitHub App of an account, for whoever runs the installation."""

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from stead.cli.keys import AccountName, open_accounts
from stead.cli.output import Json, note, print_facts, print_json
from stead.cli.terminal import run, settings
from stead.errors import InvalidRequest
from stead.github.app import GITHUB, GITHUB_API, WEBHOOKS, App, Github
from stead.github.apps import Apps
from stead.identity.accounts import Account, Accounts
from stead.repos.egress import Egress

app = typer.Typer(no_args_is_help=True, help="The GitHub App by which repositories are kept in step.")

_MAX_FILE = 64 << 10


@app.command("connect")
def connect(
    app_id: Annotated[str, typer.Option(metavar="ID", help="Its App ID, a number.")],
    private_key: Annotated[Path, typer.Option(metavar="FILE", help="Its private key, as GitHub gave it.")],
    webhook_secret: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its webhook secret; else one is made and printed.")
    ] = None,
    account: AccountName = None,
    url: Annotated[str, typer.Option(help="Where GitHub is, if it is your own.")] = GITHUB,
    api_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Where its API is; else /api/v3 there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Have an account's repositories kept in step by this App, after asking GitHub whether it knows it."""

    async def work() -> None:
        given = None if webhook_secret is None else _read(webhook_secret).strip()
        found = App(
            app_id,
            _read(private_key),
            given or secrets.token_urlsafe(32),
            url.rstrip("/"),
            (api_url or (GITHUB_API if url == GITHUB else f"{url.rstrip('/')}/api/v3")).rstrip("/"),
        )
        slug = await Github(Egress(settings().dialled_private_networks)).slug(found)
        async with open_accounts() as opened:
            owner = await _owner(opened, account)
            await Apps(opened.database).connect(owner.id, found)
        facts = _facts(found, owner) | {"slug": slug}
        if given is None:
            facts["webhook_secret"] = found.webhook_secret
        if as_json:
            print_json(facts)
            return
        typer.echo(f"connected: the App {slug or app_id}, for the account {owner.name}")
        note(f"set its webhook to {facts['webhook_url']}")
        if given is None:
            note(f"and its webhook secret to {found.webhook_secret}; it is not shown again")

    run(work())


@app.command("show")
def show(account: AccountName = None, as_json: Json = False) -> None:
    """Show the App of an account, without its secrets."""

    async def work() -> None:
        async with open_accounts() as opened:
            owner = await _owner(opened, account)
            facts = _facts(await Apps(opened.database).of(owner.id), owner)
        if as_json:
            print_json(facts)
        else:
            print_facts([(name.replace("_", " "), value) for name, value in facts.items()])

    run(work())


@app.command("disconnect")
def disconnect(account: AccountName = None, as_json: Json = False) -> None:
    """Forget the App of an account. Repositories stay as they are, on both sides."""

    async def work() -> None:
        async with open_accounts() as opened:
            owner = await _owner(opened, account)
            await Apps(opened.database).disconnect(owner.id)
        if as_json:
            print_json({"account": owner.name, "disconnected": True})
        else:
            typer.echo(f"disconnected: the account {owner.name} has no App any more")

    run(work())


async def _owner(opened: Accounts, name: str | None) -> Account:
    return await opened.default() if name is None else await opened.by_name(name)


def _facts(found: App, owner: Account) -> dict[str, Any]:
    return {
        "account": owner.name,
        "app_id": found.id,
        "url": found.url,
        "api_url": found.api_url,
        "webhook_url": settings().clone_root + WEBHOOKS,
    }


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE + 1)
    if len(content) > _MAX_FILE or b"\0" in content:
        raise InvalidRequest(f"{path} is neither a private key nor a secret")
    return content.decode(errors="replace")
