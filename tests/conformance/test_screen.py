"""The terminal emulator of the guest agent (`guest/screen`), judged by xterm.js."""

from pathlib import Path

from hatch_build import find_go, run_go, vendor

from support import ROOT
from support.npm import Npm


async def test_screen_and_replay_equal_those_of_xterm_js(package: Npm, tmp_path: Path) -> None:
    emulator = tmp_path / "emulator"
    go, source = find_go(), ROOT / "guest"
    vendor(go, source)
    run_go(go, "test", "-c", "-o", str(emulator), "./screen", cwd=source)
    recordings = source / "screen" / "testdata" / "recordings"
    await package.script("screen", {"EMULATOR": str(emulator), "RECORDINGS": str(recordings)}, limit=120)
