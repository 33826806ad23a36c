"""Runs a script whose Ray waits longer for its proxy than a minute, which a busy machine needs.

python patient.py SECONDS SCRIPT [ARGUMENT ...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ray.serve._private import api


def main() -> None:
    """Sets what Ray has no variable for, and becomes the script."""
    seconds, script, *arguments = sys.argv[1:]
    assert hasattr(api, "HTTP_PROXY_TIMEOUT"), "Ray calls its patience otherwise"
    api.HTTP_PROXY_TIMEOUT = int(seconds)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
