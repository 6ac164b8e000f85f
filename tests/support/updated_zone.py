"""A name server (knot) for one zone that takes updates with a TSIG key."""

import asyncio
import base64
import contextlib
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from support.debian_packages import unpacked
from support.links import Side
from support.waiting import until

KEY = "stead"


@dataclass(frozen=True)
class UpdatedZone:
    zone: str
    folder: Path
    address: str
    """Where it listens, on port 53."""
    secret: str = field(default_factory=lambda: base64.b64encode(secrets.token_bytes(32)).decode())

    def provider(self) -> str:
        """For the file of STEAD_ACME_DNS."""
        return (
            f'type = "rfc2136"\nserver = "{self.address}"\nzone = "{self.zone}"\n'
            f'key_name = "{KEY}"\nkey_secret = "{self.secret}"\nwait = 0\n'
        )

    @contextlib.asynccontextmanager
    async def running(self, cache: Path, side: Side) -> AsyncIterator[None]:
        """Serve the zone in a namespace during a block."""
        program = await asyncio.to_thread(_knot, cache)
        self._configure()
        libraries = ":".join(str(path) for path in program.glob("usr/lib/*-linux-gnu*"))
        with (self.folder / "knot.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *("ip", "netns", "exec", side.name),
                *(str(program / "usr/sbin/knotd"), "-c", str(self.folder / "knot.conf")),
                env={"PATH": os.defpath, "LD_LIBRARY_PATH": libraries},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            await until(lambda: side.reaches(self.address, 53), 60)
            yield
        finally:
            process.kill()
            await process.wait()

    def _configure(self) -> None:
        (self.folder / "zone").write_text(
            f"{self.zone}. 60 SOA ns.{self.zone}. admin.{self.zone}. 1 60 60 600 60\n"
            f"{self.zone}. 60 NS ns.{self.zone}.\nns.{self.zone}. 60 A {self.address}\n"
        )
        (self.folder / "knot.conf").write_text(
            f"server:\n  rundir: {self.folder}\n  listen: {self.address}@53\n"
            f"database:\n  storage: {self.folder}\n"
            f"key:\n  - id: {KEY}\n    algorithm: hmac-sha256\n    secret: {self.secret}\n"
            f"acl:\n  - id: update\n    key: {KEY}\n    action: update\n"
            f"zone:\n  - domain: {self.zone}\n    file: {self.folder}/zone\n    acl: update\n"
            "    zonefile-load: difference-no-serial\n    journal-content: all\n"
        )


def _knot(cache: Path) -> Path:
    """The unpacked package, with those that it needs and this host lacks."""
    simulated = ["apt-get", "install", "-s", "-qq", "--no-install-recommends", "knot"]
    said = subprocess.run(simulated, capture_output=True, text=True, check=False, timeout=60).stdout
    needed = [line.split()[1] for line in said.splitlines() if line.startswith("Inst ")]
    return unpacked(cache, "knot", *(name for name in needed if name != "knot"))
