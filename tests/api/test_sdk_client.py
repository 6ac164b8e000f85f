"""Settings, models and packaging of the SDK."""

import ast
import subprocess
import sys

import httpx2
import pytest

from stead import Stead
from stead.sdk import errors
from stead.sdk.models import Token, VmInfo
from stead.sdk.parsing import parse
from support import ROOT
from support.scripted_server import Reply, free_port, scripted
from support.sdk_calls import VM

# Client


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEAD_API_KEY", "STEAD_API_URL", "FREESTYLE_API_KEY", "FREESTYLE_API_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.MissingCredentials):
        Stead()
    with pytest.raises(ValueError, match="either"):
        Stead(api_key="a", access_token="b")
    with pytest.raises(ValueError, match="base URL"):
        Stead(api_key="a", base_url="localhost:8600")
    with Stead(api_key="a") as stead:
        assert stead.base_url == "http://127.0.0.1:8600"
    monkeypatch.setenv("FREESTYLE_API_KEY", "theirs")
    monkeypatch.setenv("FREESTYLE_API_URL", "http://theirs/")
    with Stead() as stead:
        assert stead.base_url == "http://theirs"
    monkeypatch.setenv("STEAD_API_KEY", "ours")
    monkeypatch.setenv("STEAD_API_URL", "http://ours")
    with Stead() as stead:
        assert stead.base_url == "http://ours"
        assert stead._connection.settings.headers["Authorization"] == "Bearer ours"


async def test_access_token_replaces_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEAD_API_KEY", "secret")
    with (
        scripted(Reply(content={"accountId": "a", "identityId": "i"})) as server,
        Stead(access_token="stid_x", base_url=f"{server.url}/prefix/") as stead,
    ):
        assert stead.whoami().identity_id == "i"
        assert "stid_x" not in repr(stead) + repr(stead._connection.settings)
    assert server.seen[0].target == "/prefix/auth/v1/whoami"
    assert server.seen[0].headers["x-freestyle-identity-access-token"] == "stid_x"
    assert "authorization" not in server.seen[0].headers


def test_supplied_http_client_is_not_closed() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"accountId": request.url.host})

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        with Stead("key", base_url="https://example.test", http_client=http) as stead:
            assert stead.whoami().account_id == "example.test"
        assert not http.is_closed


def test_loopback_requests_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with scripted(Reply(content={"accountId": "a"})) as server, Stead("key", base_url=server.url) as stead:
        assert stead.whoami().account_id == "a"


def test_unknown_fields_and_values_of_a_newer_server_are_accepted() -> None:
    info = parse(
        VmInfo,
        {
            "id": VM,
            "state": "hibernating",
            "createdAt": "2026-01-31T12:00:00.123456Z",
            "sizing": {"vcpuCount": 4, "novelty": True},
            "cpuTimeSeconds": 3,
            "name": None,
            "colour": "green",
        },
    )
    assert str(info.state) == "hibernating" and info.name is None and info.cpu_time_seconds == 3.0
    assert info.created_at is not None and info.created_at.microsecond == 123456
    assert info.sizing is not None and info.sizing.vcpu_count == 4 and info.sizing.mem_size_mib is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"state": "running"}, "missing required field `id`"),
        ({"id": VM, "state": None}, "Expected `str`, got `null` - at `$.state`"),
        (
            {"id": VM, "state": "running", "persistence": {"type": "sticky", "priority": "high"}},
            "Expected `int | null`, got `str` - at `$.persistence.priority`",
        ),
        ({"id": VM, "state": "running", "createdAt": "today"}, "at `$.createdAt`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_an_invalid_answer_is_an_error_with_the_path_of_the_field(data: object, message: str) -> None:
    with pytest.raises(errors.UnexpectedAnswer) as refused:
        parse(VmInfo, data)
    assert str(refused.value).startswith("the answer is not a valid VmInfo: ") and message in str(
        refused.value
    )


def test_repr_of_a_model_hides_secrets_and_contents() -> None:
    token = parse(Token, {"id": "t", "token": "secret"})
    assert repr(token) == "Token(id='t')" and token.__rich_repr__() == [("id", "t")]
    assert token.token == "secret"


# Package


def test_sync_client_is_up_to_date_with_unasync() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "unasync"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/unasync; stale: {done.stdout}{done.stderr}"


def test_sdk_imports_nothing_else_of_the_package() -> None:
    for path in (ROOT / "src" / "stead" / "sdk").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.partition(".")[0]
                assert name.startswith("stead.sdk") or top in {
                    "httpx2",
                    "msgspec",
                    "websockets",
                    *sys.stdlib_module_names,
                }, f"{path.name} imports {name}"


def test_import_of_stead_does_not_load_the_client() -> None:
    code = "import sys, stead; print('httpx2' in sys.modules); stead.Stead; print('httpx2' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]


def test_all_exported_names_exist() -> None:
    import stead
    from stead import sdk

    assert all(getattr(stead, name) is getattr(sdk, name) for name in stead.__all__)
    assert set(stead.__all__) <= set(sdk.__all__)
    with pytest.raises(AttributeError):
        stead.Nonsense  # type: ignore[attr-defined] # noqa: B018
