"""Settings and sizes: read from the environment, refused in one sentence when wrong."""

from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import InvalidRequest
from stead.limits import Limits
from stead.settings import Settings, Size


def test_the_default_size_is_what_the_docs_promise() -> None:
    assert Settings.from_environment({}).default_size == Size(vcpus=4, memory_mib=8192, disk_gib=20)


def test_settings_are_read_from_the_environment() -> None:
    settings = Settings.from_environment(
        {
            "STEAD_DATA": "/srv/stead",
            "STEAD_DEFAULT_SIZE": "2x1Gx40G",
            "STEAD_POOL": "5",
            "STEAD_ACCELERATOR": "tcg",
            "STEAD_DEADLINE_SCALE": "2.5",
            "STEAD_HOST_CERTIFICATES": "no",
            "STEAD_ALLOW_PRIVATE": "10.1.0.0/16, 192.168.7.0/24",
        }
    )
    assert settings.data == Path("/srv/stead")
    assert settings.default_size == Size(2, 1024, 40)
    assert settings.pool == 5
    assert settings.accelerator == "tcg"
    assert settings.deadline_scale == 2.5
    assert not settings.carry_host_certificates
    assert settings.allowed_private_networks == (IPv4Network("10.1.0.0/16"), IPv4Network("192.168.7.0/24"))
    assert settings.cache_folder == Path("/srv/stead/cache")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("STEAD_ACCELERATOR", "xen", "must be auto, kvm or tcg"),
        ("STEAD_DEADLINE_SCALE", "0.5", "must be a number from 1 to 1000"),
        ("STEAD_DEADLINE_SCALE", "nan", "must be a number from 1 to 1000"),
        ("STEAD_DEADLINE_SCALE", "slow", "must be a number from 1 to 1000"),
        ("STEAD_POOL", "many", "must be an integer of at least 0"),
        ("STEAD_POOL", "-1", "must be an integer of at least 0"),
        ("STEAD_MAX_CALLS", "0", "must be an integer of at least 1"),
        ("STEAD_IDLE_TIMEOUT", "0", "must be `never` or a number of seconds of at least 1"),
        ("STEAD_IDLE_TIMEOUT", "soon", "must be `never` or a number of seconds of at least 1"),
        ("STEAD_DEFAULT_SIZE", "big", "must be VCPUSxMEMORYxDISK"),
        ("STEAD_DEFAULT_SIZE", "3x1Gx20G", "vcpus must be a power of two up to 64, not 3"),
        ("STEAD_HOST_CERTIFICATES", "perhaps", "must be 1, true, yes, on, 0, false, no or off"),
        ("STEAD_ALLOW_PRIVATE", "10.0.0.1/8", "must be networks such as 10.1.0.0/16"),
        ("STEAD_DIAL_PRIVATE", "here", "must be networks such as 10.1.0.0/16"),
        ("STEAD_LISTEN", "8600", "must be HOST:PORT"),
        ("STEAD_LISTEN", "127.0.0.1:65536", "must be HOST:PORT"),
        ("STEAD_LIMIT_VMS", "few", "must be an integer of at least 0"),
    ],
)
def test_an_invalid_variable_is_refused_with_its_name_its_value_and_what_is_allowed(
    name: str, value: str, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Settings.from_environment({name: value})
    assert str(refused.value).startswith(f"invalid {name}={value!r}: ")
    assert allowed in str(refused.value)


def test_an_empty_limit_is_no_limit() -> None:
    assert Settings.from_environment({"STEAD_LIMIT_VMS": "", "STEAD_LIMIT_RUNNING": "3"}).limits == Limits(
        running=3
    )


@pytest.mark.parametrize(
    ("size", "text"), [(Size(), "4x8Gx20G"), (Size(1, 512, 40), "1x512Mx40G"), (Size(2, 1024), "2x1Gx20G")]
)
def test_a_size_is_written_with_the_largest_unit(size: Size, text: str) -> None:
    assert str(size) == text


@given(st.integers(-10, 200), st.integers(0, 1 << 20), st.integers(0, 5000))
def test_a_size_is_valid_or_refused_and_survives_its_own_text(vcpus: int, memory: int, disk: int) -> None:
    try:
        size = Size(vcpus, memory, disk)
    except InvalidRequest:
        return
    assert Size.parse(str(size)) == size
    assert size.vcpus.bit_count() == size.memory_mib.bit_count() == 1


def test_data_folders_give_different_instance_names() -> None:
    assert Settings(data=Path("/a")).instance != Settings(data=Path("/b")).instance
