"""Rules of domains: who owns a name, what it leads to, and what happens when two accounts want it."""

import asyncio
from dataclasses import replace

import pytest

from stead.domains.domains import MAX_AT_ONCE, MAX_PENDING, Domains, Target
from stead.domains.errors import (
    DnsUnavailable,
    DomainNotFound,
    DomainNotVerified,
    DomainTaken,
    InvalidDomain,
    MappingNotFound,
    VerificationFailed,
    VerificationNotFound,
)
from stead.domains.verification import LABEL
from stead.errors import InvalidRequest, MachineNotFound, SteadError
from stead.limits import LimitExceeded, Limits
from stead.store.domains import DomainStore, MappingStore
from stead.store.machines import MachineStore
from support.accounts import attempt
from support.domains_with_dns import RESERVED, DomainsWithDns


def led(domains: Domains, name: str) -> tuple[str, int] | None:
    found = domains.route(name)
    return None if found is None else (found.machine, found.port)


# Verification


async def test_verified_domain_is_owned_with_its_subdomains(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    pending = await domains.verify(ours, "Example.com.")
    assert (pending.domain, pending.record) == ("example.com", f"{LABEL}.example.com")
    assert await domains.verify(ours, "example.com") == pending
    assert await domains.verifications(ours) == [pending]
    with pytest.raises(VerificationFailed):
        await domains.complete(ours, domain="example.com")
    assert await domains.owned(ours) == []

    domains_dns.records[pending.record] = ["v=spf1 -all", pending.code]
    owned = await domains.complete(ours, domain="EXAMPLE.com")
    assert (owned.domain, owned.account, owned.implicit) == ("example.com", ours, False)
    assert await domains.owned(ours) == [owned]
    assert await domains.verifications(ours) == []
    assert await domains.complete(ours, domain="example.com") == owned

    machine = await domains_dns.machine(ours)
    for number, name in enumerate(("example.com", "a.b.example.com", "*.example.com"), 1):
        mapping = await domains.map(ours, name, machine, number)
        assert mapping.ownership == owned.id
    assert led(domains, "A.B.Example.com.") == (machine, 2)


async def test_verification_is_completed_by_id_and_by_a_record_of_a_parent(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    pending = await domains.verify(ours, "app.example.com")
    domains_dns.records[f"{LABEL}.example.com"] = [pending.code]
    with pytest.raises(VerificationNotFound):
        await domains.complete(theirs, verification=pending.id)
    assert (await domains.complete(ours, verification=pending.id)).domain == "app.example.com"
    assert domains_dns.asked == [f"{LABEL}.app.example.com", f"{LABEL}.example.com"]
    with pytest.raises(VerificationNotFound):
        await domains.complete(ours, verification=pending.id)
    machine = await domains_dns.machine(ours)
    with pytest.raises(DomainNotVerified):
        await domains.map(ours, "other.example.com", machine, 80)


async def test_a_failed_lookup_leaves_the_verification_pending(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    pending = await domains.verify(ours, "example.com")
    domains_dns.broken.add(pending.record)
    with pytest.raises(DnsUnavailable):
        await domains.complete(ours, domain="example.com")
    assert await domains.verifications(ours) == [pending]
    domains_dns.broken.clear()
    domains_dns.records[pending.record] = [pending.code]
    await domains.complete(ours, domain="example.com")


async def test_complete_needs_one_reference(domains: Domains, ours: str) -> None:
    with pytest.raises(InvalidRequest):
        await domains.complete(ours)
    with pytest.raises(InvalidRequest):
        await domains.complete(ours, domain="example.com", verification="x")
    with pytest.raises(VerificationNotFound):
        await domains.complete(ours, domain="example.com")


async def test_cancelled_verification_cannot_be_completed(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    pending = await domains.verify(ours, "example.com")
    other = await domains.verify(theirs, "example.com")
    assert other.code != pending.code
    for account, code in ((ours, "wrong"), (ours, other.code), (theirs, pending.code)):
        with pytest.raises(VerificationNotFound):
            await domains.cancel(account, "example.com", code)
    assert await domains.cancel(ours, "EXAMPLE.com", pending.code) == pending
    domains_dns.records[pending.record] = [pending.code]
    for reference in ({"domain": "example.com"}, {"verification": pending.id}):
        with pytest.raises(VerificationNotFound):
            await domains.complete(ours, **reference)
    assert await domains.verifications(theirs) == [other]


async def test_pending_verifications_are_limited(domains: Domains, ours: str, theirs: str) -> None:
    for number in range(MAX_PENDING):
        await domains.verify(ours, f"d{number}.example.com")
    with pytest.raises(LimitExceeded):
        await domains.verify(ours, "more.example.com")
    await domains.verify(ours, "d0.example.com")
    await domains.verify(theirs, "more.example.com")


# One owner at a time


async def test_domain_cannot_be_taken_from_its_owner(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    """Not by a verification that was started before, and not through a subdomain."""
    early = [await domains.verify(theirs, name) for name in ("example.com", "app.example.com")]
    for pending in early:
        domains_dns.records[pending.record].append(pending.code)
    await domains_dns.verified(domains, ours, "example.com")
    for pending in early:
        with pytest.raises(DomainTaken):
            await domains.complete(theirs, verification=pending.id)
    for name in ("example.com", "new.example.com"):
        with pytest.raises(DomainTaken):
            await domains.verify(theirs, name)
    machine = await domains_dns.machine(theirs)
    for name in ("example.com", "app.example.com", "*.example.com", "*.app.example.com"):
        with pytest.raises(DomainTaken):
            await domains.map(theirs, name, machine, 80)
    assert await domains.owned(theirs) == []


async def test_owner_of_a_subdomain_keeps_it(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    """The parent domain may be verified by another account later: its wildcard stops at the subdomain."""
    await domains_dns.verified(domains, ours, "app.example.com")
    await domains_dns.verified(domains, theirs, "example.com")
    machine, other = await domains_dns.machine(ours), await domains_dns.machine(theirs)
    await domains.map(theirs, "*.example.com", other, 80)
    assert led(domains, "x.example.com") == (other, 80)
    assert led(domains, "app.example.com") is None
    for name in ("app.example.com", "x.app.example.com", "*.app.example.com"):
        with pytest.raises(DomainTaken):
            await domains.map(theirs, name, other, 80)
    await domains.map(ours, "app.example.com", machine, 81)
    assert led(domains, "app.example.com") == (machine, 81)
    await domains.unmap(ours, "app.example.com")
    await domains.release(ours, "app.example.com")
    assert led(domains, "app.example.com") == (other, 80)


async def test_one_of_two_concurrent_completions_wins(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    for account in (ours, theirs):
        pending = await domains.verify(account, "example.com")
        domains_dns.records[pending.record].append(pending.code)
    results = await asyncio.gather(
        *(attempt(domains.complete(account, domain="example.com")) for account in (ours, theirs))
    )
    assert sorted(isinstance(result, DomainTaken) for result in results) == [False, True]
    owners = [await domains.owned(account) for account in (ours, theirs)]
    assert sorted(map(len, owners)) == [0, 1]


async def test_released_domain_can_be_verified_by_another_account(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    await domains_dns.verified(domains, ours, "example.com")
    machine = await domains_dns.machine(ours)
    await domains.map(ours, "app.example.com", machine, 80)
    with pytest.raises(InvalidRequest, match="unmap its names first"):
        await domains.release(ours, "example.com")
    with pytest.raises(DomainNotFound):
        await domains.release(theirs, "example.com")
    await domains.unmap(ours, "app.example.com")
    await domains.release(ours, "example.com")
    assert await domains.owned(ours) == []
    await domains_dns.verified(domains, theirs, "example.com")
    with pytest.raises(DomainTaken):
        await domains.map(ours, "app.example.com", machine, 80)


async def test_unverified_domain_cannot_be_mapped(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    machine = await domains_dns.machine(ours)
    await domains.verify(ours, "example.com")
    for name in ("example.com", "app.example.com", "*.example.com"):
        with pytest.raises(DomainNotVerified):
            await domains.map(ours, name, machine, 80)
        with pytest.raises(DomainNotVerified):
            await domains.check(ours, [Target(name, 80)])
    assert domains.mapped_names() == []


# Preview zones


async def test_preview_name_belongs_to_the_first_account_until_it_is_unmapped(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    machine, other = await domains_dns.machine(ours), await domains_dns.machine(theirs)
    mapping = await domains.map(ours, "App.style.dev", machine, 3000)
    assert (mapping.domain, mapping.port) == ("app.style.dev", 3000)
    assert led(domains, "app.style.dev") == (machine, 3000)
    assert await domains.owned(ours) == []
    (owned,) = await domains.owned(ours, implicit=True)
    assert (owned.id, owned.domain, owned.implicit) == (mapping.ownership, "app.style.dev", True)
    for name in ("app.style.dev", "deep.app.style.dev", "*.app.style.dev"):
        with pytest.raises(DomainTaken):
            await domains.map(theirs, name, other, 80)
    with pytest.raises(MappingNotFound):
        await domains.unmap(theirs, "app.style.dev")
    assert led(domains, "app.style.dev") == (machine, 3000)

    second = await domains.map(ours, "deep.app.style.dev", machine, 3001)
    assert second.ownership == mapping.ownership
    await domains.unmap(ours, "app.style.dev")
    with pytest.raises(DomainTaken):
        await domains.map(theirs, "app.style.dev", other, 80)
    await domains.unmap(ours, "deep.app.style.dev")
    assert await domains.owned(ours, implicit=True) == []
    await domains.map(theirs, "app.style.dev", other, 80)
    assert led(domains, "app.style.dev") == (other, 80)


async def test_one_of_many_concurrent_accounts_gets_a_preview_name(
    domains_dns: DomainsWithDns, domains: Domains
) -> None:
    accounts = [(await domains_dns.accounts.create(f"a{number}")).id for number in range(8)]
    machines = [await domains_dns.machine(account) for account in accounts]
    wanted = zip(accounts, machines, strict=True)
    results = await asyncio.gather(
        *(attempt(domains.map(account, "app.style.dev", machine, 80)) for account, machine in wanted)
    )
    won = [result for result in results if not isinstance(result, SteadError)]
    assert len(won) == 1
    assert led(domains, "app.style.dev") == (won[0].machine, 80)


async def test_preview_names_outlive_a_change_of_the_zones_but_give_no_rights(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    machine = await domains_dns.machine(ours)
    await domains.map(ours, "app.style.dev", machine, 80)
    later = await domains_dns.open(["stead.localhost"])
    with pytest.raises(DomainNotVerified):
        await later.map(ours, "other.app.style.dev", machine, 80)
    await later.unmap(ours, "app.style.dev")
    assert await later.owned(ours, implicit=True) == []


async def test_preview_url_of_a_port_is_made_once(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    machine, other = await domains_dns.machine(ours), await domains_dns.machine(ours)
    made = await asyncio.gather(*(domains.map_preview(ours, machine, 3000) for _ in range(5)))
    assert len({mapping.domain for mapping in made}) == 1
    assert led(domains, made[0].domain) == (machine, 3000)
    assert made[0].domain.endswith(".stead.localhost")
    assert domains.url(made[0].domain) == f"https://{made[0].domain}"
    domains.https_port = 8443
    assert domains.url(made[0].domain) == f"https://{made[0].domain}:8443"
    names = {made[0].domain}
    names.add((await domains.map_preview(ours, machine, 3001)).domain)
    names.add((await domains.map_preview(ours, other, 3000)).domain)
    assert len(names) == 3
    await domains.map(ours, "chosen.stead.localhost", other, 5173)
    assert (await domains.map_preview(ours, other, 5173)).domain == "chosen.stead.localhost"
    with pytest.raises(InvalidRequest, match="no preview zone"):
        await (await domains_dns.open([])).map_preview(ours, machine, 80)


# Mappings


async def test_exact_name_wins_over_a_wildcard(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    await domains_dns.verified(domains, ours, "example.com")
    machine = await domains_dns.machine(ours)
    for name, port in (("*.example.com", 1), ("app.example.com", 2), ("*.app.example.com", 3)):
        await domains.map(ours, name, machine, port)
    expected = {
        "x.example.com": 1,
        "app.example.com": 2,
        "x.app.example.com": 3,
        "x.y.example.com": None,
        "example.com": None,
        "notexample.com": None,
        "*.example.com": None,
        "": None,
        ".": None,
        "com": None,
    }
    found = {name: domains.route(name) for name in expected}
    assert {name: route and route.port for name, route in found.items()} == expected
    route = domains.route("X.EXAMPLE.COM.")
    assert route is not None
    assert (route.domain, route.account, route.machine) == ("*.example.com", ours, machine)


async def test_wildcard_does_not_reach_names_of_the_installation(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    await domains_dns.verified(domains, ours, "freestyle.sh")
    machine = await domains_dns.machine(ours)
    await domains.map(ours, "*.freestyle.sh", machine, 80)
    assert led(domains, "x.freestyle.sh") == (machine, 80)
    for own in RESERVED:
        assert led(domains, own) is None
        with pytest.raises(InvalidDomain):
            await domains.map(ours, own, machine, 80)


async def test_mapping_moves_between_vms_in_one_step(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    machine, other = await domains_dns.machine(ours), await domains_dns.machine(ours)
    first = await domains.map(ours, "app.style.dev", machine, 80)
    assert await domains.map(ours, "app.style.dev", machine, 80) == first
    seen: list[tuple[str, int] | None] = []

    async def look() -> None:
        while True:
            seen.append(led(domains, "app.style.dev"))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    for number in range(20):
        await domains.map(ours, "app.style.dev", (other, machine)[number % 2], 80 + number % 2)
    looking.cancel()
    assert set(seen) == {(machine, 80), (other, 80), (machine, 81)}
    (mapping,) = await domains.mappings(ours)
    assert (mapping.machine, mapping.port) == (machine, 81)
    assert mapping.id != first.id and mapping.ownership == first.ownership
    assert [each.domain for each in domains.of_machine(other)] == []


async def test_many_names_are_mapped_all_or_none(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    machine = await domains_dns.machine(ours)
    await domains.map(theirs, "taken.style.dev", await domains_dns.machine(theirs), 80)
    good = [Target("a.style.dev", 1), Target("b.a.style.dev", 2), Target("c.stead.localhost", 3)]
    for bad, error in (
        (Target("taken.style.dev", 4), DomainTaken),
        (Target("example.com", 4), DomainNotVerified),
        (Target("A.style.dev.", 4), InvalidDomain),
        (Target("d.style.dev", 0), InvalidRequest),
        (Target("d.style.dev", 65536), InvalidRequest),
    ):
        with pytest.raises(error):
            await domains.check(ours, [*good, bad])
        with pytest.raises(error):
            await domains.map_all(ours, machine, [*good, bad])
    with pytest.raises(InvalidRequest, match="too many domains"):
        await domains.map_all(ours, machine, [Target(f"n{n}.style.dev", 1) for n in range(MAX_AT_ONCE + 1)])
    assert domains.mapped_names() == ["taken.style.dev"]
    assert await domains.owned(ours, implicit=True) == []
    made = await domains.map_all(ours, machine, good)
    assert [mapping.domain for mapping in made] == [target.domain for target in good]
    assert made[0].ownership == made[1].ownership != made[2].ownership
    assert domains.of_machine(machine) == sorted(made, key=lambda each: each.domain)


async def test_vm_of_another_account_or_none_cannot_be_mapped(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    for machine in (await domains_dns.machine(theirs), "nowhere"):
        with pytest.raises(MachineNotFound):
            await domains.map(ours, "app.style.dev", machine, 80)
        with pytest.raises(MachineNotFound):
            await domains.map_preview(ours, machine, 80)
    assert domains.mapped_names() == []
    assert await domains.owned(ours, implicit=True) == []


async def test_mappings_are_removed_with_their_vm(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    await domains_dns.verified(domains, ours, "example.com")
    machine, kept = await domains_dns.machine(ours), await domains_dns.machine(ours)
    await domains.map_all(ours, machine, [Target("a.style.dev", 1), Target("example.com", 2)])
    await domains.map(ours, "x.a.style.dev", kept, 3)
    await domains.map(ours, "b.style.dev", machine, 4)
    await domains_dns.delete_machine(domains, machine)
    assert domains.mapped_names() == ["x.a.style.dev"]
    assert [mapping.domain for mapping in await domains.mappings(ours)] == ["x.a.style.dev"]
    owned = await domains.owned(ours, implicit=True)
    assert {each.domain for each in owned} == {"example.com", "a.style.dev"}
    await domains.map(theirs, "b.style.dev", await domains_dns.machine(theirs), 80)


async def test_mapping_to_a_vm_that_is_being_deleted_leaves_nothing(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    """Whichever comes first, no route to the deleted VM is left."""
    for number in range(20):
        machine = await domains_dns.machine(ours)
        name = f"n{number}.style.dev"
        result, _ = await asyncio.gather(
            attempt(domains.map(ours, name, machine, 80)), domains_dns.delete_machine(domains, machine)
        )
        await domains.remove_machine(machine)
        assert isinstance(result, MachineNotFound) or not isinstance(result, SteadError), result
        assert domains.route(name) is None
        assert await MappingStore(domains_dns.database).all() == []
        await domains.map(theirs, name, other := await domains_dns.machine(theirs), 80)
        await domains_dns.delete_machine(domains, other)


async def test_limits_of_the_account_hold(domains_dns: DomainsWithDns, domains: Domains, ours: str) -> None:
    domains_dns.limits = Limits(domains=1, mappings=2)
    machine = await domains_dns.machine(ours)
    await domains_dns.verified(domains, ours, "example.com")
    pending = await domains.verify(ours, "example.org")
    domains_dns.records[pending.record] = [pending.code]
    with pytest.raises(LimitExceeded, match="domains is limited to 1"):
        await domains.complete(ours, domain="example.org")
    results = await asyncio.gather(
        *(attempt(domains.map(ours, f"n{number}.style.dev", machine, 80)) for number in range(5))
    )
    assert sum(isinstance(result, LimitExceeded) for result in results) == 3
    mapped = domains.mapped_names()
    assert len(mapped) == 2
    await domains.map(ours, mapped[0], machine, 81)
    with pytest.raises(LimitExceeded):
        await domains.check(ours, [Target("more.style.dev", 80)])
    domains_dns.limits = replace(domains_dns.limits, domains=2)
    await domains.complete(ours, domain="example.org")


async def test_lists_are_paged_oldest_first_and_filtered(
    domains_dns: DomainsWithDns, domains: Domains, ours: str, theirs: str
) -> None:
    first = await domains_dns.verified(domains, ours, "example.com")
    second = await domains_dns.verified(domains, ours, "example.org")
    machine = await domains_dns.machine(ours)
    names = [f"n{number}.example.{'org' if number % 3 else 'com'}" for number in range(12)]
    made = [await domains.map(ours, name, machine, 80) for name in names]
    await domains.map(theirs, "x.style.dev", await domains_dns.machine(theirs), 80)
    assert await domains.mappings(ours) == made
    assert await domains.mappings(ours, limit=10) == made[:10]
    assert await domains.mappings(ours, limit=5, offset=10) == made[10:]
    assert await domains.mappings(ours, domain="N1.example.org.") == [made[1]]
    assert await domains.mappings(ours, domain="x.style.dev") == []
    of_first = [mapping for mapping in made if mapping.ownership == first]
    assert await domains.mappings(ours, ownership=first) == of_first
    assert len(await domains.mappings(ours, ownership=second)) == 12 - len(of_first)
    assert await domains.mappings(theirs, ownership=first) == []
    assert [each.id for each in await domains.owned(ours, limit=1, offset=1)] == [second]


async def test_watchers_hear_of_every_change(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    seen: list[list[str]] = []
    domains.watch(lambda _: seen.append(sorted(domains.mapped_names())))
    machine = await domains_dns.machine(ours)
    await domains.map(ours, "a.style.dev", machine, 80)
    await domains.map(ours, "b.style.dev", machine, 80)
    await domains.unmap(ours, "a.style.dev")
    await domains_dns.delete_machine(domains, machine)
    assert seen == [["a.style.dev"], ["a.style.dev", "b.style.dev"], ["b.style.dev"], []]


async def test_cancelled_caller_leaves_memory_and_rows_the_same(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    machine = await domains_dns.machine(ours)
    for steps in range(12):
        task = asyncio.create_task(domains.map(ours, f"n{steps}.style.dev", machine, 80))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    rows = {row.domain for row in await MappingStore(domains_dns.database).all()}
    assert rows == set(domains.mapped_names())
    owned = {row.domain for row in await DomainStore(domains_dns.database).all()}
    assert owned == rows


async def test_restart_keeps_everything_and_releases_unused_preview_names(
    domains_dns: DomainsWithDns, domains: Domains, ours: str
) -> None:
    await domains_dns.verified(domains, ours, "example.com")
    machine, gone = await domains_dns.machine(ours), await domains_dns.machine(ours)
    await domains.map_all(ours, machine, [Target("*.example.com", 1), Target("a.style.dev", 2)])
    await domains.map(ours, "b.style.dev", gone, 3)
    await MachineStore(domains_dns.database).delete(gone)
    later = await domains_dns.open()
    assert sorted(later.mapped_names()) == ["*.example.com", "a.style.dev"]
    assert led(later, "x.example.com") == (machine, 1)
    owned = await later.owned(ours, implicit=True)
    assert {each.domain for each in owned} == {"example.com", "a.style.dev"}
