"""The operators as standard ONNX for caches of one size, in place of the nodes.

The bodies are those that every converted model carries (``tq_onnx.ops.functions``), but for two
pieces, because sizes must not depend on numbers here: new rows never make a cache longer, and
attention looks at all of its slots. CANN's parser has no ScatterElements of bytes; a row is chosen
for every slot instead.
"""

# Tensor annotations are onnxscript's, which mypy cannot read. A function's output is named after
# the variable it returns.
# mypy: disable-error-code="type-arg,misc,no-any-return"
# ruff: noqa: RET504

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass
from onnxscript import INT64, UINT8, script

from tq_onnx.ascend.graph_mode.masklengths import Sizes
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.ops.bodies import TURBOQUANT, U8, op
from tq_onnx.ops.bodies.composing import operator_style
from tq_onnx.ops.domain import BODY_OPSET, DOMAIN, VERSION
from tq_onnx.ops.features import ATTENTION_BIAS, MIXED_CODECS, features_of
from tq_onnx.ops.functions import function_protos
from tq_onnx.ops.operator import Operator
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import LayerPlan, Plan


@script(TURBOQUANT, default_opset=op)
def append_rows(past: UINT8[...], rows: UINT8[...], past_length: INT64[...]) -> UINT8[...]:
    """Cache [B, N, S, W] with row t of rows [B, N, T, W] in slot past_length + t.

    There is one past_length [1] for all sequences, and room for all rows. Every slot is given one
    of the rows, and keeps it if it is its own.
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    slots = op.Range(zero, op.Squeeze(op.Shape(past, start=2, end=3)), one)
    steps = op.Sub(slots, past_length)
    new = op.Shape(rows, start=2, end=3)
    chosen = op.Gather(rows, op.Min(op.Max(steps, zero), op.Sub(new, one)), axis=2)
    is_new = op.And(op.GreaterOrEqual(steps, zero), op.Less(steps, new))
    width = op.Sub(op.Shape(past, start=3), op.Shape(rows, start=3))
    fill_shape = op.Concat(op.Shape(past, start=0, end=3), width, axis=0)
    fill = op.Expand(op.Cast(zero, to=U8), fill_shape)
    filled = op.Concat(chosen, fill, axis=-1)
    present = op.Where(op.Reshape(is_new, op.Constant(value_ints=[1, 1, -1, 1])), filled, past)
    return present


@script(TURBOQUANT, default_opset=op)
def append_row(past: UINT8[...], rows: UINT8[...], past_length: INT64[...]) -> UINT8[...]:
    """The same for one row: nothing has to be chosen, it is broadcast to all slots."""
    slots = op.Range(
        op.Constant(value_int=0),
        op.Squeeze(op.Shape(past, start=2, end=3)),
        op.Constant(value_int=1),
    )
    is_new = op.Equal(slots, past_length)
    width = op.Sub(op.Shape(past, start=3), op.Shape(rows, start=3))
    fill_shape = op.Concat(op.Shape(rows, start=0, end=3), width, axis=0)
    fill = op.Expand(op.Cast(op.Constant(value_int=0), to=U8), fill_shape)
    filled = op.Concat(rows, fill, axis=-1)
    present = op.Where(op.Reshape(is_new, op.Constant(value_ints=[1, 1, -1, 1])), filled, past)
    return present


def inline_operators(model: ir.Model, plan: Plan, sizes: Sizes) -> None:
    """Put the bodies of both operators, and all other functions, in place of the nodes.

    Args:
        model: every attention has a bias, and no cache is longer than the capacity.
        plan: of the conversion.
        sizes: new tokens of a call, and slots of every cache.
    """
    for identifier in [key for key in model.functions if key[1] in (Encode.name, Attention.name)]:
        del model.functions[identifier]
    domains: dict[tuple[type[Operator], tuple[Codec, Codec]], str] = {}
    for layer in converted_layers(model, plan):
        key, value = layer.plan.codecs
        for operator, node, codecs in (
            (Encode, layer.key.node, (key, key)),
            (Encode, layer.value.node, (value, value)),
            (Attention, layer.attention.node, (key, value)),
        ):
            if (operator, codecs) not in domains:
                # Without If, each codec needs bodies of its own, in a domain of their own.
                domain = domains[operator, codecs] = f"{DOMAIN}.graph{len(domains)}"
                for function in _bodies(plan, layer.plan, codecs, sizes):
                    _add_body(model, function, domain)
                model.opset_imports[domain] = VERSION
            node.domain = domains[operator, codecs]
            for attribute in operator.attributes:
                if MIXED_CODECS in attribute.when:
                    node.attributes.pop(attribute.name, None)
    InlinePass()(model)
    model.functions.clear()
    for domain in [name for name in model.opset_imports if name != ""]:
        if not any(node.domain == domain for node in model.graph):
            del model.opset_imports[domain]


def _bodies(
    plan: Plan, layer: LayerPlan, codecs: tuple[Codec, Codec], sizes: Sizes
) -> Iterator[onnx.FunctionProto]:
    """Yield both operators for one pair of codecs, and all that they call."""
    for proto in function_protos(
        [codecs],
        features=features_of(plan) | {ATTENTION_BIAS},
        element=ir.DataType[layer.dtype].numpy().name,
    ):
        if proto.name == operator_style(append_rows.name):
            body = append_row if sizes.tokens == 1 else append_rows
            replacement = body.to_function_proto()
            replacement.name = proto.name
            yield replacement
            continue
        if proto.name == "TotalLength":
            del proto.node[:]
            total = [ir.Value(name=proto.output[0])]
            constant = ir.node("Constant", [], {"value_ints": [sizes.capacity]}, outputs=total)
            proto.node.append(ir.to_proto(constant))
        yield proto


def _add_body(model: ir.Model, proto: onnx.FunctionProto, domain: str) -> None:
    proto.domain = domain
    for node in proto.node:
        if node.domain == DOMAIN:
            node.domain = domain
    function = ir.serde.deserialize_function(proto)
    function.opset_imports[""] = model.opset_imports.get("", BODY_OPSET)
    function.opset_imports[domain] = VERSION
    model.functions[function.identifier()] = function
