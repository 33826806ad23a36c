"""Installs the npm packages of package.json, where a package index can be reached.

``python -m tests.javascript.packages FOLDER`` does it in advance; tests then find them by
``TQ_NODE_PACKAGES=FOLDER``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

_MADE = "installed"
_SECONDS = 600


def install(folder: Path) -> str:
    """Installs the packages unless they are there; returns why not, or nothing.

    Scripts of packages do not run: that of onnxruntime-node fetches libraries for GPUs.
    """
    wanted = Path(__file__).with_name("package.json")
    made = folder / _MADE
    if made.is_file() and made.read_bytes() == wanted.read_bytes():
        return ""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "needs Node and npm"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(wanted, folder / wanted.name)
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"npm was not done after {_SECONDS} seconds"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["npm failed"]
        return f"npm cannot install the packages: {lines[0]}"
    shutil.copyfile(wanted, made)
    return ""


if __name__ == "__main__":
    print(install(Path(sys.argv[1])) or "installed")
