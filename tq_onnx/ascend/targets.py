"""The target ``cann``: every node that computes floats runs on CANNExecutionProvider.

What is imported inside of the functions takes onnx with it, and the command line reads this row for
its help.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from tq_onnx.conversion.target import (
    Lowering,
    Target,
    TargetOption,
    Values,
)
from tq_onnx.plan import Plan


def _refuse(plan: Plan) -> None:
    from tq_onnx.ascend.lowering.refusals import expect_kernels

    expect_kernels(plan)


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.ascend.lowering.decoder import lowering_of
    from tq_onnx.ascend.lowering.positions import positions_of
    from tq_onnx.ascend.lowering.refusals import WholeBlocksPass

    lowering = lowering_of(plan, positions_of(path, values["max_positions"]))
    passes = (*lowering.passes, WholeBlocksPass())
    if values["expand_weights"] is None:
        return replace(lowering, passes=passes)

    from tq_onnx.ascend.lowering.weights import TYPES, ExpandWeightsPass, NarrowProductsPass

    narrow = NarrowProductsPass(TYPES[values["expand_weights"]])
    return replace(lowering, passes=(ExpandWeightsPass(), *passes, narrow), has_all_weights=True)


CANN: Final = Target(
    name="cann",
    help="every floating-point node on CANNExecutionProvider, for Ascend NPUs",
    summary="every floating-point node on CANNExecutionProvider",
    example="--target cann --max-positions 8192",
    options=(
        TargetOption(
            "max_positions",
            "longest context, the size of the rotary tables.  [default: "
            "max_position_embeddings of config.json beside MODEL, or 32768]",
        ),
        TargetOption(
            "expand_weights",
            "write quantised weights (MatMulNBits) in that type, to a data file beside the output.",
            words=("float16", "float32"),
        ),
    ),
    refuse=_refuse,
    lower=_lower,
    provider="cann",
    feeds_back=False,
    # The provider copies an output that shares its memory before it is computed.
    exposes_views=False,
)
