"""Specs without VMs: validation, cache keys, plans, unit files and the wire format."""

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from stead.api.errors import from_product
from stead.api.wire.builds import BuildRecord, PhaseRecord
from stead.api.wire.creation import CreateSnapshot, CreateVm
from stead.api.wire.layers import LayerFields, LayerModel, Spec
from stead.api.wire.unknown import unknown_keys
from stead.builds.dockerfile import commands_of
from stead.builds.errors import InvalidSpec, ProgramFailed, Rule, last_line
from stead.builds.layer_services import UnitState, command_of, late_units
from stead.builds.plan import Base, plan_machine, plan_snapshot
from stead.builds.records import BuildInfo, PhaseInfo
from stead.builds.repositories import source_of
from stead.builds.setup import planned
from stead.builds.spec import (
    Clone,
    File,
    GitUser,
    Group,
    Layer,
    Port,
    Restart,
    Service,
    ServicePatch,
    User,
    combine,
    layer_hash,
)
from stead.builds.units import passing_units, patch_unit, reference, service_unit
from stead.builds.validation import check, check_service
from stead.errors import InvalidRequest
from stead.machines import Persistent, Sticky
from stead.machines.unchanged import UNCHANGED
from stead.settings import Size

SNAPSHOT = "sc-" + "a" * 20


def problem_of(layer: Layer) -> str:
    with pytest.raises(InvalidSpec) as raised:
        check(layer)
    return raised.value.rule


def user(**facts: Any) -> Layer:
    return Layer(users=(User(**{"name": "alice"} | facts),))


def group(name: str, **facts: Any) -> Layer:
    return Layer(groups=(Group(name, **facts),))


def service(**facts: Any) -> Layer:
    return Layer(services=(Service(**{"name": "web", "exec": ("/bin/true",)} | facts),))


def repository(repo: str = "https://example.com/r.git", path: str = "/r", rev: str | None = None) -> Layer:
    return Layer(repositories=(Clone(repo, path, rev),))


