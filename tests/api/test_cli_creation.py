"""`stead vm create` while the server builds a template, against a scripted server."""

import json
import signal
import subprocess

import pytest

from support.pseudo_terminal import typed
from support.run_cli import PROGRAM, Shell
from support.scripted_server import Reply, Script, scripted

VM = "x" * 20
ONCE = "building the template of 2x1G (once for all disk sizes; 1 to 2 minutes without KVM)"
BOOTING = "building the template of 2x1G, once: booting the image"
SAVING = "building the template of 2x1G, once: saving memory and disk"
PENDING = Reply(202, {"requestId": "ri-1", "status": "pending"})
CREATED = Reply(content={"id": VM, "domains": []})


def lines(*messages: str, source: str = "template", at: int = 1) -> Reply:
    logs = [
        {"timestamp": f"2026-01-01T00:00:{at:02}.00000{number}Z", "message": message, "source": source}
        for number, message in enumerate(messages)
    ]
    return Reply(content={"logs": logs})


def create(script: Script, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [PROGRAM, "vm", "create", *options],
        env=Shell(script.url, "key").environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_each_phase_of_a_template_is_a_line_on_standard_error(options: tuple[str, ...]) -> None:
    created = lines(f"VM {VM} created", source="vm", at=3)
    with scripted(
        PENDING, PENDING, lines(ONCE, BOOTING), PENDING, lines(SAVING, at=2), CREATED, created
    ) as script:
        result = create(script, "--size", "2x1Gx20G", *options)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [ONCE, BOOTING, SAVING]
    if options:
        assert json.loads(result.stdout)["id"] == VM
    else:
        assert result.stdout == f"{VM}\n"
    assert script.seen[0].headers["x-freestyle-background-after-secs"] == "5"


def test_a_quick_create_prints_no_progress() -> None:
    with scripted(CREATED) as script:
        result = create(script)
    assert (result.stdout, result.stderr) == (f"{VM}\n", "")


def test_a_template_that_cannot_be_built_is_an_error() -> None:
    failure = "cannot build a template of 2x1G: QEMU exited"
    with scripted(
        PENDING, Reply(500, {"code": "INTERNAL_ERROR", "message": failure}), lines(ONCE, BOOTING)
    ) as script:
        result = create(script)
    assert result.returncode == 1 and failure in result.stderr and not result.stdout


async def test_the_line_on_a_terminal_names_the_phase_and_ctrl_c_cancels_the_create() -> None:
    pending = [PENDING, lines(BOOTING)] * 20
    with scripted(*pending[:1], *pending) as script:
        async with typed(Shell(script.url, "key"), "vm", "create", cols=100) as window:
            await window.expect(BOOTING.encode())
            await window.expect(b"(2 s)")
            window.type(b"\x03")
            assert await window.ended() == 128 + signal.SIGINT
    assert (script.seen[-1].method, script.seen[-1].target) == (
        "DELETE",
        "/auth/v1/background-requests/ri-1",
    )
