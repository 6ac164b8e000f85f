"""Settings and sizes: read from the environment, refused in one sentence when wrong."""

from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import InvalidRequest
from stead.settings import Settings, Size


def test_the_default_size_is_what_the_docs_promise() -> None:
    assert Settings.from_environment({}).default_size == Size(vcpus=4, memory_mib=8192, disk_gib=20)


def test_everything_can_be_set_by_the_environment() -> None:
    settings = Settings.from_environment(
        {
            "STEAD_DATA": "/srv/stead",
            "STEAD_DEFAULT_SIZE": "2x1Gx40G",
            "STEAD_POOL": "5",
            "STEAD_ACCELERATOR": "tcg",
            "STEAD_HOST_CERTIFICATES": "no",
            "STEAD_ALLOW_PRIVATE": "10.1.0.0/16, 192.168.7.0/24",
        }
    )
    assert settings.data == Path("/srv/stead")
    assert settings.default_size == Size(2, 1024, 40)
    assert settings.pool == 5
    assert settings.accelerator == "tcg"
    assert not settings.carry_host_certificates
    assert settings.allowed_private_networks == (IPv4Network("10.1.0.0/16"), IPv4Network("192.168.7.0/24"))
    assert settings.cache_folder == Path("/srv/stead/cache")


@pytest.mark.parametrize(
    "environment",
    [
        {"STEAD_ACCELERATOR": "xen"},
        {"STEAD_POOL": "many"},
        {"STEAD_DEFAULT_SIZE": "big"},
        {"STEAD_HOST_CERTIFICATES": "perhaps"},
        {"STEAD_ALLOW_PRIVATE": "10.0.0.1/8"},
    ],
)
def test_a_wrong_setting_is_refused_in_words(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        Settings.from_environment(environment)


@given(st.integers(-10, 200), st.integers(0, 1 << 20), st.integers(0, 5000))
def test_a_size_is_valid_or_refused_and_survives_its_own_text(vcpus: int, memory: int, disk: int) -> None:
    try:
        size = Size(vcpus, memory, disk)
    except InvalidRequest:
        return
    assert Size.parse(str(size)) == size
    assert size.vcpus.bit_count() == size.memory_mib.bit_count() == 1


def test_two_data_folders_are_two_installations() -> None:
    assert Settings(data=Path("/a")).instance != Settings(data=Path("/b")).instance
