"""VPCs over HTTP, by the SDK and by the command line. VMs are in memory."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from stead import AsyncStead
from stead.cli.main import app
from stead.networks import tunnels
from stead.sdk import AmbiguousName, Conflict, InvalidRequest, Nic, NotFound, Stead, Vpc
from support.domain_calls import Caller, calling
from support.fake_api import FakeApi, fake_api
from support.run_cli import Shell
from support.sdk_clients import done
from support.waiting import until

ID = re.compile(r"vpc-[a-z0-9]{20}")


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        yield api


@pytest_asyncio.fixture(autouse=True)
async def nothing_left(api: FakeApi) -> AsyncIterator[None]:
    yield
    networks = api.installation.networks
    for account in await api.installation.accounts.list():
        for vpc in await networks.list(account.id):
            await networks.delete(account.id, vpc.id)


@pytest_asyncio.fixture
async def ours(api: FakeApi) -> AsyncIterator[Caller]:
    async with calling(api) as caller:
        yield caller


def key_of(api: FakeApi) -> str:
    return api.callers["owner"]["Authorization"].removeprefix("Bearer ")


async def test_vpc_is_created_listed_and_deleted_over_http(api: FakeApi, ours: Caller) -> None:
    made = await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24", "name": "office"})
    assert ID.fullmatch(made["vpcId"])
    assert made == {
        "vpcId": made["vpcId"],
        "name": "office",
        "cidr": "192.168.10.0/24",
        "accountId": api.account,
        "createdAt": made["createdAt"],
        "created": True,
    }
    del made["created"]
    assert await ours.succeed("GET", "/v1/vpcs") == {"vpcs": [made]}
    assert await ours.succeed("GET", f"/v1/vpcs/{made['vpcId']}") == {**made, "vms": []}
    assert await ours.succeed("DELETE", f"/v1/vpcs/{made['vpcId']}") == {}
    body = await ours.fail(404, "NOT_FOUND", "GET", f"/v1/vpcs/{made['vpcId']}")
    assert body["vpcId"] == made["vpcId"]


@pytest.mark.parametrize("body", [None, {}, {"cidr": "10.0.0.0/16", "name": None}])
async def test_default_range(ours: Caller, body: Any) -> None:
    assert (await ours.succeed("POST", "/v1/vpcs", body))["cidr"] == "10.0.0.0/16"


@pytest.mark.parametrize("body", [{"cidr": "8.8.8.0/24"}, {"cidr": None}, {"cidr": 5}, {"name": ""}, []])
async def test_invalid_requests_are_refused(ours: Caller, body: Any) -> None:
    await ours.fail(400, "BAD_REQUEST", "POST", "/v1/vpcs", body)
    assert await ours.succeed("GET", "/v1/vpcs") == {"vpcs": []}


async def test_another_account_does_not_see_a_vpc(api: FakeApi, ours: Caller) -> None:
    made = await ours.succeed("POST", "/v1/vpcs")
    async with calling(api, "stranger") as stranger:
        assert await stranger.succeed("GET", "/v1/vpcs") == {"vpcs": []}
        await stranger.fail(404, "NOT_FOUND", "GET", f"/v1/vpcs/{made['vpcId']}")
        await stranger.fail(404, "NOT_FOUND", "DELETE", f"/v1/vpcs/{made['vpcId']}")
    await ours.succeed("GET", f"/v1/vpcs/{made['vpcId']}")


@pytest.mark.parametrize("kind", [Stead, AsyncStead])
async def test_sdk_creates_finds_and_deletes(api: FakeApi, kind: type[Any]) -> None:
    if kind is Stead:

        def use() -> None:
            with Stead(key_of(api), base_url=api.url, max_retries=0) as stead:
                asyncio.run(_use_sdk(stead))

        await asyncio.to_thread(use)
    else:
        async with AsyncStead(key_of(api), base_url=api.url) as stead:
            await _use_sdk(stead)


async def _use_sdk(stead: Any) -> None:
    made: Vpc = await done(stead.vpcs.create("192.168.10.0/24", name="office"))
    assert ID.fullmatch(made.id) and (made.cidr, made.name) == ("192.168.10.0/24", "office")
    assert (await done(stead.vpcs.create())).cidr == "10.0.0.0/16"
    assert [each.name for each in await done(stead.vpcs.list())] == ["office", None]
    for reference in (made.id, made.id[:10], "office"):
        assert (await done(stead.vpcs.get(reference))).id == made.id
    await done(stead.vpcs.create(name="office"))
    with pytest.raises(AmbiguousName):
        await done(stead.vpcs.get("office"))
    with pytest.raises(InvalidRequest, match="not private"):
        await done(stead.vpcs.create("1.2.3.0/24"))
    await done(stead.vpcs.delete(made.id))
    with pytest.raises(NotFound):
        await done(stead.vpcs.get(made.id))


async def test_command_line(api: FakeApi) -> None:
    environment = {"STEAD_API_URL": api.url, "STEAD_API_KEY": key_of(api)}

    async def stead(*arguments: str, status: int = 0) -> str:
        ended = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
        assert ended.exit_code == status, ended.stderr
        return ended.stdout if status == 0 else ended.stderr

    vpc = (await stead("vpc", "create", "192.168.10.0/24", "--name", "office")).strip()
    assert ID.fullmatch(vpc)
    assert json.loads(await stead("vpc", "create", "--json"))["cidr"] == "10.0.0.0/16"
    assert "192.168.10.0/24" in await stead("vpc", "list")
    assert len(json.loads(await stead("vpc", "list", "--json"))["vpcs"]) == 2
    assert vpc in await stead("vpc", "get", "office")
    assert json.loads(await stead("vpc", "get", "office", "--json"))["vms"] == []
    assert "not private" in await stead("vpc", "create", "8.8.8.0/24", status=1)
    assert await stead("vpc", "delete", "office") == f"deleted {vpc}\n"
    assert "no VPC 'office'" in await stead("vpc", "delete", "office", status=1)


async def test_wireguard_session_over_http(api: FakeApi, ours: Caller) -> None:
    vpc = (await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24"}))["vpcId"]
    path = f"/v1/vpcs/{vpc}/wireguard/ephemeral"
    made = await ours.succeed("POST", path, {})
    assert made["clientPrivateKey"] in made["clientConfig"]
    assert f"Endpoint = 127.0.0.1:{made['endpointPort']}\n" in made["clientConfig"]
    assert "host of Stead only: see STEAD_WIREGUARD_HOST.\nEndpoint = " in made["clientConfig"]
    assert made["clientAllowedIps"] == [made["vpcCidr"]] == ["192.168.10.0/24"]
    assert (made["serverTunnelIp"], made["clientTunnelIp"]) == ("100.96.0.1", "100.96.0.2")
    assert datetime.fromisoformat(made["expiresAt"]) > datetime.now(UTC)
    (peer,) = api.world.tunnels[vpc].peers
    assert (peer.public_key, str(peer.address)) == (made["clientPublicKey"], "100.96.0.2")
    async with calling(api, "stranger") as stranger:
        await stranger.fail(404, "NOT_FOUND", "POST", path, {})
        await stranger.fail(404, "NOT_FOUND", "DELETE", path, {"sessionId": made["sessionId"]})
    await ours.fail(400, "BAD_REQUEST", "DELETE", path, {})
    assert await ours.succeed("DELETE", path, {"sessionId": made["sessionId"]}) == {}
    await ours.fail(404, "NOT_FOUND", "DELETE", path, {"sessionId": made["sessionId"]})
    assert api.world.tunnels[vpc].peers == ()


async def test_wireguard_session_by_the_sdk_and_the_command_line(api: FakeApi, tmp_path: Path) -> None:
    async with AsyncStead(key_of(api), base_url=api.url) as stead:
        vpc = await stead.vpcs.create("192.168.10.0/24", name="office")
        session = await stead.vpcs.connect("office")
        assert session.client_config.startswith("[Interface]\n") and session.vpc_id == vpc.id
        assert len(api.world.tunnels[vpc.id].peers) == 1
        await stead.vpcs.disconnect(session)
        assert api.world.tunnels[vpc.id].peers == ()
    environment = {"STEAD_API_URL": api.url, "STEAD_API_KEY": key_of(api)}
    file = tmp_path / "office.conf"
    arguments = ["vpc", "connect", "office", "--file", str(file)]
    ended = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
    assert ended.exit_code == 0 and str(file) in ended.stdout
    assert "works on the host of Stead only: set STEAD_WIREGUARD_HOST" in ended.stderr
    assert re.search(r"; the session [a-z0-9]{12} ends \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", ended.stdout)
    assert file.stat().st_mode & 0o777 == 0o600 and "PrivateKey" in file.read_text()
    assert len(api.world.tunnels[vpc.id].peers) == 1
    other = tmp_path / "other.conf"
    asked = ["vpc", "connect", "office", "--file", str(other), "--json"]
    ended = await asyncio.to_thread(CliRunner().invoke, app, asked, env=environment)
    said = json.loads(ended.stdout)
    assert {"file": said["file"], "vpc": said["vpc_id"]} == {"file": str(other), "vpc": vpc.id}
    assert (
        f"Address = {said['client_tunnel_ip']}/32" in other.read_text() and "PrivateKey" not in ended.stdout
    )
    arguments_to_end = ["vpc", "disconnect", "office", said["session_id"]]
    ended = await asyncio.to_thread(CliRunner().invoke, app, arguments_to_end, env=environment)
    assert ended.exit_code == 0 and len(api.world.tunnels[vpc.id].peers) == 1
    for path, status in ((tmp_path / "sixteen-letters-.conf", 2), (tmp_path / "absent" / "office.conf", 1)):
        arguments[-1] = str(path)
        ended = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environment)
        assert ended.exit_code == status and path.name[:15] in ended.stderr, ended.stderr
    assert len(api.world.tunnels[vpc.id].peers) == 1


async def test_wireguard_clients_are_listed_and_disconnected(api: FakeApi, ours: Caller) -> None:
    """Sessions and computers with keys of their own; private keys are not shown again."""
    vpc = (await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24", "name": "office"}))["vpcId"]
    path = f"/v1/vpcs/{vpc}/wireguard"
    assert await ours.succeed("GET", path) == {"clients": []}
    session = await ours.succeed("POST", f"{path}/ephemeral", {})
    vm = (await ours.create({"nics": [{"vpc": vpc, "mode": "routed", "ipv4": True}]}))["id"]
    key = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg="
    await ours.succeed("POST", f"{path}/peers", {"gatewayVmId": vm, "clientPublicKey": key})
    first, second = (await ours.succeed("GET", path))["clients"]
    assert datetime.fromisoformat(first.pop("createdAt")) <= datetime.fromisoformat(second.pop("createdAt"))
    assert first == {
        "vpcId": vpc,
        "sessionId": session["sessionId"],
        "gatewayVmId": None,
        "clientPublicKey": session["clientPublicKey"],
        "clientTunnelIp": "100.96.0.2",
        "expiresAt": session["expiresAt"],
    }
    assert second == {
        "vpcId": vpc,
        "sessionId": None,
        "gatewayVmId": vm,
        "clientPublicKey": key,
        "clientTunnelIp": "100.96.0.3",
        "expiresAt": None,
    }
    async with calling(api, "stranger") as stranger:
        await stranger.fail(404, "NOT_FOUND", "GET", path)

    shell = Shell(api.url, key_of(api))
    table = await shell.run("vpc", "clients", "office")
    assert session["sessionId"] in table and key in table and "never" in table
    shown = (await shell.ask("vpc", "clients", "office"))["clients"]
    assert [each["session_id"] for each in shown] == [session["sessionId"], None]
    refused = await shell.try_("vpc", "disconnect", "office", "nothing")
    assert refused.returncode == 1 and "no client 'nothing'" in refused.stderr
    assert len(api.world.tunnels[vpc].peers) == 2
    assert await shell.run("vpc", "disconnect", "office", key) == f"disconnected {key}\n"
    assert [peer.public_key for peer in api.world.tunnels[vpc].peers] == [session["clientPublicKey"]]
    told = await shell.ask("vpc", "disconnect", "office", session["sessionId"])
    assert told == {"client": session["sessionId"], "disconnected": True}
    assert api.world.tunnels[vpc].peers == ()
    await ours.succeed("DELETE", f"/v1/vms/{vm}")


# VMs in a VPC


async def test_a_vm_is_created_in_a_vpc_over_http(api: FakeApi, ours: Caller) -> None:
    vpc = (await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24"}))["vpcId"]
    nic = {"vpc": vpc, "mode": "routed", "ipv4": "192.168.10.10", "default": True}
    vm = (await ours.create({"nics": [nic]}))["id"]
    assert (await ours.succeed("GET", f"/v1/vms/{vm}"))["nics"] == [nic]
    assert (await ours.succeed("GET", f"/v1/vpcs/{vpc}"))["vms"] == [
        {"vmId": vm, "ipv4": "192.168.10.10", "names": [f"{vm}.internal"]}
    ]
    body = await ours.fail(409, "CONFLICT", "POST", "/v1/vms", {"nics": [nic]})
    assert (body["vpcId"], body["ipv4"]) == (vpc, "192.168.10.10")
    await ours.fail(400, "VPC_FORK_UNSUPPORTED", "POST", f"/v1/vms/{vm}/fork", {})
    body = await ours.fail(409, "CONFLICT", "DELETE", f"/v1/vpcs/{vpc}")
    assert body["vmIds"] == [vm]
    free = (await ours.create({"nics": [{**nic, "ipv4": True}]}))["id"]
    (fork,) = (await ours.succeed("POST", f"/v1/vms/{free}/fork", {}))["forks"]
    members = (await ours.succeed("GET", f"/v1/vpcs/{vpc}"))["vms"]
    assert {each["vmId"]: each["ipv4"] for each in members} == {
        vm: "192.168.10.10",
        free: "192.168.10.1",
        fork["id"]: "192.168.10.2",
    }
    for each in (vm, free, fork["id"]):
        await ours.succeed("DELETE", f"/v1/vms/{each}")


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"ipv4": "192.168.11.1"}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"ipv4": False}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"ipv4": 7}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"mode": "bridged"}, 400, "CREATE_VM_BAD_REQUEST"),
        ({"vpc": "vpc-" + "x" * 20}, 404, "NOT_FOUND"),
    ],
)
async def test_a_nic_that_cannot_be_is_refused(
    api: FakeApi, ours: Caller, change: dict[str, Any], status: int, code: str
) -> None:
    vpc = (await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24"}))["vpcId"]
    nic = {"vpc": vpc, "mode": "routed", "ipv4": True, **change}
    before = await api.installation.machines.list()
    await ours.fail(status, code, "POST", "/v1/vms", {"nics": [nic]})
    await ours.fail(400, "CREATE_VM_BAD_REQUEST", "POST", "/v1/vms", {"nics": [nic, nic]})
    assert await api.installation.machines.list() == before


async def test_a_vpc_of_another_account_is_not_found(api: FakeApi, ours: Caller) -> None:
    vpc = (await ours.succeed("POST", "/v1/vpcs"))["vpcId"]
    async with calling(api, "stranger") as stranger:
        nic = {"vpc": vpc, "mode": "routed", "ipv4": True}
        await stranger.fail(404, "NOT_FOUND", "POST", "/v1/vms", {"nics": [nic]})


async def test_a_vm_is_created_in_a_vpc_by_the_sdk_and_the_command_line(api: FakeApi) -> None:
    shell = Shell(api.url, key_of(api))
    async with AsyncStead(key_of(api), base_url=api.url) as stead:
        await stead.vpcs.create("192.168.10.0/24", name="office")
        vm = await stead.vms.create(nics=[Nic("office", "192.168.10.10")])
        assert [each.ipv4 for each in (await vm.info()).nics] == ["192.168.10.10"]
        with pytest.raises(Conflict):
            await stead.vms.create(nics=[Nic("office", "192.168.10.10")])
        made = await shell.ask("vm", "create", "--name", "My DB", "--vpc", "office:192.168.10.20")
        other = await shell.ask("vm", "create", "--vpc", "office")
        found = {each.vm_id: each.ipv4 for each in (await stead.vpcs.get("office")).vms}
        assert found == {vm.id: "192.168.10.10", made["id"]: "192.168.10.20", other["id"]: "192.168.10.1"}
        (named,) = [each for each in (await stead.vpcs.get("office")).vms if each.vm_id == made["id"]]
        assert named.names == ("my-db.internal", f"{made['id']}.internal")
        shown = await shell.ask("vpc", "get", "office")
        assert {each["vm_id"]: each["names"] for each in shown["vms"]}[made["id"]] == list(named.names)
        for each in found:
            await stead.vms.delete(each)


PEER = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg="


async def test_wireguard_peer_over_http(api: FakeApi, ours: Caller) -> None:
    vpc = (await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24"}))["vpcId"]
    vm = (await ours.succeed("POST", "/v1/vms", {"nics": [{"vpc": vpc}]}))["id"]
    path = f"/v1/vpcs/{vpc}/wireguard/peers"
    wanted = {"gatewayVmId": vm, "clientPublicKey": PEER}
    made = await ours.succeed("POST", path, wanted)
    assert made.items() >= {**wanted, "vpcId": vpc, "vpcCidr": "192.168.10.0/24"}.items()
    assert (made["serverTunnelIp"], made["clientTunnelIp"]) == ("100.96.0.1", "100.96.0.2")
    assert f"PublicKey = {made['serverPublicKey']}\n" in made["clientConfig"]
    assert f"Endpoint = {made['endpointHost']}:{made['endpointPort']}\n" in made["clientConfig"]
    assert await ours.succeed("POST", path, wanted) == made
    await ours.fail(400, "BAD_REQUEST", "POST", path, {})
    await ours.fail(400, "BAD_REQUEST", "POST", path, {**wanted, "gatewayVmId": api.vm})
    await ours.fail(400, "BAD_REQUEST", "POST", path, {**wanted, "clientPublicKey": "x"})
    async with calling(api, "stranger") as stranger:
        await stranger.fail(404, "NOT_FOUND", "POST", path, wanted)
        await stranger.fail(404, "NOT_FOUND", "DELETE", path, {"clientPublicKey": PEER})
    assert [peer.public_key for peer in api.world.tunnels[vpc].peers] == [PEER]
    async with AsyncStead(key_of(api), base_url=api.url) as stead:
        await stead.vpcs.delete_peer(vpc, PEER)
        assert api.world.tunnels[vpc].peers == ()
        assert (await stead.vpcs.set_peer(vpc, PEER, gateway=vm)).gateway_vm_id == vm
    await ours.succeed("DELETE", f"/v1/vms/{vm}")
    await until(lambda: api.world.tunnels[vpc].peers == (), 60)
    await ours.fail(404, "NOT_FOUND", "DELETE", path, {"clientPublicKey": PEER})


WG_QUICK = """#!/bin/sh
echo "$1 $(basename "$2") $(stat -c %a "$2")" >> "$0.log"
if [ "$1" = up ] && [ -e "$0.broken" ]; then echo "no tunnel" >&2; exit 1; fi
"""


async def test_connect_brings_the_tunnel_up_and_down(api: FakeApi, ours: Caller, tmp_path: Path) -> None:
    """With a program in the place of wg-quick, which would change the network of this host."""
    vpc = (await ours.succeed("POST", "/v1/vpcs", {"name": "office"}))["vpcId"]
    program = tmp_path / "wg-quick"
    program.write_text(WG_QUICK)
    program.chmod(0o755)
    log = tmp_path / "wg-quick.log"
    environment = {
        **os.environ,
        "STEAD_API_URL": api.url,
        "STEAD_API_KEY": key_of(api),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stead.cli.main", "vpc", "connect", "office"),
            env=environment,
            stderr=asyncio.subprocess.PIPE,
        )

    running = await start()
    assert running.stderr is not None
    async with asyncio.timeout(60):
        assert b"STEAD_WIREGUARD_HOST" in await running.stderr.readline()
        said = await running.stderr.readline()
        assert re.match(rb"connected: 10\.0\.0\.0/16 leads into \S+ until \d{4}-\d\d-\d\d", said)
    assert len(api.world.tunnels[vpc].peers) == 1
    running.send_signal(signal.SIGTERM)
    assert await running.wait() == 128 + signal.SIGTERM
    assert api.world.tunnels[vpc].peers == ()
    up, down = log.read_text().splitlines()
    assert re.fullmatch(r"up wg-[a-z0-9]{12}\.conf 600", up) and down == up.replace("up", "down", 1)

    (tmp_path / "wg-quick.broken").touch()
    failed = await start()
    _, said = await failed.communicate()
    assert failed.returncode == 1 and b"wg-quick up failed: no tunnel" in said
    assert api.world.tunnels[vpc].peers == ()


async def test_a_revoked_key_ends_the_wireguard_clients_that_it_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnels, "_CHECK", 0.1)
    async with fake_api(tmp_path) as api, calling(api) as ours:
        vpc = (await ours.succeed("POST", "/v1/vpcs", {"cidr": "192.168.10.0/24"}))["vpcId"]
        vm = (await ours.succeed("POST", "/v1/vms", {"nics": [{"vpc": vpc, "mode": "routed"}]}))["id"]
        await ours.succeed("POST", f"/v1/vpcs/{vpc}/wireguard/ephemeral")
        wanted = {"gatewayVmId": vm, "clientPublicKey": PEER}
        await ours.succeed("POST", f"/v1/vpcs/{vpc}/wireguard/peers", wanted)
        await asyncio.sleep(0.5)
        assert len(api.world.tunnels[vpc].peers) == 2
        await api.installation.accounts.revoke_key(api.keys["owner"])
        await until(lambda: not api.world.tunnels[vpc].peers, 60)
