"""The target ``web``: standard operators that onnxruntime-web and onnxruntime-node open fast.

What is imported inside of the functions takes onnx with it, and the command line reads this row for
its help.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.target import Lowering, Target, Values
from tq_onnx.errors import UsageError
from tq_onnx.plan import Plan

if TYPE_CHECKING:
    import onnx_ir as ir

CODECS: Final = tuple(Codec(LLOYD_MAX, bits) for bits in range(1, 6))
"""Those with one scale and no more: a table knows the centroids of a byte."""

_WITHOUT: Final = "convert without --target; the same runtimes run that too, but open it slowly"


def _refuse(plan: Plan) -> None:
    for layer in plan.layers:
        for codec in layer.codecs:
            if codec not in CODECS:
                known = ", ".join(map(str, CODECS))
                raise UsageError(
                    f"the target web has no graph for caches of {codec}; it has {known}",
                    where=f"layer {layer.layer}",
                    fix=f"give a preset such as int4 or int2 for all layers, or {_WITHOUT}",
                )
    if plan.has_window:
        raise UsageError(
            "the target web has no graph for an exact window",
            fix=f"give --window 0 --sinks 0, or {_WITHOUT}",
        )
    if plan.centered or plan.feeds_back:
        raise UsageError(
            "the target web has no graph for the means and covariances of a calibration",
            fix=f"leave --calibration out, or {_WITHOUT}",
        )


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.targets.web.lower import lowering_of

    return lowering_of(plan)


def _restore(model: ir.Model, plan: Plan) -> ir.Model:
    from tq_onnx.targets.web.restore import restore

    return restore(model, plan)


WEB: Final = Target(
    name="web",
    help="few standard operators, for onnxruntime-web and onnxruntime-node; see docs/portable.md",
    summary="few standard operators for onnxruntime-web and onnxruntime-node (docs/portable.md)",
    example="--target web",
    refuse=_refuse,
    lower=_lower,
    searches=False,
    has_windows=False,
    has_operators=False,
    restore=_restore,
)
