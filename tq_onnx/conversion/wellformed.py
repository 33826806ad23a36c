"""Find nodes that no runtime takes: operands that are missing, attributes of another type.

What ``onnx.checker`` says of a whole model is no reason to refuse it, because runtimes accept more
than it does. Of one node they accept no more: ONNX Runtime asks the same checker. Operators of
onnxruntime have no schema in onnx; of those that recognition looks into, the least number of
operands and the types of attributes are told here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import onnx
import onnx.checker
import onnx.defs
import onnx_ir as ir

from tq_onnx.graph.values import label
from tq_onnx.ops.domain import MICROSOFT

_LEAST_INPUTS: Final[dict[str, int]] = {
    "Attention": 2,
    "BiasGelu": 2,
    "FusedMatMul": 2,
    "GatherBlockQuantized": 3,
    "GroupQueryAttention": 7,
    "MatMulNBits": 3,
    "RotaryEmbedding": 4,
    "SimplifiedLayerNormalization": 2,
    "SkipLayerNormalization": 3,
    "SkipSimplifiedLayerNormalization": 3,
}
_TYPES: Final[Mapping[str, ir.AttributeType]] = {
    **dict.fromkeys(
        (
            *("K", "N", "accuracy_level", "axis", "bits", "block_size", "causal", "do_rotary"),
            *("gather_axis", "interleaved", "is_packed_batching", "kv_cache_bit_width"),
            *("kv_num_heads", "local_window_size", "num_heads", "qk_output", "quantize_axis"),
            *("rotary_embedding_dim", "rotary_interleaved", "sliding_window_cache"),
            *("smooth_softmax", "stash_type", "transA", "transB", "transBatchA", "transBatchB"),
            *("unidirectional",),
        ),
        ir.AttributeType.INT,
    ),
    **dict.fromkeys(
        ("alpha", "epsilon", "mask_filter_value", "qk_norm_epsilon", "scale", "softcap"),
        ir.AttributeType.FLOAT,
    ),
    **dict.fromkeys(("k_quant_type", "v_quant_type"), ir.AttributeType.STRING),
}
_CONTROL: Final = frozenset({"If", "Loop", "Scan", "SequenceMap"})
_LARGE: Final = 1024
"""Elements of a constant that the checker need not see."""


def broken_node(model: ir.Model, *, standard: bool) -> str:
    """Return what is wrong with the first node that no runtime takes; empty if there is none."""
    circle = _calls_itself(model)
    if circle:
        return f"the function {circle} calls itself"
    version = model.opset_imports.get("", 1)
    context: Any = onnx.checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = dict(model.opset_imports)
    for node in model.graph.all_nodes():
        if not node.op_type:
            return "a node has no operator"
        if not node.outputs:
            return f"the node {node.name or node.op_type} has no outputs"
        if node.domain == "" and node.op_type == "Cast" and not _casts(node):
            return f"the node {label(node)} casts to no element type"
        if node.domain == "" and onnx.defs.has(node.op_type, version):
            reason = _checked(node, context) if standard else ""
        elif node.domain in ("", MICROSOFT):
            reason = _foreign(node)
        else:
            reason = ""
        if reason:
            return reason
    return ""


def _casts(node: ir.Node) -> bool:
    """Return True unless a Cast names an element type that there is not."""
    to = node.attributes.get("to")
    known = {int(each) for each in ir.DataType}
    return to is None or to.type != ir.AttributeType.INT or to.value in known


def _calls_itself(model: ir.Model) -> str:
    """Return the name of a function that calls itself, at once or by others; empty if none does."""
    calls = {
        name: {node.op_identifier() for node in function.all_nodes()} & model.functions.keys()
        for name, function in model.functions.items()
    }
    while calls:
        leaves = [name for name, called in calls.items() if not called & calls.keys()]
        if not leaves:
            return next(iter(calls))[1]
        for name in leaves:
            del calls[name]
    return ""


def _checked(node: ir.Node, context: Any) -> str:
    if node.op_type in _CONTROL:
        return ""  # the checker needs the names around it
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR and attribute.value.size > _LARGE:
            return ""
    try:
        onnx.checker.check_node(ir.serde.serialize_node(node), context)
    except Exception as error:  # ValidationError, and errors of its C++ parts
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    return ""


def _foreign(node: ir.Node) -> str:
    least = _LEAST_INPUTS.get(node.op_type, 0)
    if len(node.inputs) < least:
        return f"the node {label(node)} ({node.op_type}) has {len(node.inputs)} inputs of {least}"
    if least and node.inputs[0] is None:
        return f"the node {label(node)} ({node.op_type}) has no first input"
    for name, attribute in node.attributes.items():
        expected = _TYPES.get(name)
        if expected is not None and attribute.type != expected:
            return f"the attribute {name} of the node {label(node)} is no {expected.name}"
    return ""
