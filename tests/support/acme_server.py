"""A local ACME server, Debian's `pebble`, with a DNS server that has one address for every name."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stead.addresses import GATEWAY
from stead.host.authority import Authority, create_root
from stead.settings import Settings
from support.links import Side
from support.waiting import until

_DIRECTORY, _MANAGEMENT, _DNS, _DNS_MANAGEMENT = 14000, 15000, 8053, 8055
HTTP, TLS_ALPN = "http-01", "tls-alpn-01"
_NOWHERE = 9
"""A port without a listener: what is validated there fails."""


@dataclass(frozen=True)
class AcmeServer:
    """An ACME server that can be started in a namespace; certificates live for `lifetime` seconds."""

    folder: Path
    lifetime: int = 3600
    challenges: Sequence[str] = (HTTP, TLS_ALPN)
    address: str = "127.0.0.1"
    """Where it listens."""
    found_at: str = str(GATEWAY)
    """The address of all names; by default, the one at which VMs reach the edge."""
    name_server: str = f"127.0.0.1:{_DNS}"
    """Where it looks for records; by default, a server that has that address for all names."""

    @property
    def roots(self) -> Path:
        """The CA of the certificates that it issues."""
        return self.folder / "issued.pem"

    @property
    def orders(self) -> int:
        """How many certificates were ordered so far, refused ones included.

        Caddy orders again, with the other challenge, when a validation fails.
        """
        return self._logged(r"There are now \d+ orders in the db")

    @property
    def issued(self) -> int:
        """How many certificates were issued so far."""
        return self._logged(r"Issued certificate serial \w+ for order")

    def _logged(self, pattern: str) -> int:
        return len(re.findall(pattern, self._log.read_text(errors="replace")))

    @property
    def _log(self) -> Path:
        return self.folder / "pebble.log"

    @contextlib.asynccontextmanager
    async def running(self, side: Side) -> AsyncIterator[dict[str, Any]]:
        """Run it during a block; yields the settings that an installation needs for it."""
        self._configure()
        names = ["-defaultIPv4", self.found_at, "-defaultIPv6", "", "-dns01", f"127.0.0.1:{_DNS}"]
        others = [
            "-http01",
            "",
            "-https01",
            "",
            "-tlsalpn01",
            "",
            "-management",
            f"127.0.0.1:{_DNS_MANAGEMENT}",
        ]
        pebble = ["-config", str(self.folder / "pebble.json"), "-dnsserver", self.name_server]
        async with (
            _process(side, self.folder / "dns.log", "pebble-challtestsrv", *names, *others),
            _process(side, self._log, "pebble", *pebble),
        ):
            await until(lambda: side.reaches(self.address, _DIRECTORY), 60)
            root = await asyncio.create_subprocess_exec(
                *("ip", "netns", "exec", side.name, "curl", "-sSf", "--cacert", self._own_root),
                f"https://{self.address}:{_MANAGEMENT}/roots/0",
                stdout=asyncio.subprocess.PIPE,
            )
            self.roots.write_bytes((await root.communicate())[0])
            yield {
                "acme_directory": f"https://{self.address}:{_DIRECTORY}/dir",
                "acme_roots": self._own_root,
            }

    @property
    def _own_root(self) -> Path:
        return self.folder / "pebble.pem"

    def _configure(self) -> None:
        data = self.folder / "data"
        create_root(data, "CA of the ACME server", ())
        authority = Authority.open(Settings(data=data, ca=data))
        own = authority.server_certificate([self.address])
        self._own_root.write_bytes(authority.certificate)
        (self.folder / "pebble.crt").write_bytes(own.certificate)
        (self.folder / "pebble.key").write_bytes(own.key)
        configuration = {
            "listenAddress": f"{self.address}:{_DIRECTORY}",
            "managementListenAddress": f"{self.address}:{_MANAGEMENT}",
            "certificate": str(self.folder / "pebble.crt"),
            "privateKey": str(self.folder / "pebble.key"),
            "httpPort": 80 if HTTP in self.challenges else _NOWHERE,
            "tlsPort": 443 if TLS_ALPN in self.challenges else _NOWHERE,
            "certificateValidityPeriod": self.lifetime,
        }
        (self.folder / "pebble.json").write_text(json.dumps({"pebble": configuration}))


@contextlib.asynccontextmanager
async def _process(side: Side, log: Path, *command: str) -> AsyncIterator[None]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", side.name, *command),
            env={"PATH": os.defpath, "PEBBLE_VA_NOSLEEP": "1", "PEBBLE_AUTHZREUSE": "0"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.kill()
        await process.wait()
