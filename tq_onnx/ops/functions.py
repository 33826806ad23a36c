"""Function bodies: both operators in standard ONNX, to travel inside every converted model.

A runtime without the library runs these; a runtime with the library ignores them. They are the
executable specification that the kernels are compared with.

``function_protos`` returns one FunctionProto per operator and one per piece that they are made of,
all in the operators' domain. The bodies are chosen per model: for the codecs of keys and values,
and with or without the input ``attention_bias`` (function inputs are never optional). They are
polymorphic in the element type of vectors, query and bias: float, float16 or bfloat16; only what
reads and writes ``raw`` rows is made for one of them.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import onnx
from onnxscript import OnnxFunction

from tq_onnx.codec.spec import Codec
from tq_onnx.ops import documentation as doc
from tq_onnx.ops.bodies import attention, elements, encode, half, planes
from tq_onnx.ops.bodies.operators import attention_body, encode_body
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE


def function_protos(
    key: Codec, value: Codec, *, has_bias: bool, element: str = "float32"
) -> list[onnx.FunctionProto]:
    """FunctionProtos for a model whose caches use these codecs.

    Args:
        key: codec of the key caches.
        value: codec of the value caches.
        has_bias: whether the model's attention nodes have the input ``attention_bias``; all of a
            model's nodes must agree, because a function has no optional inputs.
        element: element type of vectors and queries, see ``codec.elements``; only the bodies of
            ``raw`` depend on it.

    Returns:
        Fresh copies, which the caller may edit. A function comes after those that it calls; that
        order must be kept, since the reference evaluator relies on it.
    """
    inputs = doc.ATTENTION_INPUTS + ((doc.ATTENTION_BIAS,) if has_bias else ())
    operators = (
        _operator(
            encode_body(key, value, element),
            ENCODE,
            doc.markdown(
                doc.ENCODE_SUMMARY,
                inputs=doc.ENCODE_INPUTS,
                outputs=doc.ENCODE_OUTPUTS,
                attributes=doc.ENCODE_ATTRIBUTES,
            ),
        ),
        _operator(
            attention_body(key, value, element, has_bias=has_bias),
            ATTENTION,
            doc.markdown(
                doc.ATTENTION_SUMMARY,
                inputs=inputs,
                outputs=doc.ATTENTION_OUTPUTS,
                attributes=doc.ATTENTION_ATTRIBUTES,
            ),
        ),
    )
    protos: dict[str, onnx.FunctionProto] = {}
    for proto in operators:
        _add_with_pieces(proto, protos)
    return list(protos.values())


def _operator(body: OnnxFunction[..., Any], name: str, text: str) -> onnx.FunctionProto:
    proto = _proto(body)
    proto.name = name
    proto.doc_string = text
    return proto


def _add_with_pieces(proto: onnx.FunctionProto, protos: dict[str, onnx.FunctionProto]) -> None:
    """Adds what a function calls, then the function: runtimes resolve calls in that order."""
    for node in proto.node:
        if node.domain == DOMAIN and node.op_type not in protos:
            _add_with_pieces(_proto(_pieces()[node.op_type]), protos)
    protos[proto.name] = proto


def _proto(body: OnnxFunction[..., Any]) -> onnx.FunctionProto:
    """The function with names in the style of ONNX operators, documentation unindented."""
    proto = body.to_function_proto()
    proto.name = _operator_style(proto.name)
    proto.doc_string = inspect.cleandoc(proto.doc_string)
    for node in proto.node:
        if node.domain == DOMAIN:
            node.op_type = _operator_style(node.op_type)
    return proto


def _operator_style(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


@cache
def _pieces() -> dict[str, OnnxFunction[..., Any]]:
    modules: tuple[ModuleType, ...] = (half, elements, planes, encode, attention)
    return {
        _operator_style(item.name): item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, OnnxFunction)
    }
