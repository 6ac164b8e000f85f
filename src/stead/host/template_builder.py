"""Builds a template: boot once, warm up, save memory, devices and disk at one instant."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from stead import addresses
from stead.deadlines import scaled
from stead.errors import SteadError, TemplateError
from stead.files import locked, sync_file, sync_folder, write_atomically
from stead.guest.execution import ExecRequest, collect
from stead.guest.identity import prepare
from stead.host import disks, templates
from stead.host.interface import Progress, Report, VmSlot
from stead.host.qemu import Memory
from stead.host.templates import LocalTemplate, TemplateInputs
from stead.host.vm import QemuVm, open_kernel
from stead.settings import Size
from stead.tasks import Threads, in_thread

if TYPE_CHECKING:
    from stead.host.local import LocalHost

BOOT_TIMEOUT = scaled(180.0)
_WARM_UP_TIMEOUT = scaled(300.0)
_LOCK_TIMEOUT = scaled(3600.0)
_SETTLING = scaled(1.0)
"""Seconds for the guest to finish what it has begun, such as closing a connection: else every clone would."""
TEMPLATE_PREFIX = "template-"
"""Names the VM that a template is made of: it is no VM of an account."""
_SLOTS = 16
"""The last slots are reserved for templates that are being built."""
_next_slot = 0


def machine_slots() -> range:
    return range(addresses.MAX_SLOTS - _SLOTS)


async def ensure_template(host: "LocalHost", size: Size, progress: Report = lambda _: None) -> LocalTemplate:
    """The template for VMs of a size, built if it is missing: once for concurrent callers, by a lock."""
    inputs = await host.template_inputs(size, progress)
    folder = host.templates_folder
    if (found := templates.find(folder, inputs)) is not None:
        return found
    key = inputs.key
    folder.mkdir(parents=True, exist_ok=True, mode=0o711)
    async with locked(folder / f".{key}.lock", _LOCK_TIMEOUT):
        if (found := templates.find(folder, inputs)) is not None:
            return found
        for leftover in folder.glob(f".building-{key}-*"):
            await Threads.COPIES.run(shutil.rmtree, leftover)
        try:
            return await _build(host, inputs, progress)
        except SteadError as error:
            raise TemplateError(f"cannot build a template of {size.compute}: {error}") from error
        except OSError as error:
            raise TemplateError(f"cannot build a template of {size.compute}: {error.strerror}") from error


async def _build(host: "LocalHost", inputs: TemplateInputs, progress: Report) -> LocalTemplate:
    global _next_slot
    _next_slot = (_next_slot + 1) % _SLOTS
    template_id = f"{inputs.key}-{secrets.token_hex(4)}"
    vm_slot = VmSlot(f"{TEMPLATE_PREFIX}{template_id}", addresses.MAX_SLOTS - 1 - _next_slot)
    building = host.templates_folder / f".building-{template_id}"
    building.mkdir(mode=0o711)
    template = LocalTemplate(template_id, building, inputs.size, inputs.image)
    try:
        await _freeze(host, vm_slot, template, inputs.commands, progress)
        facts = {
            "image": inputs.image.key,
            "image_build": templates.image_build(inputs.image),
            "size": inputs.size.key,
            "platform": asdict(inputs.platform),
        }
        await Threads.COPIES.run(_sync, building)
        write_atomically(building / "template.json", json.dumps(facts).encode())
        final = host.templates_folder / template_id
        building.rename(final)
        sync_folder(host.templates_folder)
        progress(_step("ready", "", 1.0))
        return LocalTemplate(template_id, final, inputs.size, inputs.image)
    finally:
        await asyncio.shield(host.discard(vm_slot.machine))
        await Threads.COPIES.run(shutil.rmtree, building, ignore_errors=True)


async def _freeze(
    host: "LocalHost", vm_slot: VmSlot, template: LocalTemplate, commands: Sequence[str], progress: Report
) -> None:
    files = host.disks.files(vm_slot.machine)
    uid = host.settings.uid(vm_slot.number)
    files.folder.mkdir(parents=True, mode=0o700)
    await in_thread(disks.make_layer, template.disk, template.size.disk_gib << 30)
    progress(_step("booting the image", template.size.compute, 0.1))
    with template.memory.open("xb") as ram, contextlib.ExitStack() as opened:
        os.truncate(ram.fileno(), template.size.memory_mib << 20)
        # QEMU opens it once more, by the name of its descriptor.
        os.fchown(ram.fileno(), uid, uid)
        layers = (
            await in_thread(disks.open_top, template.disk, opened),
            await in_thread(disks.open_frozen, template.image.disk, opened),
        )
        image = template.image
        boot = await in_thread(open_kernel, image.kernel, image.initrd, opened, template.generation)
        memory = Memory("template", ram.fileno())
        process = await host.launch(vm_slot, template.size, memory, layers, boot, await host.platform())
    vm = await host.connect(vm_slot.machine, process)
    try:
        await _warm_up(host, vm_slot, vm, commands, progress)
        progress(_step("saving memory and disk", "", 0.95))
        await asyncio.sleep(_SETTLING)
        async with vm.saving_devices() as save_devices:
            await vm.pause()
            devices = await save_devices()
        await vm.quit()
        # From here on no process can write any of it.
        os.chown(template.memory, 0, 0)
        await in_thread(write_atomically, template.devices, devices)
    finally:
        await asyncio.shield(vm.kill())
        await asyncio.shield(vm.release())


async def _warm_up(
    host: "LocalHost", vm_slot: VmSlot, vm: QemuVm, commands: Sequence[str], progress: Report
) -> None:
    agent = host.agent(vm_slot)
    ended = asyncio.create_task(_abort_with(vm, agent.abort))
    try:
        await agent.call("GET", "/v1/health", timeout=BOOT_TIMEOUT, connect_timeout=BOOT_TIMEOUT)
        for number, command in enumerate(commands):
            shown = command.rpartition("\n")[2]
            progress(_step("warming up", shown, 0.3 + 0.6 * number / len(commands)))
            request = ExecRequest(command, timeout=_WARM_UP_TIMEOUT)
            result = await collect(agent, request)
            if not result.ok:
                said = result.stderr.decode(errors="replace").strip()
                raise TemplateError(
                    f"`{shown}` failed in the guest: {said or result.signal or result.exit_code}"
                )
        await prepare(agent)
        await agent.call("POST", "/v1/sync", timeout=_WARM_UP_TIMEOUT)
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        # No connection may be open in the frozen memory: a clone would answer for it.
        await agent.close()


def _step(phase: str, detail: str, fraction: float) -> Progress:
    return Progress(phase, detail, fraction, "template")


async def _abort_with(vm: QemuVm, abort: Callable[[str], None]) -> None:
    how = await vm.wait()
    abort(f"QEMU {how}")


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        sync_file(path)
