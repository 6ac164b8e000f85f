"""A VM and its own Stead: the API and Git by name over HTTPS, with a certificate that it trusts."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from stead import AsyncStead
from stead.addresses import GATEWAY
from stead.host.commands import run
from stead.machines import Machine
from support.api_calls import new_account
from support.guests import sh
from support.installations import Server
from support.waiting import until
from support.webhooks import Endpoint

_API, _GIT = "https://api.freestyle.sh", "https://git.freestyle.sh"
_PUSH = """
git config --global user.name Agent && git config --global user.email agent@example.com
git clone -q {url} /srv/work && cd /srv/work
git lfs track '*.bin' >&2 && head -c 100000 /dev/zero > large.bin && echo hello > page.txt
git add . && git commit -qm work && git push -q origin HEAD
"""


@dataclass(frozen=True)
class Home:
    """A VM with access to one of the two repositories of its account."""

    stead: AsyncStead
    vm: Machine
    repo: str
    other: str


@pytest_asyncio.fixture(scope="module")
async def home(server: Server) -> AsyncIterator[Home]:
    _, key = await new_account(server, "home")
    async with AsyncStead(base_url=server.url, api_key=key) as stead:
        repo, other = [(await stead.git.repos.create()).id for _ in range(2)]
        made = await stead.vms.create(git_access=repo)
        yield Home(stead, await server.installation.machines.get(made.id), repo, other)
        await made.delete()


async def test_programs_in_a_vm_reach_the_api_over_https(home: Home) -> None:
    vm = home.vm
    assert await sh(vm, "getent ahostsv4 api.freestyle.sh | cut -d' ' -f1 | sort -u") == str(GATEWAY)
    health = f"{_API}/healthz"
    programs = (
        f"curl -sSf -o /dev/null -w '%{{http_code}}' {health}",
        f"node -e 'fetch(\"{health}\").then((answer) => console.log(answer.status))'",
        f"python3 -c 'import urllib.request as u; print(u.urlopen(\"{health}\").status)'",
    )
    assert [await sh(vm, program) for program in programs] == ["200", "200", "200"]


async def test_a_vm_reaches_no_other_port_of_the_gateway(home: Home) -> None:
    ports = "22 53 80 443 2019 7070 8600"
    probe = f"timeout 5 bash -c '</dev/tcp/{GATEWAY}/'$port 2>/dev/null && echo $port"
    reached = await sh(home.vm, f"for port in {ports}; do ({probe}) & done; wait")
    assert sorted(reached.split()) == ["443", "53", "80"]


async def test_a_vm_reaches_a_mapped_domain_of_its_account(home: Home, server: Server) -> None:
    """The page behind it, over HTTPS; from outside, it is also at the URL of the port."""
    await sh(home.vm, "mkdir /srv/site; echo mapped > /srv/site/page")
    await sh(home.vm, "systemd-run --unit=site --working-directory=/srv/site python3 -m http.server 8000")
    await sh(home.vm, "until curl -sf http://127.0.0.1:8000/page; do sleep 0.2; done", timeout=120)
    await home.stead.domains.mappings.create("own-page.style.dev", vm=home.vm.id, port=8000)
    url = "https://own-page.style.dev/page"
    assert await sh(home.vm, f"curl -sS --max-time 60 {url}", timeout=90) == "mapped"
    root = server.installation.settings.data / "edge" / "root.crt"
    to_edge = ("--cacert", root, "--connect-to", f"::127.0.0.1:{server.https_port}")
    preview = await (await home.stead.vms.find(home.vm.id)).url(8000)
    for outside in (url, f"{preview}/page"):
        assert (await run("curl", "-sS", "--max-time", "60", *to_edge, outside)).stdout == b"mapped\n"


async def test_git_in_a_vm_pushes_to_the_repository_that_it_has_access_to(
    home: Home, endpoint: Endpoint
) -> None:
    """The loop of an agent: clone, edit, commit with LFS, push; the webhook arrives."""
    repo = home.stead.git.repos.ref(home.repo)
    await repo.triggers.create(f"{endpoint.url}/hook")
    await sh(home.vm, _PUSH.format(url=f"{_GIT}/{home.repo}"), timeout=120)
    (told,) = await endpoint.count(1, "/hook")
    assert json.loads(told.body)["repoId"] == home.repo
    # Another user of the VM, and a fresh clone with the content of the LFS file.
    again = f"git clone -q {_GIT}/{home.repo}.git /tmp/again && stat -c %s /tmp/again/large.bin"
    assert await sh(home.vm, f"useradd --create-home ann; su ann -c '{again}'", timeout=120) == "100000"


async def test_the_token_of_a_vm_is_for_one_repository(home: Home) -> None:
    refused = await home.vm.exec(f"GIT_TERMINAL_PROMPT=0 git ls-remote {_GIT}/{home.other}", timeout=60)
    assert not refused.ok
    assert b"could not read Username" in refused.stderr
    token = f"sed -n s/^password=//p /etc/stead/git-access/{home.repo}"
    tried = await home.vm.exec(f"git ls-remote https://x:$({token})@{_GIT[8:]}/{home.other}", timeout=60)
    assert not tried.ok
    assert b"not found" in tried.stderr


async def test_the_token_is_revoked_with_the_vm(server: Server, home: Home) -> None:
    other = await home.stead.vms.create(git_access=home.repo)
    secret = (await other.exec(f"cat /etc/stead/git-access/{home.repo}")).stdout
    password = secret.partition("password=")[2].strip()
    listing = f"git ls-remote https://x:{password}@{_GIT[8:]}/{home.repo}"
    assert (await home.vm.exec(listing, timeout=60)).ok
    await other.delete()

    async def is_revoked() -> bool:
        refused = await home.vm.exec(f"GIT_TERMINAL_PROMPT=0 {listing}", timeout=60)
        return b"Authentication failed" in refused.stderr

    await until(is_revoked, 60)


async def test_access_to_a_repository_of_another_account_is_refused(server: Server, home: Home) -> None:
    _, key = await new_account(server, "stranger")
    async with AsyncStead(base_url=server.url, api_key=key) as stranger:
        with pytest.raises(Exception, match="gitAccess: this account has no repository"):
            await stranger.vms.create(git_access=home.repo)
        assert (await stranger.vms.list()).vms == ()
