"""The installation's certificate authority (CA): it signs the certificates of preview zones and own names.

Its root is trusted by VMs and by hosts where `stead trust` ran. Caddy gets only an intermediate.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stead.errors import HostError
from stead.files import write_atomically
from stead.settings import Settings

CERTIFICATE_FILE = "root.crt"
KEY_FILE = "root.key"
_ROOT_DAYS = 3650
_SERVER_DAYS = 397
"""The longest that every client accepts."""
_RENEW_DAYS = 60


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class Authority:
    """The root certificate of an installation with its private key."""

    root: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Load the CA from STEAD_CA, else from the data folder, where it is made if it is missing."""
        folder = settings.ca or settings.data / "ca"
        certificate, key = folder / CERTIFICATE_FILE, folder / KEY_FILE
        if settings.ca is None and not (certificate.exists() and key.exists()):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = _new_root(f"Stead CA {settings.instance}")
            write_atomically(key, made.key, 0o600)
            write_atomically(certificate, made.certificate, 0o644)
        try:
            return cls._load(certificate, key)
        except OSError as error:
            raise HostError(f"cannot read the CA in {folder}: {error.strerror}: {error.filename}") from error
        except ValueError as error:
            raise HostError(f"cannot use the CA in {folder}: {error}") from error

    @classmethod
    def _load(cls, certificate: Path, key: Path) -> Self:
        root = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key.name} must be an ECDSA key")  # the file is invalid
        if private.public_key() != root.public_key():
            raise ValueError(f"{key.name} is not the key of {certificate.name}")
        return cls(root, private)

    @property
    def certificate(self) -> bytes:
        """The root certificate as PEM."""
        return self.root.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        return self.root.fingerprint(hashes.SHA256()).hex()

    def intermediate(self) -> KeyPair:
        """A new CA certificate below the root, which signs the certificates of servers."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _authority_certificate(
            f"{_common_name(self.root)} intermediate",
            key,
            self.root,
            self.key,
            self.root.not_valid_after_utc,
            0,
        )
        return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))

    def server_certificate(self, names: Sequence[str]) -> KeyPair:
        """A certificate for a server with these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(_in_days(_SERVER_DAYS), self.root.not_valid_after_utc)
        made = (
            _builder("Stead", key, self.root, self.key, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))

    def signed(self, path: Path, names: Sequence[str] = ()) -> bool:
        """Whether the root signed the certificate in a file, for all these names and two more months."""
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
            found.verify_directly_issued_by(self.root)
            included: x509.SubjectAlternativeName | list[x509.GeneralName] = []
            if names:
                included = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            return False
        return found.not_valid_after_utc > _in_days(_RENEW_DAYS) and {*map(_name, names)} <= {*included}


def _new_root(name: str) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    end = _in_days(_ROOT_DAYS)
    made = _authority_certificate(name, key, None, key, end, 1)
    return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))


def _authority_certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    end: datetime.datetime,
    path_length: int,
) -> x509.Certificate:
    return (
        _builder(name, key, issuer, signer, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(signer, hashes.SHA256())
    )


def _builder(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer is not None else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_in_days(-1))
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )


def _usage(*, signs_certificates: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _in_days(days: int) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value)[:50] if names else "Stead CA"


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
