"""WireGuard sessions of VPCs, on a host in memory: who may make them, what the host is told, their end."""

import asyncio
import base64
import configparser
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from stead.errors import HostError, InvalidRequest, TooBusy
from stead.host.interface import WireGuardTunnel
from stead.identity.accounts import Accounts
from stead.limits import LimitExceeded, LimitName
from stead.machines.nics import NicRequest
from stead.machines.records import Properties
from stead.networks import tunnels as module
from stead.networks.errors import PeerNotFound, SessionNotFound, VpcNotFound
from stead.networks.tunnels import Tunnels, _new_keys, _public
from support.account_vpc import networks_of
from support.engine import installation
from support.fake_server import FakeServer
from support.waiting import until


@dataclass
class VpcTunnels:
    server: FakeServer
    account: str
    vpc: str
    tunnels: Tunnels

    @property
    def on_host(self) -> WireGuardTunnel:
        return self.server.world.tunnels[self.vpc]

    async def expired(self) -> None:
        """A session whose time is over, which is not noticed yet."""
        made = await self.tunnels.create(self.account, self.vpc)
        await self.tunnels._sessions.update(made.id, expires_at=time.time_ns() - 1)


@pytest_asyncio.fixture
async def vpc_tunnels() -> AsyncIterator[VpcTunnels]:
    async with installation() as server:
        database = server.database
        account = (await Accounts(database).create("ours")).id
        vpc = (await networks_of(server).create(account, "192.168.10.0/24")).id
        settings = server.settings.replace(wireguard_host="vpn.example.com")
        yield VpcTunnels(server, account, vpc, Tunnels(database, settings, server.host.vpcs))


async def test_a_session_has_a_complete_configuration(vpc_tunnels: VpcTunnels) -> None:
    made = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    config = configparser.ConfigParser()
    config.read_string(made.config)
    assert dict(config["Interface"]) == {
        "address": "100.96.0.2/32",
        "privatekey": made.private_key,
        "mtu": "1420",
    }
    assert dict(config["Peer"]) == {
        "publickey": made.server_key,
        "allowedips": "192.168.10.0/24",
        "endpoint": "vpn.example.com:51820",
        "persistentkeepalive": "25",
    }
    assert len(base64.b64decode(made.private_key)) == 32 and _public(made.private_key) == made.public_key
    assert made.expires_at == pytest.approx(time.time() + 24 * 3600, abs=60)
    assert vpc_tunnels.on_host.port == 51820 and _public(vpc_tunnels.on_host.private_key) == made.server_key
    assert [(each.public_key, str(each.address)) for each in vpc_tunnels.on_host.peers] == [
        (made.public_key, "100.96.0.2")
    ]
    # What is kept does not contain the private key of the client.
    assert made.private_key not in repr(made)
    rows = await vpc_tunnels.tunnels._sessions.list(vpc_tunnels.vpc)
    assert made.private_key not in repr(rows)


async def test_sessions_have_keys_and_addresses_of_their_own(vpc_tunnels: VpcTunnels) -> None:
    first, second = [await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc) for _ in range(2)]
    assert first.server_key == second.server_key and first.public_key != second.public_key
    assert [str(each.address) for each in (first, second)] == ["100.96.0.2", "100.96.0.3"]
    await vpc_tunnels.tunnels.delete(vpc_tunnels.account, vpc_tunnels.vpc, first.id)
    assert [each.public_key for each in vpc_tunnels.on_host.peers] == [second.public_key]
    with pytest.raises(SessionNotFound):
        await vpc_tunnels.tunnels.delete(vpc_tunnels.account, vpc_tunnels.vpc, first.id)
    third = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    assert str(third.address) == "100.96.0.2"


async def test_another_account_has_no_session(vpc_tunnels: VpcTunnels) -> None:
    made = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    with pytest.raises(VpcNotFound):
        await vpc_tunnels.tunnels.create("stranger", vpc_tunnels.vpc)
    with pytest.raises(VpcNotFound):
        await vpc_tunnels.tunnels.delete("stranger", vpc_tunnels.vpc, made.id)
    assert len(vpc_tunnels.on_host.peers) == 1


async def test_a_failure_of_the_host_leaves_no_session(vpc_tunnels: VpcTunnels) -> None:
    vpc_tunnels.server.host.fail("vpcs.set_tunnel", HostError("no"))
    with pytest.raises(HostError):
        await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    assert await vpc_tunnels.tunnels._sessions.list(vpc_tunnels.vpc) == []


