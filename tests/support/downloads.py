"""Stand-ins for the hosts that guides download Go and Node.js from, where only PyPI and npm are reachable."""

import importlib.util
import socket
import subprocess
from pathlib import Path

from support.npm import Npm, node

GO, NVM, NODE = "go.dev", "raw.githubusercontent.com", "nodejs.org"
_INSTALL = f'curl -fsSL https://{NVM}/nvm.sh -o "$NVM_DIR/nvm.sh"\n'
_NVM = f"""
nvm() {{
  versions="$NVM_DIR/versions/node"
  case "$1" in
    install)
      mkdir -p "$versions/v$2" && curl -fsSL "https://{NODE}/node.tar.gz" | tar -xz -C "$versions/v$2" ;;
    alias) ln -sfn "v$3" "$versions/$2" ;;
  esac
}}
if [ -d "$NVM_DIR/versions/node/default" ]; then
  PATH="$NVM_DIR/versions/node/default/bin:$PATH"
fi
"""


def unreachable() -> list[str]:
    """Which of the hosts this host cannot resolve."""
    found = []
    for name in (GO, NVM, NODE):
        try:
            socket.getaddrinfo(name, 443)
        except OSError:
            found.append(name)
    return found


def publish_go(folder: Path, version: str) -> None:
    """The toolchain of this project, which is a newer one, under the name of the release of a guide."""
    found = importlib.util.find_spec("go")
    assert found is not None and found.submodule_search_locations is not None
    (toolchain,) = found.submodule_search_locations
    archive = folder / "dl" / f"go{version}.linux-amd64.tar.gz"
    archive.parent.mkdir()
    _pack(archive, Path(toolchain).parent, "--exclude=*_test.go", "--exclude=testdata", "go")


def publish_node(folder: Path, npm: Npm, version: str) -> None:
    """Node.js and npm, and an installer with the two commands of nvm that a guide uses."""
    installer = folder / "nvm-sh" / "nvm" / version / "install.sh"
    installer.parent.mkdir(parents=True)
    installer.write_text(_INSTALL)
    (folder / "nvm.sh").write_text(_NVM)
    tree = folder / "node"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "node").symlink_to(npm.node22)
    (tree / "lib").symlink_to(node().parent.parent / "lib")
    script = '#!/bin/sh\nexec node "${0%/*}/../lib/node_modules/npm/bin/npm-cli.js" "$@"\n'
    (tree / "bin" / "npm").write_text(script)
    (tree / "bin" / "npm").chmod(0o755)
    _pack(folder / "node.tar.gz", tree, "--dereference", "bin", "lib/node_modules/npm")


def _pack(archive: Path, folder: Path, *arguments: str) -> None:
    command = ["tar", "--create", "--file", str(archive), "--use-compress-program=gzip -1"]
    subprocess.run([*command, f"--directory={folder}", *arguments], check=True)
