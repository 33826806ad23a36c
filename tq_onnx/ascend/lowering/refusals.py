"""Know the limits of the kernels for CANN, to refuse other conversions in time."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.ascend.features import lacking
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.values import label, static_dim
from tq_onnx.ops.domain import DOMAIN, RMS_NORMALIZATION, SWISH, TRANSPOSE
from tq_onnx.plan import Plan

_IN_BLOCKS: Final = frozenset({RMS_NORMALIZATION, SWISH, TRANSPOSE})
_BLOCK: Final = 16
"""Elements: what is moved is whole blocks of 32 bytes, in either type."""


def expect_kernels(plan: Plan) -> None:
    """Refuse a plan with something that there are no kernels for.

    Raises:
        UsageError: a layer has it.
    """
    for layer in plan.layers:
        for asked, feature in lacking(layer, plan):
            raise UsageError(
                f"there are no kernels for CANN with {asked}; {feature.name}: {feature.there}",
                where=f"layer {layer.layer}",
                fix=f"{feature.fix}, or leave out --target cann"
                if feature.fix
                else "leave out --target cann",
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
