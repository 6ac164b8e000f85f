"""Identities that a command creates for its own use."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stead.cli.output import note
from stead.cli.signals import ignore_repeated_signals

if TYPE_CHECKING:
    from stead.sdk import Identity, Stead


@contextlib.contextmanager
def temporary_identity(stead: "Stead", name: str) -> "Iterator[Identity]":
    """An identity for the length of a block."""
    identity = stead.identities.create(name=name)
    try:
        yield identity
    finally:
        delete_identity(identity)


def delete_identity(identity: "Identity") -> None:
    try:
        with ignore_repeated_signals():
            identity.delete()
    except BaseException:
        note(f"identity {identity.id} was not deleted: run `stead identity delete {identity.id}`")
        raise
