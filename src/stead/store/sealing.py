"""Secrets in the database are sealed: encrypted with a key that is in a file, and in no copy of the database.

A sealed value names its key and is bound to its table, column and row: it opens nowhere else.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stead.errors import HostError
from stead.files import sync_folder, write_atomically

_FORMAT = "sealed1"
_KEY_BYTES = 32
_NONCE_BYTES = 12
_MAX_FILE = 64 << 10
_ID = b"stead sealing key id\0"


class SealingError(HostError):
    """A secret cannot be sealed or opened: its key is missing, or the value was changed."""


@dataclass(frozen=True)
class Place:
    """The one place where a sealed value opens."""

    table: str
    column: str
    row: str

    @property
    def associated_data(self) -> bytes:
        return "\0".join((_FORMAT, self.table, self.column, self.row)).encode()

    def __str__(self) -> str:
        return f"{self.table}.{self.column} of {self.row}"


SEALED = (("github_apps", "private_key"), ("github_apps", "webhook_secret"), ("vpcs", "wireguard_key"))
"""The columns that hold secrets. Credentials of callers are not among them: they are hashes."""


@dataclass(frozen=True)
class _Key:
    id: str
    secret: bytes

    @classmethod
    def of(cls, secret: bytes) -> "_Key":
        return cls(hashlib.sha256(_ID + secret).hexdigest()[:8], secret)


class SealingKeys:
    """The keys in some files, each a line of base64. The first one seals, all of them open.

    Files are read for every value that is sealed, and when a value has a key that is not known yet: a running
    server notices a new key.
    """

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self.files = tuple(files)
        self._keys: dict[str, _Key] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the keys, that of the key which seals first."""
        self._read()
        return tuple(self._keys)

    def ensure(self) -> None:
        """Create a key unless there is one."""
        if not self._read() and self.files:
            path = self.files[-1]
            try:
                _create(path)
            except OSError as error:
                raise SealingError(
                    f"cannot create the sealing key {path}: {error.strerror}. Set STEAD_SEALING_KEY to a file"
                    " that can be written, outside of the data folder"
                ) from error
            self._read()

    def rotate(self) -> None:
        """Put a new key before the others of its file: it seals from now on."""
        self._read()
        path = self._writable()
        write_atomically(path, _content([_new_line(), *_lines(path)]))
        self._read()

    def seal(self, secret: str, place: Place) -> str:
        key = next(iter(self._read().values()), None)
        if key is None:
            raise SealingError(f"cannot store {place}: no sealing key in {self._names()}. {RESTORE}")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + AESGCM(key.secret).encrypt(nonce, secret.encode(), place.associated_data)
        return f"{_FORMAT}.{key.id}.{base64.b64encode(sealed).decode()}"

    def open(self, sealed: str, place: Place) -> str:
        key_id = sealing_key_of(sealed)
        if key_id is None:
            raise SealingError(f"cannot read {place}: it is not sealed. Restart the server, which seals it")
        key = self._keys.get(key_id) or self._read().get(key_id)
        if key is None:
            raise SealingError(
                f"cannot read {place}: its sealing key {key_id} is not in {self._names()}. {RESTORE}"
            )
        try:
            content = base64.b64decode(sealed.rpartition(".")[2], validate=True)
            nonce, text = content[:_NONCE_BYTES], content[_NONCE_BYTES:]
            return AESGCM(key.secret).decrypt(nonce, text, place.associated_data).decode()
        except (InvalidTag, ValueError) as error:
            raise SealingError(
                f"cannot read {place}: the value was changed or moved here. Restore the database from a"
                " backup, or delete the value with `stead secrets forget`"
            ) from error

    def _read(self) -> dict[str, _Key]:
        found, problems = [], []
        for path in self.files:
            try:
                found += [_key(path, line) for line in _lines(path)]
            except SealingError as error:
                problems.append(error)
        if problems and not found:
            raise problems[0]
        self._keys = {key.id: key for key in found}
        return self._keys

    def _writable(self) -> Path:
        """The file that a new key goes to: the one with the key that seals."""
        found = [path for path in self.files if path.exists()] or list(self.files[-1:])
        if not found:
            raise SealingError("this database has no file with sealing keys")
        if not os.access(found[0].parent, os.W_OK) or os.statvfs(found[0].parent).f_flag & os.ST_RDONLY:
            raise SealingError(
                f"{found[0]} is read-only: put a new line, as of `openssl rand -base64 32`, before those of"
                " its source, restart the server, and run `stead secrets reseal`"
            )
        return found[0]

    def _names(self) -> str:
        return " or ".join(map(str, self.files)) or "any file"