async def test_sessions_are_set_up_again_after_a_restart_and_end(
    vpc_tunnels: VpcTunnels, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    vpc_tunnels.server.world.tunnels.clear()
    async with vpc_tunnels.tunnels.running():
        assert [each.public_key for each in vpc_tunnels.on_host.peers] == [made.public_key]
    monkeypatch.setattr(module, "_CHECK", 0.01)
    async with vpc_tunnels.tunnels.running():
        other = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
        assert len(vpc_tunnels.on_host.peers) == 2
        await vpc_tunnels.tunnels._sessions.update(other.id, expires_at=time.time_ns() - 1)
        await until(lambda: len(vpc_tunnels.on_host.peers) == 1, 60)
    assert [each.public_key for each in vpc_tunnels.on_host.peers] == [made.public_key]


async def test_the_lifetime_of_sessions_is_a_setting(vpc_tunnels: VpcTunnels) -> None:
    settings = vpc_tunnels.server.settings.replace(wireguard_lifetime=3600)
    tunnels = Tunnels(vpc_tunnels.server.database, settings, vpc_tunnels.server.host.vpcs)
    made = await tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    assert made.expires_at == pytest.approx(time.time() + 3600, abs=60)


async def test_hundreds_of_sessions(vpc_tunnels: VpcTunnels) -> None:
    made = [await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc) for _ in range(300)]
    assert len({each.id for each in made}) == len({each.address for each in made}) == 300
    wanted = {(each.public_key, each.address) for each in made}
    assert {(peer.public_key, peer.address) for peer in vpc_tunnels.on_host.peers} == wanted
    middle = made.pop(150)
    await vpc_tunnels.tunnels.delete(vpc_tunnels.account, vpc_tunnels.vpc, middle.id)
    assert {peer.address for peer in vpc_tunnels.on_host.peers} == {each.address for each in made}
    assert (await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)).address == middle.address


async def test_limits(vpc_tunnels: VpcTunnels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    for _ in range(2):
        await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    with pytest.raises(LimitExceeded):
        await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)


async def test_an_account_has_tunnels_into_few_vpcs(
    vpc_tunnels: VpcTunnels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each VPC with clients may need a process of the host."""
    monkeypatch.setattr(module, "MAX_TUNNELS", 2)
    networks, tunnels, ours = networks_of(vpc_tunnels.server), vpc_tunnels.tunnels, vpc_tunnels.account
    vpcs = [vpc_tunnels.vpc, *[(await networks.create(ours, "10.0.0.0/16")).id for _ in range(2)]]
    made = [await tunnels.create(ours, vpc) for vpc in vpcs[:2]]
    with pytest.raises(LimitExceeded) as refused:
        await tunnels.create(ours, vpcs[2])
    assert (refused.value.limit_name, refused.value.limit) == (LimitName.WIREGUARD_VPCS, 2)
    await tunnels.create(ours, vpcs[0])  # one more client of a VPC that has some
    others = (await Accounts(vpc_tunnels.server.database).create("theirs")).id
    theirs = (await networks.create(others, "10.0.0.0/16")).id
    await tunnels.create(others, theirs)
    await tunnels.delete(ours, vpcs[1], made[1].id)
    await tunnels.create(ours, vpcs[2])


async def test_all_accounts_have_tunnels_into_a_limited_number_of_vpcs(vpc_tunnels: VpcTunnels) -> None:
    server, networks = vpc_tunnels.server, networks_of(vpc_tunnels.server)
    tunnels = Tunnels(server.database, server.settings.replace(max_tunnels=2), server.host.vpcs)
    made = await tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    others = (await Accounts(server.database).create("theirs")).id
    vpcs = [(await networks.create(others, "10.0.0.0/16")).id for _ in range(3)]
    # The first clients of several VPCs at the same time.
    results = await asyncio.gather(*(tunnels.create(others, vpc) for vpc in vpcs), return_exceptions=True)
    refused = [each for each in results if isinstance(each, BaseException)]
    assert len(refused) == 2 and all(isinstance(each, TooBusy) for each in refused)
    assert "STEAD_MAX_TUNNELS" in str(refused[0])
    await tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    await tunnels.delete(vpc_tunnels.account, vpc_tunnels.vpc, made.id)
    with pytest.raises(TooBusy):
        await tunnels.create(others, vpcs[-1])


async def test_clients_end_with_the_api_key_that_let_them_in(vpc_tunnels: VpcTunnels) -> None:
    accounts, tunnels = Accounts(vpc_tunnels.server.database), vpc_tunnels.tunnels
    ours, vpc = vpc_tunnels.account, vpc_tunnels.vpc
    leaked, good = [(await accounts.create_key(ours))[0].id for _ in range(2)]
    vm = await gateway(vpc_tunnels)
    peers = [_new_keys()[1] for _ in range(2)]
    ends = await tunnels.create(ours, vpc, leaked)
    stays = [(await tunnels.create(ours, vpc, key)).public_key for key in (good, None)]
    for peer in peers:
        await tunnels.set_peer(ours, vpc, vm, peer, leaked)
    # Another key takes this one over.
    await tunnels.set_peer(ours, vpc, vm, peers[1], good)
    await tunnels._end_clients()
    known = {ends.public_key, *stays, *peers}
    assert {each.public_key for each in vpc_tunnels.on_host.peers} == known
    await accounts.revoke_key(leaked)
    await tunnels._end_clients()
    assert {each.public_key for each in vpc_tunnels.on_host.peers} == {*stays, peers[1]}
    assert {each.public_key for each in await tunnels.clients(ours, vpc)} == {*stays, peers[1]}
    await accounts.revoke_key(good)
    # Also when the key is revoked while the server is down.
    vpc_tunnels.server.world.tunnels.clear()
    async with tunnels.running():
        assert [each.public_key for each in vpc_tunnels.on_host.peers] == stays[1:]


async def test_an_endpoint_inside_the_vpc_is_refused(vpc_tunnels: VpcTunnels) -> None:
    settings = vpc_tunnels.server.settings.replace(wireguard_host="192.168.10.7")
    tunnels = Tunnels(vpc_tunnels.server.database, settings, vpc_tunnels.server.host.vpcs)
    with pytest.raises(InvalidRequest, match="lead into itself"):
        await tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)


async def test_the_id_of_a_session_names_a_device(vpc_tunnels: VpcTunnels) -> None:
    """The npm package's documentation writes `wg-ID.conf`; wg-quick takes up to 15 characters."""
    made = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    assert len(f"wg-{made.id}") <= 15


async def test_sessions_that_end_while_the_server_is_down_are_removed_at_its_start(
    vpc_tunnels: VpcTunnels,
) -> None:
    await vpc_tunnels.expired()
    assert vpc_tunnels.on_host.peers
    async with vpc_tunnels.tunnels.running():
        assert not vpc_tunnels.on_host.peers


async def test_a_session_ends_with_its_vpc(vpc_tunnels: VpcTunnels) -> None:
    made = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    networks = networks_of(vpc_tunnels.server)
    await networks.delete(vpc_tunnels.account, vpc_tunnels.vpc)
    assert vpc_tunnels.vpc not in vpc_tunnels.server.world.tunnels
    assert await vpc_tunnels.tunnels._sessions.get(made.id) is None
    with pytest.raises(VpcNotFound):
        await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)


