"""The target ``web``: standard operators that onnxruntime-web and onnxruntime-node open fast.

What is imported inside of the functions takes onnx with it, and the command line reads this row for
its help.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import CODECS
from tq_onnx.conversion.capabilities import Capabilities
from tq_onnx.conversion.target import Lowering, Target, Values
from tq_onnx.ops.features import COMMON, FIRST_PROMPT, ROW_WIDTH, SHARED_CACHES
from tq_onnx.plan import Plan

if TYPE_CHECKING:
    import onnx_ir as ir


def _lower(plan: Plan, path: Path, values: Values) -> Lowering:
    from tq_onnx.targets.web.lower import lowering_of

    return lowering_of(plan)


def _restore(model: ir.Model, plan: Plan) -> ir.Model:
    from tq_onnx.targets.restore import restore

    return restore(model, plan)


WEB: Final = Target(
    name="web",
    help="onnxruntime-web and onnxruntime-node, in standard operators only (docs/portable.md)",
    summary="standard operators only, for onnxruntime-web and onnxruntime-node (docs/portable.md)",
    capabilities=Capabilities(
        means="graph",
        features=COMMON | {SHARED_CACHES, FIRST_PROMPT, ROW_WIDTH},
        # Those with one scale and no more: a table knows the centroids of a byte.
        codecs=tuple(codec for codec in CODECS if codec.kind == LLOYD_MAX),
    ),
    lower=_lower,
    restore=_restore,
)
