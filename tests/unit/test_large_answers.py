"""Large answers: their JSON, made in pieces, is that of the whole; the memory that calls reserve for them."""

import asyncio
import binascii
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from stead.api import answer_memory, large_answers
from stead.api.admission import Admission
from stead.api.answer_memory import AnswerMemory, AnswerReservation
from stead.api.calls import Call
from stead.api.errors import ApiError
from stead.api.large_answers import (
    Base64,
    Items,
    LongValue,
    Members,
    Objects,
    Serialized,
    Text,
    large_answer,
    large_object,
)
from stead.api.repo_answers import FolderEntries
from stead.api.wire import Wire
from stead.guest.execution import ExecRequest, collect
from stead.repos.contents import Listing, RepoFolder
from stead.shares import MemoryReservation
from support.hostile_agent import chunks, frame, hostile

MIB = 1 << 20


class Pair(Wire):
    some_name: str
    other: int | None = None


class PairList(Wire):
    pairs: list[Pair]
    total_count: int


def made(value: LongValue) -> Any:
    return json.loads(b"".join(value.pieces()))


@pytest.fixture
def small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_answers, "_TEXT_STEP", 3)
        patch.setattr(large_answers, "_BATCH", 2)
        yield


class TestJson:
    @given(st.binary() | st.text().map(lambda text: text.encode(errors="surrogatepass")))
    def test_text_and_base64_are_those_of_all_bytes(self, data: bytes) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(large_answers, "_TEXT_STEP", 3)
            expected = json.dumps(data.decode(errors="replace"), ensure_ascii=False).encode()
            assert b"".join(Text(data).pieces()) == expected
            assert made(Base64(data)) == binascii.b2a_base64(data, newline=False).decode()

    @pytest.mark.parametrize("count", range(6))
    def test_lists_and_objects_are_those_of_all_models(self, small_steps: None, count: int) -> None:
        pairs = [Pair(some_name=str(number)) for number in range(count)]
        wire = [{"someName": str(number), "other": None} for number in range(count)]
        assert made(Items(Pair, count, lambda: iter(pairs))) == wire
        short = [{"someName": str(number)} for number in range(count)]
        assert made(Items(Pair, count, lambda: iter(pairs), exclude_none=True)) == short
        members = Members(Pair, count, lambda: ((pair.some_name, pair) for pair in pairs))
        assert made(members) == {str(number): each for number, each in enumerate(wire)}
        assert (
            made(Objects([{"a": 1, "pairs": Items(Pair, count, lambda: pairs), "b": 2}] * count))
            == [{"a": 1, "pairs": wire, "b": 2}] * count
        )
        texts = [json.dumps(each).encode() for each in wire]
        assert made(Serialized(texts)) == wire

    @given(st.lists(st.sampled_from(["a", "b", "long"]), unique=True))
    def test_fields_keep_their_order(self, long: list[str]) -> None:
        fields: dict[str, object] = {"a": 1, "b": None, "long": ["x"]}
        pieces = {name: Serialized([json.dumps(name).encode()]) for name in long}
        found = json.loads(b"".join(large_answers._serialized({**fields, **pieces})))
        assert list(found) == list(fields)
        assert found == {**fields, **{name: [name] for name in long}}

    def test_an_object_without_fields_is_empty(self) -> None:
        assert b"".join(large_answers._serialized({})) == b"{}"


def nested(folder: RepoFolder) -> list[dict[str, Any]]:
    """The entries of a folder, each in that of its parent."""
    top: list[dict[str, Any]] = []
    places = {folder.path: top}
    for entry in folder.entries:
        found: dict[str, Any] = {"type": "dir", "name": entry.name, "path": entry.path, "sha": entry.sha}
        if entry.kind != "tree":
            found |= {"type": "file", "size": entry.size or 0}
        elif folder.recursive:
            places[entry.path] = found["entries"] = []
        places[entry.path.rpartition("/")[0]].append(found)
    return top


_trees = st.recursive(
    st.none(), lambda inner: st.dictionaries(st.sampled_from(["a", "b c", 'q"', "ü"]), inner, max_size=3)
)


def printed(tree: dict[str, Any], below: str = "") -> bytes:
    """As `git ls-tree -r -t -z -l` prints it."""
    lines = b""
    for name, inner in tree.items():
        kind = b"040000 tree %040x       -" if isinstance(inner, dict) else b"100644 blob %040x      12"
        lines += kind % len(lines) + f"\t{below}{name}\0".encode()
        lines += printed(inner, f"{below}{name}/") if isinstance(inner, dict) else b""
    return lines


@given(_trees.filter(lambda tree: isinstance(tree, dict)), st.sampled_from(["", "top", "top/inner"]))
def test_a_recursive_listing_has_entries_in_their_folders(tree: dict[str, Any], path: str) -> None:
    folder = RepoFolder(path, "0" * 40, Listing(printed(tree), path), recursive=True)
    assert made(FolderEntries(folder)) == nested(folder)
    has_folders = any(isinstance(inner, dict) for inner in tree.values())
    assert folder.entries.has_folders == has_folders
    folders = printed({name: {} for name in tree})
    flat = RepoFolder(path, "0" * 40, Listing(folders, path), recursive=False)
    assert made(FolderEntries(flat)) == nested(flat)


# Responses


@pytest.fixture
def memory() -> AnswerMemory:
    return AnswerMemory(8 * MIB, 4 * MIB)


@pytest.fixture
async def call(memory: AnswerMemory) -> Call:
    scope = {"type": "http", "headers": [], "path": "/", "client": ("192.0.2.1", 1)}
    return Call(scope, Admission(10, 100, 100), memory, [])