async def gateway(vpc_tunnels: VpcTunnels) -> str:
    made = await vpc_tunnels.server.machines.create(
        Properties(account=vpc_tunnels.account), nic=NicRequest(vpc_tunnels.vpc)
    )
    return made.id


async def test_a_peer_with_a_gateway_vm(vpc_tunnels: VpcTunnels) -> None:
    vm, other = await gateway(vpc_tunnels), await gateway(vpc_tunnels)
    private, public = _new_keys()
    made = await vpc_tunnels.tunnels.set_peer(vpc_tunnels.account, vpc_tunnels.vpc, vm, public)
    assert (made.machine, made.public_key, str(made.address)) == (vm, public, "100.96.0.2")
    assert f"PublicKey = {made.server_key}\n" in made.config and private not in made.config
    assert "AllowedIPs = 192.168.10.0/24\n" in made.config
    # The same key again changes nothing but the gateway.
    again = await vpc_tunnels.tunnels.set_peer(vpc_tunnels.account, vpc_tunnels.vpc, other, public)
    assert (again.id, again.machine) == (made.id, other)
    assert [(each.public_key, str(each.address)) for each in vpc_tunnels.on_host.peers] == [
        (public, "100.96.0.2")
    ]
    async with vpc_tunnels.tunnels.running():
        assert vpc_tunnels.on_host.peers
    with pytest.raises(SessionNotFound):
        await vpc_tunnels.tunnels.delete(vpc_tunnels.account, vpc_tunnels.vpc, made.id)
    with pytest.raises(VpcNotFound):
        await vpc_tunnels.tunnels.delete_peer("stranger", vpc_tunnels.vpc, public)
    await vpc_tunnels.tunnels.delete_peer(vpc_tunnels.account, vpc_tunnels.vpc, public)
    assert not vpc_tunnels.on_host.peers
    with pytest.raises(PeerNotFound):
        await vpc_tunnels.tunnels.delete_peer(vpc_tunnels.account, vpc_tunnels.vpc, public)


async def test_a_peer_ends_with_its_gateway_vm(vpc_tunnels: VpcTunnels) -> None:
    vm = await gateway(vpc_tunnels)
    await vpc_tunnels.tunnels.set_peer(vpc_tunnels.account, vpc_tunnels.vpc, vm, _new_keys()[1])
    await vpc_tunnels.server.machines.delete(vm)
    await vpc_tunnels.tunnels.machine_deleted(vpc_tunnels.vpc)
    assert vpc_tunnels.on_host.peers == ()


async def test_peers_that_are_refused(vpc_tunnels: VpcTunnels) -> None:
    vm = await gateway(vpc_tunnels)
    session = await vpc_tunnels.tunnels.create(vpc_tunnels.account, vpc_tunnels.vpc)
    public = _new_keys()[1]
    for machine, key, reason in (
        ("nobody", public, "not in VPC"),
        (vm, "", "invalid public key"),
        (vm, public[:-1], "invalid public key"),
        (vm, public + "\n", "invalid public key"),
        (vm, base64.b64encode(bytes(32)).decode(), "invalid public key"),
        (vm, f"{public}\nAllowedIPs = 0.0.0.0/0", "invalid public key"),
        (vm, session.public_key, "of WireGuard session"),
        (vm, session.server_key, "server's end"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            await vpc_tunnels.tunnels.set_peer(vpc_tunnels.account, vpc_tunnels.vpc, machine, key)
    assert len(vpc_tunnels.on_host.peers) == 1
