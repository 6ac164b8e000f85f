"""Signatures by which receivers tell that a webhook comes from here and was not changed on its way."""

import hashlib
from pathlib import Path
from typing import Any, Self

from joserfc import jwt
from joserfc.jwk import OKPKey
from joserfc.jws import JWSRegistry

from stead.errors import HostError
from stead.host.files import write_atomically

ALGORITHM = "EdDSA"
VALID = 300
"""Seconds for which a signature is good; every attempt has one of its own."""
_FILE = "webhook-key.pem"
_PARAMETERS = {"use": "sig", "alg": ALGORITHM}


class Algorithms(JWSRegistry):
    """EdDSA alone.

    It has a newer name, which the library would have us use; receivers are written for the old one.
    """

    def get_alg(self, name: str) -> Any:
        return self.algorithms[name] if name == ALGORITHM else super().get_alg(name)


class Signing:
    """One Ed25519 key of this installation, and what is signed with it."""

    def __init__(self, key: OKPKey, issuer: str) -> None:
        self._key = key
        self._issuer = issuer
        self._registry = Algorithms(algorithms=[ALGORITHM])

    @classmethod
    def open(cls, folder: Path, issuer: str) -> Self:
        """The key that is kept in this folder, made when there is none; only its owner can read it."""
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

    def sign(self, body: bytes, now: float) -> str:
        """A JWT that speaks for exactly these bytes, from now on for a few minutes."""
        header = {"alg": ALGORITHM, "kid": self._key.kid}
        claims = {
            "iss": self._issuer,
            "iat": int(now),
            "exp": int(now) + VALID,
            "body_sha256": hashlib.sha256(body).hexdigest(),
        }
        return jwt.encode(header, claims, self._key, registry=self._registry)

    def jwks(self) -> dict[str, Any]:
        """The public half, as it is published for receivers."""
        return {"keys": [dict(self._key.as_dict(private=False))]}
