"""Dockerfiles of base images: `FROM` the Debian release of Stead's own base image, and `RUN` commands.

Stead builds no container images. The RUN commands of such a Dockerfile become a layer; other Dockerfiles are
refused.
"""

import json
import re
import shlex
from collections.abc import Iterator

from stead.builds.errors import InvalidSpec

_BASE = re.compile(r"((docker\.io/)?library/|docker\.io/)?debian:(trixie|13)(-slim|-\d{8}(-slim)?)?")
_INSTRUCTION = re.compile(r"\s*(?P<name>[A-Za-z]+)(\s+(?P<rest>.*))?", re.DOTALL)
_HEREDOC = re.compile(r"<<(?P<tabs>-?)(?P<quote>['\"]?)(?P<word>\w+)(?P=quote)\s*")


def commands_of(text: str) -> tuple[str, ...]:
    """The RUN commands of a Dockerfile, each for `sh -c`; other instructions are refused."""
    commands: list[str] = []
    based = False
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while line.rstrip().endswith("\\"):
            following = next(lines, "")
            if following.lstrip().startswith("#"):
                continue
            line = f"{line.rstrip()}\n{following}"
        match = _INSTRUCTION.fullmatch(line)
        name, rest = (match["name"].upper(), (match["rest"] or "").strip()) if match else ("", line.strip())
        if name == "FROM":
            _check_base(rest, again=based)
            based = True
        elif name == "RUN" and based and rest and not rest.startswith("--"):
            heredoc = _HEREDOC.fullmatch(rest)
            commands.append(_shell(rest) if heredoc is None else _body(lines, heredoc))
        else:
            instruction = line.strip().splitlines()[0][:80]
            raise _invalid(f"supports only FROM debian:trixie-slim and RUN commands, not {instruction!r}")
    if not based:
        raise _invalid("must start with FROM debian:trixie-slim")
    return tuple(commands)


def _check_base(rest: str, *, again: bool) -> None:
    words = [word for word in rest.split() if not word.startswith("--platform=")]
    image = words[0] if words else ""
    named = len(words) == 1 or (len(words) == 3 and words[1].upper() == "AS")
    if again or not named or not _BASE.fullmatch(image):
        text = f"{{field}} supports only Debian 13, once: FROM debian:trixie-slim, not FROM {rest}"
        raise InvalidSpec("unsupported_image", text, field="base_image", image=image)


def _invalid(problem: str) -> InvalidSpec:
    return InvalidSpec("invalid_value", f"{{field}} {problem}", field="base_image")


def _shell(rest: str) -> str:
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except ValueError:
            return rest
        if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
            return shlex.join(words)
    return rest


def _body(lines: Iterator[str], heredoc: re.Match[str]) -> str:
    body: list[str] = []
    for line in lines:
        stripped = line.lstrip("\t") if heredoc["tabs"] else line
        if stripped == heredoc["word"]:
            return "\n".join(body)
        body.append(stripped)
    raise _invalid(f"has a RUN heredoc that does not end: {heredoc['word']} is missing")
