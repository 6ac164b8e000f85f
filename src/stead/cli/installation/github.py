"""`stead github`: the GitHub App of an account; for operators of the installation."""

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from stead.cli.installation.keys import AccountName, open_accounts
from stead.cli.installation.terminal import run, settings
from stead.cli.output import Json, note, print_facts, print_json
from stead.errors import InvalidRequest
from stead.github.app import GITHUB, GITHUB_API, WEBHOOKS, App, GithubClient
from stead.github.apps import Apps, ConnectedApp
from stead.identity.accounts import Account, Accounts
from stead.repos.ssrf import SsrfGuard

app = typer.Typer(no_args_is_help=True, help="Manage the GitHub App used for GitHub sync.")

_MAX_FILE = 64 << 10


@app.command("connect")
def connect(
    app_id: Annotated[str, typer.Option(metavar="ID", help="App ID (a number).")],
    private_key: Annotated[Path, typer.Option(metavar="FILE", help="Private key file (PEM) from GitHub.")],
    webhook_secret: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the webhook secret (default: generate and print one)."),
    ] = None,
    account: AccountName = None,
    url: Annotated[str, typer.Option(help="URL of a GitHub Enterprise server.")] = GITHUB,
    api_url: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of its API (default: /api/v3 on that server).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Connect a GitHub App to an account, after a check with GitHub."""

    async def work() -> None:
        given = None if webhook_secret is None else _read(webhook_secret).strip()
        found = App(
            app_id,
            _read(private_key),
            given or secrets.token_urlsafe(32),
            url.rstrip("/"),
            (api_url or (GITHUB_API if url == GITHUB else f"{url.rstrip('/')}/api/v3")).rstrip("/"),
        )
        slug = await GithubClient(SsrfGuard(settings().dial_private)).slug(found)
        async with open_accounts() as opened:
            owner = await _owner(opened, account)
            await Apps(opened.database).connect(owner.id, found)
        facts = _facts(found, owner) | {"slug": slug}
        if given is None:
            facts["webhook_secret"] = found.webhook_secret
        if as_json:
            print_json(facts)
            return
        typer.echo(f"connected App {slug or app_id} to account {owner.name}")
        note(f"set the App's webhook URL to {facts['webhook_url']}")
        if given is None:
            note(f"set its webhook secret to {found.webhook_secret} (it is not shown again)")

    run(work())


@app.command("show")
def show(account: AccountName = None, as_json: Json = False) -> None:
    """Show the App of an account, without its secrets."""

    async def work() -> None:
        async with open_accounts() as opened:
            owner = await _owner(opened, account)
            facts = _facts(await Apps(opened.database).describe(owner.id), owner)
        if as_json:
            print_json(facts)
        else:
            print_facts([(name.replace("_", " "), value) for name, value in facts.items()])

    run(work())


@app.command("disconnect")
def disconnect(account: AccountName = None, as_json: Json = False) -> None:
    """Disconnect the App of an account. Repositories on both sides stay as they are."""

    async def work() -> None:
        async with open_accounts() as opened:
            owner = await _owner(opened, account)
            await Apps(opened.database).disconnect(owner.id)
        if as_json:
            print_json({"account": owner.name, "disconnected": True})
        else:
            typer.echo(f"disconnected the App of account {owner.name}")

    run(work())


async def _owner(opened: Accounts, name: str | None) -> Account:
    return await opened.default() if name is None else await opened.by_name(name)


def _facts(found: App | ConnectedApp, owner: Account) -> dict[str, Any]:
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
        raise InvalidRequest(f"{path} is not a private key or secret file")
    return content.decode(errors="replace")
