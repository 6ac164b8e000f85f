"""The client of a Stead server."""

import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx2

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.identities import AsyncIdentities
from stead.sdk._async.logs import AsyncLogs
from stead.sdk._async.vms import AsyncVms
from stead.sdk.arguments import checked, checks_arguments
from stead.sdk.exceptions import InvalidArgument
from stead.sdk.models import SshGateway, Whoami
from stead.sdk.parsing import parse
from stead.sdk.requests import DEFAULT_TIMEOUT, UNSET, Unset, connection_settings, request
from stead.sdk.retries import RetryPolicy

if TYPE_CHECKING:
    from stead.sdk._async.domains import AsyncDomains
    from stead.sdk._async.git import AsyncGit
    from stead.sdk._async.networks import AsyncVpcs


@checks_arguments
class AsyncStead:
    """A client of a Stead server.

        async with AsyncStead() as stead:
            async with await stead.vms.create() as vm:
                print((await vm.exec("uname -a")).stdout)

    Args:
        api_key: the account's API key. Default: `STEAD_API_KEY`, then `FREESTYLE_API_KEY`, then the
            content of the file `STEAD_API_KEY_FILE`.
        access_token: an identity's access token, instead of an API key.
        base_url: the server's URL. Default: `STEAD_API_URL`, then `FREESTYLE_API_URL`, then
            `http://127.0.0.1:8600`.
        timeout: seconds to wait for an answer; None for no limit. Long calls (create, exec, builds) have
            their own timeouts.
        max_retries: how often a failed request is repeated, where that is safe: see `stead.sdk.retries`.
        http_client: your own `httpx2` client, for proxies, certificates or tests. It is not closed with this
            client.
    """

    @checked
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
        settings = connection_settings(api_key, access_token, base_url, timeout)
        if max_retries < 0:
            raise InvalidArgument(f"max_retries must be 0 or more, not {max_retries}")
        self._connection = AsyncConnection(settings, RetryPolicy(attempts=max_retries + 1), http_client)
        self.vms = AsyncVms(self._connection)
        """VMs, snapshots and builds."""
        self.identities = AsyncIdentities(self._connection)
        """Identities: restricted access for others."""
        self.logs = AsyncLogs(self._connection)
        """Logs of VMs, builds and requests."""

    @functools.cached_property
    def git(self) -> "AsyncGit":
        """Git repositories. Loaded on first use."""
        from stead.sdk._async.git import AsyncGit

        return AsyncGit(self._connection)

    @functools.cached_property
    def domains(self) -> "AsyncDomains":
        """Domains: verification, and host names mapped to VMs. Loaded on first use."""
        from stead.sdk._async.domains import AsyncDomains

        return AsyncDomains(self._connection)

    @functools.cached_property
    def vpcs(self) -> "AsyncVpcs":
        """VPCs: private networks between VMs. Loaded on first use."""
        from stead.sdk._async.networks import AsyncVpcs

        return AsyncVpcs(self._connection)

    @property
    def base_url(self) -> str:
        """The URL of the server."""
        return self._connection.settings.base_url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_url!r})"

    async def whoami(self) -> Whoami:
        """The account of the credentials, and the identity if they are an access token."""
        return parse(Whoami, await self._connection.call(request("GET", "/auth/v1/whoami")))

    async def ssh_gateway(self) -> SshGateway:
        """Where `ssh` reaches the VMs, and the gateway's host key."""
        return parse(SshGateway, await self._connection.call(request("GET", "/v1/ssh")))

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
        """Send any request to the server, with credentials. Error answers are returned, not raised."""
        if not path.startswith("/"):
            raise InvalidArgument(f"invalid path {path!r}: must start with a slash")
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
