"""One line for each graph: ``python -m tests.agreement [--preset NAME] [--library] PATH...``.

A path is a model file, or a folder that is searched for ``*.onnx``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.agreement.harness import agreement
from tests.agreement.tolerances import allowed


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.agreement")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--preset", default="raw")
    parser.add_argument("--library", action="store_true", help="run the kernels, not the bodies")
    given = parser.parse_args()
    for path in given.paths:
        for file in sorted(path.rglob("*.onnx")) if path.is_dir() else [path]:
            name = file.relative_to(path.parent) if path.is_dir() else file
            print(line(str(name), file, given.preset, library=given.library), flush=True)


def line(name: str, file: Path, preset: str, *, library: bool) -> str:
    """One graph: dialects, layers, and figures or the refusal."""
    try:
        found = agreement(file, preset, library=library)
    except Exception as error:  # a defect; the other graphs still count
        return f"!!  {name}  {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    kind = f"{found.dialects or '-'} x{found.layers} {found.dtype}"
    if found.refusal:
        return f"--  {name}  {kind}  {found.refusal}"
    figures = "  ".join(f"{way} {figure:.1e}" for way, figure in found.figures.items())
    sign = "ok" if found.worst <= allowed(found, preset) else ">>"
    return f"{sign}  {name}  {kind}  {figures}  (noise {found.noise:.1e})"


if __name__ == "__main__":
    main()