async def sent(response: Callable[..., Any]) -> tuple[dict[bytes, bytes], list[bytes]]:
    """The headers and the pieces of an answer."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    return dict(messages[0]["headers"]), [each["body"] for each in messages[1:] if each["body"]]


async def test_a_small_answer_reserves_nothing(call: Call, memory: AnswerMemory) -> None:
    pairs = [Pair(some_name="a")] * 200
    model = PairList(pairs=[], total_count=7)
    headers, pieces = await sent(
        await large_answer(call, model, {"pairs": Items(Pair, len(pairs), lambda: pairs)})
    )
    whole = PairList(pairs=pairs, total_count=7).model_dump_json(by_alias=True).encode()
    assert pieces == [whole] and headers[b"content-length"] == b"%d" % len(whole)
    assert memory.bytes.used == 0


async def test_a_large_answer_is_sent_in_pieces(call: Call, memory: AnswerMemory) -> None:
    pairs = [Pair(some_name="a" * 1000)] * 5000
    model = PairList(pairs=[], total_count=7)
    headers, pieces = await sent(
        await large_answer(call, model, {"pairs": Items(Pair, len(pairs), lambda: pairs)})
    )
    assert b"content-length" not in headers
    assert len(pieces) > 10 and max(map(len, pieces)) < 1.2 * MIB
    assert b"".join(pieces) == PairList(pairs=pairs, total_count=7).model_dump_json(by_alias=True).encode()
    assert memory.bytes.used == MIB
    call.release()
    assert memory.bytes.used == 0


async def test_an_error_before_the_first_piece_is_an_answer(call: Call) -> None:
    def models() -> Iterable[Pair]:
        raise ApiError("INTERNAL", "cannot read")

    with pytest.raises(ApiError, match="cannot read"):
        await large_object(call, {"pairs": Items(Pair, 1000, models)})


# Memory


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_memory, "_ATTEMPT", 0.01)


async def test_an_account_reserves_up_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_memory, "_MAX_WAIT", 0.01)
    memory = AnswerMemory(8 * MIB, 4 * MIB)
    first, second, other = (AnswerReservation(memory) for _ in range(3))
    await first.reserve("a", 3 * MIB)
    with pytest.raises(ApiError) as error:
        await second.reserve("a", 2 * MIB)
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "1"})
    await other.reserve("b", 4 * MIB)
    first.release()
    await second.reserve("a", 2 * MIB)
    for each in (first, second, other):
        each.release()
    assert memory.bytes.used == 0


async def test_one_command_of_an_account_collects_beyond_its_share(memory: AnswerMemory, quick: None) -> None:
    """Otherwise four of them that have a MiB each would wait for each other."""
    commands = [AnswerReservation(memory) for _ in range(4)]
    for each in commands:
        assert await each.reserve_output("a", MIB)
    assert [await each.reserve_output("a", MIB) for each in commands] == [True, False, False, False]
    assert await commands[0].reserve_output("a", MIB)
    other = AnswerReservation(memory)
    assert await other.reserve_output("b", MIB)
    waiting = asyncio.create_task(commands[1].reserve_output("a", MIB))
    await asyncio.sleep(0)
    commands[0].release()
    assert await waiting
    for each in (*commands, other):
        each.release()
    assert (memory.bytes.used, memory.beyond_shares.used) == (0, 0)


async def test_memory_is_reserved_in_steps_while_data_is_collected() -> None:
    reserved: list[int] = []

    async def reserve(amount: int) -> bool:
        reserved.append(amount)
        return True

    memory = MemoryReservation(reserve)
    for _ in range(64):
        assert await memory.add(1024)
    assert reserved == []
    assert await memory.add(1)
    assert await memory.add(3 * MIB)
    assert reserved == [MIB, 2 * MIB + 1]


STARTED, ENDED = frame(0, b'{"id": "one", "pid": 1}'), frame(3, b'{"exit_code": 3, "duration_us": 5}')


async def test_a_command_is_read_no_further_while_its_output_waits_for_memory() -> None:
    printed, asked, granted = 0, asyncio.Event(), asyncio.Event()

    def body() -> Iterator[bytes]:
        nonlocal printed
        yield STARTED
        while printed < 512:
            printed += 1
            yield frame(1, b"x" * 65536)
        yield ENDED

    async def reserve(_: int) -> bool:
        asked.set()
        await granted.wait()
        return True

    async with hostile(lambda: chunks(body())) as agent:
        running = asyncio.create_task(collect(agent, ExecRequest("true"), 64 * MIB, reserve))
        await asked.wait()
        before = -1
        while before != printed:
            before = printed
            await asyncio.sleep(0.5)
        assert not running.done() and 0 < printed < 400
        granted.set()
        result = await running
    assert (len(result.stdout), result.stdout_truncated, result.exit_code) == (32 * MIB, False, 3)


async def test_output_without_memory_is_dropped_and_the_command_ends() -> None:
    left = 2

    async def reserve(_: int) -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    body = [STARTED, *[frame(1, b"x" * 65536)] * 64, frame(2, b"late"), ENDED]
    async with hostile(lambda: chunks(body)) as agent:
        result = await collect(agent, ExecRequest("true"), reserve=reserve)
    assert 2 * MIB <= len(result.stdout) <= 2 * MIB + 65536
    assert (result.stdout_truncated, result.stderr, result.stderr_truncated) == (True, b"", True)
    assert result.exit_code == 3
