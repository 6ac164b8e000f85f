"""The tests of the client: they need neither a server nor its libraries, and no conftest.py."""

from support import ROOT

PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
_FILES = ("tests/api/test_sdk_*.py", "tests/api/test_cli_errors.py", "tests/unit/test_sdk_archives.py")
_LIVE = "test_sdk_live.py"
"""It needs VMs."""
_OF_THE_CHECKOUT = "tests/api/test_sdk_client.py::test_sync_client_is_up_to_date_with_unasync"
"""It runs ruff on the sources."""
ARGUMENTS = (
    *("--noconftest", "-q", "-p", "support.sdk_clients", "-p", "no:cacheprovider"),
    *("--deselect", _OF_THE_CHECKOUT),
)
ENVIRONMENT = {"CI": "1"}
"""Hypothesis sets no deadlines then."""


def client_tests() -> list[str]:
    """Paths in the checkout."""
    found = [path for pattern in _FILES for path in sorted(ROOT.glob(pattern)) if path.name != _LIVE]
    return [str(path.relative_to(ROOT)) for path in found]
