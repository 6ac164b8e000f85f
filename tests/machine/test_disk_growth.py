"""VMs with larger disks than their template: disk and file system grow before the create is answered."""

from dataclasses import replace

import pytest

from stead.machines import Machine, Machines
from support.guests import sh
from support.internals import inside

GIB = 1 << 30


async def disk_sizes(machine: Machine) -> tuple[int, float]:
    """The disk and its file system in GiB, as the guest sees them."""
    said = await sh(machine, "cat /sys/class/block/vda/size; df -B1 --output=size / | tail -1")
    sectors, size = map(int, said.split())
    return sectors * 512 // GIB, size / GIB


async def test_a_larger_disk_is_there_at_the_first_command(machines: Machines) -> None:
    """It has the template of all disk sizes, holds data beyond the template's end, and stays so."""
    default = await machines.template()
    size = replace(default.size, disk_gib=40)
    assert (await machines.template(size)).id == default.id
    machine = await machines.create(size=size)
    disk, whole = await disk_sizes(machine)
    assert disk == 40 and 38 < whole < 40
    # Blocks that the template's file system does not have.
    write = "seq 100000 | dd of=/root/large bs=1M seek=24500 conv=notrunc,fsync 2> /dev/null"
    await sh(machine, f"fallocate -l 25G /root/large && {write}")
    read = "dd if=/root/large bs=1M skip=24500 count=1 2> /dev/null | tr -d '\\0' | md5sum"
    known = await sh(machine, read)
    assert known == await sh(machine, "seq 100000 | md5sum")
    await sh(machine, "echo memory > /run/marker")
    (child,) = await machine.fork()
    await machine.suspend()
    for each in (machine, child):
        assert await sh(each, "echo 3 > /proc/sys/vm/drop_caches; cat /run/marker") == "memory"
        assert await sh(each, read) == known
        assert await disk_sizes(each) == (disk, whole)
    await child.delete()
    # A guest that can no longer grow its file system starts, because that fills the disk.
    await sh(machine, "rm /usr/sbin/resize2fs && ! resize2fs 2> /dev/null")
    await machine.stop()
    await machine.start()
    assert await sh(machine, read) == known
    assert await disk_sizes(machine) == (disk, whole)
    assert await sh(machine, "dmesg | grep -ciE 'ext4.*error|i/o error' || true") == "0"
    await machine.delete()


async def test_a_vm_of_the_pool_gets_the_disk_of_its_create(machines: Machines) -> None:
    pool, template = inside(machines).pool, await machines.template()
    await pool._prepare(template)
    (prepared,) = await pool.prepared()
    machine = await machines.create(size=replace(template.size, disk_gib=64))
    assert machine.id == prepared.id
    disk, whole = await disk_sizes(machine)
    assert disk == 64 and 61 < whole < 64
    await sh(machine, "head -c 1M /dev/urandom > /root/file && sync")
    await machine.delete()


@pytest.mark.slow
async def test_the_largest_disk_grows(machines: Machines) -> None:
    template = await machines.template()
    machine = await machines.create(size=replace(template.size, disk_gib=template.size.MAX_DISK_GIB))
    disk, whole = await disk_sizes(machine)
    assert disk == 4096 and whole > 4000
    await machine.delete()
