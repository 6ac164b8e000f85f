"""Every method of the SDK with odd arguments: a result, an exception of the SDK, or a TypeError that names
the argument. The server answers anything."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stead import AsyncStead, Stead
from stead.sdk import errors
from stead.sdk.models import ProcessInfo
from support.any_server import SNAPSHOT, UUID, VM, any_server
from support.odd_values import odd_value

SEED = 20_262
EMPTY = {"vms": [], "repositories": [], "snapshots": [], "identities": [], "vpcs": [], "total": 0}
GOOD: tuple[Any, ...] = (VM, SNAPSHOT, UUID, "name", "file", 80, 1.5, True, None, b"data", ["ls"], {"a": "b"})
NOT_CALLED = {
    "close": "ends the client",
    "aclose": "ends the client",
    "forward": "returns a listener that is not started",
}
OWN = (errors.SteadException, OSError)
"""OSError is for local files: of a path to upload from, for example."""


def objects(stead: Any) -> list[Any]:
    """The client and everything that is reached from it: collections, handles, and their parts."""
    found = [stead, *_parts(stead)]
    vm = stead.vms.ref(VM)
    process = vm.processes._handle(ProcessInfo("job"), None)
    for handle in (vm, process, stead.git.repos.ref(UUID), stead.identities.ref(UUID)):
        found += [handle, *_parts(handle)]
    return found


def _parts(owner: Any) -> Iterator[Any]:
    for name in dir(owner):
        if name.startswith("_"):
            continue
        part = getattr(owner, name)
        if type(part).__module__.startswith("stead.sdk._") and not inspect.isroutine(part):
            yield part
            yield from _parts(part)


def methods(owner: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, member in inspect.getmembers(owner, inspect.ismethod):
        if not name.startswith("_") and name not in NOT_CALLED:
            yield f"{type(owner).__name__}.{name}", member


def arguments(method: Callable[..., Any], random: Random) -> tuple[list[Any], dict[str, Any]]:
    good = random.choice((0.0, 0.7, 0.95))
    args, kwargs = list[Any](), dict[str, Any]()
    for name, each in inspect.signature(method).parameters.items():
        value = random.choice(GOOD) if random.random() < good else odd_value(random)
        if name in ("interval", "timeout", "wait_for_ready_signal") and random.random() < 0.7:
            continue
        if each.kind is each.VAR_KEYWORD:
            options = ("cwd", "env", "stdin", "timeout", "user", "on_data")
            kwargs |= {random.choice(options): value} if random.random() < 0.5 else {}
        elif each.default is each.empty and each.kind is not each.KEYWORD_ONLY:
            args.append(value)
        elif each.default is each.empty or random.random() < 0.4:
            kwargs[name] = value
    return args, kwargs


def check(call: str, method: Callable[..., Any], error: BaseException) -> None:
    if isinstance(error, OWN):
        return
    names = [*inspect.signature(method).parameters, "cwd", "env", "stdin", "timeout", "user", "on_data"]
    named = [*(f"{name} must be" for name in names), "cannot be sent as JSON", "unexpected keyword argument"]
    assert isinstance(error, TypeError) and any(each in str(error) for each in named), (call, repr(error))


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    monkeypatch.setattr("stead.sdk.blocking.time.sleep", lambda seconds: None)
    with any_server() as url:
        yield url


def run_many(url: str, seed: int, rounds: int) -> None:
    random = Random(seed)
    with Stead("key", base_url=url, max_retries=0) as stead:
        known = [each for owner in objects(stead) for each in methods(owner)]
        assert len(known) > 120
        for _ in range(rounds):
            for name, method in known:
                args, kwargs = arguments(method, random)
                call = f"{name}(*{str(args)[:200]}, **{str(kwargs)[:200]})"
                try:
                    finish(method(*args, **kwargs))
                except Exception as error:
                    check(call, method, error)


def finish(result: Any) -> None:
    """Take the first event of a stream, and close what can be closed."""
    if hasattr(result, "__next__"):
        next(result, None)
    if hasattr(result, "close"):
        result.close()


def test_odd_arguments_of_every_method_are_named_errors(url: str) -> None:
    run_many(url, SEED, rounds=3)


@pytest.mark.slow
def test_odd_arguments_of_every_method_are_named_errors_in_many_rounds(url: str) -> None:
    run_many(url, SEED + 1, rounds=200)


async def test_both_clients_check_arguments_alike(url: str) -> None:
    """The fuzz calls the synchronous client, which is generated from the other one."""
    async with AsyncStead("key", base_url=url, max_retries=0) as stead:
        with Stead("key", base_url=url) as other:
            names = {name.removeprefix("Async") for owner in objects(stead) for name, _ in methods(owner)}
            assert names == {name for owner in objects(other) for name, _ in methods(owner)}
        vm = stead.vms.ref(VM)
        with pytest.raises(TypeError, match="command must be str or a sequence of str, not int"):
            await vm.exec(42)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="text must be str, not bytes"):
            await vm.fs.write_text("/x", b"bytes")  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument, match=r"timeout must be .* above 0, not 0"):
            await vm.exec("true", timeout=0)
    with pytest.raises(errors.ClientClosed):
        await vm.info()
    with pytest.raises(errors.ClientClosed):
        await vm.pty.open()


@pytest.mark.parametrize("reference", ["", ".", "..", "\0", "\udcff", "\n"])
def test_odd_references_are_the_not_found_error_of_their_noun(reference: str) -> None:
    """They returned a handle, whose first request failed with an error that was none of the SDK."""
    with any_server(EMPTY) as url, Stead("key", base_url=url, max_retries=0) as stead:
        for find, expected in (
            (stead.vms.find, errors.VmNotFound),
            (stead.git.repos.find, errors.RepoNotFound),
            (stead.vms.snapshots.find, errors.SnapshotNotFound),
            (stead.identities.find, errors.IdentityNotFound),
            (stead.vpcs.get, errors.NotFound),
        ):
            with pytest.raises(expected):
                find(reference)
