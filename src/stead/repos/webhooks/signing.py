"""Webhook signatures: EdDSA JWTs over the body's hash and its destination, and the public key as JWKS."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from joserfc import jwt
from joserfc.jwk import OKPKey
from joserfc.jws import JWSRegistry

from stead.errors import HostError
from stead.files import write_atomically

ALGORITHM = "EdDSA"
VALID = 300
"""Seconds that a signature is valid; every attempt is signed again."""
_FILE = "webhook-key.pem"
_PARAMETERS = {"use": "sig", "alg": ALGORITHM}


class EdDsaRegistry(JWSRegistry):
    """Only EdDSA.

    The library prefers its newer name (Ed25519), but receivers check for the old one.
    """

    def get_alg(self, name: str) -> Any:
        return self.algorithms[name] if name == ALGORITHM else super().get_alg(name)


@dataclass(frozen=True)
class SignedDelivery:
    """What a signature is for: all repositories of an installation have one key, so it names its receiver."""

    id: str
    endpoint: str
    repo: str


class WebhookSigner:
    """The Ed25519 key of this installation."""

    def __init__(self, key: OKPKey, issuer: str) -> None:
        self._key = key
        self._issuer = issuer
        self._registry = EdDsaRegistry(algorithms=[ALGORITHM])

    @classmethod
    def open(cls, folder: Path, issuer: str) -> Self:
        """Load the key from this folder, or create it; only its owner can read it."""
        path = folder / _FILE
        if not path.exists():
            write_atomically(path, OKPKey.generate_key("Ed25519").as_pem(private=True), 0o600)
        try:
            key = OKPKey.import_key(path.read_bytes(), _PARAMETERS)  # type: ignore[arg-type]
        except ValueError as error:
            raise HostError(f"{path} is not a private key: delete it to create a new one") from error
        if key.curve_name != "Ed25519" or not key.is_private:
            raise HostError(f"{path} is not a private Ed25519 key: delete it to create a new one")
        key.ensure_kid()
        return cls(key, issuer)

    def sign(self, body: bytes, delivery: SignedDelivery, now: float) -> str:
        """A JWT for exactly this body and this receiver, valid from now for VALID seconds."""
        header = {"alg": ALGORITHM, "kid": self._key.kid}
        claims = {
            "iss": self._issuer,
            "aud": delivery.endpoint,
            "sub": delivery.repo,
            "jti": delivery.id,
            "iat": int(now),
            "exp": int(now) + VALID,
            "body_sha256": hashlib.sha256(body).hexdigest(),
        }
        return jwt.encode(header, claims, self._key, registry=self._registry)

    def jwks(self) -> dict[str, Any]:
        """The public key as a JWK set."""
        return {"keys": [dict(self._key.as_dict(private=False))]}
