"""Host names from outside in their one canonical form: lower case, ASCII (A-labels), no dot at the end."""

import re

import idna

from stead.domains.errors import InvalidDomain

MAX_NAME = 253
MAX_LABEL = 63
_MAX_TYPED = 1000
"""Characters of a name before its conversion to ASCII."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
WILDCARD = "*."


def canonical(text: str) -> str:
    """A host name of two or more labels in canonical form. Raises `InvalidDomain`."""
    name = text[:-1] if text.endswith(".") else text
    if not name or len(name) > _MAX_TYPED:
        raise InvalidDomain(text, f"must have 1 to {MAX_NAME} characters")
    name = name.lower() if name.isascii() else _to_ascii(text, name)
    if len(name) > MAX_NAME:
        raise InvalidDomain(text, f"must have 1 to {MAX_NAME} characters, not {len(name)}")
    labels = name.split(".")
    for label in labels:
        _check_label(text, label)
    if len(labels) < 2:
        raise InvalidDomain(text, "must have at least two labels, such as app.example.com")
    if _NUMBER.fullmatch(labels[-1]):
        raise InvalidDomain(text, "the last label cannot be a number: IP addresses are not domains")
    return name


def canonical_pattern(text: str) -> str:
    """A host name, or `*.` before one: every name that is one label longer."""
    if not text.startswith(WILDCARD):
        return canonical(text)
    name = WILDCARD + canonical(text.removeprefix(WILDCARD))
    if len(name) > MAX_NAME:
        raise InvalidDomain(text, f"must have 1 to {MAX_NAME} characters, not {len(name)}")
    return name


def base(pattern: str) -> str:
    """The name that decides who owns a pattern: that of `*.example.com` is `example.com`."""
    return pattern.removeprefix(WILDCARD)


def with_parents(name: str) -> list[str]:
    """A name and its parent domains of two or more labels, longest first."""
    labels = name.split(".")
    return [".".join(labels[start:]) for start in range(max(1, len(labels) - 1))]


def is_below(name: str, zone: str) -> bool:
    return name.endswith(f".{zone}")


def _check_label(text: str, label: str) -> None:
    if not label:
        raise InvalidDomain(text, "empty label: two dots in a row, or one at the start")
    if len(label) > MAX_LABEL:
        raise InvalidDomain(text, f"a label has {len(label)} characters (max {MAX_LABEL})")
    if not _LABEL.fullmatch(label):
        raise InvalidDomain(
            text, f"label {label!r} must have only a-z, 0-9 and -, and no - at its start or end"
        )
    if label.startswith("xn--"):
        _check_punycode(text, label)


def _to_ascii(text: str, name: str) -> str:
    """IDNA 2008 with the mapping of UTS 46: upper case, full width and ideographic dots are folded."""
    try:
        found = idna.encode(name, uts46=True, std3_rules=True).decode()
    except (idna.IDNAError, UnicodeError) as error:
        raise InvalidDomain(text, f"not an internationalized domain name: {error}") from None
    return found.removesuffix(".")


def _check_punycode(text: str, label: str) -> None:
    """Refuse labels that are not the encoding of a valid one: two spellings could look the same."""
    try:
        if idna.alabel(idna.ulabel(label)).decode() == label:
            return
    except (idna.IDNAError, UnicodeError):
        pass
    raise InvalidDomain(text, f"label {label!r} is not valid Punycode")
