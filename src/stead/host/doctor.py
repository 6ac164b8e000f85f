"""`stead doctor`: checks this host and reports each problem with its consequence and its fix."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stead.errors import SteadError
from stead.host import examination
from stead.host.examination import Finding, Status
from stead.host.image import BaseImage, find_image, image_key
from stead.host.side_channels import isolation, side_channels
from stead.settings import Settings
from stead.tasks import in_thread

__all__ = ["Finding", "Status", "examine", "healthy", "render", "to_json"]

_COLOURS: dict[Status, str] = {"ok": "green", "degraded": "yellow", "missing": "red"}


async def examine(settings: Settings) -> list[Finding]:
    """Run all checks, in the order in which they are shown."""
    image = await in_thread(_built_image, settings)
    kvm = await examination.kvm(settings, image)
    return [
        examination.python(),
        examination.architecture(),
        examination.privileges(),
        await examination.qemu(),
        kvm,
        isolation(settings, kvm),
        *examination.tools(),
        examination.tun(),
        await examination.namespaces(),
        await examination.nftables(),
        examination.overcommit(),
        examination.pagemap(),
        examination.seccomp(),
        examination.file_access(),
        examination.cgroups(),
        examination.memory(settings),
        examination.disk(settings),
        examination.leases(settings),
        examination.resolver(),
        await examination.forwarding(),
        await examination.ssh_gateway(settings),
        *side_channels(settings),
        examination.authority(settings),
        examination.previews(settings),
        examination.base_image(image),
    ]


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether VMs can run at all, however slowly."""
    return all(finding.status != "missing" for finding in findings)


def render(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        lines = [finding.what]
        if finding.cost:
            lines.append(f"effect: {finding.cost}")
        if finding.remedy:
            lines.append(f"fix: {finding.remedy}")
        status = f"[{_COLOURS[finding.status]}]{finding.status}[/]"
        table.add_row(status, finding.name, "\n".join(lines).replace("[", r"\["))
    console.print(table)


def to_json(findings: Sequence[Finding]) -> str:
    document = {"healthy": healthy(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(document, indent=2)


def _built_image(settings: Settings) -> BaseImage | None:
    try:
        from stead.guest_agent import agent_path

        agent: Path = agent_path()
        return find_image(settings, image_key(settings, agent))
    except (SteadError, ImportError, OSError):
        return None
