"""The VM engine: lifecycle, snapshots, forks, quotas and recovery, journaled in the database."""

from stead.machines.machine import Machine, MachineInfo
from stead.machines.machines import Machines
from stead.machines.persistence import Ephemeral, Persistent, Sticky
from stead.machines.records import Properties
from stead.machines.snapshot_journal import SnapshotState
from stead.machines.snapshots import SnapshotInfo
from stead.machines.states import State

__all__ = [
    "Ephemeral",
    "Machine",
    "MachineInfo",
    "Machines",
    "Persistent",
    "Properties",
    "SnapshotInfo",
    "SnapshotState",
    "State",
    "Sticky",
]
