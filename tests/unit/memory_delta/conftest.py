"""Processes with the RAM of a VM."""

import os
from collections.abc import Iterator

import pytest

from support.memory_guest import CONTENT, Guest, NewGuest


@pytest.fixture(scope="module")
def template() -> Iterator[int]:
    descriptor = os.memfd_create("template", os.MFD_CLOEXEC)
    os.pwrite(descriptor, CONTENT, 0)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def new_guest(template: int) -> Iterator[NewGuest]:
    guests = []

    def start(template: int | None = template, layout: str = "plain") -> Guest:
        guests.append(Guest(template, layout))
        return guests[-1]

    yield start
    for guest in guests:
        guest.end()


@pytest.fixture
def guest(new_guest: NewGuest) -> Guest:
    return new_guest()
