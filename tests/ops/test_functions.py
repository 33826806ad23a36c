"""What travels in a model: form, order and documentation of the function bodies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import onnx
import pytest

from tests.covering import covering, features_of_operators
from tests.ops.site import CODECS, FLOATS, INT2, INT3, Site
from tests.singleop import INT4, codec_of, run_ort, run_reference_evaluator
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.bodies.composing import Composer
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.features import FEEDBACK, GAINS, MIXED_CODECS, PLANES
from tq_onnx.ops.functions import body_codecs, body_encoders, function_protos
from tq_onnx.ops.operators import Attention, Encode

HALVES = codec_of(16)
MIXED = [(INT4, INT4), (FLOATS, FLOATS), (Codec(PROD, 4), INT3)]
SUBSETS = covering(features_of_operators(Encode, Attention))

# Codecs of the layers, and options.
VARIANTS: list[tuple[list[tuple[Codec, Codec]], dict[str, Any]]] = [
    *(([(codec, codec)], {}) for codec in CODECS),
    *(
        ([(codec, codec)], {"features": each if codec.is_rotated else each - {PLANES}})
        for codec, each in zip(CODECS, cycle(SUBSETS), strict=False)
    ),
    *(([(HALVES, HALVES)], {"element": element}) for element in ("float16", "bfloat16")),
    (MIXED, {}),
    *((MIXED, {"features": features - {PLANES}}) for features in SUBSETS),
]

# Not in onnxruntime 1.24, or of another meaning in an opset between 15 and 24.
UNSAFE = {
    "BitCast",
    "TensorScatter",
    "BitwiseAnd",
    "BitwiseOr",
    "Split",
    "Scan",
    "Attention",
    "Pad",
}


def variants() -> Iterator[list[onnx.FunctionProto]]:
    for pairs, options in VARIANTS:
        yield function_protos(pairs, **options)


def nodes_of(nodes: Any) -> Iterator[onnx.NodeProto]:
    """Nodes, those of branches included."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g.node)


def test_both_operators_come_after_all_that_they_call() -> None:
    for protos in variants():
        seen: set[str] = set()
        for proto in protos:
            called = {node.op_type for node in nodes_of(proto.node) if node.domain == DOMAIN}
            assert called <= seen
            seen.add(proto.name)
        assert {ENCODE, ATTENTION} <= seen
        assert len(seen) == len(protos)


def test_bodies_use_only_what_every_runtime_has() -> None:
    for proto in (proto for protos in variants() for proto in protos):
        assert proto.domain == DOMAIN
        assert not proto.overload
        opsets = {entry.domain: entry.version for entry in proto.opset_import}
        assert opsets.pop("", BODY_OPSET) == BODY_OPSET
        assert opsets in ({}, {DOMAIN: VERSION})
        for node in nodes_of(proto.node):
            assert node.op_type not in UNSAFE
            assert all(node.input), f"{proto.name}: an optional input is left out"
            if node.op_type in ("ReduceMax", "ReduceMin"):
                assert len(node.input) == 1, "axes moved from attribute to input in opset 18"
            if node.op_type == "Loop":
                assert len(node.output) == 1, "onnxscript orders carried values by their hashes"


def test_only_models_that_mix_codecs_have_anything_to_choose() -> None:
    for (pairs, options), protos in zip(VARIANTS, variants(), strict=True):
        choices = [
            node for proto in protos for node in nodes_of(proto.node) if node.op_type == "If"
        ]
        keys, values = (len(set(codecs)) for codecs in zip(*pairs, strict=True))
        encoders = body_encoders(pairs, FEEDBACK in options.get("features", ()))
        assert len(choices) == len(encoders) - 1 + (keys - 1) + (values - 1)


def test_every_name_within_an_operator_is_its_own() -> None:
    for proto in (proto for protos in variants() for proto in protos):
        names = [name for node in nodes_of(proto.node) for name in node.output]
        assert len(names) == len(set(names))
        assert not set(names) & set(proto.input)


def test_inputs_outputs_and_attributes_are_those_that_are_documented() -> None:
    for (pairs, options), protos in zip(VARIANTS, variants(), strict=True):
        named = {proto.name: proto for proto in protos}
        features = set(options.get("features", ()))
        features |= {GAINS} if FEEDBACK in features else set()
        encoders = body_encoders(pairs, FEEDBACK in features)
        for operator, cases in ((Encode, encoders), (Attention, body_codecs(pairs))):
            proto = named[operator.name]
            there = features | ({MIXED_CODECS} if len(cases) > 1 else set())
            entries = (
                operator.inputs_with(there),
                operator.outputs,
                operator.attributes_with(there),
            )
            for found, expected in zip(
                (proto.input, proto.output, proto.attribute), entries, strict=True
            ):
                assert list(found) == [each.name for each in expected]
                for each in expected:
                    assert f"`{each.name}`: {each.meaning}" in proto.doc_string
        assert all(proto.doc_string for proto in protos)


def test_the_order_of_codecs_is_that_of_the_layers() -> None:
    assert body_codecs(MIXED) == (INT4, FLOATS, Codec(PROD, 4), INT3)
    assert body_codecs([(INT2, INT4), (INT4, INT3), (INT2, INT4)]) == (INT2, INT4, INT3)
    assert body_encoders([(INT4, INT4)], False) == ((INT4, False),)
    fed = body_encoders([(FLOATS, FLOATS), (INT4, INT4)], True)
    assert fed == ((FLOATS, False), (INT4, True), (INT4, False))


def test_a_single_case_is_no_choice() -> None:
    body = Composer()
    made = body.standard("one", "Constant", [], value_int=1)
    assert body.choose("chosen", Encode.codec_index, {7: lambda _: made}, made) is made
    assert len(body.nodes) == 1


def test_a_caller_may_edit_what_it_gets() -> None:
    function_protos([(INT4, INT4)])[0].name = "edited"
    assert function_protos([(INT4, INT4)])[0].name != "edited"


def test_a_node_must_have_as_many_inputs_as_its_body(rng: Any) -> None:
    """Why the bias is a variant: runtimes disagree about inputs that are left out."""
    site = Site(has_bias=True)
    model = site.model()
    for node in model.graph.node:
        if node.op_type == ATTENTION:
            del node.input[-1]
    feeds = site.feeds(rng) | {"attention_bias": np.zeros((1, 1, 1, 1), np.float32)}
    with pytest.raises(RuntimeError, match="number of inputs"):
        run_reference_evaluator(model, feeds)
    with pytest.raises(Exception, match="Inference error"):
        run_ort(model, feeds)
