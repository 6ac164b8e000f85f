"""Validation of ref names and paths from clients."""

import re
import unicodedata

from stead.repos.errors import InvalidBranch, InvalidObjectId, InvalidPath

SHA = re.compile(r"[0-9a-f]{40}")
SHORT_SHA = re.compile(r"[0-9a-f]{4,40}")
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
MAX_PATH = 4096
_MAX_COMPONENT = 250
"""Bytes: a ref is a file, and during an update also a file with the suffix .lock."""
_MAX_REF = 1000
_NOT_IN_REFS = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//")
_IGNORED_BY_HFS = dict.fromkeys(
    [*range(0x200C, 0x2010), *range(0x202A, 0x202F), *range(0x206A, 0x2070), 0xFEFF]
)
_NTFS_SHORT_NAMES = re.compile(r"git~[0-9]+")


def is_ref(name: str) -> bool:
    """Whether git accepts this name below refs/heads or refs/tags."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    if not name or size > _MAX_REF or name == "@" or name.startswith("-") or name.endswith((".", "/")):
        return False
    if name.startswith("/") or _NOT_IN_REFS.search(name):
        return False
    parts = name.split("/")
    return not any(
        part.startswith(".") or part.endswith(".lock") or len(part.encode()) > _MAX_COMPONENT
        for part in parts
    )


def check_branch(name: str) -> str:
    """Check a branch name, with or without `refs/heads/`; returns the short name."""
    short = name.removeprefix("refs/heads/")
    if not short:
        raise InvalidBranch("branch name is empty")
    if not is_ref(short) or short == "HEAD":
        raise InvalidBranch(f"invalid branch name {name!r}")
    return short


def check_sha(sha: str) -> str:
    if not SHA.fullmatch(sha.lower()):
        raise InvalidObjectId(sha)
    return sha.lower()


def check_path(path: str) -> str:
    """Check the path of a file relative to the repository's root.

    Paths that could leave a checkout, or reach into its `.git`, on any file system are refused.
    """
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise InvalidPath(path.encode(errors="replace").decode(), "not valid UTF-8") from None
    if not path or path.startswith("/") or path.endswith("/") or size > MAX_PATH:
        raise InvalidPath(path, f"must be relative, name a file and have at most {MAX_PATH} bytes")
    if any(unicodedata.category(sign) == "Cc" for sign in path):
        raise InvalidPath(path, "contains control characters")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise InvalidPath(path, "contains empty, . or .. components")
        if len(part.encode()) > _MAX_COMPONENT + 5:
            raise InvalidPath(path, "a component is too long")
        if any(is_git_folder(piece) for piece in part.split("\\")):
            raise InvalidPath(path, "would be inside .git on some file systems")
        if "\\" in part and any(piece in (".", "..") for piece in part.split("\\")):
            raise InvalidPath(path, "would be outside its folder on Windows")
    return path


def is_git_folder(part: str) -> bool:
    """Whether some file system treats this name as `.git`."""
    hfs = part.translate(_IGNORED_BY_HFS).casefold()
    ntfs = part.partition(":")[0].rstrip(" .").casefold()
    return ".git" in (hfs, ntfs) or _NTFS_SHORT_NAMES.fullmatch(ntfs) is not None


def check_directory(path: str) -> str:
    """Check the path of a folder, with or without slashes around it; the root is empty."""
    stripped = path.strip("/")
    return check_path(stripped) if stripped else ""
