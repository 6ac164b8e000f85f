"""The client: where everything begins."""

import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx2

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.identities import AsyncIdentities
from stead.sdk._async.logs import AsyncLogs
from stead.sdk._async.vms import AsyncVms
from stead.sdk.models import Whoami
from stead.sdk.parsing import parse
from stead.sdk.requests import DEFAULT_TIMEOUT, UNSET, Unset, find_settings, request
from stead.sdk.retries import RetryPolicy

if TYPE_CHECKING:
    from stead.sdk._async.git import AsyncGit


class AsyncStead:
    """A client of a Stead server.

        async with AsyncStead() as stead:
            async with await stead.vms.create() as vm:
                print((await vm.exec("uname -a")).stdout)

    Args:
        api_key: the account's key; else `STEAD_API_KEY`, else `FREESTYLE_API_KEY`.
        access_token: an identity's token, instead of a key.
        base_url: where the server is; else `STEAD_API_URL`, else `FREESTYLE_API_URL`, else
            `http://127.0.0.1:8600`.
        timeout: seconds that an ordinary call may be without an answer; None for no limit. Calls that take
            long by nature (create, exec, builds) have limits of their own.
        max_retries: how often a call is made again that failed on its way, where that is safe.
        http_client: an `httpx2` client to use instead of an own one: for proxies, certificates, tests. It
            stays open.
    """

    def __init__(
        self,
        api_key: str | None = None,
        access_token: str | None = None,
        base_url: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        max_retries: int = 4,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        settings = find_settings(api_key, access_token, base_url, timeout)
        self._connection = AsyncConnection(settings, RetryPolicy(attempts=max_retries + 1), http_client)
        self.vms = AsyncVms(self._connection)
        """Machines, snapshots and builds."""
        self.identities = AsyncIdentities(self._connection)
        """Who else may use them."""
        self.logs = AsyncLogs(self._connection)
        """What happened."""

    @functools.cached_property
    def git(self) -> "AsyncGit":
        """Repositories. Much belongs to them, so it is loaded when it is first used."""
        from stead.sdk._async.git import AsyncGit

        return AsyncGit(self._connection)

    @property
    def base_url(self) -> str:
        return self._connection.settings.base_url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def whoami(self) -> Whoami:
        """The account, and the identity if the caller is one."""
        return parse(Whoami, await self._connection.call(request("GET", "/auth/v1/whoami")))

    async def fetch(
        self,
        path: str,
        *,
        method: str = "GET",
        query: Mapping[str, object] | None = None,
        json: Any = UNSET,
        headers: Mapping[str, str] | None = None,
        timeout: float | Unset | None = UNSET,
    ) -> httpx2.Response:
        """Any call to the server, with credentials. The answer comes as it is: errors are not raised."""
        if not path.startswith("/"):
            raise ValueError("a path begins with a slash")
        escaped = path.replace("{", "{{").replace("}", "}}")
        call = request(method.upper(), escaped, query=query, json=json, headers=headers, timeout=timeout)
        return await self._connection.send(call)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
