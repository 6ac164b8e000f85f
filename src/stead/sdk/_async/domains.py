"""Domains: verify their ownership, and map host names to ports of VMs."""

import builtins
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.lookups import find_vm
from stead.sdk.arguments import checks_arguments
from stead.sdk.exceptions import InvalidArgument
from stead.sdk.models import Domain, DomainMapping, DomainName, DomainVerification
from stead.sdk.parsing import parse, parse_array
from stead.sdk.requests import request

_ROOT = "/domains/v1"


@checks_arguments
class AsyncDomains:
    """Verified domains, their verifications, and mappings of host names to VMs."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.verifications = AsyncVerifications(connection)
        """Verifications that are not completed."""
        self.mappings = AsyncMappings(connection)
        """Host names that lead to ports of VMs."""
        self._connection = connection

    async def list(
        self, *, limit: int | None = None, offset: int = 0, include_previews: bool = False
    ) -> builtins.list[Domain]:
        """Verified domains, oldest first; with `include_previews`, mapped names of preview zones too.

        A list has at most 1,000 entries; `offset` continues it.
        """
        query = {"limit": limit, "offset": offset, "implicitlyOwned": include_previews or None}
        answer = await self._connection.call(request("GET", f"{_ROOT}/domains", query=query))
        return parse_array(Domain, answer)

    async def release(self, domain: str) -> None:
        """Give up a verified domain, so that another account can verify it. Unmap its names first."""
        await self._connection.call(request("DELETE", f"{_ROOT}/domains/{{}}", domain))


@checks_arguments
class AsyncVerifications:
    """Proof that you own a domain: a TXT record with a code."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(self, domain: str) -> DomainVerification:
        """Start to verify a domain; it includes its subdomains.

        Add the TXT record `record_name` with the content `verification_code`, then call `complete`. A
        verification of the domain that is pending is returned again, with the same code.
        """
        answer = await self._call("POST", {"domain": domain}, idempotent=True)
        return parse(DomainVerification, answer)

    async def complete(self, domain: str | None = None, *, verification_id: str | None = None) -> str:
        """Let the server look up the TXT record, by domain or by verification id; returns the domain.

        Raises `VerificationFailed` while the record is missing: repeat the call later.
        """
        if (domain is None) == (verification_id is None):
            raise InvalidArgument("give either domain or verification_id")
        body = {"domain": domain} if verification_id is None else {"id": verification_id}
        answer = await self._call("PUT", body)
        return parse(DomainName, answer).domain

    async def list(self) -> builtins.list[DomainVerification]:
        """Verifications that are not completed, oldest first."""
        call = request("GET", f"{_ROOT}/verifications")
        return parse_array(DomainVerification, await self._connection.call(call))

    async def cancel(self, domain: str, verification_code: str) -> None:
        """Cancel a verification that is not completed."""
        await self._call("DELETE", {"domain": domain, "verificationCode": verification_code})

    async def _call(self, method: str, body: dict[str, Any], **options: Any) -> Any:
        call = request(method, f"{_ROOT}/verifications", json=body, **options)
        return await self._connection.call(call)


@checks_arguments
class AsyncMappings:
    """Host names that lead to ports of VMs over HTTPS.

    A name belongs to a verified domain, or to a preview zone of the server, which needs no verification.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def create(self, domain: str, *, vm: str, port: int) -> DomainMapping:
        """Map a host name, or `*.` and a domain, to a port of a VM.

        A name that you have mapped before moves to the VM at once. The VM is given by its id, a unique id
        prefix, or a unique name.
        """
        vm_id, _ = await find_vm(self._connection, vm)
        body = {"domain": domain, "vmId": vm_id, "vmPort": port}
        call = request("POST", f"{_ROOT}/mappings/{{}}", domain, json=body, idempotent=True)
        return parse(DomainMapping, await self._connection.call(call))

    async def list(
        self,
        *,
        domain: str | None = None,
        domain_id: str | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> builtins.list[DomainMapping]:
        """Mappings, oldest first: all, that of one name, or those of one verified domain.

        A list has at most 1,000 entries; `offset` continues it.
        """
        query = {"domain": domain, "domainOwnership": domain_id, "limit": limit, "offset": offset}
        call = request("GET", f"{_ROOT}/mappings", query=query)
        return parse_array(DomainMapping, await self._connection.call(call))

    async def delete(self, domain: str) -> None:
        """Remove a mapping. The domain stays verified; a name of a preview zone becomes free."""
        await self._connection.call(request("DELETE", f"{_ROOT}/mappings/{{}}", domain))