INVALID = {
    "users": [
        ("duplicate_user_name", Layer(users=(User("a"), User("a")))),
        ("user_group_empty", user(groups=("crew", ""))),
        ("user_system_flag_mismatch", user(uid=1000, system=True)),
        ("user_uid_out_of_range", user(uid=65_536)),
        ("user_uid_out_of_range", user(uid=-1)),
        ("user_home_invalid", user(home="home/alice")),
        ("user_home_invalid", user(home="/home/a:b")),
        ("user_shell_invalid", user(shell="bash")),
        ("user_shell_invalid", user(shell="/bin/sh\nroot::0:0")),
        ("invalid_value", user(name="")),
        ("invalid_value", user(name="Alice Smith")),
        ("invalid_value", user(name="-alice")),
        ("invalid_value", user(name="a" * 33)),
        ("invalid_value", user(gecos="a:b")),
        ("invalid_value", user(groups=("--help",))),
    ],
    "groups": [
        ("duplicate_group_name", Layer(groups=(Group("a"), Group("a")))),
        ("group_name_reserved", group("root")),
        ("group_name_reserved", group("systemd-journal")),
        ("group_name_invalid_chars", group("my crew")),
        ("group_name_invalid_chars", group("1crew")),
        ("group_name_too_long", group("a" * 33)),
        ("group_name_empty", group("")),
        ("invalid_value", group("crew", gid=70_000)),
        ("invalid_value", group("crew", gid=1000, system=True)),
    ],
    "services": [
        ("wanted_by_empty", service(wanted_by=())),
        ("wanted_by_empty", service(wanted_by=("",))),
        ("workdir_empty", service(workdir="")),
        ("group_empty", service(group="")),
        ("user_empty", service(user="")),
        ("on_failure_unit_empty", service(on_failure=("",))),
        ("requires_unit_empty", service(requires=("a", ""))),
        ("after_unit_empty", service(after=(" ",))),
        ("env_key_contains_equals", service(env={"A=B": "c"})),
        ("env_key_empty", service(env={"": "c"})),
        ("exec_empty", service(exec=())),
        ("exec_empty", service(exec=("/bin/true", " "))),
        ("service_name_too_long", service(name="a" * 201)),
        ("service_name_invalid_prefix", service(name=".hidden")),
        ("service_name_invalid_prefix", service(name="-option")),
        ("service_name_invalid_chars", service(name="a/b")),
        ("service_name_invalid_chars", service(name="a b")),
        ("service_name_empty", service(name="")),
        ("service_name_empty", service(name=".service")),
        ("service_exists", service(name="stead-agent")),
        (
            "service_exists",
            Layer(services=(Service("a", exec=("b",)), Service("a.service", exec=("b",)))),
        ),
        ("invalid_value", service(env={"A B": "c"})),
        ("invalid_value", service(env={"A": "b\0"})),
        ("invalid_value", service(user="root\nExecStart=/bin/sh")),
        ("invalid_value", service(after=("network.target\nRequires=x",))),
        ("invalid_value", service(exec=("/bin/true\n[Install]",))),
        ("invalid_value", service(exec=("/bin/true \\",))),
        ("invalid_value", service(workdir="relative")),
        ("invalid_value", service(workdir="/a\nUser=root")),
        ("invalid_value", service(timeout=-1)),
        ("invalid_value", service(watchdog=float("nan"))),
        ("invalid_value", service(mode="oneshot", restart=Restart("always"))),
        ("exec_empty", Layer(patches=(ServicePatch("web", exec=()),))),
        ("service_name_empty", Layer(patches=(ServicePatch(""),))),
    ],
    "files": [
        ("invalid_file", Layer(files=(File("relative"),))),
        ("invalid_file", Layer(files=(File("/a/"),))),
        ("invalid_file", Layer(files=(File("/a\0b"),))),
        ("invalid_file", Layer(files=(File("/a"), File("/a")))),
        ("invalid_file", Layer(files=(File("/a", bytes((64 << 20) + 1)),))),
    ],
    "packages": [
        ("invalid_value", Layer(packages=(name,)))
        for name in ("--reinstall", "-y", "a b", "git-", "Git", "", "./local.deb", "a;b", "git=1 -o")
    ],
    "repositories": [
        ("invalid_repository", repository(repo))
        for repo in (
            *("8f3c1a52-65d8-4dd0-9c0e", "site", "", "-u", "--upload-pack=x", "/srv/repo.git"),
            *(
                "ext::sh -c id",
                "ext::https://x",
                "ftp://example.com/r",
                "https://",
                "https://h:port/r",
                "a\nb",
            ),
        )
    ]
    + [
        ("invalid_repository", repository(path="relative")),
        ("invalid_repository", repository(path="/")),
        ("invalid_repository", repository(rev="--force")),
        ("invalid_repository", repository(rev="")),
        ("invalid_repository", repository(rev="a b")),
        (
            "invalid_repository",
            Layer(repositories=(Clone("https://a/b", "/r"), Clone("https://a/c", "/r/"))),
        ),
        ("invalid_value", Layer(git_user=GitUser(name="a\n[core]"))),
    ],
    "sizes": [
        ("vcpus_not_power_of_two", Layer(vcpus=3)),
        ("vcpus_out_of_range", Layer(vcpus=128)),
        ("vcpus_out_of_range", Layer(vcpus=0)),
        ("memory_not_power_of_two", Layer(memory_gb=3)),
        ("memory_not_power_of_two", Layer(memory_gb=1.0001)),
        ("memory_out_of_range", Layer(memory_gb=0.25)),
        ("memory_out_of_range", Layer(memory_gb=1024)),
        ("memory_too_large", Layer(memory_gb=1e12)),
        ("disk_out_of_range", Layer(disk_gb=10)),
        ("disk_out_of_range", Layer(disk_gb=20.5)),
        ("disk_too_large", Layer(disk_gb=1e12)),
    ],
    "others": [
        ("workdir_empty", Layer(workdir="")),
        ("invalid_value", Layer(workdir="here")),
        ("invalid_value", Layer(ports=(Port(443, 0),))),
        ("invalid_value", Layer(ports=(Port(443, 3000), Port(8081, 5000)))),
        ("invalid_value", Layer(ports=(Port(443, 3000, "udp"),))),
        ("invalid_value", Layer(ready_timeout=0)),
        ("invalid_value", Layer(idle_timeout=0)),
        ("invalid_snapshot_id", Layer(snapshot_id="")),
        ("invalid_snapshot_id", Layer(snapshot_id="../../etc")),
    ],
}


@pytest.mark.parametrize("problem, layer", [each for cases in INVALID.values() for each in cases])
def test_invalid_specs_are_refused_with_their_problem(problem: str, layer: Layer) -> None:
    assert problem_of(layer) == problem


