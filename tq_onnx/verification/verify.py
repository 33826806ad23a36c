"""``verify``: a conversion against its original.

Hard properties are checks: the model keeps its inputs and outputs, all but its codecs is its
original (``tq_onnx.verification.fidelity``), its baked tables are as its plan says, its calibration
is of this model (``tq_onnx.verification.calibrated``), every backend computes what the reference
computes, caches hold what theory promises, and the way of feeding does not matter. Quality figures
(perplexity, KL divergence, greedy continuation) are measured and reported; they depend on model and
text, so no verdict hangs on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.conversion.branches import split
from tq_onnx.errors import located
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.measure.windows import text_of
from tq_onnx.plan import plan_in
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.targets.registry import target_of_plan
from tq_onnx.verification.baseline import Baseline
from tq_onnx.verification.findings import Inputs, VerifyReport
from tq_onnx.verification.interfaces import failing, not_made_from
from tq_onnx.verification.steps import OPENING, Steps
from tq_onnx.verification.verification import Verification

BEGINNING: Final = "first prompt"
"""Of checks of the branch that takes no caches."""


def verify(
    original: Path,
    converted: Path,
    tokens: Sequence[int] | npt.NDArray[np.int64] | int,
    *,
    source: str,
    new_tokens: int = 32,
    context: int = 512,
    library: bool = True,
    threads: int | None = None,
    ep: ExecutionProvider = CPU,
    quick: bool = False,
    is_named: bool = False,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Compare a converted model with its original; return the report; ``holds`` is its verdict.

    Args:
        context: tokens per perplexity window.
        ep: where the converted model runs when it is compared with the original, which always runs
            on the CPU; it is then compared with itself on the CPU too.
        is_named: whether the caller chose the tokens, so that the check "quality" reads them; else
            the original writes a text for it.
        on_progress: called as each step begins and goes on, with what all of it will take as soon
            as that is known.
    """
    tell = on_progress or silent
    tell(Progress(OPENING))
    loaded = load(converted)
    with failing(converted):
        plan = plan_in(loaded.model.metadata_props)
    with located(converted):
        if plan is not None:
            target_of_plan(plan)
    whole = Baseline.of(original, threads=threads)

    def inputs_of(baseline: Baseline) -> Inputs:
        text = text_of(baseline.opened, tokens)
        return Inputs(text, new_tokens, context, library, threads, ep, quick, is_named)

    pairs = _parts(whole, converted, loaded) or [(whole, loaded)]
    progress = Steps(tell, parts=len(pairs))
    reports = []
    for baseline, part in pairs:
        verification = Verification(baseline, converted, part, inputs_of(baseline), progress)
        reports.append(verification.report(source))
    *earlier, report = reports
    beginning = [
        replace(check, name=f"{BEGINNING}: {check.name}") for r in earlier for check in r.checks
    ]
    return replace(
        report,
        checks=(*beginning, *report.checks),
        warnings=tuple(text for part in reports for text in part.warnings),
    )


def _parts(
    whole: Baseline, converted: Path, loaded: LoadedModel
) -> list[tuple[Baseline, LoadedModel]]:
    """Return the parts of merged models, those that take caches last; [] for others."""
    parts = whole.parts()
    if not parts:
        return []
    branches = split(loaded)
    if branches is None:
        raise not_made_from(whole.path, converted, "it is not merged of two branches")
    return list(zip(parts, (branches.first, branches.following), strict=True))
