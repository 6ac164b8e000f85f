"""Which names may have certificates."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stead.edge.certificates import CertificatePermission, issued_in


@dataclass(frozen=True)
class Mapped:
    domain: str
    account: str
    machine: str = "vm"
    port: int = 80


@dataclass
class World:
    storage: Path
    now: float = 0.0
    mappings: dict[str, str] = field(default_factory=dict)
    """Accounts by mapped name."""

    def __post_init__(self) -> None:
        self.permission = CertificatePermission(self, issued_in(self.storage), 2, lambda: self.now)

    def route(self, hostname: str) -> Mapped | None:
        for domain in (hostname, f"*.{hostname.partition('.')[2]}"):
            if domain in self.mappings:
                return Mapped(domain, self.mappings[domain])
        return None

    def allowed(self, *names: str) -> list[bool]:
        return [self.permission.allows(name) for name in names]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_only_mapped_names_are_allowed(world: World) -> None:
    world.mappings["app.example.com"] = "ours"
    assert world.allowed("app.example.com", "APP.example.com.") == [True, True]
    assert world.allowed("example.com", "a.app.example.com", "", "../app.example.com", "*") == [False] * 5


def test_new_names_of_an_accounts_wildcards_are_limited_by_day(world: World) -> None:
    world.mappings |= {"*.a.example": "ours", "*.b.example": "ours", "*.c.example": "theirs"}
    assert world.allowed("1.a.example", "1.b.example") == [True, True]
    assert world.allowed("2.a.example", "2.b.example") == [False, False]
    assert world.allowed("1.a.example", "1.b.example") == [True, True], "a name counts once"
    assert world.allowed("1.c.example") == [True], "accounts have shares of their own"
    world.mappings |= {f"{number}.x.example": "ours" for number in range(5)}
    assert world.allowed(*(f"{number}.x.example" for number in range(5))) == [True] * 5
    world.now = 86_399
    assert world.allowed("2.a.example") == [False]
    world.now = 86_400
    assert world.allowed("2.a.example", "3.a.example", "4.a.example") == [True, True, False]


def test_names_that_have_a_certificate_do_not_count(world: World) -> None:
    """After a restart Caddy asks again for every name in use."""
    world.mappings["*.a.example"] = "ours"
    for number in range(4):
        name = f"{number}.a.example"
        (world.storage / "certificates" / "acme" / name).mkdir(parents=True)
        (world.storage / "certificates" / "acme" / name / f"{name}.crt").touch()
    assert world.allowed(*(f"{number}.a.example" for number in range(7))) == [True] * 6 + [False]
