"""The GitHub App of each account, connected by the operator."""

from stead.github.app import App
from stead.github.errors import GithubNotConnected
from stead.store.database import Database
from stead.store.github import AppRow, AppStore


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
        await self.get(account)
        await self._store.delete(account)

    async def get(self, account: str) -> App:
        row = await self._store.get(account)
        if row is None:
            raise GithubNotConnected
        return _app(row)

    async def by_app_id(self, app_id: str) -> dict[str, App]:
        """The Apps with this GitHub id, by account."""
        return {row.id: _app(row) for row in await self._store.by_app_id(app_id)}


def _app(row: AppRow) -> App:
    return App(row.app, row.private_key, row.webhook_secret, row.url, row.api_url)
