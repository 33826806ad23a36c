"""Pieces of the function bodies, in standard ONNX (opset 18), written with onnxscript.

Every function here becomes a FunctionProto of its own in the operators' domain: a reader can open
it in Netron, and nothing is written twice. ``tq_onnx.ops.functions`` picks what a model needs.
Together they are the executable specification of the operators: plain arithmetic in float32, one
idea per function, and only operators that every runtime has (no BitCast, no TensorScatter, no
optional inputs). The operators themselves are put together from them for each model
(``tq_onnx.ops.bodies.operators``); a choice between codecs is their only subgraph.

onnxruntime inlines a body into the graph that calls it and reads it with that graph's opset, not
with the function's own. So every node here is written in a form that means the same in all opsets
from 15: reductions other than ReduceSum without axes (the largest of a row is a TopK), no Bitwise
operators, no Split.
"""

from __future__ import annotations

from typing import Any, Final

from onnx_ir import DataType
from onnxscript import opset18
from onnxscript.values import Opset

from tq_onnx.ops.domain import DOMAIN, VERSION

TURBOQUANT: Final = Opset(DOMAIN, VERSION)
"""The opset that the bodies' functions live in."""

# onnxscript's own signatures describe tensors as closed unions of element types, which no
# composition of operators satisfies: hence Any.
op: Any = opset18
"""The default opset that they are written in: ``domain.BODY_OPSET``."""

F32: Final = int(DataType.FLOAT)
U8: Final = int(DataType.UINT8)
I32: Final = int(DataType.INT32)
I64: Final = int(DataType.INT64)
F64: Final = int(DataType.DOUBLE)
BOOLEAN: Final = int(DataType.BOOL)
