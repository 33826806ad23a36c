"""Runs ``models/make_exports.py`` as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Its exit status where no package index answers.
UNREACHABLE = 75


def make_exports(
    route: str,
    folder: Path,
    *,
    environments: Path,
    families: Sequence[str] = (),
    **variables: str,
) -> tuple[int, str]:
    """Exports the trained model by a route.

    Args:
        route: one of the script's routes.
        folder: receives ``ROUTE/``.
        environments: folder of the virtual environments.
        families: tiny models to export, into ``ROUTE/FAMILY/``, in place of the trained one.
        variables: of the process, more than those of this one.

    Returns:
        The exit status, and what was printed to stderr.
    """
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "models" / "make_exports.py"), route, str(folder)),
            *("--environments", str(environments)),
            *(("--families", *families) if families else ()),
        ],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr.strip()
