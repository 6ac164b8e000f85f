"""Checks of `stead doctor` that look at settings and files."""

from pathlib import Path

import pytest

from stead.host import examination, trust_store
from stead.host.authority import Authority, create_root
from stead.settings import Settings


@pytest.mark.parametrize(
    ("domain", "previews", "status"),
    [
        (None, None, "ok"),
        ("stead.example.com", None, "degraded"),
        ("stead.example.com", "previews.example.com", "degraded"),
        ("stead.example.com", "example-previews.com", "ok"),
    ],
)
def test_previews_on_the_site_of_the_api_are_reported(
    domain: str | None, previews: str | None, status: str
) -> None:
    found = examination.previews(Settings(domain=domain, preview_domain=previews))
    assert found.status == status
    assert status == "ok" or "STEAD_PREVIEW_DOMAIN" in found.remedy


def test_a_ca_without_constraints_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = trust_store.TrustStore(tmp_path / "store", ("true",))
    store.folder.mkdir()
    monkeypatch.setattr(trust_store, "STORES", (store,))
    settings = Settings(data=tmp_path)
    assert examination.authority(settings).status == "ok", "there is none yet"
    assert not (tmp_path / "ca").exists()
    create_root(tmp_path / "ca", "of an earlier version", ())
    found = examination.authority(settings)
    assert found.status == "degraded" and "name constraints" in found.what
    store.file(settings).write_bytes(Authority.open(settings).certificate)
    Authority.open_current(settings)
    found = examination.authority(settings)
    assert found.status == "degraded" and found.remedy == "run `stead trust`"
    store.file(settings).write_bytes(Authority.open(settings).certificate)
    assert examination.authority(settings).status == "ok"
    create_root(tmp_path / "imported", "imported", ())
    found = examination.authority(settings.replace(ca=tmp_path / "imported"))
    assert found.status == "degraded" and "STEAD_CA" in found.remedy
