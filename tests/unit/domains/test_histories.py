"""Random histories of domains: memory, rows and a model agree after every step."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from stead.domains.domains import Domains
from stead.errors import SteadError
from support.domains_with_dns import DomainsWithDns, domains_with_dns

ACCOUNTS = ("ann", "bob")
NAMES = (
    *("example.com", "app.example.com", "x.app.example.com", "*.example.com", "*.app.example.com"),
    *("one.style.dev", "deep.one.style.dev", "*.one.style.dev", "two.style.dev"),
)
VERIFIED = ("example.com", "app.example.com")
HOSTS = (*(name.replace("*", "any") for name in NAMES), "a.b.example.com", "style.dev")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("map"), st.sampled_from(ACCOUNTS), st.sampled_from(NAMES), st.integers(0, 3)),
        st.tuples(st.just("unmap"), st.sampled_from(ACCOUNTS), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("verify"), st.sampled_from(ACCOUNTS), st.sampled_from(VERIFIED), st.just(0)),
        st.tuples(st.just("release"), st.sampled_from(ACCOUNTS), st.sampled_from(VERIFIED), st.just(0)),
        st.tuples(st.just("delete"), st.sampled_from(ACCOUNTS), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("restart"), st.just(""), st.just(""), st.just(0)),
    ),
    max_size=30,
)


class Model:
    """The rules once more, as plainly as possible."""

    def __init__(self) -> None:
        self.verified: dict[str, str] = {}
        self.mapped: dict[str, tuple[str, str]] = {}
        """Account and VM by name."""

    def owner(self, name: str) -> str | None:
        base = name.removeprefix("*.")
        if base.endswith(".style.dev"):
            top = ".".join(base.split(".")[-3:])
            mine = [who for each, (who, _) in self.mapped.items() if f".{each}".endswith(f".{top}")]
            return mine[0] if mine else None
        labels = base.split(".")
        parents = [".".join(labels[start:]) for start in range(len(labels))]
        return next((self.verified[each] for each in parents if each in self.verified), None)

    def may_map(self, account: str, name: str) -> bool:
        owner = self.owner(name)
        return owner == account or (owner is None and name.endswith(".style.dev"))

    def route(self, host: str) -> str | None:
        if host in self.mapped:
            return self.mapped[host][1]
        found = self.mapped.get(f"*.{host.partition('.')[2]}")
        if found is None or self.verified.get(host, found[0]) != found[0]:
            return None
        return found[1]


async def play(domains_dns: DomainsWithDns, steps: list[tuple[str, str, str, int]]) -> None:
    domains, model = await domains_dns.open(), Model()
    accounts = {name: (await domains_dns.accounts.create(name)).id for name in ACCOUNTS}
    machines = {name: [await domains_dns.machine(accounts[name]) for _ in range(4)] for name in ACCOUNTS}
    for what, who, name, number in steps:
        account = accounts.get(who, "")
        expected = True
        try:
            match what:
                case "map":
                    machine = machines[who][number]
                    expected = model.may_map(who, name)
                    await domains.map(account, name, machine, 80)
                    model.mapped[name] = who, machine
                case "unmap":
                    expected = name in model.mapped and model.mapped[name][0] == who
                    await domains.unmap(account, name)
                    del model.mapped[name]
                case "verify":
                    expected = model.owner(name) in (None, who)
                    await domains_dns.verified(domains, account, name)
                    model.verified[name] = who
                case "release":
                    if model.verified.get(name) == who:
                        expected = not any(
                            each.ownership == domains_id(domains, name)
                            for vm in machines[who]
                            for each in domains.of_machine(vm)
                        )
                    else:
                        expected = False
                    await domains.release(account, name)
                    del model.verified[name]
                case "delete":
                    machine = machines[who][number]
                    await domains_dns.delete_machine(domains, machine)
                    machines[who][number] = await domains_dns.machine(account)
                    model.mapped = {key: to for key, to in model.mapped.items() if to[1] != machine}
                case "restart":
                    domains = await domains_dns.open()
        except SteadError as error:
            assert not expected, (what, who, name, str(error))
        else:
            assert expected, (what, who, name)
        await check(domains_dns, domains, model)


def domains_id(domains: Domains, name: str) -> str:
    return domains._routes.owned[name].id


async def check(domains_dns: DomainsWithDns, domains: Domains, model: Model) -> None:
    assert sorted(domains.mapped_names()) == sorted(model.mapped)
    again = await domains_dns.open()
    for host in HOSTS:
        route = domains.route(host)
        assert (route and route.machine) == model.route(host), host
        assert again.route(host) == route
    assert again._routes.owned == domains._routes.owned
    assert again._routes.mappings == domains._routes.mappings


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_memory_rows_and_model_agree_after_any_history(steps: list[tuple[str, str, str, int]]) -> None:
    async def run() -> None:
        with TemporaryDirectory() as folder:
            async with domains_with_dns(Path(folder)) as domains_dns:
                await play(domains_dns, steps)

    asyncio.run(run())
