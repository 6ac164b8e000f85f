"""Repositories to search in."""

from collections.abc import Mapping

from stead.repos.committing import Change, commit
from stead.repos.repository import Repository
from stead.repos.search.search import ContentFound


async def put(repository: Repository, files: Mapping[str, str | bytes | None], message: str = "m") -> str:
    changes = [Change(path, text.encode() if isinstance(text, str) else text) for path, text in files.items()]
    return (await commit(repository, changes, message)).sha


def paths(found: ContentFound) -> list[str]:
    return [file.path for file in found.files]
