"""Specs of VMs: what is refused and why."""

from typing import Any, get_args

import pytest

from stead.api.errors import from_product
from stead.builds.errors import InvalidSpec, Rule
from stead.builds.spec import Clone, File, GitUser, Group, Layer, Port, Restart, Service, ServicePatch, User
from stead.builds.validation import check
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
