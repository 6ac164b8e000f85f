"""The input format of `git fast-import`."""

import time
from dataclasses import dataclass

from stead.errors import InvalidRequest


@dataclass(frozen=True)
class Author:
    name: str = "Stead"
    email: str = "git@stead.invalid"

    def __post_init__(self) -> None:
        for value in (self.name, self.email):
            if not value.strip() or not value.isprintable() or any(sign in value for sign in "<>"):
                raise InvalidRequest(
                    f"invalid author {value!r}: name and e-mail must not be empty or contain < or >"
                )


def signed(message: str, author: Author) -> bytes:
    """The committer line, with the current time, and the message."""
    text = message.encode(errors="replace")
    text += b"" if text.endswith(b"\n") else b"\n"
    who = f"{author.name} <{author.email}> {int(time.time())} +0000".encode()
    return b"author %s\ncommitter %s\ndata %d\n%s\n" % (who, who, len(text), text)


def quoted(path: str) -> bytes:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.encode()
