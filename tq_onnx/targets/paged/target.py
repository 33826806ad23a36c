"""The target ``paged``: caches in pages, for servers that let requests join at any step.

What is imported inside of the functions takes onnx with it, and the command line reads this row for
its help.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tq_onnx.conversion.capabilities import Capabilities
from tq_onnx.conversion.target import Lowering, Target, TargetOption, Values
from tq_onnx.errors import UsageError
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    COMMON,
    EXACT_WINDOW,
    FEEDBACK,
    GAINS,
    OFFSETS,
    PAGES,
    ROTARY_OFFSETS,
    ROW_WIDTH,
    SHARED_CACHES,
    SPARE_ROWS,
)
from tq_onnx.plan import Plan

PAGED: Final = "paged"
BLOCK_SIZE: Final = 256
MULTIPLE: Final = 16
"""Of slots in a page: what kernels read together."""
MAX_BATCH_SIZE: Final = 16
USUAL_TOKENS: Final = 4096
"""Of a request, for which there are pages where nobody says how many there are to be."""


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.targets.paged.lower import lowering_of

    size = values["block_size"] or BLOCK_SIZE
    if size % MULTIPLE:
        raise UsageError(f"`block_size={size}` is not a multiple of {MULTIPLE}")
    return lowering_of(plan, size)


TARGET: Final = Target(
    name=PAGED,
    help="onnxruntime-genai's Engine, with paged caches (docs/serving.md)",
    summary="caches in pages, the tokens of many requests in one call (docs/serving.md)",
    options=(
        TargetOption(
            "block_size",
            f"tokens per page, a multiple of {MULTIPLE}.",
            default=BLOCK_SIZE,
            least=MULTIPLE,
        ),
        TargetOption(
            "max_batch_size",
            "most requests per call, for a folder.",
            default=MAX_BATCH_SIZE,
            for_folders=True,
        ),
        TargetOption(
            "num_blocks",
            f"pages per cache, for a folder.  [default: enough for {USUAL_TOKENS:,} tokens per "
            "request, and for one full context]",
            for_folders=True,
        ),
    ),
    capabilities=Capabilities(
        features=COMMON
        | {SHARED_CACHES, ROW_WIDTH, GAINS, FEEDBACK, OFFSETS, ROTARY_OFFSETS}
        | {EXACT_WINDOW, SPARE_ROWS, PAGES},
        # What is causal needs none; lowering refuses other masks.
        notes={ATTENTION_BIAS: "none"},
    ),
    lower=_lower,
    in_pages=True,
)
