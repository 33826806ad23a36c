"""What must hold of a converted model on a device: where its nodes run, and that it is the same.

The tolerances stand here, each with its reason.
"""

from __future__ import annotations

from typing import Final

from tq_onnx.measure.checks import MAX_SCALE_STEPS
from tq_onnx.measure.devices import ProviderFigures
from tq_onnx.measure.greedy import MAX_NEAR_TIE_GAP
from tq_onnx.measure.verifyreport import Check
from tq_onnx.runtime.placement import PlacementReport, problem_of

# Sums in other orders, through all layers.
MAX_LOGIT_ERROR: Final = 1e-4
# Of the largest logit, with 16 bits and behind ties: codes that fall on the other side move all
# logits. Measured 9e-3 with random weights in float16.
MAX_RELATIVE_ERROR: Final = 3e-2
# Of vectors that are encoded, where bytes differ: behind the first tie they are no longer the same.
MAX_VECTOR_ERROR: Final = 5e-2


def on_device(report: PlacementReport) -> Check:
    """Every node that computes floats or touches a cache, on the provider that was asked for."""
    problem = problem_of(report)
    return Check(
        f"{report.provider} runs every node that it should", problem is None, problem or str(report)
    )


def providers_agree(figures: ProviderFigures, dtype: str) -> list[Check]:
    """A device against the CPU; see ``verify.crossproviders``."""
    provider = figures.provider
    relative = MAX_RELATIVE_ERROR * figures.largest_logit
    limit = MAX_LOGIT_ERROR if dtype == "FLOAT" else relative
    later = figures.later_logit_error
    behind = "" if later is None else f"; {later:.1e} behind the first tie, {relative:.1e} allowed"
    # Two logits that each differ by no more than the limit may change places.
    strict = dtype == "FLOAT" and later is None
    tie = figures.gap is not None and figures.gap <= min(2 * relative, MAX_NEAR_TIE_GAP)
    explained = (
        figures.codes_wrong == 0
        and figures.scale_steps <= MAX_SCALE_STEPS
        and figures.vector_error <= MAX_VECTOR_ERROR
    )
    ties = (
        f"; {figures.codes_wrong} codes are no boundary ties, fields within {figures.scale_steps} "
        f"steps of their type, vectors within {figures.vector_error:.1e}"
    )
    parted = "" if figures.gap is None else f", then the CPU prefers its own by {figures.gap:.1e}"
    return [
        Check(
            f"logits on {provider} equal those on the CPU",
            figures.logit_error <= limit and (later is None or later <= relative),
            f"largest difference {figures.logit_error:.1e} in the {figures.alike_tokens} tokens "
            f"of which all caches are the same, {limit:.1e} allowed{behind}",
        ),
        Check(
            f"greedy tokens on {provider} equal those on the CPU",
            figures.same_tokens == figures.new_tokens or (tie and not strict),
            f"the same {figures.same_tokens} of {figures.new_tokens} tokens{parted}",
        ),
        Check(
            f"caches on {provider} equal those on the CPU",
            figures.bytes_differing == 0 or explained,
            f"{figures.bytes_differing} of {figures.cache_bytes} bytes differ"
            + (ties if figures.bytes_differing else ""),
        ),
    ]
