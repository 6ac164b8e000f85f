"""The JSON of specs and create bodies."""

import base64
from typing import Any, cast

import pytest

from stead.api.wire.creation import CreateSnapshot, CreateVm
from stead.api.wire.unknown import unknown_keys
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
from stead.sdk.vm_options import VmOptions


def body(**given: Any) -> dict[str, Any]:
    """The body of a create with these arguments."""
    return vm_body(cast("VmOptions", given))


def test_empty_spec_is_an_empty_object() -> None:
    assert VmSpec().to_wire() == {}
    assert body() == {}


def test_spec_is_immutable() -> None:
    base = VmSpec().apt("git").file("/a", "1").run("true")
    before = base.to_wire()
    one, two = base.apt("make").file("/b", "2"), base.run("false").user("dev").snapshot()
    assert base.to_wire() == before
    assert one.to_wire()["aptDeps"] == ["git", "make"]
    assert "users" not in one.to_wire() and two.to_wire()["snapshot"]["users"] == [{"name": "dev"}]


def test_run_commands_depend_on_each_other() -> None:
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


def test_snapshot_ends_a_layer() -> None:
    app = Service(name="app", command="/srv/app")
    spec = VmSpec().apt("git").run("one").snapshot().run("two").snapshot().service(app)
    wire = spec.to_wire()
    assert set(wire) == {"systemd", "snapshot"}
    (sent,) = wire["systemd"]["services"]
    assert sent == {"name": "app", "mode": "service", "exec": ["/srv/app"]}
    (two,) = wire["snapshot"]["systemd"]["services"]
    # Names are unique across layers, which share one VM; commands of lower layers have ended.
    assert two["name"] == "stead-run-command-2" and "after" not in two
    assert wire["snapshot"]["snapshot"]["aptDeps"] == ["git"]
    assert "snapshot" not in wire["snapshot"]["snapshot"]


def test_size_and_source_are_set_on_the_innermost_layer() -> None:
    spec = VmSpec().apt("git").snapshot().run("two").size(cpu=4).from_snapshot("sc-1").workdir("/srv")
    wire = spec.to_wire()
    assert wire["workdir"] == "/srv" and "vcpuCount" not in wire
    assert wire["snapshot"] == {"aptDeps": ["git"], "vcpuCount": 4, "snapshotId": "sc-1"}
    raised = body(spec=spec, size=Size(cpu=8, memory=16), name="big")["spec"]
    assert raised["name"] == "big"
    assert raised["snapshot"]["vcpuCount"] == 8 and raised["snapshot"]["memSizeGb"] == 16
    assert spec.to_wire() == wire


