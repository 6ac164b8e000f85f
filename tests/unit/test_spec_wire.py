"""Specs, builds and phases on the wire."""

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from stead.api.errors import from_product
from stead.api.wire.builds import BuildRecord, PhaseRecord
from stead.api.wire.creation import CreateSnapshot, CreateVm
from stead.api.wire.layers import LayerFields, LayerModel, Spec
from stead.api.wire.unknown import unknown_keys
from stead.builds.errors import InvalidSpec
from stead.builds.records import BuildInfo, PhaseInfo
from stead.builds.spec import Clone, File, Layer, Port, Restart
from stead.builds.validation import check
from stead.errors import InvalidRequest
from stead.machines import Persistent, Sticky
from stead.machines.unchanged import UNCHANGED


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
        ({"dockerCredentials": {"registry": "x"}}, "dockerCredentials: this server pulls no images"),
        ({"udpHolePunchPorts": [{"targetPort": 1}]}, "udpHolePunchPorts: this version of Stead has no UDP"),
        ({"spec": {"persistence": {"type": "sticky"}}}, "put persistence beside spec"),
    ],
)
def test_unsupported_keys_are_refused(sent: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        CreateVm.model_validate(sent).order("me", "ri-1")


def test_docker_credentials_of_a_snapshot_are_refused() -> None:
    body = {"spec": {}, "dockerCredentials": {"registry": "x", "username": "a", "password": "b"}}
    with pytest.raises(InvalidRequest, match="pulls no images from registries"):
        CreateSnapshot.model_validate(body).order("me", "ri-1")


@pytest.mark.parametrize("ports", [None, [], [{"port": 443, "targetPort": 3000, "protocol": None}]])
def test_ports_that_ask_for_the_default_are_accepted(ports: Any) -> None:
    check(LayerModel.model_validate({"ports": ports}).layer())


def test_a_port_mapping_is_refused_with_its_numbers() -> None:
    layer = LayerModel.model_validate({"snapshot": {"ports": [{"port": 8081, "targetPort": 5000}]}}).layer()
    with pytest.raises(InvalidSpec, match=r"ports: 8081 -> 5000/tcp: only 443/tcp can be mapped"):
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
