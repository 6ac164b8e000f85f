"""Templates: a VM of each combination of vCPUs and memory, booted once and saved, to restore VMs from."""

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stead.errors import HostError
from stead.files import ABSENT, exists
from stead.host.image import BaseImage
from stead.host.interface import TemplateUnreadable
from stead.host.qemu import QemuPlatform
from stead.settings import Size

_FORMAT = 2
_FACTS = "template.json"
_USED = "used"
_MINUTE = 60.0
_DAY = 24 * 3600.0
_KEPT = 16
"""Templates without a VM or snapshot that are kept: each takes some hundred MB of disk."""
_IN_USE = 10 * _MINUTE
RETENTION = 7 * _DAY
"""Seconds that a template is kept after its last use when no VM or snapshot needs it."""
WARM_UP = (
    "systemctl is-system-running --wait || true",
    "ls / && cat /etc/hostname && id && env",
    "python3 -c 'import json, ssl, subprocess, urllib.request'",
    "git --version && curl --version && tar --version && rg --version",
    "node -e 0 && npm --version",
    "true",
)
"""Run once so that every clone starts with these programs in its page cache, shared by all of them."""
_TRUST = """mkdir -p /usr/local/share/ca-certificates
cat >/usr/local/share/ca-certificates/stead.crt <<'END'
{certificate}
END
update-ca-certificates"""


@dataclass(frozen=True)
class LocalTemplate:
    """The saved state that VMs are restored from. It is shared and never changes."""

    id: str
    folder: Path
    size: Size
    image: BaseImage

    @property
    def image_key(self) -> str:
        return self.image.key

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
    def generation(self) -> str:
        """The vmgenid of the template and of the VMs that are restored from it."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, self.id))

    @property
    def layers(self) -> tuple[Path, ...]:
        """The lowest disk layers of every VM of this template."""
        return self.disk, self.image.disk


@dataclass(frozen=True)
class TemplateInputs:
    """What a template is made of. Saved memory is valid only for the same inputs."""

    image: BaseImage
    size: Size
    platform: QemuPlatform
    authority: str
    """The root certificate of the installation's CA (PEM), which VMs trust."""

    @property
    def commands(self) -> tuple[str, ...]:
        """What runs in the guest before it is saved."""
        return _TRUST.format(certificate=self.authority), *WARM_UP

    @property
    def key(self) -> str:
        """The cache key."""
        platform = asdict(self.platform), self.platform.kernel_arguments
        parts = [_FORMAT, self.image.key, str(self.size), *platform, self.commands]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def image_build(image: BaseImage) -> str | int:
    """Identifies one build of an image: a disk layer is valid only with the same backing file.

    An id of its own, which a copy or a restored backup keeps. An older image without one is identified by
    the time of its last change.
    """
    changed = image.disk.stat().st_mtime_ns
    try:
        return image.build.read_text().strip()
    except FileNotFoundError:
        return changed


def find(folder: Path, inputs: TemplateInputs) -> LocalTemplate | None:
    """The newest complete template of these inputs, if there is one; HostError when the host cannot tell."""
    key = inputs.key
    try:
        found = [
            (path, _changed_at(path / _FACTS)) for path in folder.iterdir() if path.name.startswith(f"{key}-")
        ]
    except ABSENT:
        return None
    except OSError as error:
        raise TemplateUnreadable(f"cannot list the templates in {folder}: {error.strerror}") from error
    for path, _ in sorted(found, key=lambda each: each[1], reverse=True):
        template = LocalTemplate(path.name, path, inputs.size, inputs.image)
        try:
            if _valid(template):
                return template
        except HostError as error:
            raise TemplateUnreadable(str(error)) from error
    return None


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except ABSENT:
        return 0


def _valid(template: LocalTemplate) -> bool:
    facts = _read_facts(template.folder)
    files = (template.memory, template.devices, template.disk)
    if facts is None or "image_build" not in facts or not all(exists(path) for path in files):
        return False
    try:
        return bool(facts["image_build"] == image_build(template.image))
    except ABSENT:
        return False
    except OSError as error:
        raise HostError(f"cannot read the image {template.image.disk}: {error.strerror}") from error


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """What was recorded of a template; None when it is missing or damaged. Other errors may pass."""
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
    except (*ABSENT, ValueError):
        return None
    except OSError as error:
        raise HostError(f"cannot read template {folder.name}: {error.strerror}") from error
    return facts if isinstance(facts, dict) else None


def load(folder: Path, template_id: str, images: Callable[[str], BaseImage | None]) -> LocalTemplate | None:
    """The template of a stopped VM; None when it or its image was removed or rebuilt.

    HostError when the host cannot tell, as with too many open files: the next call may succeed.
    """
    facts = _read_facts(folder / template_id)
    try:
        if facts is None or (image := images(facts["image"])) is None:
            return None
        template = LocalTemplate(template_id, folder / template_id, Size.parse(facts["size"]), image)
    except (ValueError, KeyError):
        return None
    return template if _valid(template) else None


def note_use(template: LocalTemplate) -> None:
    """Renew the time of the last use, at most once a minute: unused templates are removed after a while."""
    used = template.folder / _USED
    with contextlib.suppress(OSError):
        if not used.exists() or time.time() - used.stat().st_mtime > _MINUTE:
            used.touch(mode=0o600)


def unused(folder: Path, needed: Collection[str]) -> list[Path]:
    """Templates that no row refers to, and that are not among the last used ones or not used for days.

    One that was used moments ago may be that of a VM which has no row yet.
    """
    ages: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            last = max(_changed_at(path / _USED), _changed_at(path / _FACTS))
            if path.name not in needed and last:
                ages.append((time.time() - last / 1e9, path))
    ages.sort()
    old = [path for age, path in ages[:_KEPT] if age > RETENTION]
    return old + [path for age, path in ages[_KEPT:] if age > _IN_USE]
