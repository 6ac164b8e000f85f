"""Which names may have certificates."""

import datetime
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stead.edge.certificates import CertificateLimits, CertificatePermission, issued_in


@dataclass(frozen=True)
class Mapped:
    domain: str
    account: str
    machine: str = "vm"
    port: int = 80


_LIMITS = CertificateLimits(
    public_zone="previews.example",
    local_zones=("style.dev",),
    names_per_day=3,
    names_per_week=16,
    other_names_per_day=2,
)


@dataclass
class World:
    storage: Path
    now: float = 1e9
    mappings: dict[str, str] = field(default_factory=dict)
    """Accounts by mapped name."""
    limits: CertificateLimits = _LIMITS

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.permission = CertificatePermission(
            self, issued_in(self.storage), self.limits, self.storage / "record", lambda: self.now
        )

    def route(self, hostname: str) -> Mapped | None:
        for domain in (hostname, f"*.{hostname.partition('.')[2]}"):
            if domain in self.mappings:
                return Mapped(domain, self.mappings[domain])
        return None

    def allowed(self, *names: str) -> list[bool]:
        return [self.permission.allows(name) for name in names]

    def issue(self, name: str, days: int = 1) -> None:
        """What Caddy writes when it has a certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=90))
            .not_valid_after(now + datetime.timedelta(days=days))
            .sign(key, hashes.SHA256())
        )
        folder = self.storage / "certificates" / "acme" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_only_mapped_names_are_allowed(world: World) -> None:
    world.mappings["app.example.com"] = "ours"
    assert world.allowed("app.example.com", "APP.example.com.") == [True, True]
    assert world.allowed("example.com", "a.app.example.com", "", "../app.example.com", "*") == [False] * 5


@pytest.mark.parametrize("exact", [True, False], ids=["exact names", "names of a wildcard"])
def test_new_names_of_own_domains_are_limited_by_day(world: World, exact: bool) -> None:
    names = [f"{number}.a.example" for number in range(5)]
    world.mappings |= dict.fromkeys(names, "ours") if exact else {"*.a.example": "ours"}
    world.mappings["*.c.example"] = "theirs"
    assert world.allowed(*names) == [True, True, False, False, False]
    world.now += 60
    assert world.allowed(*names[:2]) == [True, True], "a name counts once"
    assert world.allowed("1.c.example") == [True], "accounts have shares of their own"
    world.now += 86_338
    assert world.allowed(names[2]) == [False]
    world.now += 3
    assert world.allowed(*names[2:]) == [True, True, False]


def test_made_up_names_of_a_wildcard_leave_room_for_exact_names(world: World) -> None:
    """Strangers make them up."""
    world.mappings |= {"*.a.example": "ours", "shop.example": "ours", "*.b.previews.example": "ours"}
    world.mappings["app.previews.example"] = "ours"
    made_up = [f"{number}.a.example" for number in range(10)]
    assert sum(world.allowed(*made_up)) == 2
    assert world.allowed("shop.example") == [True]
    assert sum(world.allowed(*(f"{number}.b.previews.example" for number in range(10)))) == 3
    assert world.allowed("app.previews.example") == [True]


def test_exact_names_of_the_public_zone_are_limited_by_day_and_week(world: World) -> None:
    """The ACME server issues so many for the zone in a week, and all accounts share them."""
    for account in ("mallory", "alice", "bob", "carol", "dave", "erin"):
        world.mappings |= {f"{account}{number}.previews.example": account for number in range(20)}

    def new_of(account: str) -> int:
        return sum(world.allowed(*(f"{account}{number}.previews.example" for number in range(20))))

    assert new_of("mallory") == 3, "a day"
    world.now += 60
    assert new_of("mallory") == 3, "the same"
    assert new_of("alice") == 3
    world.now += 86_400
    world.restart()
    assert new_of("mallory") == 4, "a quarter of a week's"
    assert [new_of(account) for account in ("alice", "bob", "carol", "dave")] == [4, 3, 3, 2]
    assert new_of("erin") == 0, "all names of the week are used"
    world.now += 604_800
    assert new_of("mallory") == 3


def test_names_that_have_a_certificate_do_not_count(world: World) -> None:
    """After a restart Caddy asks again for every name in use."""
    world.mappings["*.a.example"] = "ours"
    for number in range(4):
        world.issue(f"{number}.a.example")
    assert world.allowed(*(f"{number}.a.example" for number in range(7))) == [True] * 6 + [False]


def test_orders_that_fail_are_limited_by_name_and_by_account(tmp_path: Path) -> None:
    """A name that leads elsewhere: each connection would be an order, which all accounts share."""
    world = World(tmp_path, limits=replace(_LIMITS, other_names_per_day=1000))
    world.mappings |= {"away.example": "mallory", "old.example": "mallory", "shop.example": "alice"}
    assert world.allowed(*["away.example"] * 8) == [True] * 8, "connections at the same time are one order"

    def orders(name: str) -> int:
        found = 0
        for _ in range(50):
            world.now += 6
            found += world.permission.allows(name)
        return found

    assert orders("away.example") == 4
    world.issue("old.example", days=-1)
    assert orders("old.example") == 5, "a certificate that has ended is ordered again"
    world.issue("away.example")
    assert world.allowed(*["away.example"] * 100) == [True] * 100
    many = {f"n{number}.style.test": "mallory" for number in range(400)}
    world.mappings |= many
    assert sum(world.allowed(*many)) < 50, "a quarter of all orders"
    assert world.allowed("shop.example") == [True]


def test_exact_names_of_local_zones_are_not_limited(world: World) -> None:
    """The installation's own CA signs them."""
    world.mappings |= {f"{number}.b.style.dev": "ours" for number in range(300)}
    assert all(world.allowed(*world.mappings))
    world.mappings |= {"*.c.style.dev": "ours"}
    assert sum(world.allowed(*(f"{number}.c.style.dev" for number in range(10)))) == 2


def test_a_damaged_record_is_read_as_far_as_possible(world: World) -> None:
    world.mappings |= {f"{number}.previews.example": "ours" for number in range(9)}
    assert sum(world.allowed("0.previews.example", "1.previews.example")) == 2
    record = world.storage / "record"
    record.write_bytes(record.read_bytes()[:-7] + b"\xff\n[1, 2]\n{}\n")
    world.restart()
    assert sum(world.allowed(*(f"{number}.previews.example" for number in range(2, 9)))) == 2
