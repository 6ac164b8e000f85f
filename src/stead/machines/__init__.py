"""Machines: virtual computers with a journaled life."""

from stead.machines.machines import Machine, MachineInfo, Machines
from stead.machines.states import State

__all__ = ["Machine", "MachineInfo", "Machines", "State"]
