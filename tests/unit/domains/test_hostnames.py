"""Host names from outside: one canonical form, or refused."""

import re
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stead.domains.errors import InvalidDomain
from stead.domains.hostnames import MAX_LABEL, MAX_NAME, canonical, canonical_pattern, with_parents
from stead.domains.names import Names

CANONICAL = re.compile(
    r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
)
LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True).filter(
    lambda label: not label.startswith("xn--")
)
NAMES = st.lists(LABEL, min_size=1, max_size=5).map(lambda labels: ".".join([*labels, "example", "com"]))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("app.example.com", "app.example.com"),
        ("APP.Example.COM", "app.example.com"),
        ("app.example.com.", "app.example.com"),
        ("1.example.com", "1.example.com"),
        ("r3---sn-x.example.com", "r3---sn-x.example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("bu\u0308cher.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("\uff41\uff50\uff50.example", "app.example"),
        ("a" * MAX_LABEL + ".example", "a" * MAX_LABEL + ".example"),
        (".".join(["a" * 61] * 4) + ".abcd", ".".join(["a" * 61] * 4) + ".abcd"),
    ],
)
def test_names_have_one_canonical_form(typed: str, name: str) -> None:
    assert canonical(typed) == name
    assert canonical_pattern(typed) == name
    assert canonical(name) == name


@pytest.mark.parametrize(
    "typed",
    [
        *("", ".", "..", "localhost", "com", "a..example.com", ".example.com", "example.com.."),
        *("-a.example.com", "a-.example.com", "a_b.example.com", "_x.example.com", "a b.example.com"),
        *("a" * (MAX_LABEL + 1) + ".example.com", ".".join(["a" * 61] * 4) + ".abcdef", "a." * 200 + "com"),
        *("127.0.0.1", "1.2.3", "a.0x7f", "[::1]", "::1", "example.com:80", "https://example.com"),
        *("example.com/path", "user@example.com", "exa\x00mple.com", "exa\nmple.com", "example.com\n"),
        *("xn--.example", "xn--a.example", "xn--bcher-kva8445foa.example", "xn--80ak6aa92e-.com"),
        *("\ud800.example", "a\u200d.example", "\u202eexample.com", "💩.example", "ü" * 2000, "%2e.example"),
        *("*.example.com", "a.*.example.com", "*"),
    ],
)
def test_names_that_are_no_host_names_are_refused(typed: str) -> None:
    with pytest.raises(InvalidDomain) as error:
        canonical(typed)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("typed", ["*.com", "*.", "**.example.com", "*.*.example.com", "a*.example.com"])
def test_only_the_whole_first_label_can_be_a_wildcard(typed: str) -> None:
    assert canonical_pattern("*.Example.com.") == "*.example.com"
    with pytest.raises(InvalidDomain):
        canonical_pattern(typed)


def test_wildcard_name_is_at_most_as_long_as_a_host_name() -> None:
    longest = ".".join(["a" * 61] * 4) + ".abcd"
    assert len(longest) <= MAX_NAME < len(f"*.{longest}")
    with pytest.raises(InvalidDomain):
        canonical_pattern(f"*.{longest}")


@given(name=NAMES, flips=st.lists(st.booleans(), min_size=80, max_size=80), dot=st.booleans())
def test_case_and_trailing_dot_do_not_matter(name: str, flips: list[bool], dot: bool) -> None:
    typed = "".join(
        sign.upper() if flip else sign for sign, flip in zip(name, flips + [False] * 80, strict=False)
    )
    assert canonical(typed + "." * dot) == name


@given(st.text(alphabet=st.characters() | st.sampled_from(string.ascii_letters + ".-*"), max_size=60))
@example("xn--\u0130.com")
def test_any_text_is_canonical_or_refused(text: str) -> None:
    try:
        name = canonical(text)
    except InvalidDomain:
        return
    assert CANONICAL.fullmatch(name), name
    assert canonical(name) == name


def test_parents_end_above_the_top_level() -> None:
    assert with_parents("a.b.example.com") == ["a.b.example.com", "b.example.com", "example.com"]
    assert with_parents("example.com") == ["example.com"]


# Zones

NAMES_HERE = Names.of(["stead.localhost", "style.dev", "pages.style.dev"], ["api.freestyle.sh"])


@pytest.mark.parametrize(
    ("name", "owned"),
    [
        ("app.style.dev", "app.style.dev"),
        ("a.b.app.style.dev", "app.style.dev"),
        ("app.pages.style.dev", "app.pages.style.dev"),
        ("x.app.pages.style.dev", "app.pages.style.dev"),
        ("style.dev", None),
        ("notstyle.dev", None),
        ("app.style.dev.example.com", None),
    ],
)
def test_name_below_a_preview_zone_belongs_to_its_first_label(name: str, owned: str | None) -> None:
    assert NAMES_HERE.preview(name) == owned


@pytest.mark.parametrize(
    "name",
    [
        *("style.dev", "*.style.dev", "STYLE.dev.", "stead.localhost", "git.stead.localhost"),
        *("api.style.dev", "x.git.style.dev", "*.ssh.style.dev", "www.style.dev", "api.freestyle.sh"),
        *("pages.style.dev", "*.pages.style.dev"),
    ],
)
def test_names_of_the_installation_cannot_be_mapped_or_verified(name: str) -> None:
    with pytest.raises(InvalidDomain):
        NAMES_HERE.to_map(name)
    with pytest.raises(InvalidDomain):
        NAMES_HERE.to_verify(name)


def test_preview_names_and_wildcards_are_not_verified() -> None:
    assert NAMES_HERE.to_map("app.style.dev") == "app.style.dev"
    with pytest.raises(InvalidDomain, match="need no verification"):
        NAMES_HERE.to_verify("app.style.dev")
    assert NAMES_HERE.to_map("*.example.com") == "*.example.com"
    with pytest.raises(InvalidDomain, match=r"verify 'example\.com' instead"):
        NAMES_HERE.to_verify("*.example.com")


def test_reserved_labels_are_a_setting() -> None:
    default = Names.of(["style.dev"])
    for label in ("login", "admin", "mail", "autodiscover", "mta-sts", "wpad", "vm-ssh"):
        for name in (f"{label}.style.dev", f"x.{label}.style.dev", f"*.{label}.style.dev"):
            with pytest.raises(InvalidDomain, match="reserved"):
                default.to_map(name)
    assert default.to_map("admin.example.com") == "admin.example.com", "only below preview zones"
    own = Names.of(["style.dev"], labels=["shop"])
    assert own.to_map("admin.style.dev") == "admin.style.dev"
    with pytest.raises(InvalidDomain):
        own.to_map("shop.style.dev")
