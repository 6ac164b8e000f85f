"""What a build makes of a spec: Dockerfile commands, systemd units, clone commands."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.builds.dockerfile import commands_of
from stead.builds.errors import InvalidSpec, ProgramFailed, last_line
from stead.builds.layer_services import UnitState, command_of, late_units
from stead.builds.plan import plan_machine
from stead.builds.repositories import source_of
from stead.builds.setup import planned
from stead.builds.spec import Layer, Restart, Service, ServicePatch, User
from stead.builds.units import passing_units, patch_unit, reference, service_unit
from stead.builds.validation import check_service

# Base images


def test_dockerfile_run_commands_are_parsed() -> None:
    assert commands_of("FROM debian:trixie-slim") == ()
    assert (
        commands_of(
            "\n# syntax=docker/dockerfile:1\nfrom --platform=linux/amd64 docker.io/library/debian:13 as x\n"
        )
        == ()
    )
    text = """FROM debian:trixie-slim

RUN <<'FREESTYLE_EOF'
echo "one" && \\
  echo two
# not a comment here
FREESTYLE_EOF

RUN apt-get update && \\
    # a comment
    apt-get install -y git
RUN ["echo", "a b"]
"""
    assert commands_of(text) == (
        'echo "one" && \\\n  echo two\n# not a comment here',
        "apt-get update && \\\n    apt-get install -y git",
        "echo 'a b'",
    )
    plan = plan_machine(Layer(base_image=text, users=(User("a"),)), None, Layer())
    assert [planned(layer) for layer in plan.layers] == [("image",)]
    assert planned(plan.own) == ("users",)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("FROM ubuntu:24.04", "unsupported_image"),
        ("FROM debian:bookworm-slim", "unsupported_image"),
        ("FROM debian", "unsupported_image"),
        ("FROM debian:trixie-slim\nFROM debian:trixie-slim", "unsupported_image"),
        ("FROM debian:trixie-slim\nCOPY . /", "invalid_value"),
        ("FROM debian:trixie-slim\nRUN --mount=type=cache,target=/x true", "invalid_value"),
        ("FROM debian:trixie-slim\nRUN <<EOF\ntrue", "invalid_value"),
        ("RUN true", "invalid_value"),
        ("", "invalid_value"),
        ("\x00", "invalid_value"),
    ],
)
def test_unsupported_dockerfiles_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        commands_of(text)
    assert raised.value.rule == problem


# Units


def test_unit_file_of_a_service() -> None:
    unit = service_unit(
        Service(
            "web",
            exec=("/bin/prepare 100%", "/usr/bin/node server.js $PORT"),
            env={"PORT": "3000", "TEXT": 'a "b" \\ 5%\nc'},
            user="app",
            group="crew",
            workdir="/srv/app",
            after=("network-online", "db"),
            requires=("db.service",),
            on_failure=("rescue-me",),
            timeout=0,
            ready_signal=True,
            watchdog=1.5,
            restart=Restart("on-failure", 2, 5, 60),
        )
    )
    assert (
        unit
        == """[Unit]
Description=web
After=network-online.target db.service
Requires=db.service
OnFailure=rescue-me.service
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
ExecStartPre=/bin/prepare 100%%
ExecStart=/usr/bin/node server.js $PORT
SetLoginEnvironment=yes
Environment="PORT=3000"
Environment="TEXT=a \\"b\\" \\\\ 5%%\\nc"
User=app
Group=crew
WorkingDirectory=/srv/app
TimeoutSec=infinity
WatchdogSec=1.5
NotifyAccess=all
Restart=on-failure
RestartSec=2

