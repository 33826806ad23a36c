"""Know the limits of the kernels for CANN, to refuse other conversions in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from tq_onnx.codec.kind import NORM_KEPT
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.values import label, static_dim
from tq_onnx.ops.domain import DOMAIN, RMS_NORMALIZATION, SWISH, TRANSPOSE
from tq_onnx.plan import LayerPlan, Plan

_CODEC: Final = Codec(LLOYD_MAX, 4)
_HEAD_SIZES: Final = (64, 128)
_ELEMENTS: Final = ("FLOAT", "FLOAT16")
_IN_BLOCKS: Final = frozenset({RMS_NORMALIZATION, SWISH, TRANSPOSE})
_BLOCK: Final = 16
"""Elements: what is moved is whole blocks of 32 bytes, in either type."""


def expect_kernels(plan: Plan) -> None:
    """Refuse a plan with something that there are no kernels for.

    Raises:
        UsageError: a layer has it.
    """
    for layer in plan.layers:
        for lacking, fix in _lacking(layer, plan):
            raise UsageError(
                f"there are no kernels for CANN with {lacking}",
                where=f"layer {layer.layer}",
                fix=f"{fix}, or leave out --target cann" if fix else "leave out --target cann",
            )


class WholeBlocksPass(ir.passes.InPlacePass):
    """Refuses a lowered model with rows that the kernels cannot move; changes nothing."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Look at every row.

        Raises:
            UnsupportedModelError: a row is no multiple of 16 elements.
        """
        _expect_whole_blocks(model)
        return ir.passes.PassResult(model, modified=False)


def _expect_whole_blocks(model: ir.Model) -> None:
    for node in model.graph:
        if node.domain != DOMAIN or node.op_type not in _IN_BLOCKS:
            continue
        width = static_dim(node.outputs[0], -1)
        if width is not None and width % _BLOCK:
            raise UnsupportedModelError(
                f"the kernels for CANN take rows of a multiple of {_BLOCK} elements, and "
                f"{label(node)} ({node.op_type}) has rows of {width}",
                where="--target cann",
                fix="leave out --target cann",
            )


def _lacking(layer: LayerPlan, plan: Plan) -> Iterator[tuple[str, str]]:
    """Return the part of a layer that has no kernel, and the advice for it, if any."""
    if layer.dtype not in _ELEMENTS:
        other = f"the element type {layer.dtype}, expected FLOAT or FLOAT16"
        yield other, "export it in float32 or float16"
    if layer.key.past is None:
        other = "a graph for a first prompt, which takes no caches"
        yield other, "export it with past key/value inputs and outputs"
    if layer.sliding_window:
        yield f"a sliding window of {layer.sliding_window} tokens", ""
    if layer.softcap:
        yield f"a softcap of {layer.softcap}", ""
    if layer.has_sink:
        yield "attention sinks", ""
    if layer.head_size not in _HEAD_SIZES:
        yield f"a head size of {layer.head_size}, expected 64 or 128", ""
    if plan.gains:
        yield "encoders that try several gains", "convert the original with --target cann"
    elif layer.codecs != (_CODEC, _CODEC) or plan.norm_correction != NORM_KEPT:
        caches = f"caches of {layer.key_of} and {layer.value_of}, expected {_CODEC} for both"
        yield caches, "use --preset int4 for all layers"
    if layer.centered:
        yield "centered keys and values", "leave out --calibration"
