"""The compiled guest agent; its source is guest/, compiled by hatch_build.py when Stead is installed."""

from pathlib import Path

from stead.errors import ImageError


def agent_path() -> Path:
    """Where the static binary is that goes into every image."""
    path = Path(__file__).with_name("agent")
    if not path.is_file():
        raise ImageError(f"the guest agent is not compiled ({path} is missing): run `python hatch_build.py`")
    return path
