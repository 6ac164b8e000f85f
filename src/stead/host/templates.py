"""Templates: a VM of each size, booted once and saved, from which new VMs are restored."""

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
    """The saved state that VMs are restored from. It is shared and never changes."""

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
        """The lowest disk layers of every VM of this template."""
        return self.disk, self.image.disk


def template_key(image: BaseImage, size: Size, platform: Platform) -> str:
    """The cache key: saved memory is valid only for the same image, size and platform."""
    parts = [_FORMAT, image.key, str(size), asdict(platform), platform.kernel_arguments, WARM_UP]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def image_build(image: BaseImage) -> int:
    """Identifies one build of an image: a disk layer is valid only with the same backing file."""
    return image.disk.stat().st_mtime_ns


def find(folder: Path, image: BaseImage, size: Size, platform: Platform) -> Template | None:
    """The newest complete template of a size, if there is one."""
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
    """The template of a stopped VM; None when it or its image was removed or rebuilt."""
    try:
        facts = json.loads((folder / template_id / "template.json").read_bytes())
        image = images(facts["image"])
        if image is None:
            return None
        template = Template(template_id, folder / template_id, Size.parse(facts["size"]), image)
    except (OSError, ValueError, KeyError):
        return None
    return template if _valid(template) else None
