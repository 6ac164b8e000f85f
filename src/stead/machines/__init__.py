"""Machines: virtual computers with a journaled life."""

from stead.machines.machine import Machine, MachineInfo
from stead.machines.machines import Machines
from stead.machines.states import State

__all__ = ["Machine", "MachineInfo", "Machines", "State"]
