"""Values that people and programs pass by mistake, for fuzz tests."""

import math
from random import Random
from typing import Any

TEXTS = [
    "",
    ".",
    "..",
    " ",
    "a b",
    "a/b",
    "../../etc",
    "//nowhere//",
    "nul\0byte",
    "two\nlines",
    "tab\tand\rreturn",
    "\udcff",
    "\ud800",
    "x" * 300,
    "long" * 20_000,
    "名前 🚀",
    "\u202eright to left",
    "-1",
    "0",
    "nan",
    "1e999",
    "-",
    "--",
    "--unknown",
    "None",
    "%s{}$(x)`y`",
    "*",
    "x:y",
    "x=y",
    "=",
    "[1]",
    "{",
    "http://[",
    "@",
]
NUMBERS = [0, -1, 1, 2**31, 2**70, -(10**30), math.nan, math.inf, -math.inf, 0.5, 1e-9, True]
OTHERS: list[Any] = [None, b"bytes", b"", [], ["a", 1], {}, {"a": object()}, (), object(), {1: 2}, 3j, print]


def odd_text(random: Random) -> str:
    return random.choice(TEXTS)


def odd_value(random: Random) -> Any:
    return random.choice(random.choice((TEXTS, NUMBERS, OTHERS)))
