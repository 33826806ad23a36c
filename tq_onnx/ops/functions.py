"""Function bodies: the operators in standard ONNX, to travel inside every converted model.

A runtime without the library runs these; a runtime with the library ignores them. They are the
executable specification that the kernels are compared with. The operators on pages have none: the
runtime that keeps pages has the library.

``function_protos`` returns one FunctionProto per operator and one per piece that they are made of,
all in the operators' domain. The bodies are made per model: for the codecs of its caches, and for
the optional inputs that its nodes have. They are polymorphic in the element type of vectors, query
and bias: float, float16 or bfloat16; only what reads and writes ``raw`` rows is made for one of
them. ``decoder_function_protos`` returns the functions of the decoder's other operators, which
depend on no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import onnx
import onnx_ir as ir
from onnxscript import OnnxFunction

from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies import (
    attention,
    decoder,
    elements,
    encode,
    half,
    offsets,
    planeforms,
    planes,
    rotated,
    search,
    signed,
    tables,
    unit,
    unrotated,
    window,
)
from tq_onnx.ops.bodies.composing import operator_style
from tq_onnx.ops.bodies.operators import (
    Model,
    attention_function,
    body_codecs,
    body_encoders,
    encode_function,
)
from tq_onnx.ops.domain import DOMAIN, VERSION
from tq_onnx.ops.features import FEEDBACK, GAINS, Features
from tq_onnx.ops.operators import BY_NAME

__all__ = ["body_codecs", "body_encoders", "decoder_function_protos", "function_protos"]

_Functions = dict[str, OnnxFunction[..., Any]]


def function_protos(
    pairs: Sequence[tuple[Codec, Codec]],
    *,
    features: Features = frozenset(),
    element: str = "float32",
) -> list[onnx.FunctionProto]:
    """Return FunctionProtos for a model whose caches use these codecs.

    All nodes of a model must agree about the optional inputs, because a function has none: a node
    has the inputs up to the last one that the model uses, and those in between that it does not use
    are empty. With more than one codec (``body_codecs``) all nodes have the attributes that choose.

    Args:
        element: element type of vectors and queries, see ``codec.elements``; only the bodies of
            ``raw`` depend on it.

    Returns:
        Fresh copies, which the caller may edit. A function comes after those that it calls; that
        order must be kept, since the reference evaluator relies on it.
    """
    model = Model(
        codecs=body_codecs(pairs),
        pairs=tuple(dict.fromkeys(pairs)),
        features=features | {GAINS} if FEEDBACK in features else features,
        element=element,
    )
    return [onnx.FunctionProto.FromString(data) for data in _serialized(model)]


@lru_cache(maxsize=16)  # verify asks for the same bodies several times
def _serialized(model: Model) -> tuple[bytes, ...]:
    protos: dict[str, onnx.FunctionProto] = {}
    for make in (encode_function, attention_function):
        _add_with_pieces(ir.serde.serialize_function(make(model)), protos)
    return tuple(proto.SerializeToString() for proto in protos.values())


def decoder_function_protos(names: Iterable[str]) -> list[onnx.FunctionProto]:
    """Return FunctionProtos of the decoder's other operators, each of one function.

    Returns:
        Fresh copies, which the caller may edit, in the order of ``names``.
    """
    protos = []
    for name in names:
        proto = decoder.BODIES[name].to_function_proto()
        proto.name = name
        proto.doc_string = BY_NAME[name].documentation()
        protos.append(proto)
    return protos


def _add_with_pieces(proto: onnx.FunctionProto, protos: dict[str, onnx.FunctionProto]) -> None:
    """Add what a function calls, then the function: runtimes resolve calls in that order."""
    for node in _nodes(proto.node):
        if node.domain == DOMAIN and node.op_type not in protos:
            _add_with_pieces(_proto(_pieces()[node.op_type]), protos)
    protos[proto.name] = proto


def _nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, including the nodes of branches."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g.node)


def _proto(body: OnnxFunction[..., Any]) -> onnx.FunctionProto:
    """Return the function with names in the style of ONNX operators, documentation unindented."""
    proto = body.to_function_proto()
    proto.name = operator_style(proto.name)
    proto.doc_string = inspect.cleandoc(proto.doc_string)
    imported = {opset.domain for opset in proto.opset_import}
    for node in _nodes(proto.node):
        if node.domain == DOMAIN:
            node.op_type = operator_style(node.op_type)
            if DOMAIN not in imported:  # onnxscript does not look into loops
                imported.add(DOMAIN)
                proto.opset_import.add(domain=DOMAIN, version=VERSION)
    _say_conditions(proto)
    return proto


def _say_conditions(proto: onnx.FunctionProto) -> None:
    """Give loops their condition: without one, the reference evaluator does nothing."""
    loops = [node for node in proto.node if node.op_type == "Loop" and not node.input[1]]
    if not loops:
        return
    true = onnx.TensorProto(data_type=onnx.TensorProto.BOOL, int32_data=[1])
    value = onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=true)
    always = onnx.NodeProto(op_type="Constant", output=["always"], attribute=[value])
    nodes = [always, *proto.node]
    for node in loops:
        node.input[1] = always.output[0]
    del proto.node[:]
    proto.node.extend(nodes)


@cache
def _pieces() -> _Functions:
    modules: tuple[ModuleType, ...] = (
        *(half, elements, planes, unit, tables, search, rotated, signed, unrotated),
        *(encode, offsets, attention, window, planeforms),
    )
    return {
        operator_style(item.name): item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, OnnxFunction)
    }