def test_invalid_sizes_report_the_limits() -> None:
    facts = {
        Layer(vcpus=3): {"got": 3},
        Layer(memory_gb=3): {"got": 3072},
        Layer(vcpus=128): {"got": 128, "max": Size.MAX_VCPUS},
        Layer(disk_gb=10): {"got": 10_240, "min": 20_480, "max": Size.MAX_DISK_GIB * 1024},
        Layer(memory_gb=1e12): {"gotGb": 1e12},
    }
    for layer, expected in facts.items():
        with pytest.raises(InvalidSpec) as raised:
            check(layer)
        assert from_product(raised.value).extras == expected


def test_base_and_size_belong_to_the_innermost_layer() -> None:
    """Depth 0 is the outermost layer."""
    inner = Layer(snapshot_id=SNAPSHOT, vcpus=2, memory_gb=4, disk_gb=20)
    check(Layer(snapshot=Layer(snapshot=inner)))
    for name, wire in (("vcpus", "vcpuCount"), ("memory_gb", "memSizeGb"), ("disk_gb", "rootfsSizeGb")):
        given: dict[str, Any] = {name: 32}
        with pytest.raises(InvalidSpec) as raised:
            check(Layer(snapshot=Layer(snapshot=inner, **given)))
        assert raised.value.rule == "misplaced_field"
        assert from_product(raised.value).extras == {"depth": 1, "field": wire}
        assert wire in from_product(raised.value).message
    conflicts = {
        ("snapshot", "snapshotId"): Layer(snapshot=inner, snapshot_id=SNAPSHOT),
        ("snapshot", "baseImage"): Layer(snapshot=inner, base_image="FROM debian:trixie-slim"),
        ("snapshotId", "baseImage"): Layer(snapshot_id=SNAPSHOT, base_image="FROM debian:trixie-slim"),
    }
    for (first, second), layer in conflicts.items():
        with pytest.raises(InvalidSpec) as raised:
            check(Layer(snapshot=layer))
        assert raised.value.rule == "conflicting_sources"
        answer = from_product(raised.value)
        assert answer.extras == {"depth": 1, "fieldA": first, "fieldB": second}
        assert f"both {first} and {second} are given" in answer.message


def test_every_rule_has_a_code_on_the_wire() -> None:
    rules = [rule for group in get_args(Rule) for rule in get_args(group)]
    assert {from_product(InvalidSpec(rule, "")).status for rule in rules} == {400, 409}


def test_layers_have_a_limited_depth() -> None:
    deep = Layer()
    for _ in range(32):
        deep = Layer(snapshot=deep)
    assert problem_of(deep) == "invalid_value"


def test_valid_specs_pass() -> None:
    check(
        Layer(
            groups=(Group("crew", 1001), Group("_svc", 150, system=True)),
            users=(User("alice", 1000, "Alice A.", ("crew", "docker.io"), "/srv/alice", "/bin/zsh"),),
            packages=(
                "git",
                "g++",
                "libstdc++6",
                "python3.13",
                "nginx=1.26.0-1",
                "libc6:amd64",
                "vim/trixie",
            ),
            repositories=(
                Clone("https://user:pass@example.com:8443/a/b.git", "/srv/b", "feature/x"),
                Clone("git@example.com:a/b.git", "/srv/c", "v1.0"),
                Clone("ssh://git@example.com/a/b", "/srv/d"),
                Clone("file:///srv/repo.git", "/srv/e", "0123abc"),
                Clone("8f3c1a52-65d8-4dd0-9c0e-0f5e1a6d3a11", "/srv/f"),
            ),
            services=(
                Service("getty@tty9", exec=("/bin/true",), workdir="~", user="1000", env={"A": "b\nc"}),
            ),
            ports=(Port(443, 3000),),
            idle_timeout=None,
        )
    )


# Cache keys


LAYERS = st.builds(
    Layer,
    files=st.lists(st.builds(File, st.sampled_from(["/a", "/b"]), st.binary(max_size=4), st.booleans())).map(
        tuple
    ),
    packages=st.lists(st.sampled_from(["git", "tree"]), max_size=2).map(tuple),
    users=st.lists(st.builds(User, st.sampled_from(["a", "b"]), st.none() | st.integers(0, 9))).map(tuple),
    discriminator=st.none() | st.text(max_size=2),
)


@given(LAYERS, LAYERS)
def test_equal_layers_and_no_others_have_the_same_hash(one: Layer, other: Layer) -> None:
    same = layer_hash("account", "base", one) == layer_hash("account", "base", other)
    assert same == (one == other)


