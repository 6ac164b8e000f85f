"""The client of the Copilot SDK, as its users install it."""

import hashlib
from pathlib import Path

from support.npm import SCRIPTS, fetch


async def packages(folder: Path, cache: Path) -> Path:
    """A new folder with the SDK in its node_modules."""
    source = SCRIPTS / "copilot" / "package.json"
    kept = cache / "npm" / hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    if not kept.exists():
        # Optional: the CLI, which would run beside the client.
        await fetch(kept, [source], 600, "--omit=optional")
    made = folder / "copilot"
    (made / "node_modules").mkdir(parents=True)
    for package in (kept / "node_modules").iterdir():
        (made / "node_modules" / package.name).symlink_to(package)
    return made
