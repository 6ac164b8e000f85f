"""What is inside of `Machines`: the one way in which benchmarks reach it."""

from stead.machines import Machines
from stead.machines.capture import CaptureOperation
from stead.machines.engine import Engine
from stead.machines.pool import Pool
from stead.machines.wake import WakeOperation
from stead.settings import Settings
from stead.store.machines import MachineStore


def engine_of(machines: Machines) -> Engine:
    return machines._engine


def settings_of(machines: Machines) -> Settings:
    return machines._settings


def store_of(machines: Machines) -> MachineStore:
    return machines._store


def pool_of(machines: Machines) -> Pool:
    return machines._pool


def wake_of(machines: Machines) -> WakeOperation:
    return machines._start.wake


def capture_of(machines: Machines) -> CaptureOperation:
    return machines._fork.capture