def test_layer_hash_covers_content_and_nothing_else() -> None:
    layer = Layer(
        packages=("git",),
        files=(File("/a", b"b"),),
        services=(Service("web", exec=("a",), env={"B": "1", "A": "2"}),),
        workdir="/srv",
    )
    own = layer_hash("account", "base", layer)
    assert own != layer_hash("another", "base", layer)
    assert own != layer_hash("account", "base built anew", layer)
    different: list[dict[str, Any]] = [
        {"packages": ("tree",)},
        {"files": (File("/a", b"c"),)},
        {"files": (File("/a", b"b", executable=True),)},
        {"services": (Service("web", exec=("a",), env={"B": "1"}),)},
        {"services": (*layer.services, Service("db", exec=("a",)))},
        {"workdir": "/"},
        {"git_user": GitUser("a")},
        {"repositories": (Clone("https://a/b", "/a"),)},
        {"repositories": (Clone("https://a/b", "/a", "main"),)},
        {"discriminator": "x"},
        {"commands": ("true",)},
    ]
    hashes = {layer_hash("account", "base", replace(layer, **each)) for each in different}
    assert len(hashes | {own}) == len(different) + 1
    alike: list[dict[str, Any]] = [
        {"skip_cache": True},
        {"ports": (Port(443, 1),)},
        {"idle_timeout": 7},
        {"wait_for_ready": True},
        {"ready_timeout": 7.0},
        {"services": (Service("web", exec=("a",), env={"A": "2", "B": "1"}),)},
    ]
    for each in alike:
        assert layer_hash("account", "base", replace(layer, **each)) == own


# Plans


def test_all_layers_of_a_spec_but_the_outermost_are_built() -> None:
    inner = Layer(vcpus=2, packages=("git",), workdir="/inner", idle_timeout=10)
    middle = Layer(snapshot=inner, users=(User("a"),))
    outer = Layer(snapshot=middle, users=(User("b"), User("c", 7)), ready_timeout=5)
    top = Layer(users=(User("c", 8),), vcpus=8, idle_timeout=None, wait_for_ready=True)
    plan = plan_machine(outer, None, top)
    assert plan.base == Base(None, vcpus=2)
    assert plan.base.size(Size(4, 1024, 20)) == Size(2, 1024, 20)
    assert [planned(layer) for layer in plan.layers] == [("packages", "repositories"), ("users",)]
    assert plan.own.users == (User("b"), User("c", 8))
    assert (plan.workdir, plan.idle_timeout) == ("/inner", None)
    assert (plan.wait_for_ready, plan.ready_timeout) == (True, 5)


def test_all_layers_of_a_template_are_built() -> None:
    template = Layer(snapshot_id=SNAPSHOT, vcpus=2, packages=("git",), workdir="/t")
    plan = plan_machine(None, template, Layer(files=(File("/a"),)))
    assert plan.base == Base(SNAPSHOT, vcpus=2)
    assert [planned(layer) for layer in plan.layers] == [("packages", "repositories")]
    assert planned(plan.own) == ("files",)
    assert plan.workdir == "/t"
    assert [
        planned(layer) for layer in plan_snapshot(Layer(snapshot=template, users=(User("a"),))).layers
    ] == [
        ("packages", "repositories"),
        ("users",),
    ]


def test_the_base_snapshot_can_be_given_in_three_places() -> None:
    for spec, template, top in (
        (None, None, Layer(snapshot_id=SNAPSHOT)),
        (Layer(snapshot_id=SNAPSHOT), None, Layer()),
        (Layer(), None, Layer(snapshot_id=SNAPSHOT)),
        (None, Layer(snapshot_id=SNAPSHOT), Layer(snapshot_id=SNAPSHOT)),
        (Layer(snapshot=Layer(snapshot_id=SNAPSHOT)), None, Layer()),
    ):
        plan = plan_machine(spec, template, top)
        assert plan.base.snapshot == SNAPSHOT
        assert not plan.own.work
    for spec, template, top in (
        (Layer(), Layer(), Layer()),
        (Layer(snapshot_id=SNAPSHOT), None, Layer(snapshot_id="sc-" + "b" * 20)),
        (Layer(base_image="FROM debian:trixie-slim"), None, Layer(snapshot_id=SNAPSHOT)),
    ):
        with pytest.raises(InvalidSpec) as raised:
            plan_machine(spec, template, top)
        assert raised.value.rule == "conflicting_sources"


