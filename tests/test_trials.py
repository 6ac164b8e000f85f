"""Slow trials: minutes each under emulation, so `make test` leaves them out and `make trials` runs them."""

import shutil
import tempfile
from pathlib import Path

import pytest
from installations import another_installation

from stead.host.commands import run
from stead.machines import Machine, Machines
from stead.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def sh(machine: Machine, command: str) -> str:
    result = await machine.exec(command, timeout=600)
    assert result.ok, (command, result)
    return result.stdout.decode().strip()


async def test_a_firewall_from_the_distribution_does_not_cut_the_agent_off(machine: Machine) -> None:
    """The guest installs ufw from Debian's packages, through NAT and DNS, and denies everything."""
    await sh(
        machine, "apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq ufw iptables"
    )
    await sh(machine, "ufw --force enable && ufw default deny incoming && ufw default deny outgoing")
    assert "Status: active" in await sh(machine, "ufw status")
    await sh(
        machine,
        "for each in iptables ip6tables; do"
        " for chain in INPUT OUTPUT FORWARD; do $each -P $chain DROP; done; done"
        "; iptables -t nat -N DOCKER; iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER",
    )
    assert await sh(machine, "echo alive") == "alive"
    assert await machine.files().read("/etc/hostname") == f"{machine.id}\n".encode()


async def test_an_image_that_was_deleted_is_built_again(settings: Settings, machines: Machines) -> None:
    """Machines that run go on from the files they hold; the next create builds image and template anew."""
    template = await machines.template()
    with tempfile.TemporaryDirectory(prefix="stead-trial-", dir=settings.cache_folder.parent) as folder:
        cache = Path(folder)
        for part in (template.image.folder, template.folder):
            target = cache / part.relative_to(settings.cache_folder)
            target.parent.mkdir(parents=True)
            await run("cp", "--archive", "--link", part, target)
        async with another_installation(settings, cache=cache) as other:
            old = await other.create()
            assert (await other.template()).id == template.id
            shutil.rmtree(cache / template.image.folder.relative_to(settings.cache_folder))
            new = await other.create()
            assert (await other.template()).id != template.id
            assert await sh(new, "echo new") == "new"
            assert await sh(old, "python3 --version && echo old") != ""
