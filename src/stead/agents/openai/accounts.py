"""The users and groups of a manifest, as one shell program that can run twice."""

import shlex

from agents.sandbox import Manifest


def accounts_script(manifest: Manifest) -> str | None:
    """Creates what is missing; None if the manifest has no users and groups."""
    users = {user.name for user in manifest.users} | {
        user.name for group in manifest.groups for user in group.users
    }
    lines = [
        f"getent group {q(group.name)} >/dev/null || groupadd -- {q(group.name)}" for group in manifest.groups
    ]
    lines += [
        f"getent passwd {q(name)} >/dev/null || useradd -U -M -s /usr/sbin/nologin -- {q(name)}"
        for name in sorted(users)
    ]
    lines += [
        f"usermod -aG {q(group.name)} -- {q(user.name)}" for group in manifest.groups for user in group.users
    ]
    return "\n".join(["set -e", *lines]) if lines else None


def groups_script(groups: list[tuple[str, str]]) -> str | None:
    """Sets the groups of paths; None if there are none."""
    lines = [f"chgrp -- {q(name)} {q(path)}" for name, path in groups]
    return "\n".join(["set -e", *lines]) if lines else None


q = shlex.quote