def test_the_upper_layer_wins_when_layers_are_combined() -> None:
    below = Layer(
        files=(File("/a", b"1"), File("/b", b"1")), packages=("git",), workdir="/below", skip_cache=True
    )
    above = Layer(files=(File("/b", b"2"),), packages=("git", "tree"))
    both = combine(below, above)
    assert both.files == (File("/a", b"1"), File("/b", b"2"))
    assert both.packages == ("git", "tree")
    assert (both.workdir, both.skip_cache) == ("/below", True)


def test_a_layer_without_changes_has_no_phases() -> None:
    for layer in (
        Layer(),
        Layer(workdir="/", git_user=GitUser(), discriminator="x", skip_cache=True, ports=(), idle_timeout=5),
    ):
        assert not layer.work
        assert planned(layer) == ()


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


# The wire


def test_spec_of_the_npm_client_is_parsed() -> None:
    sent = {
        "name": None,
        "aptDeps": ["git", "git"],
        "users": [{"name": "alice", "groups": None, "uid": None, "system": None}],
        "additionalFiles": {
            "/opt/freestyle/scripts/freestyle-run-command-1.sh": {
                "content": "#!/bin/bash\nls",
                "encoding": "utf-8",
            },
            "/b": {"content": "AAE=", "encoding": "base64", "executable": True},
        },
        "systemd": {
            "services": [
                {
                    "name": "freestyle-run-command-1",
                    "mode": "oneshot",
                    "deleteAfterSuccess": True,
                    "workdir": "/root",
                    "env": {"HOME": "/root"},
                    "exec": ["/bin/bash /opt/freestyle/scripts/freestyle-run-command-1.sh"],
                    "bash": "ls",
                }
            ],
            "patchedServices": [{"name": "ssh", "env": None, "restartPolicy": {"policy": "always"}}],
        },
        "git": {"config": {}, "repos": [{"repo": "https://example.com/r", "path": "/r", "rev": None}]},
        "snapshot": {
            "vcpuCount": 2,
            "memSizeGb": 4,
            "baseImage": {"dockerfileContent": "FROM debian:trixie-slim"},
            "discriminator": "x",
            "skipCache": None,
            "idleTimeoutSeconds": None,
            "snapshot": None,
            "ports": [{"port": 443, "targetPort": 3000, "protocol": None}],
            "somethingNew": {"a": 1},
        },
    }
    layer = TypeAdapter(Spec).validate_json(json.dumps(sent)).layer()
    check(layer)
    assert layer.packages == ("git",)
    assert layer.files[1] == File("/b", b"\0\1", executable=True)
    (service_,) = layer.services
    assert (service_.mode, service_.delete_after_success, service_.enable) == ("oneshot", True, None)
    assert layer.patches[0].restart == Restart("always")
    assert layer.repositories == (Clone("https://example.com/r", "/r"),)
    assert layer.idle_timeout is UNCHANGED
    assert layer.snapshot is not None
    assert (layer.snapshot.vcpus, layer.snapshot.memory_gb, layer.snapshot.skip_cache) == (2, 4, False)
    assert layer.snapshot.idle_timeout is None
    assert layer.snapshot.ports == (Port(443, 3000),)


def test_null_equals_missing_except_for_the_idle_timeout() -> None:
    nulls = dict.fromkeys(LayerFields.model_json_schema()["properties"])
    layer = LayerModel.model_validate(nulls).layer()
    assert replace(layer, idle_timeout=UNCHANGED) == Layer() == LayerModel.model_validate({}).layer()
    assert layer.idle_timeout is None


