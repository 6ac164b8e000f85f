"""A fresh Debian in a folder. Commands in it share the kernel and the network of this host."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

USER = "tester"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PACKAGES = "python3,python3-venv,ca-certificates"
# A root of its own rather than chroot, where user namespaces are refused. Mounts and processes end with it.
_ENTER = """\
root=$1 && shift
mount --rbind "$root" "$root" && cd "$root"
mount -t proc proc proc && mount --rbind /sys sys && mount --rbind /dev dev && mount -t tmpfs tmpfs run
mount --bind /etc/resolv.conf etc/resolv.conf
while [ "$1" != -- ]; do
  mkdir -p ".$(dirname "$1")"
  if [ -d "$1" ]; then mkdir -p ".$1"; else [ -e ".$1" ] || : >".$1"; fi
  mount --bind -o ro "$1" ".$1" && shift
done
shift && mkdir -p .old && pivot_root . .old && umount -l /.old && exec "$@"
"""
_NONE: Mapping[str, str] = {}
Result = subprocess.CompletedProcess[str]


class DebianRoot:
    def __init__(self, folder: Path, suite: str, *options: str) -> None:
        """Unpack a suite with Python and certificates; `options` are those of mmdebstrap."""
        self.folder = folder
        command = [
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            f"--include={_PACKAGES}",
            *options,
        ]
        subprocess.run([*command, suite, str(folder)], check=True)
        (folder / "etc/resolv.conf").touch()
        self._variables, self._shared = _pip_configuration()
        self.done("useradd", "--create-home", USER)

    @property
    def home(self) -> Path:
        return self.folder / "home" / USER

    def give(self, source: Path, name: str) -> None:
        """Copy a file or a folder to the home of the ordinary user."""
        if source.is_dir():
            shutil.copytree(source, self.home / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, self.home / name)
        self.done("chown", "-R", USER, f"/home/{USER}")

    def run(
        self, *words: str, user: str = "root", seconds: float = 1200, variables: Mapping[str, str] = _NONE
    ) -> Result:
        """Run a command; those of the ordinary user start in the home."""
        home = "/root" if user == "root" else f"/home/{user}"
        environment = {"PATH": _PATH, "HOME": home, "LC_ALL": "C.UTF-8", **self._variables, **variables}
        namespaces = ("--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
        return subprocess.run(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", "-euc", _ENTER, "sh"),
                *(str(self.folder), *self._shared, "--", "runuser", "-u", user, "--"),
                *("sh", "-c", f'cd {home} && exec "$@"', "sh", *words),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def done(
        self, *words: str, user: str = "root", seconds: float = 1200, variables: Mapping[str, str] = _NONE
    ) -> str:
        """The output of a command that must succeed."""
        result = self.run(*words, user=user, seconds=seconds, variables=variables)
        assert result.returncode == 0, f"{words}: {result.stdout[-4000:]}{result.stderr[-4000:]}"
        return result.stdout


def _pip_configuration() -> tuple[dict[str, str], list[str]]:
    """What reaches PyPI on this host: variables of pip and of proxies, and the files that they name."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    found = dict(line.split("=", 1) for line in listed.splitlines())
    variables = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for name in sorted(found, key=lambda name: name.startswith(":env:")):  # variables override files
        variables[f"PIP_{name.rpartition('.')[2].upper().replace('-', '_')}"] = ast.literal_eval(found[name])
    words = [word for value in variables.values() for word in value.split()]
    # An index in a folder has links to files beside it.
    named = {str(Path(word[7:]).parent) if word.startswith("file:///") else word for word in words}
    return variables, sorted(word for word in named if word.startswith("/") and Path(word).exists())
