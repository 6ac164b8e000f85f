"""Specs as the server gets them."""

import base64
from typing import Any

import pytest

from stead.sdk import (
    FileContent,
    Git,
    Group,
    Persistence,
    RepoRef,
    RestartPolicy,
    Service,
    Size,
    User,
    VmSpec,
)
from stead.sdk.creation import snapshot_body, spec_body, vm_body
from stead.sdk.requests import UNSET


def body(**given: Any) -> dict[str, Any]:
    """The body of a create with these arguments; all others are left out."""
    wanted: dict[str, Any] = dict.fromkeys(vm_body.__annotations__.keys() - {"return"})
    return vm_body(**{**wanted, "idle_timeout_seconds": UNSET, "size": Size(), **given})


def test_an_empty_spec_says_nothing() -> None:
    assert VmSpec().to_wire() == {}
    assert body() == {}


def test_a_spec_is_never_changed() -> None:
    base = VmSpec().apt("git").file("/a", "1").run("true")
    before = base.to_wire()
    one, two = base.apt("make").file("/b", "2"), base.run("false").user("dev").snapshot()
    assert base.to_wire() == before
    assert one.to_wire()["aptDeps"] == ["git", "make"]
    assert "users" not in one.to_wire() and two.to_wire()["snapshot"]["users"] == [{"name": "dev"}]


def test_commands_run_one_after_the_other() -> None:
    wire = VmSpec().run("make", "make install").wait_for("curl -f localhost", interval=0.5).to_wire()
    first, second, wait = wire["systemd"]["services"]
    assert first == {
        "name": "stead-run-command-1",
        "mode": "oneshot",
        "exec": ["/bin/bash /opt/stead/scripts/stead-run-command-1.sh"],
        "env": {"HOME": "/root"},
        "workdir": "/root",
        "deleteAfterSuccess": True,
    }
    assert second["after"] == second["requires"] == ["stead-run-command-1.service"]
    assert wait["name"] == "stead-wait-for-1" and wait["timeoutSec"] == 0
    assert wait["after"] == wait["requires"] == ["stead-run-command-2.service"]
    files = wire["additionalFiles"]
    script = files["/opt/stead/scripts/stead-run-command-2.sh"]
    assert script == {"content": "#!/bin/bash\nset -eo pipefail\nmake install", "encoding": "utf-8"}
    assert "sleep 0.5" in files["/opt/stead/scripts/stead-wait-for-1.sh"]["content"]


def test_a_layer_closes_what_stands_before() -> None:
    spec = VmSpec().apt("git").run("one").snapshot().run("two").snapshot().service("app", command="/srv/app")
    wire = spec.to_wire()
    assert set(wire) == {"systemd", "snapshot"}
    (app,) = wire["systemd"]["services"]
    assert app == {"name": "app", "mode": "service", "exec": ["/srv/app"]}
    (two,) = wire["snapshot"]["systemd"]["services"]
    # Numbers go on across layers, whose services share one machine; what ran in a layer below is over.
    assert two["name"] == "stead-run-command-2" and "after" not in two
    assert wire["snapshot"]["snapshot"]["aptDeps"] == ["git"]
    assert "snapshot" not in wire["snapshot"]["snapshot"]


def test_size_and_source_belong_to_the_innermost_layer() -> None:
    spec = VmSpec().apt("git").snapshot().run("two").size(vcpu_count=4).from_snapshot("sc-1").workdir("/srv")
    wire = spec.to_wire()
    assert wire["workdir"] == "/srv" and "vcpuCount" not in wire
    assert wire["snapshot"] == {"aptDeps": ["git"], "vcpuCount": 4, "snapshotId": "sc-1"}
    raised = body(spec=spec, size=Size(cpu=8, memory=16), name="big")["spec"]
    assert raised["name"] == "big"
    assert raised["snapshot"]["vcpuCount"] == 8 and raised["snapshot"]["memSizeGb"] == 16
    assert spec.to_wire() == wire