def test_unknown_keys_are_reported_with_their_path_and_the_nearest_key() -> None:
    sent = {
        "naem": "x",
        "spec": {
            "aptDep": ["git"],
            "packages": ["git"],
            "additionalFiles": {"/a": {"contents": "x"}},
            "systemd": {
                "services": [{"name": "web", "bash": "ls", "restartPolicy": {"policy": "no", "x": 1}}]
            },
            "users": [{"name": "a"}, {"name": "b", "Shel": "/bin/sh"}],
            "snapshot": {"mem_size": 4, "git": {"config": {"usr": {}}}},
        },
        "persistence": {"type": "sticky", "priorty": 3},
    }
    assert unknown_keys(CreateVm.model_validate(sent)) == [
        "unknown key naem: did you mean name?",
        "unknown key spec.aptDep: did you mean aptDeps?",
        "unknown key spec.packages: did you mean aptDeps?",
        "unknown key spec.systemd.services[0].bash: did you mean exec?",
        "unknown key spec.systemd.services[0].restartPolicy.x",
        "unknown key spec.users[1].Shel: did you mean shell?",
        'unknown key spec.additionalFiles["/a"].contents: did you mean content?',
        "unknown key spec.snapshot.mem_size: did you mean memSizeGb?",
        "unknown key spec.snapshot.git.config.usr: did you mean user?",
        "unknown key persistence.priorty: did you mean priority?",
    ]
    assert unknown_keys(CreateSnapshot.model_validate({"template": {"nam": 1}})) == [
        "unknown key template.nam: did you mean name?"
    ]
    known: dict[str, Any] = {
        "spec": {"snapshot": {"template": None}, "name": None},
        "dockerCredentials": None,
        "nics": [],
    }
    assert unknown_keys(CreateVm.model_validate(known)) == []
    hostile = json.loads('{"a\\u0007\\n": 1, "additionalFiles": {"/\\ud800": {"x": 1}}}')
    assert unknown_keys(CreateVm.model_validate(hostile)) == [
        "unknown key a\\x07\\n",
        'unknown key additionalFiles["/\\ud800"].x',
    ]
    many = CreateVm.model_validate({f"{'k' * 500}{number}": 1 for number in range(500)})
    assert len(unknown_keys(many)) == 20
    assert max(len(each) for each in unknown_keys(many)) < 200


def test_lone_surrogates_of_a_request_are_escaped_in_the_answer() -> None:
    """JSON can write a lone surrogate, and UTF-8 cannot."""
    sent = json.loads('{"additionalFiles": {"/a\\ud800": {"content": "*", "encoding": "base64"}}}')
    with pytest.raises(InvalidSpec) as raised:
        LayerModel.model_validate(sent).layer()
    answer = json.loads(bytes(from_product(raised.value).response().body))
    assert answer["message"] == "/a\\ud800: content is not valid base64"


