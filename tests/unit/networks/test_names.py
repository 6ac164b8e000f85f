"""Names of VMs in VPCs: how a name becomes a label."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stead.networks.names import label_of, names_of


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("db", "db"),
        ("DB", "db"),
        ("my db", "my-db"),
        ("my_db", "my-db"),
        ("my--db", "my-db"),
        (" -db.prod- ", "db-prod"),
        ("Bücher №5", "bucher-no5"),
        ("\uff24\uff22", "db"),
        ("日本 db", "db"),
        ("日本", None),
        ("--", None),
        ("x" * 200, "x" * 63),
        ("x" * 62 + " y", "x" * 62),
        ("10.0.0.1", "10-0-0-1"),
    ],
)
def test_label_of_a_name(name: str, label: str | None) -> None:
    assert label_of(name) == label


@settings(deadline=None)
@given(st.text(max_size=200))
def test_every_label_is_one_of_a_host_name(name: str) -> None:
    label = label_of(name)
    if label is not None:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", label) and len(label) <= 63
        assert label_of(label) == label == label_of(label.upper())


def test_names_of_a_vm() -> None:
    assert names_of("q1", "My DB") == ("my-db.internal", "q1.internal")
    assert names_of("q1", None) == names_of("q1", "日本") == ("q1.internal",)
