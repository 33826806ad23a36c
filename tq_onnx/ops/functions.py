"""Function bodies: both operators in standard ONNX, to travel inside every converted model.

A runtime without the library runs these; a runtime with the library ignores them. They are the
executable specification that the kernels are compared with.

``function_protos`` returns one FunctionProto per operator and one per piece that they are made of,
all in the operators' domain. The bodies are chosen per model: for the codecs of keys and values,
and for the inputs that its attention nodes have: neither ``attention_bias`` nor ``head_sink``, the
first, or both (function inputs are never optional). They are
polymorphic in the element type of vectors, query and bias: float, float16 or bfloat16; only what
reads and writes ``raw`` rows is made for one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any

import onnx
from onnxscript import OnnxFunction

from tq_onnx.codec.spec import Codec
from tq_onnx.ops import documentation as doc
from tq_onnx.ops.bodies import attention, elements, encode, half, planes
from tq_onnx.ops.bodies.operators import attention_body, encode_body
from tq_onnx.ops.bodies.readers import cache_readers
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE

_Functions = dict[str, OnnxFunction[..., Any]]


def function_protos(
    key: Codec,
    value: Codec,
    *,
    has_bias: bool,
    has_sink: bool = False,
    element: str = "float32",
) -> list[onnx.FunctionProto]:
    """FunctionProtos for a model whose caches use these codecs.

    Args:
        key: codec of the key caches.
        value: codec of the value caches.
        has_bias: whether the model's attention nodes have the input ``attention_bias``; all of a
            model's nodes must agree, because a function has no optional inputs.
        has_sink: likewise for ``head_sink``; only with a bias.
        element: element type of vectors and queries, see ``codec.elements``; only the bodies of
            ``raw`` depend on it.

    Returns:
        Fresh copies, which the caller may edit. A function comes after those that it calls; that
        order must be kept, since the reference evaluator relies on it.
    """
    if has_sink and not has_bias:
        raise ValueError("a body with a sink has a bias too")
    encoder = encode_body(key, value, element)
    reader = attention_body(key, value, element, has_bias=has_bias, has_sink=has_sink)
    optional = ((doc.ATTENTION_BIAS, has_bias), (doc.HEAD_SINK, has_sink))
    inputs = doc.ATTENTION_INPUTS + tuple(entry for entry, there in optional if there)
    operators = (
        _operator(
            encoder,
            ENCODE,
            doc.markdown(
                doc.ENCODE_SUMMARY,
                inputs=doc.ENCODE_INPUTS,
                outputs=doc.ENCODE_OUTPUTS,
                attributes=doc.ENCODE_ATTRIBUTES,
            ),
        ),
        _operator(
            reader,
            ATTENTION,
            doc.markdown(
                doc.ATTENTION_SUMMARY,
                inputs=inputs,
                outputs=doc.ATTENTION_OUTPUTS,
                attributes=doc.ATTENTION_ATTRIBUTES,
            ),
        ),
    )
    pieces = _pieces() | _by_name(cache_readers(key, value, element))
    protos: dict[str, onnx.FunctionProto] = {}
    for proto in operators:
        _add_with_pieces(proto, pieces, protos)
    return list(protos.values())


def _operator(body: OnnxFunction[..., Any], name: str, text: str) -> onnx.FunctionProto:
    proto = _proto(body)
    proto.name = name
    proto.doc_string = text
    return proto


def _add_with_pieces(
    proto: onnx.FunctionProto, pieces: _Functions, protos: dict[str, onnx.FunctionProto]
) -> None:
    """Adds what a function calls, then the function: runtimes resolve calls in that order."""
    for node in proto.node:
        if node.domain == DOMAIN and node.op_type not in protos:
            _add_with_pieces(_proto(pieces[node.op_type]), pieces, protos)
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
def _pieces() -> _Functions:
    modules: tuple[ModuleType, ...] = (half, elements, planes, encode, attention)
    return _by_name(
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, OnnxFunction)
    )


def _by_name(functions: Iterable[OnnxFunction[..., Any]]) -> _Functions:
    return {_operator_style(function.name): function for function in functions}
