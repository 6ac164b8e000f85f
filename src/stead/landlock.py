"""Landlock: which files a program may use, as rules of the kernel that it and its children cannot leave."""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CREATE_RULESET = 444
_ASK_VERSION = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _REMOVE_FOLDER, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_FOLDER, _MAKE_FILE = 1 << 7, 1 << 8
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_RIGHTS_OF_VERSION = {2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""The rights that a version knows. With version 1 nothing can be moved between folders, as git does."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
"""The rights that a rule for a file may have; the others are for folders."""

_READ = _READ_FILE | _READ_FOLDER
_RUN = _READ | _EXECUTE
# No links, sockets, pipes and devices, and nothing that was written can be run.
_CHANGE = _READ | _WRITE_FILE | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _MOVE | _TRUNCATE

PROGRAMS = tuple(
    Path("/", name)
    for name in ("usr", "lib", "lib32", "lib64", "libx32", "bin", "sbin", "nix", "gnu", "etc/ld.so.cache")
)
"""Programs and their libraries."""
NULL = Path("/dev/null")
RANDOM = (Path("/dev/urandom"), Path("/dev/random"))
USERS = (Path("/etc/passwd"), Path("/etc/group"), Path("/etc/nsswitch.conf"))
CERTIFICATES = tuple(
    Path("/etc", name) for name in ("ssl", "ca-certificates", "pki", "pkcs11", "gnutls", "crypto-policies")
)
NAMES = tuple(
    Path("/etc", name) for name in ("resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf")
)
"""How names of hosts are resolved."""


def version() -> int:
    """The version of Landlock that this kernel has, as far as it is known here; 0 if it cannot be used."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_ASK_VERSION)))
    return usable(found)


def usable(found: int) -> int:
    """The version whose rights are used; -1 is the answer of a kernel without Landlock."""
    return 0 if found < min(_RIGHTS_OF_VERSION) else min(found, max(_RIGHTS_OF_VERSION))


@dataclass(frozen=True)
class FileAccess:
    """The files and folders that a program may use. Links are followed; what does not exist is left out."""

    run: Iterable[Path] = PROGRAMS
    """These may also be read."""
    read: Iterable[Path] = ()
    change: Iterable[Path] = (NULL,)
    """These may also be read, but not run."""

    def rules(self, version: int) -> Iterator[str]:
        """All rules for a version, as options of the launcher; none for version 0."""
        if version:
            yield f"landlock={_RIGHTS_OF_VERSION[version]}"
            yield from self.allowed(version)

    def allowed(self, version: int) -> Iterator[str]:
        """What is allowed, in addition to rules before."""
        known = _RIGHTS_OF_VERSION.get(version, 0)
        for rights, paths in ((_RUN, self.run), (_READ, self.read), (_CHANGE, self.change)):
            allowed = rights & known
            for path in paths if known else ():
                yield f"allow={allowed}:{allowed & _OF_FILES}:{path}"
