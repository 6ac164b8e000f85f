"""When the certificate of the preview zone is ordered."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stead.edge.wildcard import WildcardCertificate
from stead.settings import Settings

_PROVIDER = 'type = "acme-dns"\nurl = "http://x"\nsubdomain = "s"\nusername = "u"\npassword = "p"\n'


@pytest.fixture
def wildcard(tmp_path: Path) -> WildcardCertificate:
    provider = tmp_path / "dns.toml"
    provider.write_text(_PROVIDER)
    provider.chmod(0o600)
    settings = Settings(data=tmp_path, domain="stead.example.com", acme_dns=provider)
    found = WildcardCertificate.of(settings, tmp_path)
    assert found is not None
    return found


def _write(wildcard: WildcardCertificate, name: str, used: int, left: int) -> None:
    """A certificate of so many days."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=used))
        .not_valid_after(now + datetime.timedelta(days=left))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    wildcard.files.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize(
    ("name", "used", "left", "due"),
    [
        ("*.stead.example.com", 1, 89, False),
        ("*.stead.example.com", 59, 31, False),
        ("*.stead.example.com", 61, 29, True),
        ("*.stead.example.com", 91, -1, True),
        ("*.other.example.com", 1, 89, True),
    ],
)
def test_it_is_due_in_the_last_third_of_its_lifetime_or_for_another_zone(
    wildcard: WildcardCertificate, name: str, used: int, left: int, due: bool
) -> None:
    _write(wildcard, name, used, left)
    assert wildcard.is_due() == due
    assert wildcard.exists() == (name == wildcard.name)


def test_it_is_due_when_there_is_none(wildcard: WildcardCertificate) -> None:
    assert wildcard.is_due() and not wildcard.exists()
    wildcard.files.certificate.write_bytes(b"nonsense")
    assert wildcard.is_due() and not wildcard.exists()


def test_without_a_provider_or_a_public_zone_there_is_none(tmp_path: Path) -> None:
    assert WildcardCertificate.of(Settings(data=tmp_path, domain="stead.example.com"), tmp_path) is None
    assert WildcardCertificate.of(Settings(data=tmp_path, acme_dns=tmp_path / "x"), tmp_path) is None
