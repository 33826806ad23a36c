"""GroupQueryAttention with norms inside, which ONNX Runtime's CPU provider has no kernel for."""

from __future__ import annotations

import onnx_ir as ir

from tq_onnx.graph.builder import Builder


def take_norms_out(model: ir.Model) -> None:
    """Norms queries and keys before the operator, as it says that it does; in place."""
    build = Builder(model.graph)
    for node in [node for node in model.graph if node.op_type == "GroupQueryAttention"]:
        if len(node.inputs) < 16 or node.inputs[14] is None:
            continue
        with build.before(node, f"norms.{node.name}"):
            if node.inputs[1] is None:
                _split(build, node)
            for slot, name in ((0, "num_heads"), (1, "kv_num_heads")):
                _norm(build, node, slot, node.attributes.get_int(name) or 0)
        node.resize_inputs(14)


def _split(build: Builder, node: ir.Node) -> None:
    """Splits projections that come in one."""
    heads, shared = (node.attributes.get_int(name) or 0 for name in ("num_heads", "kv_num_heads"))
    past, packed = node.inputs[3], node.inputs[0]
    assert past is not None and past.shape is not None and packed is not None
    size = packed.shape[2] // (heads + 2 * shared) if packed.shape is not None else past.shape[3]
    sizes = build.integers(heads * size, shared * size, shared * size)
    dtype, shapes = packed.dtype, [["B", "T", count * size] for count in (heads, shared, shared)]
    parts = build.ops(
        "Split", [packed, sizes], "parts", dtype=dtype, shapes=shapes, attributes={"axis": -1}
    )
    for slot, part in enumerate(parts):
        node.replace_input_with(slot, part)


def _norm(build: Builder, node: ir.Node, slot: int, heads: int) -> None:
    rows, weight = node.inputs[slot], node.inputs[14 + slot]
    assert rows is not None and weight is not None and weight.shape is not None
    size, dtype = weight.shape[0], rows.dtype
    apart = build.op("Reshape", [rows, build.integers(0, 0, heads, -1)], "heads", dtype=dtype)
    names = (("q", "k")[slot] + "_norm_epsilon", "qk_norm_epsilon")
    epsilon = next(filter(None, map(node.attributes.get_float, names)), 1e-6)
    normed = build.op(
        "SimplifiedLayerNormalization", [apart, weight], "norm", dtype=dtype, epsilon=epsilon
    )
    merged = build.integers(0, 0, heads * int(size))
    node.replace_input_with(slot, build.op("Reshape", [normed, merged], "rows", dtype=dtype))
