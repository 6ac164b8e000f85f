"""The installation's certificate authority (CA): it signs the certificates of preview zones and own names.

Its root is trusted by VMs and by hosts where `stead trust` ran. Caddy, which parses what strangers send, gets
only an intermediate for some months. Both have name constraints: clients refuse what they sign for others.
"""

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
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
from stead.logs import get_logger
from stead.settings import Settings

CERTIFICATE_FILE = "root.crt"
KEY_FILE = "root.key"
_ROOT_DAYS = 3650
_INTERMEDIATE_DAYS, _RENEW_INTERMEDIATE_DAYS = 90, 30
_SERVER_DAYS, _RENEW_DAYS = 397, 60
"""The first is the longest that every client accepts."""
_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

log = get_logger("stead.authority")


def signed_names(settings: Settings) -> tuple[str, ...]:
    """Domains for which the CA signs, with all names below them: those that no public CA certifies.

    `localhost` includes what is below it, so a name that is below another one is left out.
    """
    own = {*settings.api_names, *settings.git_names} - {*settings.public_names}
    local = {"localhost", *own, *settings.local_zones}
    return tuple(sorted(name for name in local if not any(_is_below(name, each) for each in local)))


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
            create_root(folder, f"Stead CA {settings.instance}", signed_names(settings))
        try:
            return cls._load(certificate, key)
        except OSError as error:
            raise HostError(f"cannot read the CA in {folder}: {error.strerror}: {error.filename}") from error
        except ValueError as error:
            raise HostError(f"cannot use the CA in {folder}: {error}") from error

    @classmethod
    def open_current(cls, settings: Settings) -> Self:
        """Like `open`, for the holder of the installation's lock: renews the certificate of a root that may
        sign for any name, or not for all of this installation's.

        The new one has the same name and key, so hosts and VMs that trust the one before accept what is
        signed. A CA from STEAD_CA is left as it is.
        """
        found = cls.open(settings)
        names = signed_names(settings)
        if settings.ca is not None or found.is_constrained_to(names):
            return found
        made = _authority_certificate(
            found.root.subject, found.key, None, found.key, _in_days(_ROOT_DAYS), 1, names
        )
        path = settings.data / "ca" / CERTIFICATE_FILE
        write_atomically(path, made.public_bytes(serialization.Encoding.PEM), 0o644)
        log.warning(
            "CA renewed with name constraints: run `stead trust` again on hosts that trust it",
            path=str(path),
            domains=", ".join(names),
        )
        return cls(made, found.key)

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

    @property
    def is_constrained(self) -> bool:
        """Whether the root can sign for some domains only."""
        return bool(_permitted(self.root))

    def is_constrained_to(self, names: Sequence[str]) -> bool:
        """Whether the root can sign for some domains only, which include these."""
        permitted = _permitted(self.root)
        return bool(permitted) and all(any(_is_in(name, each) for each in permitted) for name in names)

    def intermediate(self, names: Sequence[str]) -> KeyPair:
        """A new CA certificate below the root, which signs the certificates of servers in these domains."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(_in_days(_INTERMEDIATE_DAYS), self.root.not_valid_after_utc)
        subject = _subject(f"{_common_name(self.root)} intermediate")
        made = _authority_certificate(subject, key, self.root, self.key, end, 0, names)
        return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))

    def server_certificate(self, names: Sequence[str]) -> KeyPair:
        """A certificate for a server with these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(_in_days(_SERVER_DAYS), self.root.not_valid_after_utc)
        made = (
            _builder(_subject("Stead"), key, self.root, self.key, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_name(name) for name in names]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return KeyPair(made.public_bytes(serialization.Encoding.PEM), _pem(key))

    def signed(self, path: Path, names: Sequence[str]) -> bool:
        """Whether the root signed the certificate in a file, for all these names and two more months."""
        found = self._signed(path, _RENEW_DAYS)
        try:
            return found is not None and {*map(_name, names)} <= {*_alternative_names(found)}
        except ValueError:
            return False

    def signed_intermediate(self, path: Path, names: Sequence[str]) -> bool:
        """Whether the root signed the intermediate in a file for exactly these domains, and for at least
        another month but not for longer than it signs today."""
        found = self._signed(path, _RENEW_INTERMEDIATE_DAYS)
        return (
            found is not None
            and _permitted(found) == {*names}
            and found.not_valid_after_utc <= _in_days(_INTERMEDIATE_DAYS)
        )

    def _signed(self, path: Path, days: int) -> x509.Certificate | None:
        """The certificate in a file if the root signed it and it is valid for so many days."""
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
            found.verify_directly_issued_by(self.root)
        except (OSError, ValueError, TypeError, InvalidSignature):
            return None
        return found if found.not_valid_after_utc > _in_days(days) else None


def create_root(folder: Path, name: str, domains: Sequence[str]) -> None:
    """Make a CA in a folder, for these domains and loopback; without domains, for any name."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    made = _authority_certificate(_subject(name), key, None, key, _in_days(_ROOT_DAYS), 1, domains)
    write_atomically(folder / KEY_FILE, _pem(key), 0o600)
    write_atomically(folder / CERTIFICATE_FILE, made.public_bytes(serialization.Encoding.PEM), 0o644)


def _authority_certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    end: datetime.datetime,
    path_length: int,
    domains: Sequence[str],
) -> x509.Certificate:
    made = (
        _builder(subject, key, issuer, signer, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    if domains:
        permitted = [*map(x509.DNSName, domains), *map(x509.IPAddress, _LOOPBACK)]
        made = made.add_extension(x509.NameConstraints(permitted, None), critical=True)
    return made.sign(signer, hashes.SHA256())


def _permitted(certificate: x509.Certificate) -> set[str]:
    """The domains to which a CA certificate is constrained; none without constraints."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees
    except (x509.ExtensionNotFound, ValueError):
        return set()
    return {str(each.value) for each in found or [] if isinstance(each, x509.DNSName)}


def _alternative_names(certificate: x509.Certificate) -> Iterable[x509.GeneralName]:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()


def _is_in(name: str, domain: str) -> bool:
    return f".{name}".endswith(f".{domain}")


def _is_below(name: str, domain: str) -> bool:
    return name.endswith(f".{domain}")


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
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