def test_services_users_groups_repositories() -> None:
    spec = (
        VmSpec()
        .group("ops", gid=2000)
        .user("dev", uid=1500, groups=["ops"], shell="/bin/zsh")
        .repo("https://example.com/app.git", "/srv/app", rev="main")
        .git_user("Dev", "dev@example.com")
        .service(
            "web",
            bash="#!/usr/bin/env python3\nprint(1)",
            user="dev",
            after=["network-online.target", "db"],
            wanted_by=["multi-user.target"],
            restart_policy=RestartPolicy("always", restart_sec=1),
            ready_signal=True,
        )
    )
    wire = spec.to_wire()
    assert wire["groups"] == [{"name": "ops", "gid": 2000}]
    assert wire["users"] == [{"name": "dev", "uid": 1500, "groups": ["ops"], "shell": "/bin/zsh"}]
    assert wire["git"] == {
        "config": {"user": {"name": "Dev", "email": "dev@example.com"}},
        "repos": [{"repo": "https://example.com/app.git", "path": "/srv/app", "rev": "main"}],
    }
    (web,) = wire["systemd"]["services"]
    assert web["after"] == ["network-online.target", "db.service"]
    assert web["restartPolicy"] == {"policy": "always", "restartSec": 1}
    assert "bash" not in web and "command" not in web
    assert wire["additionalFiles"]["/opt/stead/scripts/web.sh"]["content"].startswith(
        "#!/usr/bin/env python3"
    )


def test_files_of_all_kinds() -> None:
    wire = (
        VmSpec().file("/run.sh", "#!/bin/sh", executable=True).files({"/raw": b"\xff", "/t": "ü"}).to_wire()
    )
    assert wire["additionalFiles"] == {
        "/run.sh": {"content": "#!/bin/sh", "encoding": "utf-8", "executable": True},
        "/raw": {"content": base64.b64encode(b"\xff").decode(), "encoding": "base64"},
        "/t": {"content": "ü", "encoding": "utf-8"},
    }


def test_a_service_is_a_command_or_a_script() -> None:
    with pytest.raises(ValueError, match="either"):
        VmSpec().service("x")
    with pytest.raises(ValueError, match="either"):
        VmSpec().service("x", command="a", bash="b")


def test_a_machine_of_its_own() -> None:
    made = body(
        name="one",
        snapshot_id="sc-1",
        persistence=Persistence("sticky", priority=3),
        users=["dev", User("ops", system=True)],
        groups=[Group("staff")],
        additional_files={"/etc/motd": "hi", "/bin/x": FileContent(b"x", executable=True)},
        git=Git(repos=(RepoRef(repo="r", path="/r"),)),
        systemd=[Service(name="app", bash="serve")],
        apt_deps=("git",),
        domains={"app.example.com": 3000},
        recreate=True,
    )
    assert made["users"] == [{"name": "dev"}, {"name": "ops", "system": True}]
    assert made["snapshotId"] == "sc-1" and "template" not in made and "spec" not in made
    assert made["persistence"] == {"type": "sticky", "priority": 3}
    assert set(made["additionalFiles"]) == {"/etc/motd", "/bin/x", "/opt/stead/scripts/app.sh"}
    assert made["systemd"]["services"][0]["exec"] == ["/bin/bash /opt/stead/scripts/app.sh"]
    assert made["domains"] == [{"domain": "app.example.com", "vmPort": 3000}]
    assert made["git"] == {"config": {}, "repos": [{"repo": "r", "path": "/r"}]}
    assert made["recreate"] is True and made["aptDeps"] == ["git"]


def test_a_size_without_a_spec_is_a_template() -> None:
    assert body(size=Size(cpu=8), snapshot_id="sc-1") == {"template": {"vcpuCount": 8, "snapshotId": "sc-1"}}
    assert body(domains=["a.example.com"]) == {"domains": [{"domain": "a.example.com"}]}
    with pytest.raises(ValueError, match="either"):
        body(spec=VmSpec(), template={})


def test_a_snapshot_of_a_spec() -> None:
    spec = VmSpec().apt("git")
    assert snapshot_body("tools", spec, None, "sticky") == {
        "name": "tools",
        "spec": {"aptDeps": ["git"]},
        "persistence": {"type": "sticky"},
    }
    raw = {"aptDeps": ["git"], "snapshot": {"baseImage": {"dockerfileContent": "FROM x"}}}
    assert spec_body(raw, {"vcpuCount": 2})["snapshot"]["vcpuCount"] == 2
    assert "vcpuCount" not in raw["snapshot"]
