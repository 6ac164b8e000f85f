"""The GitHub App of each account, connected by the operator."""

import contextlib
from dataclasses import dataclass

from stead.github.app import App
from stead.github.errors import GithubFailed, GithubNotConnected
from stead.logs import get_logger
from stead.store.database import Database
from stead.store.github import AppRow, AppStore
from stead.store.sealing import SealingError

log = get_logger("stead.github")


@dataclass(frozen=True)
class ConnectedApp:
    """The App of an account without its secrets."""

    id: str
    url: str
    api_url: str


class Apps:
    """One App per account, so that no account can reach repositories of another's App."""

    def __init__(self, database: Database) -> None:
        self._store = AppStore(database)

    async def connect(self, account: str, app: App) -> None:
        """Set the account's App."""
        row = AppRow(account, app.id, app.private_key, app.webhook_secret, app.url, app.api_url)
        await self._store.put(row)

    async def disconnect(self, account: str) -> None:
        """Remove the account's App. Its links stay, and fail until an App is connected again."""
        await self._row(account)
        await self._store.delete(account)

    async def describe(self, account: str) -> ConnectedApp:
        row = await self._row(account)
        return ConnectedApp(row.app, row.url, row.api_url)

    async def get(self, account: str) -> App:
        """The account's App; GithubFailed if its secrets cannot be read."""
        return self._app(await self._row(account))

    async def by_app_id(self, app_id: str) -> dict[str, App]:
        """The Apps with this GitHub id, by account, but for those whose secrets cannot be read."""
        found = {}
        for row in await self._store.by_app_id(app_id):
            with contextlib.suppress(GithubFailed):
                found[row.id] = self._app(row)
        return found

    async def _row(self, account: str) -> AppRow:
        row = await self._store.get(account)
        if row is None:
            raise GithubNotConnected
        return row

    def _app(self, row: AppRow) -> App:
        try:
            opened = self._store.opened(row)
        except SealingError as error:
            log.error("cannot read the secrets of a GitHub App", account=row.id, error=str(error))
            raise GithubFailed(
                "the key of the GitHub App cannot be read: the operator of this server runs `stead doctor`"
            ) from error
        return App(row.app, opened.private_key, opened.webhook_secret, row.url, row.api_url)
