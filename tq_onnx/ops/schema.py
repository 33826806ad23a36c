"""onnx.defs schemas of the operators, with type and shape inference.

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

from tq_onnx.ops import documentation as doc
from tq_onnx.ops.decoder import OPERATORS
from tq_onnx.ops.decoder_inference import INFERENCE
from tq_onnx.ops.domain import ATTENTION, DECODER, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.inference import infer_attention, infer_encode

_FLOATS: Final = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
_BYTES: Final = "tensor(uint8)"
_INT64: Final = "tensor(int64)"
_FLOAT: Final = "tensor(float)"
_TYPES: Final = (("T", _FLOATS, "element type of the model's activations"),)

_ENCODE_TYPES: Final = {"vectors": "T", "past": _BYTES, "present": _BYTES, "past_length": _INT64}
_ATTENTION_TYPES: Final = {
    "query": "T",
    "key_cache": _BYTES,
    "value_cache": _BYTES,
    "past_length": _INT64,
    "attention_bias": "T",
    "head_sink": "T",
    "output": "T",
}
_ATTRIBUTE_TYPES: Final[dict[str, Any]] = {
    "scale": OpSchema.AttrType.FLOAT,
    "softcap": OpSchema.AttrType.FLOAT,
    "epsilon": OpSchema.AttrType.FLOAT,
    "perm": OpSchema.AttrType.INTS,
    "codec": OpSchema.AttrType.STRING,
    "key_codec": OpSchema.AttrType.STRING,
    "value_codec": OpSchema.AttrType.STRING,
}

_NAMES: Final = (ENCODE, ATTENTION, *DECODER)


def _parameter(entry: tuple[str, str], types: dict[str, str], *, optional: bool = False) -> Any:
    name, meaning = entry
    options = OpSchema.FormalParameterOption
    return OpSchema.FormalParameter(
        name,
        types.get(name, _FLOAT),
        meaning,
        param_option=options.Optional if optional else options.Single,
    )


def _attributes(
    entries: tuple[tuple[str, str], ...], choices: tuple[tuple[str, str], ...]
) -> list[OpSchema.Attribute]:
    """Attributes that must be there, and numbers that are 0 if they are not."""
    integer, number = OpSchema.AttrType.INT, onnx.AttributeProto.INT
    required = [
        OpSchema.Attribute(name, _ATTRIBUTE_TYPES.get(name, integer), meaning, required=True)
        for name, meaning in entries
    ]
    optional = [
        OpSchema.Attribute(name, onnx.AttributeProto(name=name, type=number, i=0), meaning)
        for name, meaning in choices
    ]
    return required + optional


def encode_schema() -> OpSchema:
    """The schema of TurboQuantEncode."""
    schema = OpSchema(
        ENCODE,
        DOMAIN,
        VERSION,
        doc.ENCODE_SUMMARY,
        inputs=[
            *(_parameter(entry, _ENCODE_TYPES) for entry in doc.ENCODE_INPUTS),
            _parameter(doc.OFFSET, _ENCODE_TYPES, optional=True),
        ],
        outputs=[_parameter(entry, _ENCODE_TYPES) for entry in doc.ENCODE_OUTPUTS],
        type_constraints=_TYPES,
        attributes=_attributes(doc.ENCODE_ATTRIBUTES, doc.ENCODE_CHOICE),
    )
    schema.set_type_and_shape_inference_function(infer_encode)
    return schema


def attention_schema() -> OpSchema:
    """The schema of TurboQuantDequantAttention."""
    schema = OpSchema(
        ATTENTION,
        DOMAIN,
        VERSION,
        doc.ATTENTION_SUMMARY,
        inputs=[
            *(_parameter(entry, _ATTENTION_TYPES) for entry in doc.ATTENTION_INPUTS),
            *(_parameter(e, _ATTENTION_TYPES, optional=True) for e in doc.ATTENTION_OPTIONAL),
        ],
        outputs=[_parameter(entry, _ATTENTION_TYPES) for entry in doc.ATTENTION_OUTPUTS],
        type_constraints=_TYPES,
        attributes=_attributes(doc.ATTENTION_ATTRIBUTES, doc.ATTENTION_CHOICE),
    )
    schema.set_type_and_shape_inference_function(infer_attention)
    return schema


def decoder_schema(name: str) -> OpSchema:
    """The schema of one of the decoder's other operators."""
    operator = OPERATORS[name]
    floats = dict.fromkeys((entry[0] for entry in (*operator.inputs, operator.output)), "T")
    types = floats | dict(operator.types)
    schema = OpSchema(
        name,
        DOMAIN,
        VERSION,
        operator.summary,
        inputs=[_parameter(entry, types) for entry in operator.inputs],
        outputs=[_parameter(operator.output, types)],
        type_constraints=_TYPES,
        attributes=_attributes(operator.attributes, ()),
    )
    schema.set_type_and_shape_inference_function(INFERENCE[name])
    return schema


def is_registered() -> bool:
    """Whether onnx knows all operators."""
    return all(onnx.defs.has(name, DOMAIN) for name in _NAMES)


def register_schemas() -> None:
    """Makes all operators known to onnx. Does nothing for one that is known already."""
    for schema in (encode_schema(), attention_schema(), *map(decoder_schema, DECODER)):
        if not onnx.defs.has(schema.name, DOMAIN):
            onnx.defs.register_schema(schema)
            # onnx 1.21 frees its registry after the interpreter is gone, and a schema with an
            # inference function in Python then crashes the process on exit.
            atexit.register(deregister_schemas)


def deregister_schemas() -> None:
    """Makes onnx forget all operators. Does nothing for one that is not known."""
    for name in _NAMES:
        if onnx.defs.has(name, DOMAIN):
            onnx.defs.deregister_schema(name, VERSION, DOMAIN)


@contextmanager
def registered() -> Iterator[None]:
    """Has the schemas registered inside the block, and leaves them as they were after it."""
    before = is_registered()
    register_schemas()
    try:
        yield
    finally:
        if not before:
            deregister_schemas()
