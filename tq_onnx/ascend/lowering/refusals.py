"""Know the limits of the kernels for CANN, to refuse other conversions in time."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.values import label, static_dim
from tq_onnx.ops.domain import DOMAIN, RMS_NORMALIZATION, SWISH, TRANSPOSE

_IN_BLOCKS: Final = frozenset({RMS_NORMALIZATION, SWISH, TRANSPOSE})
_BLOCK: Final = 16
"""Elements: what is moved is whole blocks of 32 bytes, in either type."""


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
                where='`target="cann"`',
                fix='leave out `target="cann"`',
            )
