"""One certificate for all names directly below the public preview zone, ordered with DNS challenges.

With it new preview names need no certificate of their own, so ACME servers' limits do not apply to them.
"""

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509

from stead.edge.acme import AcmeClient, AcmeServer, new_account_key
from stead.edge.configuration import CertificateFiles
from stead.edge.dns_provider import DnsProvider, read_provider
from stead.files import give_tree_to, write_atomically
from stead.logs import get_logger
from stead.settings import Settings
from stead.supervision import Backoff, keep_running
from stead.tasks import in_thread

log = get_logger("stead.edge")

_CHECK = 3600.0
"""Seconds between two looks at the certificate's end."""
_AGAIN = Backoff(shortest=60.0, longest=21_600.0, healthy=_CHECK)
"""After a failed order: ACME servers take few for one name."""


@dataclass(frozen=True)
class WildcardCertificate:
    zone: str
    server: AcmeServer
    provider: DnsProvider
    account_key: Path
    folder: Path
    uid: int
    """Caddy's Linux user."""

    @classmethod
    def of(cls, settings: Settings, folder: Path) -> Self | None:
        """None unless the operator configured a DNS provider. `folder` is that of Caddy's user."""
        if settings.acme_dns is None or settings.public_zone is None:
            return None
        return cls(
            settings.public_zone,
            AcmeServer(settings.acme_directory, settings.acme_roots, settings.acme_email),
            read_provider(settings.acme_dns),
            settings.data / "acme-account.key",
            folder,
            settings.edge_uid,
        )

    @property
    def name(self) -> str:
        return f"*.{self.zone}"

    @property
    def files(self) -> CertificateFiles:
        """One file: a certificate that does not fit its key would stop Caddy's next start."""
        path = self.folder / "wildcard.pem"
        return CertificateFiles(path, path)

    def exists(self) -> bool:
        return self._current() is not None

    def is_due(self) -> bool:
        """Whether there is none, or the last third of its lifetime has begun."""
        found = self._current()
        if found is None:
            return True
        lifetime = found.not_valid_after_utc - found.not_valid_before_utc
        return datetime.datetime.now(datetime.UTC) > found.not_valid_after_utc - lifetime / 3

    def _current(self) -> x509.Certificate | None:
        try:
            found = x509.load_pem_x509_certificate(self.files.certificate.read_bytes())
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (OSError, ValueError, x509.ExtensionNotFound):
            return None
        return found if self.name in names.get_values_for_type(x509.DNSName) else None

    async def renew(self) -> None:
        """Order a certificate and write it; on an error the one before stays."""
        client = AcmeClient.of(self.server, await in_thread(self._account_key))
        made = await client.order([self.name], self.provider.published)
        await in_thread(self._write, made.certificate, made.key)
        log.info("certificate issued", name=self.name)

    def _account_key(self) -> bytes:
        if not self.account_key.exists():
            write_atomically(self.account_key, new_account_key(), 0o600)
        return self.account_key.read_bytes()

    def _write(self, certificate: bytes, key: bytes) -> None:
        write_atomically(self.files.certificate, certificate + key, 0o600)
        give_tree_to(self.uid, self.folder)


async def keep_renewed(wildcard: WildcardCertificate, changed: Callable[[], Awaitable[None]]) -> None:
    """Order the certificate when it is due. `changed` is called after that."""
    written = False

    async def renew(serving: Callable[[], None]) -> None:
        nonlocal written
        while True:
            if await in_thread(wildcard.is_due):
                await wildcard.renew()
                written = True
            if written:
                await changed()
                written = False
            serving()
            await asyncio.sleep(_CHECK)

    await keep_running(f"order of the certificate for {wildcard.name}", renew, _AGAIN)
