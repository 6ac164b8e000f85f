"""The trust store of this host, where `stead trust` puts the root certificate of an installation."""

from dataclasses import dataclass
from pathlib import Path

from stead.settings import Settings


@dataclass(frozen=True)
class TrustStore:
    folder: Path
    update: tuple[str, ...]
    """The command that applies changes."""

    def file(self, settings: Settings) -> Path:
        """Where the root certificate of an installation is."""
        return self.folder / f"stead-{settings.instance}.crt"


STORES = (
    TrustStore(Path("/usr/local/share/ca-certificates"), ("update-ca-certificates",)),
    TrustStore(Path("/etc/pki/ca-trust/source/anchors"), ("update-ca-trust", "extract")),
)


def find_store() -> TrustStore | None:
    return next((store for store in STORES if store.folder.is_dir()), None)
