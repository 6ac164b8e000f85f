"""Short fuzz runs of what parses bytes of others; `scripts/fuzz` runs them for as long as is asked for."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT
from support.fuzzing.runs import CORPUS, Feed, Finding, Target, fuzz, mutated
from support.fuzzing.targets import TARGETS

SEED = 20_261_118


def short_run(name: str) -> None:
    """No crash, no hang and no growth: `fuzz` raises."""
    target = TARGETS[name]
    assert fuzz(target, seed=SEED, inputs=target.inputs).inputs == target.inputs


@pytest.mark.parametrize("name", ["agent-answers", "agent-frames", "agent-json"])
def test_mutated_answers_of_an_agent(name: str) -> None:
    short_run(name)


def test_mutated_requests_to_the_api() -> None:
    short_run("http")


def test_mutated_lists_of_refs_of_a_push() -> None:
    short_run("pkt-lines")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_mutated_archives(kind: str) -> None:
    short_run(kind)


def test_mutated_json_bodies_in_pieces_and_whole() -> None:
    short_run("json-bodies")


@pytest.mark.parametrize("name", ["dns-queries", "dns-answers", "lookups"])
def test_mutated_dns_messages(name: str) -> None:
    short_run(name)


def test_mutated_ssh_user_names() -> None:
    short_run("ssh-user-names")


def test_mutated_messages_of_the_ssh_gateway() -> None:
    short_run("ssh-gateway")


def test_mutated_headers_of_disk_layers() -> None:
    short_run("qcow2-headers")


def test_every_target_has_a_corpus_and_all_of_them_are_small() -> None:
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(TARGETS)
    assert all(target.corpus for target in TARGETS.values())
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200_000


def target_of(feed: Feed, **bounds: float) -> Target:
    @contextlib.contextmanager
    def opened() -> Iterator[Feed]:
        yield feed

    return Target("pkt-lines", opened, **bounds)  # type: ignore[arg-type]


def test_a_crash_is_reported_with_its_input() -> None:
    def feed(data: bytes) -> None:
        if b"0000" in data:
            raise KeyError(data[:1])

    with pytest.raises(Finding, match="KeyError") as found:
        fuzz(target_of(feed), seed=1, inputs=1000)
    assert b"0000" in found.value.data


def test_a_hang_is_reported_although_exceptions_are_caught() -> None:
    def feed(_data: bytes) -> None:
        with contextlib.suppress(Exception):
            for _ in itertools.count():
                pass

    with pytest.raises(Finding, match="CPU time"):
        fuzz(target_of(feed, cpu=0.05), seed=1, inputs=1)


def test_growth_is_reported() -> None:
    kept: list[bytes] = []
    with pytest.raises(Finding, match="memory grew"):
        fuzz(target_of(lambda data: kept.append(bytes(64 << 10) + data), growth_mib=8), seed=1, inputs=2000)


def test_a_seed_gives_the_same_inputs_again() -> None:
    target = TARGETS["pkt-lines"]
    first, second = (
        [mutated(chance, target.corpus, target) for _ in range(200)]
        for chance in (random.Random(7), random.Random(7))
    )
    assert first == second and len(set(first)) > 150
    assert all(len(data) <= target.longest for data in first)


def test_command_says_how_many_inputs_were_tried() -> None:
    """Of two targets side by side; a table has both."""
    command = [sys.executable, str(ROOT / "scripts/fuzz"), "ssh-user-names", "dns-queries"]
    command += ["0.02", "--jobs", "2", "--seed", "1", "--blind"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, head, first, second = done.stdout.splitlines()
    for name in ("ssh-user-names", "dns-queries"):
        assert any(line.startswith(f"{name}: no findings in ") for line in lines), done.stdout
    assert head.split() == ["target", "inputs", "seconds", "CPU", "seconds", "MiB", "findings"]
    for row, name in ((first, "ssh-user-names"), (second, "dns-queries")):
        cells = row.split()
        assert cells[0] == name and int(cells[1]) > 0 and cells[-1] == "none", row


def test_command_fails_for_a_finding_and_names_its_input(tmp_path: Path) -> None:
    """The parser is broken for the process of the command alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "import stead.edge.ssh.user_names as broken\n"
        "def parse(text):\n"
        "    raise KeyError(text[:5])\n"
        "broken.parse_user_name = parse\n"
    )
    command = [sys.executable, str(ROOT / "scripts/fuzz"), "ssh-user-names", "0.02", "--blind"]
    command += ["--findings", str(tmp_path / "kept")]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stdout
    assert "ssh-user-names: KeyError" in done.stdout
    assert done.stdout.splitlines()[-1].split()[-1] == "finding"
    assert list((tmp_path / "kept/ssh-user-names").iterdir())
