"""Where TXT records of DNS challenges are published: a name server with RFC 2136 updates, or acme-dns."""

import asyncio
import contextlib
import ipaddress
import stat
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal, Protocol

import dns.asyncquery
import dns.asyncresolver
import dns.exception
import dns.name
import dns.rcode
import dns.tsig
import dns.update
import httpx2
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from stead.deadlines import scaled
from stead.edge.acme import AcmeError
from stead.errors import InvalidRequest

_TIMEOUT = scaled(15.0)
_TTL = 60
_MAX_FILE = 64 << 10
_MAX_REASON = 300


class DnsProvider(Protocol):
    def published(self, name: str, text: str) -> contextlib.AbstractAsyncContextManager[None]:
        """A TXT record during a block; raises AcmeError."""


class _Provider(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    wait: Annotated[float, Field(ge=0, le=600)] = 10.0
    """Seconds that a new record is given to reach all name servers of the zone."""


class UpdatedZone(_Provider):
    """A name server that takes updates signed with a TSIG key (RFC 2136)."""

    type: Literal["rfc2136"]
    server: str
    """Name or address."""
    port: Annotated[int, Field(ge=1, le=65535)] = 53
    zone: str
    key_name: str
    key_secret: str
    """Base64, as `tsig-keygen` and `keymgr` print it."""
    key_algorithm: Literal["hmac-sha256", "hmac-sha384", "hmac-sha512"] = "hmac-sha256"

    @contextlib.asynccontextmanager
    async def published(self, name: str, text: str) -> AsyncIterator[None]:
        await self._update(name, text, add=True)
        try:
            await asyncio.sleep(self.wait)
            yield
        finally:
            with contextlib.suppress(AcmeError):
                await self._update(name, text, add=False)

    async def _update(self, name: str, text: str, *, add: bool) -> None:
        try:
            key = dns.tsig.Key(self.key_name, self.key_secret, self.key_algorithm)
            message = dns.update.UpdateMessage(self.zone, keyring=key)
            owner = dns.name.from_text(name)
            if add:
                message.add(owner, _TTL, "TXT", f'"{text}"')
            else:
                message.delete(owner, "TXT", f'"{text}"')
            address = await self._address()
            answer = await dns.asyncquery.tcp(message, address, timeout=_TIMEOUT, port=self.port)
        except (dns.exception.DNSException, OSError, EOFError, ValueError) as error:
            raise AcmeError(
                f"cannot update {name} at {self.server}: {error or type(error).__name__}"
            ) from error
        if answer.rcode() != dns.rcode.NOERROR:
            code = dns.rcode.to_text(answer.rcode())
            raise AcmeError(f"the name server {self.server} refused the update of {name}: {code}")

    async def _address(self) -> str:
        try:
            return str(ipaddress.ip_address(self.server))
        except ValueError:
            found = await dns.asyncresolver.resolve_name(self.server, lifetime=_TIMEOUT)
            return str(next(found.addresses()))


class AcmeDns(_Provider):
    """An acme-dns server, to which `_acme-challenge.ZONE` is an alias (CNAME)."""

    type: Literal["acme-dns"]
    url: str
    subdomain: str
    username: str
    password: str

    @contextlib.asynccontextmanager
    async def published(self, name: str, text: str) -> AsyncIterator[None]:
        # It keeps the last two records, so there is nothing to remove.
        headers = {"X-Api-User": self.username, "X-Api-Key": self.password}
        body = {"subdomain": self.subdomain, "txt": text}
        try:
            async with httpx2.AsyncClient(timeout=_TIMEOUT) as http:
                answer = await http.post(f"{self.url.rstrip('/')}/update", json=body, headers=headers)
        except httpx2.HTTPError as error:
            raise AcmeError(f"cannot reach acme-dns at {self.url}: {error!r}") from error
        if answer.status_code != 200:
            reason = f"{answer.status_code} {answer.text[:_MAX_REASON]}"
            raise AcmeError(f"acme-dns at {self.url} refused the update of {name}: {reason}")
        await asyncio.sleep(self.wait)
        yield


_PROVIDER: TypeAdapter[UpdatedZone | AcmeDns] = TypeAdapter(
    Annotated[UpdatedZone | AcmeDns, Field(discriminator="type")]
)


def read_provider(path: Path) -> UpdatedZone | AcmeDns:
    """The provider of a TOML file that only root can read; InvalidRequest says what is wrong with it."""
    try:
        found = path.stat()
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidRequest(f"{path} has a secret: let only its owner read it (chmod 600)")
        if found.st_size > _MAX_FILE:
            raise InvalidRequest(f"{path} has {found.st_size} bytes (max {_MAX_FILE})")
        return _PROVIDER.validate_python(tomllib.loads(path.read_text()))
    except OSError as error:
        raise InvalidRequest(f"cannot read STEAD_ACME_DNS={path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        # Without values: one is a secret.
        places = ", ".join(".".join(map(str, each["loc"])) + f": {each['msg']}" for each in error.errors())
        raise InvalidRequest(f"{path} is invalid: {places}") from None
