"""One line for each graph: ``python -m tests.agreement [--preset NAME] [--paged] PATH...``.

A path is a model file, or a folder that is searched for ``*.onnx``. ``--results FILE`` writes what
was found as JSON, by the graphs' paths in the folder; docs/exports.md shows that of
``docs/exports-families.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.agreement.harness import Agreement, agreement, packed
from tests.agreement.tolerances import allowed

RIGHT, REFUSED, WRONG, DOES_NOT_RUN, BROKEN = "ok", "--", ">>", "..", "!!"
"""Verdicts: compared, refused by name, other logits, an original that does not run, a defect."""


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.agreement")
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--preset", default="raw")
    parser.add_argument("--library", action="store_true", help="run the kernels, not the bodies")
    parser.add_argument("--paged", action="store_true", help="pages, too, with the preset raw")
    parser.add_argument("--results", type=Path, help="file for the results, in JSON")
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for path in given.paths:
        for file in sorted(path.rglob("*.onnx")) if path.is_dir() else [path]:
            name = file.relative_to(path.parent) if path.is_dir() else file
            verdict, found, text = judged(file, given.preset, library=given.library)
            pages: dict[str, Any] = {}
            if given.paged and verdict == RIGHT:
                verdict, pages = judged_pages(file, found)
            print(f"{verdict}  {name}  {text}  {pages or ''}", flush=True)
            results[file.relative_to(path).as_posix() if path.is_dir() else file.name] = {
                "verdict": verdict,
                "dialects": found.dialects,
                "worst": round(found.worst, 9) if found.figures else None,
                "reason": sentence(found.refusal, file),
                **pages,
            }
    if given.results:
        given.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def judged(file: Path, preset: str, *, library: bool) -> tuple[str, Agreement, str]:
    """One graph: a verdict, what was found, and that in words."""
    try:
        found = agreement(file, preset, library=library)
    except Exception as error:  # a defect; the other graphs still count
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return BROKEN, Agreement(refusal=text), text
    kind = f"{found.dialects or '-'} x{found.layers} {found.dtype}"
    if found.refusal:
        not_run = found.refusal.startswith("original does not run")
        return DOES_NOT_RUN if not_run else REFUSED, found, f"{kind}  {found.refusal}"
    figures = "  ".join(f"{way} {figure:.1e}" for way, figure in found.figures.items())
    verdict = RIGHT if found.worst <= allowed(found, preset) else WRONG
    return verdict, found, f"{kind}  {figures}  (noise {found.noise:.1e})"


def judged_pages(file: Path, found: Agreement) -> tuple[str, dict[str, Any]]:
    """A graph that is right: a verdict on its conversion to pages, and the entries of that."""
    try:
        difference, refusal = packed(file)
    except Exception as error:  # a defect, as above
        return BROKEN, {"paged": None, "paged_reason": f"{type(error).__name__}: {error}"[:300]}
    if refusal:
        return RIGHT, {"paged": None, "paged_reason": sentence(refusal, file)}
    verdict = RIGHT if difference <= allowed(found, "raw") else WRONG
    return verdict, {"paged": round(difference, 9), "paged_reason": ""}


def sentence(refusal: str, file: Path) -> str:
    """A refusal without the file, and without what to do where all are told the same."""
    text = refusal.replace(f"{file}: ", "").partition("; `tq-onnx")[0]
    return text.removeprefix('`target="paged"`: ').partition('; convert without `target="paged"`')[
        0
    ]


if __name__ == "__main__":
    main()
