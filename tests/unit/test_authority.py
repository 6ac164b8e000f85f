"""The installation's CA."""

import contextlib
import datetime
import json
import ssl
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from typer.testing import CliRunner

from stead.cli.main import app
from stead.errors import HostError
from stead.host import authority as authorities
from stead.host import trust_store
from stead.host.authority import Authority, KeyPair, create_root, signed_names
from stead.settings import Settings


def test_a_ca_is_made_once_and_only_its_owner_reads_the_key(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)
    made = Authority.open(settings)
    assert Authority.open(settings).fingerprint == made.fingerprint
    assert (tmp_path / "ca" / "root.key").stat().st_mode & 0o777 == 0o600
    imported = Authority.open(Settings(data=tmp_path / "other", ca=tmp_path / "ca"))
    assert imported.fingerprint == made.fingerprint


@pytest.mark.parametrize("kind", ["intermediate", "server"])
def test_openssl_accepts_what_it_signs(tmp_path: Path, kind: str) -> None:
    authority = Authority.open(Settings(data=tmp_path))
    names = ["*.style.dev", "127.0.0.1"] if kind == "server" else []
    made = authority.server_certificate(names) if names else authority.intermediate(["style.dev"])
    path = tmp_path / "signed.pem"
    path.write_bytes(made.certificate)
    _verified(authority.certificate, path, "a.style.dev" if names else None)
    signed = authority.signed if names else authority.signed_intermediate
    same = names or ["style.dev"]
    assert signed(path, same)
    assert not signed(path, [*same, "other.example"])
    assert not authority.signed(path, ["other.example"])
    other = Authority.open(Settings(data=tmp_path / "other"))
    assert not other.signed(path, same) and not other.signed_intermediate(path, same)
    path.write_bytes(b"not a certificate")
    assert not signed(path, same)
    assert not signed(tmp_path / "missing", same)


def _verified(roots: bytes, path: Path, name: str | None = None, chain: bytes = b"") -> None:
    """Raises CalledProcessError unless OpenSSL accepts a certificate."""
    (path.parent / "roots.pem").write_bytes(roots)
    (path.parent / "chain.pem").write_bytes(chain)
    untrusted = ["-untrusted", "chain.pem"] if chain else []
    wanted = ["-verify_hostname", name] if name else []
    command = ["openssl", "verify", "-x509_strict", "-CAfile", "roots.pem", *untrusted, *wanted, path.name]
    subprocess.run(command, cwd=path.parent, check=True, capture_output=True)


def _loaded(made: KeyPair) -> Authority:
    """What somebody can do who has a CA certificate and its key."""
    key = serialization.load_pem_private_key(made.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Authority(x509.load_pem_x509_certificate(made.certificate), key)


def _accepted_by_python(roots: bytes, chain: bytes, made: KeyPair, name: str, folder: Path) -> None:
    """Raises SSLError unless a TLS client of Python accepts a server with this certificate."""
    (folder / "server.pem").write_bytes(made.certificate + chain + made.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem")
    pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cadata=roots.decode()).wrap_bio(*pipes, server_hostname=name)
    accepting = server.wrap_bio(pipes[1], pipes[0], server_side=True)
    for _ in range(3):
        for side in (client, accepting):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()


def _accepted_by_web_rules(roots: bytes, chain: bytes, made: KeyPair, name: str) -> None:
    """Raises VerificationError unless the rules of browsers (CA/Browser Forum, RFC 5280) are met."""
    store = verification.Store(x509.load_pem_x509_certificates(roots))
    verifier = verification.PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name))
    others = x509.load_pem_x509_certificates(chain) if chain else []
    verifier.verify(x509.load_pem_x509_certificate(made.certificate), others)


@pytest.mark.parametrize("imported", [False, True], ids=["own root", "imported root without constraints"])
def test_a_stolen_intermediate_signs_for_no_other_name(tmp_path: Path, imported: bool) -> None:
    settings = Settings(data=tmp_path, ca=tmp_path / "imported" if imported else None)
    if imported:
        create_root(tmp_path / "imported", "imported", ())
    authority = Authority.open(settings)
    made = authority.intermediate(signed_names(settings))
    stolen = _loaded(made)
    roots, chain = authority.certificate, made.certificate
    path = tmp_path / "leaf.pem"
    for name in ("app.style.dev", "a.b.style.dev", "localhost", "git.freestyle.sh"):
        leaf = stolen.server_certificate([name])
        path.write_bytes(leaf.certificate)
        _verified(roots, path, name, chain)
        _accepted_by_python(roots, chain, leaf, name, tmp_path)
        _accepted_by_web_rules(roots, chain, leaf, name)
    for name in ("bank.example", "freestyle.sh", "www.freestyle.sh", "notstyle.dev"):
        for names in ([name], [name, "app.style.dev"]):
            leaf = stolen.server_certificate(names)
            path.write_bytes(leaf.certificate)
            with pytest.raises(subprocess.CalledProcessError):
                _verified(roots, path, name, chain)
            with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
                _accepted_by_python(roots, chain, leaf, name, tmp_path)
            with pytest.raises(verification.VerificationError):
                _accepted_by_web_rules(roots, chain, leaf, name)
    leaf = stolen.server_certificate(["192.0.2.1"])
    path.write_bytes(leaf.certificate)
    with pytest.raises(subprocess.CalledProcessError):
        _verified(roots, path, None, chain)


