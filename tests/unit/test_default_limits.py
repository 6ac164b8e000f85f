"""Default limits of accounts: they fit the host, and one account may use nearly all of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.limits import UNLIMITED, HostResources, Limits
from stead.settings import Settings, Size

hosts = st.builds(
    HostResources,
    cpus=st.integers(1, 256),
    memory_mib=st.integers(512, 4 << 20),
    disk_gib=st.integers(1, 1 << 20),
)
sizes = st.builds(
    Size,
    st.sampled_from([1, 2, 4, 64]),
    st.sampled_from([512, 1024, 8192, 65536]),
    st.integers(20, 200),
)


@given(hosts, sizes)
def test_an_account_may_have_vms_of_the_default_size_and_has_every_limit(
    host: HostResources, size: Size
) -> None:
    limits = Settings(default_size=size).account_limits(host)
    assert None not in vars(limits).values()
    assert limits.vcpus is not None and limits.vcpus >= size.vcpus
    assert limits.memory_gib is not None and limits.memory_gib * 1024 >= size.memory_mib
    assert limits.disk_gib is not None and limits.disk_gib >= size.disk_gib
    assert limits.total_memory_gib is not None and limits.total_memory_gib * 1024 >= 2 * size.memory_mib
    assert limits.total_disk_gib is not None and limits.total_disk_gib >= 2 * size.disk_gib


@given(hosts)
def test_one_account_cannot_take_all_that_a_host_may_promise(host: HostResources) -> None:
    settings = Settings(default_size=Size(1, 512, 20))
    limits = settings.account_limits(host)
    promised = max(int(host.disk_gib * settings.disk_overcommit), 10 * 20)
    assert limits.total_disk_gib is not None and limits.total_disk_gib < promised


def test_settings_override_the_defaults_and_may_remove_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostResources(cpus=4, memory_mib=16384, disk_gib=100)
    monkeypatch.setenv("STEAD_LIMIT_VMS", "3")
    monkeypatch.setenv("STEAD_LIMIT_RUNNING", "")
    monkeypatch.setenv("STEAD_LIMIT_SNAPSHOTS", "unlimited")
    settings = Settings.load()
    limits = settings.account_limits(host)
    assert (limits.vms, limits.running, limits.snapshots) == (3, None, None)
    assert limits.vcpus == 16 and limits.disk_gib == 100
    # Changed settings keep what was not set.
    assert settings.replace(pool=0).account_limits(host) == limits


def test_limits_of_a_program_are_complete() -> None:
    host = HostResources(cpus=4, memory_mib=16384, disk_gib=100)
    assert Settings(limit=Limits(vms=3)).account_limits(host) == Limits(vms=3)
    assert Settings(limit=UNLIMITED).account_limits(host) == UNLIMITED