RESTORE = (
    "Restore that file from its backup; if there is none, `stead secrets forget` deletes what cannot be read"
)


def sealing_key_of(value: str) -> str | None:
    """The id of the key that a value is sealed with; None for a value that is not sealed."""
    kind, _, rest = value.partition(".")
    return rest.partition(".")[0] if kind == _FORMAT else None


def sealed_values(connection: sa.Connection) -> Iterator[tuple[Place, str]]:
    """The values of all columns with secrets, also of those that are not sealed yet.

    An earlier schema, that of a copy, may not have all columns.
    """
    for table, column in SEALED:
        columns = connection.exec_driver_sql(f"PRAGMA table_info({table})").all()
        if column not in {each.name for each in columns}:
            continue
        rows = sa.table(table, sa.column("id", sa.Text), sa.column(column, sa.Text))
        statement = sa.select(rows.c.id, rows.c[column]).where(rows.c[column].is_not(None))
        for row, value in connection.execute(statement).all():
            yield Place(table, column, row), value


def put_value(connection: sa.Connection, place: Place, value: str | None) -> None:
    rows = sa.table(place.table, sa.column("id", sa.Text), sa.column(place.column, sa.Text))
    connection.execute(rows.update().where(rows.c.id == place.row).values({place.column: value}))


def seal_plain_values(connection: sa.Connection, keys: SealingKeys) -> int:
    """Seal what an earlier release stored in clear; returns how many values."""
    plain = [(place, value) for place, value in sealed_values(connection) if sealing_key_of(value) is None]
    for place, value in plain:
        put_value(connection, place, keys.seal(value, place))
    return len(plain)


def reseal(connection: sa.Connection, keys: SealingKeys) -> int:
    """Seal everything with the first key; returns how many values had another one."""
    first = keys.ids[0]
    older = [(place, value) for place, value in sealed_values(connection) if sealing_key_of(value) != first]
    for place, value in older:
        put_value(connection, place, keys.seal(keys.open(value, place), place))
    return len(older)


def unreadable(connection: sa.Connection, keys: SealingKeys) -> list[Place]:
    """The places of values that no key opens."""
    found = []
    for place, value in sealed_values(connection):
        try:
            keys.open(value, place)
        except SealingError:
            found.append(place)
    return found


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    write_atomically(temporary, _content([_new_line()]))
    # A link does not replace a key that another process has created meanwhile.
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
    sync_folder(path.parent)


def _new_line() -> str:
    return base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()


def _content(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _lines(path: Path) -> list[str]:
    """The keys in a file, as text; none if it does not exist."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SealingError(f"cannot read the sealing key {path}: {error.strerror}") from error
    if status.st_mode & stat.S_IRWXO or status.st_uid not in {0, os.geteuid()}:
        raise SealingError(
            f"other users can read the sealing key {path}: run `chown root {path}` and `chmod 600 {path}`"
        )
    if len(content) > _MAX_FILE:
        raise SealingError(f"{path} is no file of sealing keys: it is larger than {_MAX_FILE} bytes")
    return [line for line in content.decode(errors="replace").split() if line]


def _key(path: Path, line: str) -> _Key:
    try:
        secret = base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != _KEY_BYTES:
        raise SealingError(
            f"{path} is no file of sealing keys: each line must be {_KEY_BYTES} bytes in base64, as of"
            " `openssl rand -base64 32`"
        )
    return _Key.of(secret)
