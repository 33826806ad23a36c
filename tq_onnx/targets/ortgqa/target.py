"""The target ``ort-gqa``: ONNX Runtime's own caches of 8 or 4 bits, without any library of ours.

What is imported inside of the functions takes onnx with it, and the command line reads this row for
its help.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import RAW
from tq_onnx.conversion.capabilities import Capabilities
from tq_onnx.conversion.target import Lowering, Target, TargetOption, Values
from tq_onnx.errors import UsageError
from tq_onnx.ops.features import ATTENTION_BIAS, HEAD_SINK, SLIDING_WINDOW, SOFTCAP
from tq_onnx.plan import CODE_WIDTHS, Plan

if TYPE_CHECKING:
    import onnx_ir as ir

    from tq_onnx.codec.calibration import Calibration

ORT_GQA: Final = "ort-gqa"
_BITS: Final = "kv_cache_bit_width"


def _lower(plan: Plan, values: Values, calibration: Calibration) -> Lowering:
    from tq_onnx.targets.ortgqa.lower import lowering_of

    bits = values[_BITS]
    if bits not in CODE_WIDTHS:
        raise UsageError(f"`{_BITS}={bits}` is neither 8 nor 4")
    return lowering_of(plan, calibration, bits, ORT_GQA)


def _restore(model: ir.Model, plan: Plan) -> ir.Model:
    from tq_onnx.targets.ortgqa.lower import restore

    return restore(model, plan)


TARGET: Final = Target(
    name=ORT_GQA,
    help="ONNX Runtime's own int8 or int4 caches, no library of ours (docs/portable.md)",
    summary="ONNX Runtime's own caches (GroupQueryAttention), no operator library "
    "(docs/portable.md)",
    example=MappingProxyType({"calibrate": ""}),
    options=(
        TargetOption(
            _BITS,
            "bits of a number, 8 or 4.",
            default=CODE_WIDTHS[0],
            least=min(CODE_WIDTHS),
            metavar="BITS",
        ),
    ),
    capabilities=Capabilities(
        means="graph",
        features=frozenset((ATTENTION_BIAS, HEAD_SINK, SLIDING_WINDOW, SOFTCAP)),
        codecs=tuple(Codec(RAW, bits) for bits in (32, 16)),
        elements=("FLOAT", "FLOAT16"),
        # What is causal needs none; lowering refuses other masks.
        notes={ATTENTION_BIAS: "none"},
    ),
    preset=RAW,
    lower_calibrated=_lower,
    restore=_restore,
)
