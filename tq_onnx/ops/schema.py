"""onnx.defs schemas of the operators, made of their records, with type and shape inference.

Once registered, ``onnx.checker`` catches missing attributes and wrong element types, and
``onnx.shape_inference`` (and so ``check_model(full_check=True)``) the shapes that cannot be: a row
width that is not the codec's, a rotation of another size, query heads that KV heads do not divide.
A model that also carries function bodies of the same names is checked against the schemas.

Inference states the batch, heads and row bytes of the caches; the number of slots of ``present``
stays open unless past, new tokens and ``past_length`` are all constants. It refuses with
``onnx.shape_inference.InferenceError``, naming the node, the input and both values.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import onnx
from onnx.defs import OpSchema

from tq_onnx.ops.decoder_inference import INFERENCE
from tq_onnx.ops.domain import DOMAIN, VERSION
from tq_onnx.ops.inference import (
    infer_attention,
    infer_encode,
    infer_paged_attention,
    infer_paged_encode,
)
from tq_onnx.ops.operator import FLOATS, Attribute, Operator, Parameter
from tq_onnx.ops.operators import OPERATORS, Attention, Encode, PagedAttention, PagedEncode

_TYPES: Final = (
    (
        FLOATS,
        ("tensor(float)", "tensor(float16)", "tensor(bfloat16)"),
        "element type of the model's activations",
    ),
)
_INFERENCE: Final = {
    Encode.name: infer_encode,
    Attention.name: infer_attention,
    PagedEncode.name: infer_paged_encode,
    PagedAttention.name: infer_paged_attention,
    **INFERENCE,
}


def _parameter(parameter: Parameter) -> Any:
    options = OpSchema.FormalParameterOption
    return OpSchema.FormalParameter(
        parameter.name,
        parameter.element,
        parameter.meaning,
        param_option=options.Optional if parameter.is_optional else options.Single,
    )


def _attribute(attribute: Attribute) -> OpSchema.Attribute:
    if attribute.default is None:
        kind = getattr(OpSchema.AttrType, attribute.kind.name)
        return OpSchema.Attribute(attribute.name, kind, attribute.meaning, required=True)
    default = onnx.AttributeProto(
        name=attribute.name, type=onnx.AttributeProto.INT, i=attribute.default
    )
    return OpSchema.Attribute(attribute.name, default, attribute.meaning)


def schema_of(operator: type[Operator]) -> OpSchema:
    """Return the schema of an operator, with its type and shape inference."""
    schema = OpSchema(
        operator.name,
        DOMAIN,
        VERSION,
        operator.summary,
        inputs=[_parameter(each) for each in operator.inputs],
        outputs=[_parameter(each) for each in operator.outputs],
        type_constraints=_TYPES,
        attributes=[_attribute(each) for each in operator.attributes],
    )
    schema.set_type_and_shape_inference_function(_INFERENCE[operator.name])
    return schema


def is_registered() -> bool:
    """Return True if onnx knows all operators."""
    return all(onnx.defs.has(operator.name, DOMAIN) for operator in OPERATORS)


def register_schemas() -> None:
    """Make all operators known to onnx. Does nothing for one that is known already."""
    for schema in map(schema_of, OPERATORS):
        if not onnx.defs.has(schema.name, DOMAIN):
            onnx.defs.register_schema(schema)
            # onnx 1.21 frees its registry after the interpreter is gone, and a schema with an
            # inference function in Python then crashes the process on exit.
            atexit.register(deregister_schemas)


def deregister_schemas() -> None:
    """Make onnx forget all operators. Does nothing for one that is not known."""
    for operator in OPERATORS:
        if onnx.defs.has(operator.name, DOMAIN):
            onnx.defs.deregister_schema(operator.name, VERSION, DOMAIN)


@contextmanager
def registered() -> Iterator[None]:
    """Register the schemas inside the block, and leave them as they were after it."""
    before = is_registered()
    register_schemas()
    try:
        yield
    finally:
        if not before:
            deregister_schemas()
