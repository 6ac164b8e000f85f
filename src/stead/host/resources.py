"""What this host has in all: cores, memory and the disk of an installation."""

import os
import shutil

from stead.files import nearest_existing
from stead.host.memory import total
from stead.limits import HostResources
from stead.settings import Settings


def measure(settings: Settings) -> HostResources:
    return HostResources(
        cpus=os.cpu_count() or 1,
        memory_mib=total() >> 20,
        disk_gib=shutil.disk_usage(nearest_existing(settings.data)).total >> 30,
    )
