"""Commands in a VM."""

from stead.deadlines import scaled
from stead.machines import Machine


async def sh(machine: Machine, command: str, timeout: float = 60, user: str | None = None) -> str:
    """What a command that must succeed prints."""
    result = await machine.exec(command, timeout=scaled(timeout), user=user)
    assert result.ok, (command, result)
    return result.stdout.decode().strip()
