"""The installation's CA."""

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stead.cli.installation import trust
from stead.cli.main import app
from stead.errors import HostError
from stead.host.authority import Authority
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
    made = authority.server_certificate(names) if names else authority.intermediate()
    (tmp_path / "root.pem").write_bytes(authority.certificate)
    path = tmp_path / "signed.pem"
    path.write_bytes(made.certificate)
    command = ["openssl", "verify", "-x509_strict", "-CAfile", "root.pem"]
    wanted = ["-verify_hostname", "a.style.dev"] if names else []
    subprocess.run([*command, *wanted, path.name], cwd=tmp_path, check=True, capture_output=True)
    assert authority.signed(path, names)
    assert not authority.signed(path, [*names, "other.example"])
    assert not Authority.open(Settings(data=tmp_path / "other")).signed(path)
    path.write_bytes(b"not a certificate")
    assert not authority.signed(path)
    assert not authority.signed(tmp_path / "missing")


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
    monkeypatch.setattr(trust, "_STORES", (trust._Store(tmp_path / "store", ("true",)),))
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
