"""Finds the LFS pointers in commits: small files that stand for LFS objects."""

import re
from collections.abc import Iterable

from stead.repos.lfs.store import LfsObject
from stead.repos.repository import Repository

_LARGEST = 1024
"""Maximum bytes of a pointer."""
_POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n"
    rb"(?:ext-[^\n]*\n)*"
    rb"oid sha256:(?P<oid>[0-9a-f]{64})\n"
    rb"size (?P<size>[0-9]{1,18})\n"
)
_SMALL_FILES = (
    "rev-list",
    "--objects",
    "--no-object-names",
    f"--filter=combine:object:type=blob+blob:limit={_LARGEST}",
    "--filter-provided-objects",
    "--stdin",
)
_AT_ONCE = 1000


def parse_pointer(content: bytes) -> LfsObject | None:
    """The object that a pointer refers to; None if the content is not a pointer."""
    found = _POINTER.fullmatch(content)
    return None if found is None else LfsObject(found["oid"].decode(), int(found["size"]))


async def pointed_objects(
    repository: Repository, new: Iterable[str], known: Iterable[str], timeout: float
) -> list[LfsObject]:
    """The LFS objects reachable from the new objects and not from the known ones."""
    question = "".join([*(f"{sha}\n" for sha in new), *(f"^{sha}\n" for sha in known)])
    printed = await repository.run(*_SMALL_FILES, stdin=question.encode(), timeout=timeout)
    small = printed.decode().split()
    found: dict[LfsObject, None] = {}
    async with repository.reader() as reader:
        for start in range(0, len(small), _AT_ONCE):
            for read in await reader.contents(small[start : start + _AT_ONCE]):
                if read is not None and (large := parse_pointer(read[1])) is not None:
                    found[large] = None
    return list(found)
