"""Which names accounts may use: preview zones need no verification, and some names are the installation's."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from stead.domains.errors import InvalidDomain
from stead.domains.hostnames import WILDCARD, base, canonical, canonical_pattern, is_below
from stead.settings import RESERVED_LABELS


@dataclass(frozen=True)
class Names:
    """The preview zones, the first of which is for `vm.url`, and names that no account can have."""

    zones: tuple[str, ...]
    reserved: frozenset[str]

    @classmethod
    def of(
        cls, zones: Iterable[str], reserved: Iterable[str] = (), labels: Iterable[str] = RESERVED_LABELS
    ) -> Self:
        """`reserved` are names; `labels` are reserved directly below each zone."""
        known = tuple(dict.fromkeys(canonical(zone) for zone in zones))
        own = {f"{label}.{zone}" for label in labels for zone in known}
        return cls(known, frozenset({*known, *own, *(canonical(name) for name in reserved)}))

    def zone_of(self, name: str) -> str | None:
        """The preview zone that a name is below; the longest one."""
        return max((zone for zone in self.zones if is_below(name, zone)), key=len, default=None)

    def preview(self, name: str) -> str | None:
        """The name directly below its preview zone, which decides who owns it; None outside the zones.

        All of `b.style.dev` and the names below it belong to one account: pages of a name can set cookies
        for its parents.
        """
        zone = self.zone_of(name)
        if zone is None:
            return None
        return f"{name.removesuffix(zone)[:-1].rpartition('.')[2]}.{zone}"

    def to_verify(self, text: str) -> str:
        """A domain whose ownership can be verified, in canonical form."""
        if text.startswith(WILDCARD):
            parent = text.removeprefix(WILDCARD)
            raise InvalidDomain(text, f"verify {parent[:80]!r} instead: that includes its subdomains")
        name = canonical(text)
        self._check(text, name)
        if (zone := self.zone_of(name)) is not None:
            raise InvalidDomain(text, f"names below {zone} need no verification: map it")
        return name

    def to_map(self, text: str) -> str:
        """A host name or wildcard that can be mapped, in canonical form."""
        name = canonical_pattern(text)
        self._check(text, base(name))
        if name.startswith(WILDCARD) and base(name) in self.zones:
            raise InvalidDomain(text, "a whole preview zone cannot be mapped")
        return name

    def _check(self, text: str, name: str) -> None:
        if name in self.zones:
            raise InvalidDomain(text, f"it is a preview zone: choose a name below it, such as app.{name}")
        owned = self.preview(name) or name
        if name in self.reserved or owned in self.reserved:
            raise InvalidDomain(text, "the name is reserved for the installation: choose another one")