@pytest.mark.parametrize(
    "sent, message",
    [
        ({"domains": [{"domain": "a.example.com"}]}, "domains: this version of Stead has no domains"),
        ({"nics": [{"vpc": "a"}]}, "nics: this version of Stead has no private networks"),
        ({"dockerCredentials": {"registry": "x"}}, "dockerCredentials: this server pulls no images"),
        ({"udpHolePunchPorts": [{"targetPort": 1}]}, "udpHolePunchPorts: this version of Stead has no UDP"),
        ({"spec": {"persistence": {"type": "sticky"}}}, "put persistence beside spec"),
    ],
)
def test_unsupported_keys_are_refused(sent: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        CreateVm.model_validate(sent).refuse_unsupported()


def test_docker_credentials_of_a_snapshot_are_refused() -> None:
    body = {"spec": {}, "dockerCredentials": {"registry": "x", "username": "a", "password": "b"}}
    with pytest.raises(InvalidRequest, match="pulls no images from registries"):
        CreateSnapshot.model_validate(body).layer()


@pytest.mark.parametrize("ports", [None, [], [{"port": 443, "targetPort": 3000, "protocol": None}]])
def test_ports_that_ask_for_the_default_are_accepted(ports: Any) -> None:
    check(LayerModel.model_validate({"ports": ports}).layer())


def test_a_port_mapping_is_refused_with_its_numbers() -> None:
    layer = LayerModel.model_validate({"snapshot": {"ports": [{"port": 8081, "targetPort": 5000}]}}).layer()
    with pytest.raises(InvalidSpec, match=r"ports: 8081 -> 5000/tcp: .* no public port mappings"):
        check(layer)


def test_the_persistence_of_a_template_is_the_retention_of_its_snapshot() -> None:
    sent = {
        "persistence": {"type": "sticky", "priority": 9},
        "template": {"aptDeps": ["git"], "persistence": {"type": "persistent"}},
    }
    layer = LayerModel.model_validate(sent).layer()
    assert layer.persistence == Sticky(9)
    assert layer.snapshot is not None and layer.snapshot.persistence == Persistent()
    with pytest.raises(InvalidRequest, match="persistent or sticky"):
        LayerModel.model_validate({"persistence": {"type": "ephemeral"}}).layer()


def test_template_is_an_alias_of_snapshot_in_a_layer() -> None:
    below = {"aptDeps": ["git"]}
    for sent in ({"template": below}, {"snapshot": None, "template": below}, {"snapshot": below}):
        layer = LayerModel.model_validate(sent).layer()
        assert layer.snapshot is not None and layer.snapshot.packages == ("git",)
    with pytest.raises(InvalidSpec) as raised:
        LayerModel.model_validate({"snapshot": below, "template": below}).layer()
    assert raised.value.rule == "conflicting_sources"


def test_numbers_of_javascript_clients_are_accepted() -> None:
    """JSON has one number type: 2.0 is 2, and the noise of floating-point arithmetic is no fraction."""
    noisy = {
        "vcpuCount": 2.0,
        "memSizeGb": 4.000000000000001,
        "rootfsSizeGb": 20.000000000000004,
        "idleTimeoutSeconds": 1100.0000000000002,
        "readySignalTimeoutSeconds": 30,
        "users": [{"name": "alice", "uid": 1000.0000000000001}],
        "systemd": {"services": [{"name": "a", "restartPolicy": {"policy": "no", "startLimitBurst": 3.0}}]},
    }
    layer = LayerModel.model_validate_json(json.dumps(noisy)).layer()
    assert (layer.vcpus, layer.memory_gb, layer.disk_gb, layer.idle_timeout) == (2, 4, 20, 1100)
    assert (layer.users[0].uid, layer.services[0].restart) == (1000, Restart("no", limit_burst=3))
    assert CreateVm.model_validate({"activityThresholdBytes": 0.2}).activity_threshold_bytes == 1
    assert LayerModel.model_validate({"idleTimeoutSeconds": 9.6}).idle_timeout_seconds == 10
    for gigabytes in (0.7, 1.7e308):
        assert LayerModel.model_validate({"memSizeGb": gigabytes}).mem_size_gb == gigabytes
    with pytest.raises(ValidationError, match=r"vcpuCount\n.*must be a whole number, not 2\.5"):
        LayerModel.model_validate({"vcpuCount": 2.5})
    with pytest.raises(ValidationError):
        LayerModel.model_validate({"vcpuCount": float("nan")})


@pytest.mark.parametrize(
    "sent, problem",
    [
        (
            {"gitRepos": [{"repo": "a", "path": "b"}], "git": {"repos": [{"repo": "a", "path": "b"}]}},
            "invalid_repository",
        ),
        ({"additionalFiles": {"/a": {"content": "*", "encoding": "base64"}}}, "invalid_file"),
        ({"additionalFiles": {"/a": {"content": "", "encoding": "latin1"}}}, "invalid_file"),
        ({"additionalFiles": {"/a": {"content": "\ud800"}}}, "invalid_file"),
    ],
)
def test_contradictory_or_malformed_fields_are_refused(sent: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        LayerModel.model_validate(sent).layer()
    assert raised.value.rule == problem


def test_wire_names_of_builds_and_phases() -> None:
    info = BuildInfo("bld-1", "me", None, "failed", None, "files: /a is a folder", ("files",), 1.5, 2.0, 2.0)
    assert BuildRecord.of(info).model_dump(mode="json", by_alias=True) == {
        "buildId": "bld-1",
        "accountId": "me",
        "requestId": None,
        "state": "failed",
        "templateHash": None,
        "failureReason": "files: /a is a folder",
        "plannedPhases": ["files"],
        "currentPhase": None,
        "startedAt": "1970-01-01T00:00:01.500000Z",
        "finishedAt": "1970-01-01T00:00:02.000000Z",
        "updatedAt": "1970-01-01T00:00:02.000000Z",
    }
    phase = PhaseRecord.of(PhaseInfo("bph-1", "bld-1", "files", "sc-1", 1.5, 2.0, "failed"))
    assert phase.model_dump(mode="json", by_alias=True) == {
        "phaseId": "bph-1",
        "buildId": "bld-1",
        "name": "files",
        "state": "failed",
        "snapshotId": "sc-1",
        "startedAt": "1970-01-01T00:00:01.500000Z",
        "finishedAt": "1970-01-01T00:00:02.000000Z",
    }


def test_nesting_depth_is_limited() -> None:
    nest: dict[str, Any] = {}
    for _ in range(500):
        nest = {"snapshot": nest}
    with pytest.raises(ValidationError, match="too many nested layers"):
        TypeAdapter(Spec).validate_python(nest)
