"""Paging through the logbook and a guest's journal at once, without VMs."""

import base64
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.api.log_pages import MAX_TOKEN, PageToken, Source, merge
from stead.guest.systemd_journal import JournalQuery, is_cursor, parse


@dataclass(frozen=True)
class Row:
    at: int
    id: int


@dataclass(frozen=True)
class Line:
    micros: int
    cursor: str


def lines_of(times: list[int]) -> list[Line]:
    return [Line(at, f"s=1;i={number:x}") for number, at in enumerate(times)]


def read_page(
    rows: list[Row], lines: list[Line], position: PageToken, limit: int, chunk: int
) -> tuple[list[Row | Line], PageToken | None]:
    """One page as the route makes it; the journal hands out at most `chunk` lines at a time."""
    found = [row for row in rows if position.logbook is None or (row.at, row.id) > position.logbook]
    first = found[: limit + 1]
    start = 0 if position.journal is None else int(position.journal.split("i=")[1], 16) + 1
    wanted = min(limit + 1, chunk)
    second = lines[start : start + wanted]
    page = merge(
        Source(first, lambda row: row.at, complete=len(first) <= limit),
        Source(second, lambda line: line.micros, complete=not second or len(second) < wanted),
        limit,
    )
    if not page.more:
        return list(page.order), None
    last = first[page.first - 1] if page.first else None
    token = PageToken(
        position.since,
        position.until,
        position.logbook if last is None else (last.at, last.id),
        second[page.second - 1].cursor if page.second else position.journal,
    )
    return list(page.order), PageToken.decode(token.encode())


times = st.lists(st.integers(0, 30), max_size=40)


@given(rows=times, lines=times, limit=st.integers(1, 12), chunk=st.integers(1, 20), stepped=st.booleans())
def test_pages_hold_every_line_once_in_order(
    rows: list[int], lines: list[int], limit: int, chunk: int, stepped: bool
) -> None:
    """Also when the guest's clock was set back, so that the journal is not ordered by time."""
    logbook = [Row(at, number) for number, at in enumerate(sorted(rows))]
    journal = lines_of(lines if stepped else sorted(lines))
    seen: list[Row | Line] = []
    position: PageToken | None = PageToken(0, 100)
    while position is not None:
        page, following = read_page(logbook, journal, position, limit, chunk)
        assert len(page) <= limit
        assert page or following is None, "a page without lines is the last one"
        seen += page
        position = following
    assert [each for each in seen if isinstance(each, Row)] == logbook
    assert [each for each in seen if isinstance(each, Line)] == journal
    if not stepped:
        moments = [each.at if isinstance(each, Row) else each.micros for each in seen]
        assert moments == sorted(moments)


@given(st.text(max_size=200) | st.binary(max_size=100).map(lambda data: data.hex()))
def test_a_foreign_page_token_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a page token"):
        PageToken.decode(text)


@pytest.mark.parametrize(
    "parts",
    [
        [0, 1, None],
        [0, 2**70, None, None],
        [0, 1, [1], None],
        [0, 1, None, "--output=export"],
        [0, 1, None, "s=1\ni=2"],
    ],
)
def test_a_page_token_holds_only_positions(parts: list[object]) -> None:
    with pytest.raises(ValueError, match="not a page token"):
        PageToken.decode(base64.urlsafe_b64encode(json.dumps(parts).encode()).decode())


def test_a_page_token_has_a_largest_size() -> None:
    longest = PageToken(2**62, 2**62, (2**62, 2**62), ";".join(["s=" + "f" * 40] * 10))
    assert PageToken.decode(longest.encode()) == longest
    assert len(longest.encode()) <= MAX_TOKEN


def test_journal_entries_from_a_hostile_guest_are_skipped() -> None:
    good = {"__REALTIME_TIMESTAMP": "7", "MESSAGE": "fine", "PRIORITY": "3", "__CURSOR": "s=1;i=2"}
    bad: list[object] = [
        [],
        {},
        good | {"__REALTIME_TIMESTAMP": "soon"},
        good | {"__REALTIME_TIMESTAMP": "9" * 30},
        good | {"__REALTIME_TIMESTAMP": "-1"},
        good | {"__REALTIME_TIMESTAMP": float("inf")},
        good | {"__REALTIME_TIMESTAMP": float("nan")},
        good | {"MESSAGE": [256, "x"]},
        good | {"__CURSOR": "; rm -rf /"},
    ]
    output = b"".join(json.dumps(each).encode() + b"\n" for each in (*bad, good))
    (entry,) = parse(output + b"[" * 100_000 + b"\nnot json\n" + json.dumps(good).encode()[:20])
    assert (entry.micros, entry.message, entry.level) == (7, "fine", "error")
    odd = good | {"MESSAGE": "\ud800", "PRIORITY": {"a": 1}, "UNIT": 7}
    (entry,) = parse(json.dumps(odd).encode() + b"\n")
    assert (entry.message, entry.level, entry.unit) == ("?", "info", None)


def test_journal_messages_that_are_not_text() -> None:
    base = {"__REALTIME_TIMESTAMP": "7"}
    for given_message, shown in (([104, 105, 255], "hi\ufffd"), (None, "(message too long")):
        (entry,) = parse(json.dumps(base | {"MESSAGE": given_message}).encode() + b"\n")
        assert entry.message.startswith(shown)


def test_search_text_is_taken_literally() -> None:
    query = JournalQuery(0, 1, 10, search="a.b[é]\\E")
    assert r"--grep=a\.b\[é\]\\E" in query.command
    assert "--since=@0.000000" in query.command
    later = JournalQuery(0, 1, 10, after="s=1;i=2")
    assert "--after-cursor=s=1;i=2" in later.command
    assert not any(word.startswith("--since") for word in later.command)
    assert is_cursor("s=4bb1;i=1ea;b=8ce0;m=4c6b01f;t=6606d2eaba6eb;x=c02939e04c750bcb")
