"""Settings and sizes: read from variables and a file, refused in one sentence when invalid."""

import os
from collections import Counter
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import InvalidRequest
from stead.limits import Limits
from stead.settings import Settings, Size, sources


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The configuration file. There are no variables and no file at first."""
    for name in [name for name in os.environ if name.startswith("STEAD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("stead.settings.CONFIG_FILE", tmp_path / "stead.toml")
    return tmp_path / "stead.toml"


def test_the_default_size_is_what_the_docs_promise() -> None:
    assert Settings.load().default_size == Size(vcpus=4, memory_mib=8192, disk_gib=20)


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEAD_DATA", "/srv/stead")
    monkeypatch.setenv("STEAD_DEFAULT_SIZE", "2x1Gx40G")
    monkeypatch.setenv("STEAD_POOL", "5")
    monkeypatch.setenv("STEAD_IDLE_TIMEOUT", "Never")
    monkeypatch.setenv("STEAD_ACCELERATOR", "tcg")
    monkeypatch.setenv("STEAD_DEADLINE_SCALE", "2.5")
    monkeypatch.setenv("STEAD_HOST_CERTIFICATES", "no")
    monkeypatch.setenv("STEAD_ALLOW_PRIVATE", "10.1.0.0/16, 192.168.7.0/24")
    monkeypatch.setenv("STEAD_ORIGINS", "")
    settings = Settings.load()
    assert settings.data == Path("/srv/stead")
    assert settings.default_size == Size(2, 1024, 40)
    assert settings.pool == 5
    assert settings.accelerator == "tcg"
    assert settings.deadline_scale == 2.5
    assert not settings.host_certificates
    assert settings.allow_private == (IPv4Network("10.1.0.0/16"), IPv4Network("192.168.7.0/24"))
    assert (settings.idle_timeout, settings.origins) == (None, ())
    assert settings.cache_folder == Path("/srv/stead/cache")
    assert sources()["pool"] == "STEAD_POOL"


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
        ("STEAD_LIMIT_VMS", "few", "must be an integer of at least 0, or `unlimited`"),
    ],
)
def test_an_invalid_variable_is_refused_with_its_name_its_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest) as refused:
        Settings.load()
    assert str(refused.value).startswith(f"invalid {name}={value!r}: ")
    assert allowed in str(refused.value)


def test_an_empty_limit_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEAD_LIMIT_VMS", "")
    monkeypatch.setenv("STEAD_LIMIT_RUNNING", "3")
    assert Settings.load().limit == Limits(running=3)


def test_a_variable_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path) -> None:
    file.write_text(
        'pool = 3\ndata = "/srv"\ndefault_size = "2x1Gx40G"\nidle_timeout = "never"\n'
        'origins = ["https://a.example"]\ndial_private = ["fd00::/8"]\n[limit]\nvms = 4\nrunning = 2\n'
    )
    monkeypatch.setenv("STEAD_POOL", "1")
    monkeypatch.setenv("STEAD_LIMIT_RUNNING", "9")
    settings = Settings.load()
    assert (settings.pool, settings.data, settings.idle_timeout) == (1, Path("/srv"), None)
    assert (settings.default_size, settings.origins) == (Size(2, 1024, 40), ("https://a.example",))
    assert settings.dial_private == (IPv6Network("fd00::/8"),)
    assert settings.limit == Limits(vms=4, running=9)
    assert (sources()["pool"], sources()["data"]) == ("STEAD_POOL", str(file))
    monkeypatch.setenv("STEAD_CONFIG", str(tmp_path / "other.toml"))
    with pytest.raises(InvalidRequest, match=r"STEAD_CONFIG=.*other\.toml not found: create it or unset"):
        Settings.load()
    (tmp_path / "other.toml").write_text("pool = 0\n[limit]\nrunning = 1\n")
    assert Settings.load().data == Path("/var/lib/stead")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pol = 3", "unknown setting pol = 3 in {file}: did you mean `pool`?"),
        ("[limit]\nvm = 3", "unknown setting limit.vm = 3 in {file}: did you mean `vms`?"),
        ("pool = -1", "invalid pool = -1 in {file}: must be an integer of at least 0"),
        ("pool = [1]", "invalid pool = [1] in {file}: must be an integer of at least 0"),
        (
            "[limit]\nvms = 1.5",
            "invalid limit.vms = 1.5 in {file}: must be an integer of at least 0, or `unlimited`",
        ),
        ("pool = ", "the configuration file {file} is not valid TOML: Invalid value (at end of document)"),
        ("deadline_scale = 0", "invalid deadline_scale = 0 in {file}: must be a number from 1 to 1000"),
    ],
)
def test_an_invalid_file_is_refused_with_the_key_and_what_is_allowed(
    file: Path, text: str, message: str
) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        Settings.load()
    assert str(refused.value) == message.format(file=file)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("place", ["file", "folder", "owner"])
def test_root_refuses_a_file_that_others_can_write(file: Path, place: str) -> None:
    file.write_text("pool = 3")
    assert Settings.load().pool == 3
    if place == "owner":
        os.chown(file, 12345, -1)
    else:
        (file if place == "file" else file.parent).chmod(0o777)
    with pytest.raises(InvalidRequest, match=r"users other than root can write .* Run `chown root"):
        Settings.load()


def test_a_changed_copy_is_validated() -> None:
    assert Settings().replace(pool=0).pool == 0
    with pytest.raises(InvalidRequest, match="invalid listen='8600': must be HOST:PORT"):
        Settings().replace(listen="8600")
    with pytest.raises(InvalidRequest, match="unknown setting lissten='x': did you mean `listen`"):
        Settings().replace(lissten="x")


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


@pytest.mark.parametrize("instance", ["000000", "000bb7", "abcdef"])
def test_no_two_programs_have_the_same_linux_user(instance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in an installation, nor in the one with the next number on the same host."""
    users = Counter[int]()
    for number in (0, 1):
        monkeypatch.setattr(Settings, "_number", int(instance, 16) % 3000 + number)
        settings = Settings(data=Path("/data"))
        users.update([settings.edge_uid, settings.resolver_uid, settings.disk_uid, settings.ssh_uid])
        users.update([settings.git_uids[0], settings.git_uids[-1]])
        users.update(
            [settings.uid(0), settings.uid(65535), settings.tunnel_uid(0), settings.tunnel_uid(9999)]
        )
        spans = [
            range(settings.uid(0), settings.uid(65536)),
            settings.git_uids,
            range(settings.tunnel_uid(0), settings.tunnel_uid(10_000)),
        ]
        for span in spans:
            others = [user for user in users if user in span]
            assert sorted(others) == [span[0], span[-1]], "the ends of the range alone"
    assert max(users.values()) == 1
    assert min(users) > 100_000 and max(users) < 2**31