[Install]
WantedBy=multi-user.target
"""
    )


def test_unit_file_of_a_oneshot() -> None:
    lines = service_unit(Service("job", mode="oneshot", exec=("/bin/a", "/bin/b"), timeout=30)).splitlines()
    assert [line for line in lines if line.startswith(("Type", "Exec", "Remain", "Timeout"))] == [
        "Type=oneshot",
        "ExecStart=/bin/a",
        "ExecStart=/bin/b",
        "RemainAfterExit=yes",
        "TimeoutSec=30",
    ]
    again = service_unit(Service("job", mode="oneshot", exec=("/bin/a",), remain_after_exit=False))
    assert "RemainAfterExit" not in again


def test_units_that_delete_themselves_are_wanted_not_required() -> None:
    """After a reboot they are gone, and units that required them must start."""
    first = Service(
        "first", mode="oneshot", exec=("/bin/a",), delete_after_success=True, remain_after_exit=False
    )
    web = Service("web", exec=("/bin/b",), requires=("first.service", "db.service"), after=("first.service",))
    own, passing = {"first.service", "web.service"}, passing_units([first, web])
    assert passing == {"first.service"}
    unit = service_unit(web, own, passing)
    assert "Requires=db.service\nWants=first.service\n" in unit
    text = service_unit(first, own, passing)
    assert "RemainAfterExit=yes" in text
    assert "ExecStartPost=+-/bin/sh -c 'rm -f /etc/systemd/system/first.service " in text


def test_service_suffix_of_systemd_targets_is_corrected() -> None:
    assert reference("multi-user.service") == "multi-user.target"
    assert reference("network-online") == "network-online.target"
    assert reference("multi-user.target") == "multi-user.target"
    assert reference("app.web") == "app.web.service"
    assert reference("db") == "db.service"
    assert reference("network.service", own={"network.service"}) == "network.service"
    assert reference("x.timer") == "x.timer"


def test_drop_in_of_a_patch_has_only_its_fields() -> None:
    assert patch_unit(ServicePatch("ssh", env={"A": "b"})) == '[Service]\nEnvironment="A=b"\n'
    assert patch_unit(ServicePatch("ssh", exec=("/bin/a", "/bin/b"), after=("db",))) == (
        "[Unit]\nAfter=db.service\n\n"
        "[Service]\nExecStart=\nExecStartPre=\nExecStartPre=/bin/a\nExecStart=/bin/b\n"
    )


def test_a_failed_run_step_is_described_by_its_command_and_last_output() -> None:
    """The client for Node and the Python SDK send a command as a script that a service runs."""
    path = "/opt/freestyle/scripts/freestyle-run-command-1.sh"
    step = Service("freestyle-run-command-1", mode="oneshot", exec=(f"/bin/bash {path}",))
    state = UnitState("freestyle-run-command-1.service", "loaded", "failed", "failed", "exit-code", "2", "0")

    def described(script: str, output: str) -> str:
        return state.describe(command_of(step, {path: script.encode()}), last_line(output))

    assert described("#!/bin/bash\nset -eo pipefail\nmake all\n", "cc a.c\nmake: *** Error 1\n\n") == (
        "'make all' (freestyle-run-command-1.service) exited with 2: make: *** Error 1"
    )
    assert described("#!/bin/sh\n\ncd /srv\nmake\n", "") == (
        "'cd /srv ...' (freestyle-run-command-1.service) exited with 2"
    )
    assert len(described("x" * 10_000, "y" * 10_000)) < 800
    assert command_of(Service("web", exec=("/bin/prepare", "/bin/web")), {}) == "/bin/prepare"
    assert command_of(ServicePatch("web"), {}) == ""
    failed = ProgramFailed("image", "'make'", 2, "y" * 10_000)
    assert str(failed).startswith("image: 'make' exited with 2: yyy") and len(str(failed)) < 800
    killed = replace(state, result="signal")
    assert killed.describe("make", "") == "'make' (freestyle-run-command-1.service) failed: signal"


def test_late_units_are_named_even_if_systemd_has_not_started_them() -> None:
    def state(unit: str, active: str, job: str = "0") -> UnitState:
        return UnitState(unit, "loaded", active, "", "", "", job)

    assert late_units([state("a", "active"), state("b", "activating"), state("c", "inactive", "7")]) == [
        "b",
        "c",
    ]
    assert late_units([state("a", "active"), state("b", "inactive")]) == ["b"]
    assert late_units([state("a", "active")]) == ["systemd is busy"]


NASTY = st.text(alphabet=st.sampled_from("a/ =%\"'\\\n\r\t;$[]#~.-:@0é\x00\u2028"), max_size=12)


@given(
    NASTY,
    st.lists(NASTY, max_size=2),
    st.dictionaries(NASTY, NASTY, max_size=2),
    NASTY,
    NASTY,
    st.lists(NASTY, max_size=2),
)
def test_no_value_injects_a_line_into_a_unit_file(
    name: str, lines: list[str], env: dict[str, str], who: str, workdir: str, units: list[str]
) -> None:
    """A service is refused, or its unit file has exactly the expected lines."""
    wanted = Service(
        name or "x",
        exec=tuple(lines),
        env=env,
        user=who,
        workdir=workdir,
        after=tuple(units),
        requires=tuple(units),
    )
    try:
        check_service(wanted)
    except InvalidSpec:
        return
    text = service_unit(wanted)
    keys = [line.split("=")[0] for line in text.split("\n") if line]
    expected = ["[Unit]", "Description", *(["After", "Requires"] if units else [])]
    expected += ["[Service]", "Type", *["ExecStartPre"] * (len(lines) - 1), "ExecStart"]
    expected += [*["Environment"] * len(env), "User", "WorkingDirectory", "[Install]", "WantedBy"]
    assert keys == expected
    assert not any(line.endswith("\\") for line in text.split("\n"))


# Repositories


def test_credentials_are_moved_from_the_clone_url_to_the_environment() -> None:
    source = source_of("https://me:p%40ss@example.com:8443/a/b.git")
    assert source.url == "https://example.com:8443/a/b.git"
    assert (source.environment["STEAD_USER"], source.environment["STEAD_PASSWORD"]) == ("me", "p@ss")
    assert "credential.https://example.com:8443.helper" in source.environment.values()
    assert "p@ss" not in repr(source)
    assert source_of("ssh://git:secret@example.com/a").url == "ssh://git@example.com/a"
    assert source_of("git@example.com:a/b.git").url == "git@example.com:a/b.git"
    plain = source_of("https://example.com/a")
    assert plain.url == "https://example.com/a"
    assert "STEAD_PASSWORD" not in plain.environment
