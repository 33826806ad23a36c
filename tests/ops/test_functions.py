"""What travels in a model: form, order and documentation of the function bodies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest

from tests.ops.models import Site, codec_of, run_ort, run_reference_evaluator
from tq_onnx.codec.spec import LLOYD_MAX, LLOYD_MAX_BITS, Codec
from tq_onnx.ops import documentation as doc
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.functions import function_protos

# Bits of keys and of values, element type, number of optional inputs: bias, sink.
VARIANTS = [
    *product(LLOYD_MAX_BITS, LLOYD_MAX_BITS, ("float32",), (0, 1, 2)),
    *product((3, 32), (32,), ("float32",), (0, 1, 2)),
    *product((16,), (4, 16), ("float16", "bfloat16"), (0, 1, 2)),
]

# Not in onnxruntime 1.24, or of another meaning in an opset between 15 and 24.
UNSAFE = {
    "BitCast",
    "TensorScatter",
    "BitwiseAnd",
    "BitwiseOr",
    "Split",
    "If",
    "Loop",
    "Scan",
    "Attention",
    "Pad",
}


def variants() -> Iterator[list[onnx.FunctionProto]]:
    for key, value, element, extra in VARIANTS:
        yield function_protos(
            codec_of(key),
            codec_of(value),
            has_bias=extra > 0,
            has_sink=extra > 1,
            element=element,
        )


def test_both_operators_come_after_all_that_they_call() -> None:
    for protos in variants():
        seen: set[str] = set()
        for proto in protos:
            called = {node.op_type for node in proto.node if node.domain == DOMAIN}
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
        for node in proto.node:
            assert node.op_type not in UNSAFE
            assert all(node.input), f"{proto.name}: an optional input is left out"
            kinds = {attribute.type for attribute in node.attribute}
            assert not kinds & {onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS}
            if node.op_type in ("ReduceMax", "ReduceMin"):
                assert len(node.input) == 1, "axes moved from attribute to input in opset 18"


def test_inputs_outputs_and_attributes_are_those_that_are_documented() -> None:
    for (*_, extra), protos in zip(VARIANTS, variants(), strict=True):
        named = {proto.name: proto for proto in protos}
        optional = (doc.ATTENTION_BIAS, doc.HEAD_SINK)[:extra]
        for name, inputs, outputs, attributes in (
            (ENCODE, doc.ENCODE_INPUTS, doc.ENCODE_OUTPUTS, doc.ENCODE_ATTRIBUTES),
            (
                ATTENTION,
                doc.ATTENTION_INPUTS + optional,
                doc.ATTENTION_OUTPUTS,
                doc.ATTENTION_ATTRIBUTES,
            ),
        ):
            proto = named[name]
            assert list(proto.input) == [entry[0] for entry in inputs]
            assert list(proto.output) == [entry[0] for entry in outputs]
            assert list(proto.attribute) == [entry[0] for entry in attributes]
            for entry, meaning in (*inputs, *outputs, *attributes):
                assert f"`{entry}`: {meaning}" in proto.doc_string
        assert all(proto.doc_string for proto in protos)


def test_a_sink_without_a_bias_is_no_variant() -> None:
    codec = Codec(LLOYD_MAX, 4)
    with pytest.raises(ValueError, match="has a bias too"):
        function_protos(codec, codec, has_bias=False, has_sink=True)


def test_a_caller_may_edit_what_it_gets() -> None:
    codec = Codec(LLOYD_MAX, 4)
    function_protos(codec, codec, has_bias=False)[0].name = "edited"
    assert function_protos(codec, codec, has_bias=False)[0].name != "edited"


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