def test_spec_with_services_users_groups_and_repositories() -> None:
    spec = (
        VmSpec()
        .group("ops", gid=2000)
        .user("dev", uid=1500, groups=["ops"], shell="/bin/zsh")
        .repo("https://example.com/app.git", "/srv/app", rev="main")
        .git_user("Dev", "dev@example.com")
        .service(
            Service(
                name="web",
                bash="#!/usr/bin/env python3\nprint(1)",
                user="dev",
                after=["network-online.target", "db"],
                wanted_by=["multi-user.target"],
                restart_policy=RestartPolicy("always", restart_sec=1),
                ready_signal=True,
            )
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


def test_file_content_is_text_or_base64() -> None:
    wire = (
        VmSpec().file("/run.sh", "#!/bin/sh", executable=True).files({"/raw": b"\xff", "/t": "ü"}).to_wire()
    )
    assert wire["additionalFiles"] == {
        "/run.sh": {"content": "#!/bin/sh", "encoding": "utf-8", "executable": True},
        "/raw": {"content": base64.b64encode(b"\xff").decode(), "encoding": "base64"},
        "/t": {"content": "ü", "encoding": "utf-8"},
    }


def test_service_needs_either_a_command_or_a_script() -> None:
    with pytest.raises(ValueError, match="either"):
        Service(name="x")
    with pytest.raises(ValueError, match="either"):
        Service(name="x", command="a", bash="b")


def test_create_body_without_a_spec() -> None:
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


def test_size_without_a_spec_is_sent_as_a_template() -> None:
    assert body(size=Size(cpu=8), snapshot_id="sc-1") == {"template": {"vcpuCount": 8, "snapshotId": "sc-1"}}
    assert body(domains=["a.example.com"]) == {"domains": [{"domain": "a.example.com"}]}
    with pytest.raises(ValueError, match="either"):
        body(spec=VmSpec(), template={})


def test_snapshot_body() -> None:
    spec = VmSpec().apt("git")
    assert snapshot_body(spec, {"name": "tools", "persistence": "sticky"}) == {
        "name": "tools",
        "spec": {"aptDeps": ["git"]},
        "persistence": {"type": "sticky"},
    }
    raw = {"aptDeps": ["git"], "snapshot": {"baseImage": {"dockerfileContent": "FROM x"}}}
    assert spec_body(raw, {"vcpuCount": 2})["snapshot"]["vcpuCount"] == 2
    assert "vcpuCount" not in raw["snapshot"]


def test_the_server_knows_every_key_that_the_sdk_sends() -> None:
    """The SDK asks the server to refuse unknown keys, so that it must not send any itself."""
    parts: dict[str, Any] = {
        "users": [User("ops", uid=2000, groups=("ops",), home="/o", shell="/bin/sh", gecos="o", system=True)],
        "groups": [Group("ops", gid=2000, system=True)],
        "additional_files": {"/a": FileContent("a", executable=True)},
        "git": Git(
            repos=(RepoRef(repo="r", path="/r", rev="main"),),
            user_name="n",
            user_email="e",
            signing_key="k",
        ),
        "systemd": [full_service("one")],
        "apt_deps": ["git"],
        "workdir": "/",
        "wait_for_ready_signal": True,
        "ready_signal_timeout_seconds": 5,
    }
    layered = (
        VmSpec()
        .base_image("FROM debian")
        .size("2x4Gx20G")
        .discriminator("d")
        .skip_cache()
        .snapshot()
        .apt("git")
        .run("true", user="dev")
        .wait_for("true", timeout=5)
        .file("/f", b"x", executable=True)
        .user("dev", uid=1500, groups=["ops"], home="/h", shell="/bin/sh", gecos="g", system=False)
        .group("ops", gid=2000, system=True)
        .repo("r", "/r", rev="main")
        .git_user("n", "e", signing_key="k")
        .workdir("/w")
        .idle_timeout(60)
        .ready_signal(timeout=5)
    )
    bodies = [
        body(
            name="n",
            spec=layered,
            size=Size(2, 4, 20),
            persistence=Persistence("ephemeral", delete_event="OnStop"),
            idle_timeout_seconds=None,
            activity_threshold_bytes=1,
            recreate=True,
            domains={"a.example.com": 80},
        ),
        body(snapshot_id="sc-1", size=Size(2), **parts),
        body(snapshot_id="sc-1", persistence=Persistence("sticky", priority=3)),
    ]
    for sent in bodies:
        assert unknown_keys(CreateVm.model_validate(sent)) == []
    snapshot = snapshot_body(layered, {"name": "n", "persistence": Persistence("sticky", priority=3)})
    assert unknown_keys(CreateSnapshot.model_validate(snapshot)) == []
    assert unknown_keys(CreateSnapshot.model_validate({"spec": {"aptdeps": []}}))


def full_service(name: str) -> Service:
    return Service(
        name=name,
        command="true",
        mode="oneshot",
        env={"A": "b"},
        user="dev",
        group="ops",
        workdir="/",
        after=["x"],
        requires=["x"],
        on_failure=["y"],
        wanted_by=["multi-user.target"],
        enable=True,
        timeout_sec=1,
        delete_after_success=True,
        remain_after_exit=True,
        ready_signal=True,
        watchdog_sec=1,
        restart_policy=RestartPolicy(
            "always", restart_sec=1, start_limit_burst=2, start_limit_interval_sec=3
        ),
    )
