"""The GitHub App of each account, as whoever runs the installation has connected it."""

from stead.github.app import App
from stead.github.errors import GithubNotConnected
from stead.store.database import Database
from stead.store.github import AppRow, AppStore


class Apps:
    """An account has one App of its own: no account reaches what another's was installed on."""

    def __init__(self, database: Database) -> None:
        self._store = AppStore(database)

    async def connect(self, account: str, app: App) -> None:
        """From now on this is the account's App."""
        row = AppRow(account, app.id, app.private_key, app.webhook_secret, app.url, app.api_url)
        await self._store.put(row)

    async def disconnect(self, account: str) -> None:
        """Links of the account stay, and fail until an App is connected again."""
        await self.of(account)
        await self._store.delete(account)

    async def of(self, account: str) -> App:
        row = await self._store.get(account)
        if row is None:
            raise GithubNotConnected
        return _app(row)

    async def known_as(self, app_id: str) -> dict[str, App]:
        """Those with this id at GitHub, by their accounts."""
        return {row.id: _app(row) for row in await self._store.known_as(app_id)}


def _app(row: AppRow) -> App:
    return App(row.app, row.private_key, row.webhook_secret, row.url, row.api_url)
