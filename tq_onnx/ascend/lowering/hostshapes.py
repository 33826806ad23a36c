"""Take shapes from token ids and masks, which are on the host, and not from values on the device.

A Shape node runs on the CPU, and ONNX Runtime copies its input there, contents included. The sizes
that a decoder needs are the number of sequences, the number of new tokens, and constants. Shapes
are inferred for two sets of sizes to tell which of these a dimension is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx
import onnx.shape_inference
import onnx_ir as ir

from tq_onnx.ascend.lowering.claims import is_float
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.shapes import without_weights
from tq_onnx.ops.schema import registered
from tq_onnx.plan import Plan

_BATCH: Final = "batch"
_TOKENS: Final = "tokens"

_Dims = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a call that no dimension of a model has by chance; others in another call."""

    batch: int
    tokens: int
    past: int
    capacity: int


_CALLS: Final = (_Sizes(31, 11, 17, 59), _Sizes(37, 13, 19, 61))


def answer_shapes(model: ir.Model, build: Builder, plan: Plan) -> int:
    """Answer every Shape node that asks about floats or a cache from ``plan.interface.tokens``.

    Returns:
        how many were answered; one that asks for something else stays.
    """
    shape_nodes = [
        node
        for node in model.graph
        if node.domain == "" and node.op_type == "Shape" and _is_on_device(node.inputs[0])
    ]
    if not shape_nodes:
        return 0
    first, second = (_inferred(model, plan, sizes) for sizes in _CALLS)
    tokens = next(v for v in model.graph.inputs if v.name == plan.interface.tokens)
    count = 0
    for node in shape_nodes:
        value = node.inputs[0]
        name = "" if value is None else value.name or ""
        if name not in first or name not in second:
            continue
        meanings = [_meaning(*dims) for dims in zip(first[name], second[name], strict=False)]
        start = attribute_int(node, "start", 0)
        end = attribute_int(node, "end", len(meanings))
        meant = meanings[start:end]
        if not meant or None in meant:
            continue
        with build.before(node, "cann/shape"):
            parts = [_part(build, tokens, meaning) for meaning in meant]
            answer = parts[0]
            if len(parts) > 1:
                shape = [len(parts)]
                dtype = ir.DataType.INT64
                answer = build.op("Concat", parts, "shape", dtype=dtype, shape=shape, axis=0)
        node.outputs[0].replace_all_uses_with(answer)
        count += 1
    return count


def _is_on_device(value: ir.Value | None) -> bool:
    return value is not None and (is_float(value) or value.dtype is ir.DataType.UINT8)


def _meaning(first: int, second: int) -> str | int | None:
    """Return the dimension that has these sizes in the two calls."""
    if first == second:
        return first if first >= 0 else None
    for meaning in (_BATCH, _TOKENS):
        if (first, second) == tuple(getattr(sizes, meaning) for sizes in _CALLS):
            return meaning
    return None


def _part(build: Builder, tokens: ir.Value, meaning: str | int | None) -> ir.Value:
    if isinstance(meaning, int):
        return build.integers(meaning)
    return build.dim(tokens, 0 if meaning == _BATCH else 1, str(meaning))


def _inferred(model: ir.Model, plan: Plan, sizes: _Sizes) -> _Dims:
    """Return the shapes of all values whose shape is a matter of the inputs' sizes alone."""
    proto = without_weights(model)
    del proto.graph.value_info[:]
    caches = {cache.past for cache in plan.caches}
    interface = plan.interface
    input_dims: dict[str | None, tuple[int, ...]] = {
        interface.tokens: (sizes.batch, sizes.tokens),
        interface.position_ids: (sizes.batch, sizes.tokens),
        interface.attention_mask: (sizes.batch, sizes.past + sizes.tokens),
    }
    for entry in proto.graph.input:
        dims = entry.type.tensor_type.shape.dim
        input_size = input_dims.get(entry.name)
        if entry.name in caches and len(dims) == 4:
            rows = plan.overlay_rows + sizes.capacity
            input_size = (sizes.batch, dims[1].dim_value, rows, dims[3].dim_value)
        for dim, size in zip(dims, input_size or (), strict=False):
            if not dim.HasField("dim_value"):
                dim.dim_value = size
    for entry in proto.graph.output:
        entry.type.tensor_type.ClearField("shape")
    try:
        with registered():
            inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # nothing is known then, and nothing is answered
        return {}
    return {
        info.name: dims
        for info in (*inferred.graph.input, *inferred.graph.value_info)
        if (dims := _static(info)) is not None
    }


def _static(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    kind = info.type.tensor_type
    if not kind.HasField("shape"):
        return None
    # What is not known is nothing that is asked for.
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