def test_the_root_signs_for_no_other_name_either(tmp_path: Path) -> None:
    authority = Authority.open(Settings(data=tmp_path, domain="stead.example.com"))
    path = tmp_path / "leaf.pem"
    for name in ("bank.example", "stead.example.com"):
        leaf = authority.server_certificate([name])
        path.write_bytes(leaf.certificate)
        with pytest.raises(subprocess.CalledProcessError):
            _verified(authority.certificate, path, name)
        with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
            _accepted_by_python(authority.certificate, b"", leaf, name, tmp_path)
        with pytest.raises(verification.VerificationError):
            _accepted_by_web_rules(authority.certificate, b"", leaf, name)


def test_an_intermediate_lives_three_months_and_is_renewed_a_month_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.open(Settings(data=tmp_path))
    path = tmp_path / "intermediate.pem"
    made = authority.intermediate(["style.dev"])
    path.write_bytes(made.certificate)
    now = datetime.datetime.now(datetime.UTC)
    assert (x509.load_pem_x509_certificate(made.certificate).not_valid_after_utc - now).days in (89, 90)
    assert authority.signed_intermediate(path, ["style.dev"])
    with monkeypatch.context() as patch:
        patch.setattr(authorities, "_INTERMEDIATE_DAYS", 29)
        path.write_bytes(authority.intermediate(["style.dev"]).certificate)
    assert not authority.signed_intermediate(path, ["style.dev"])
    with monkeypatch.context() as patch:
        patch.setattr(authorities, "_INTERMEDIATE_DAYS", 3650)
        path.write_bytes(authority.intermediate(["style.dev"]).certificate)
    assert not authority.signed_intermediate(path, ["style.dev"]), "one of an earlier version"
    path.write_bytes(authority.intermediate([]).certificate)
    assert not authority.signed_intermediate(path, ["style.dev"]), "one that may sign for any name"


def test_a_root_without_constraints_is_renewed_with_its_key(tmp_path: Path) -> None:
    """Hosts and VMs that trust the old certificate go on, and those that trust the new one are protected."""
    settings = Settings(data=tmp_path)
    create_root(tmp_path / "ca", "Stead CA of an earlier version", ())
    before = Authority.open(settings)
    assert not before.is_constrained
    now = Authority.open_current(settings)
    assert now.is_constrained and now.fingerprint != before.fingerprint
    assert Authority.open(settings).fingerprint == now.fingerprint
    assert Authority.open_current(settings).fingerprint == now.fingerprint, "once"
    path = tmp_path / "leaf.pem"
    path.write_bytes(now.server_certificate(["app.style.dev"]).certificate)
    for roots in (before.certificate, now.certificate, before.certificate + now.certificate):
        _verified(roots, path, "app.style.dev")
    more = settings.replace(preview_zones=("style.dev", "previews.test"))
    assert Authority.open_current(more).fingerprint != now.fingerprint
    path.write_bytes(Authority.open(more).server_certificate(["x.previews.test"]).certificate)
    _verified(Authority.open(more).certificate, path, "x.previews.test")
    imported = Settings(data=tmp_path / "other", ca=tmp_path / "imported")
    create_root(tmp_path / "imported", "imported", ())
    assert not Authority.open_current(imported).is_constrained, "it is the operator's"


@pytest.mark.parametrize("broken", ["missing", "text", "mismatch"])
def test_an_imported_ca_that_cannot_be_used_is_refused_with_its_folder(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "imported"
    if broken != "missing":
        Authority.open(Settings(data=tmp_path))
        (tmp_path / "ca").rename(folder)
        other = tmp_path / "other"
        Authority.open(Settings(data=other))
        key = b"not a key" if broken == "text" else (other / "ca" / "root.key").read_bytes()
        (folder / "root.key").write_bytes(key)
    with pytest.raises(HostError, match=r"the CA in .*imported"):
        Authority.open(Settings(data=tmp_path, ca=folder))
    assert broken == "missing" or (folder / "root.crt").exists()


def test_trust_store_gets_and_loses_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder in the place of the host's store."""
    stores = (trust_store.TrustStore(tmp_path / "store", ("true",)),)
    monkeypatch.setattr(trust_store, "STORES", stores)
    (tmp_path / "store").mkdir()
    environment = {"STEAD_DATA": str(tmp_path), "STEAD_CA": ""}

    def asked(*options: str) -> dict[str, object]:
        ended = CliRunner().invoke(app, ["trust", *options, "--json"], env=environment)
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout)  # type: ignore[no-any-return]

    authority = Authority.open(Settings(data=tmp_path))
    certificate, fingerprint = authority.certificate.decode(), authority.fingerprint
    assert asked("--print") == {"certificate": certificate, "sha256": fingerprint}
    added = asked()
    (path,) = (tmp_path / "store").iterdir()
    assert added == {"path": str(path), "sha256": fingerprint, "trusted": True}
    assert path.read_text() == certificate
    assert asked("--remove") == {"path": str(path), "sha256": fingerprint, "trusted": False}
    assert not path.exists()
