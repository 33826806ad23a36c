"""Runs ``models/make_exports.py`` as users run it, and keeps what it makes.

``python -m tests.exports.recipes ENVIRONMENTS`` prints the routes that have exports to make.
"""

from __future__ import annotations

import hashlib
import os
import shutil
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


#: By which exports of the trained model are tested, and families by the last.
ROUTES = ("dynamo", "legacy", "transformers", "genai", "optimum", "genai09", "olive", "mobius")
FAMILIES = {
    "deepseek_v3": "model.onnx",  # values narrower than keys
    "gpt_oss": "model.onnx",  # sinks and windows
    "qwen3_next": "model.onnx",  # states beside the caches
    "bart": "decoder/model.onnx",  # attention over an encoder
}
"""What each shows, and its decoder."""


def kept(route: str, environments: Path, families: Sequence[str] = ()) -> Path:
    """Return the folder that keeps a route's exports beside the environments.

    Its name is a digest of all that they are made of: recipes, pins and checkpoint.
    """
    digest = hashlib.sha256(repr((route, *families)).encode())
    models = ROOT / "models"
    sources = [*models.glob("*.py"), *models.glob("environments/*"), *models.glob("qwen3-tiny/*")]
    for source in sorted(sources):
        digest.update(source.name.encode() + source.read_bytes())
    return environments / "exports" / digest.hexdigest()[:16]


def export_once(
    route: str, folder: Path, *, environments: Path, families: Sequence[str] = ()
) -> tuple[int, str]:
    """Export as ``make_exports`` does, or copy what an earlier run exported."""
    exports = kept(route, environments, families)
    if exports.is_dir():
        shutil.copytree(exports, folder / route)
        return 0, ""
    status, told = make_exports(route, folder, environments=environments, families=families)
    if status == 0:
        unfinished = exports.with_name(f"{exports.name}.{os.getpid()}")
        shutil.copytree(folder / route, unfinished)
        try:
            unfinished.rename(exports)
        except OSError:  # another run has made it meanwhile
            shutil.rmtree(unfinished)
    return status, told


def main() -> None:
    """Print the routes whose exports are not kept."""
    environments = Path(sys.argv[1])
    made = [*((route, ()) for route in ROUTES), (ROUTES[-1], tuple(FAMILIES))]
    missing = [
        route for route, families in made if not kept(route, environments, families).is_dir()
    ]
    print(*dict.fromkeys(missing))


if __name__ == "__main__":
    main()
