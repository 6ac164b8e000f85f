"""Templates: a machine size booted once, with its memory, devices and disk kept for all later machines."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from stead.host.image import BaseImage
from stead.host.qemu import Platform
from stead.settings import Size

_FORMAT = 1
WARM_UP = (
    "systemctl is-system-running --wait || true",
    "ls / && cat /etc/hostname && id && env",
    "python3 -c 'import json, ssl, subprocess, urllib.request'",
    "git --version && curl --version && tar --version && rg --version",
    "node -e 0 && npm --version",
    "true",
    "sync",
)
"""Run once so that every clone starts with these programs in its page cache, shared by all of them."""


@dataclass(frozen=True)
class Template:
    """What a machine is restored from. Frozen: many machines stand on it."""

    id: str
    folder: Path
    size: Size
    image: BaseImage

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    @property
    def devices(self) -> Path:
        return self.folder / "devices"

    @property
    def disk(self) -> Path:
        return self.folder / "disk.qcow2"

    @property
    def layers(self) -> tuple[Path, ...]:
        """The bottom of the disk of every machine that stands on this template."""
        return self.disk, self.image.disk


def template_key(image: BaseImage, size: Size, platform: Platform) -> str:
    """Memory fits only the very image, size and platform that it was taken from."""
    parts = [_FORMAT, image.key, str(size), asdict(platform), platform.kernel_arguments, WARM_UP]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def image_build(image: BaseImage) -> int:
    """Tells one build of an image from another with the same key: a disk layer fits only the one below it."""
    return image.disk.stat().st_mtime_ns


def find(folder: Path, image: BaseImage, size: Size, platform: Platform) -> Template | None:
    """The newest whole template for a size, if there is one."""
    key = template_key(image, size, platform)
    found = sorted(folder.glob(f"{key}-*/template.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(found):
        template = Template(path.parent.name, path.parent, size, image)
        if _valid(template):
            return template
    return None


def _valid(template: Template) -> bool:
    try:
        facts = json.loads((template.folder / "template.json").read_bytes())
        files = (template.memory, template.devices, template.disk)
        return facts["image_build"] == image_build(template.image) and all(path.exists() for path in files)
    except (OSError, ValueError, KeyError):
        return False


def load(folder: Path, template_id: str, images: Callable[[str], BaseImage | None]) -> Template | None:
    """The template that a stopped machine stands on; None when it or its image is gone or was rebuilt."""
    try:
        facts = json.loads((folder / template_id / "template.json").read_bytes())
        image = images(facts["image"])
        if image is None:
            return None
        template = Template(template_id, folder / template_id, Size.parse(facts["size"]), image)
    except (OSError, ValueError, KeyError):
        return None
    return template if _valid(template) else None
