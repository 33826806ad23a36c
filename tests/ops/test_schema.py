"""Schemas and inference: what is accepted, what is inferred, what is refused and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError

from tests.ops.site import CODECS, FLOATS, INT3, Site
from tests.singleop import INT4, codec_of
from tq_onnx.codec.rotated import PROD, U8
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import Q8_0
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.ops.schema import (
    deregister_schemas,
    is_registered,
    register_schemas,
    registered,
)

Change = Callable[[onnx.ModelProto], None]


@pytest.fixture
def schemas() -> Iterator[None]:
    with registered():
        yield


def check(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model, full_check=True)


def node_of(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def attribute_of(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(attribute for attribute in node.attribute if attribute.name == name)


def inferred(model: onnx.ModelProto) -> dict[str, list[Any]]:
    """Shapes that inference finds when the graph says nothing about results."""
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    result = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    return {
        value.name: [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param
            for dim in value.type.tensor_type.shape.dim
        ]
        for value in [*result.graph.value_info, *result.graph.output]
    }


def test_registering_and_deregistering_twice_is_harmless() -> None:
    register_schemas()
    register_schemas()
    assert is_registered()
    deregister_schemas()
    deregister_schemas()
    assert not is_registered()
    assert not onnx.defs.has(ENCODE, DOMAIN)


def test_registered_leaves_things_as_they_were() -> None:
    with registered():
        assert is_registered()
        with registered():
            pass
        assert is_registered()
    assert not is_registered()


def test_an_error_inside_the_block_deregisters_all_the_same() -> None:
    with pytest.raises(KeyError), registered():
        raise KeyError
    assert not is_registered()


@pytest.mark.usefixtures("schemas")
def test_everything_is_documented() -> None:
    for operator in (Encode, Attention):
        schema = onnx.defs.get_schema(operator.name, VERSION, DOMAIN)
        assert schema.doc == operator.summary
        for found, expected in (
            (schema.inputs, operator.inputs),
            (schema.outputs, operator.outputs),
        ):
            described = [(p.name, p.type_str, p.description) for p in found]
            assert described == [(p.name, p.element, p.meaning) for p in expected]
        meanings = {a.name: a.meaning for a in operator.attributes}
        assert {n: a.description for n, a in schema.attributes.items()} == meanings
        required = {n for n, attribute in schema.attributes.items() if attribute.required}
        assert required == {a.name for a in operator.attributes_with(frozenset())}
        assert required == {a.name for a in operator.attributes if a.default is None}


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
@pytest.mark.parametrize("offset_rows", [0, 3])
def test_models_with_bodies_of_the_same_names_are_accepted(
    *, dtype: ir.DataType, has_bias: bool, offset_rows: int
) -> None:
    check(Site(value=INT3, dtype=dtype, has_bias=has_bias, offset_rows=offset_rows).model())


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_models_of_every_codec_are_accepted(codec: Codec) -> None:
    check(Site(codec, codec, spare_bytes=5).model())
    check(Site(codec, INT4, others=((FLOATS, FLOATS),), has_sink=True).model())


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(
    ("key_bits", "value_bits", "dtype"),
    [
        (32, 32, ir.DataType.FLOAT),
        (3, 32, ir.DataType.FLOAT),
        (16, 16, ir.DataType.FLOAT16),
        (16, 4, ir.DataType.BFLOAT16),
    ],
)
def test_models_with_raw_caches_are_accepted(
    key_bits: int, value_bits: int, dtype: ir.DataType
) -> None:
    check(Site(codec_of(key_bits), codec_of(value_bits), dtype=dtype).model())


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(
    ("bits", "dtype", "wrong"),
    [
        (32, ir.DataType.FLOAT, 16),
        (16, ir.DataType.FLOAT16, 32),
        (16, ir.DataType.BFLOAT16, 32),
    ],
)
def test_raw_rows_of_another_width_are_refused(bits: int, dtype: ir.DataType, wrong: int) -> None:
    for op_type, name in ((ENCODE, "bits"), (ATTENTION, "key_bits"), (ATTENTION, "value_bits")):
        model = Site(codec_of(bits), codec_of(bits), dtype=dtype).model()
        attribute_of(node_of(model, op_type), name).i = wrong
        with pytest.raises(InferenceError, match=rf"{name} is {wrong}, .* the {bits}-bit elements"):
            check(model)


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(("bits", "width"), [(4, 66), (3, 50), (2, 34), (32, 512)])
def test_shapes_are_inferred(bits: int, width: int) -> None:
    shapes = inferred(Site(codec_of(bits), heads=16, kv_heads=8, head_size=128).model())
    batch, heads, slots, row_bytes = shapes["present_key"]
    assert (batch, heads, row_bytes) == ("B", 8, width)
    assert not isinstance(slots, int)
    assert shapes["present_value"][3] == 66
    assert shapes["attended"] == ["B", 16, "T", 128]


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(("past_length", "slots"), [([2, 5], 8), ([2, 9], 12), ([0], 8)])
def test_slots_are_known_when_everything_is(past_length: list[int], slots: int) -> None:
    model = Site().model()
    constant = onnx.numpy_helper.from_array(np.array(past_length, np.int64), "past_length")
    model.graph.initializer.append(constant)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"B": 2, "P": 8, "T": 3}.get(dim.dim_param, len(past_length))
    assert inferred(model)["present_key"] == [2, 2, slots, 18]


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(
    ("op_type", "attribute"),
    [
        (operator.name, attribute.name)
        for operator in (Encode, Attention)
        for attribute in operator.attributes_with(frozenset())
    ],
)
def test_a_missing_attribute_is_caught(op_type: str, attribute: str) -> None:
    model = Site().model()
    node = node_of(model, op_type)
    node.attribute.remove(attribute_of(node, attribute))
    with pytest.raises(ValidationError, match=f"'{attribute}' is missing"):
        onnx.checker.check_model(model)


@pytest.mark.usefixtures("schemas")
def test_an_attribute_that_does_not_exist_is_caught() -> None:
    model = Site().model()
    attribute_of(node_of(model, ATTENTION), "softcap").name = "soft_cap"
    with pytest.raises(ValidationError, match="soft"):
        onnx.checker.check_model(model)


def set_attribute(op_type: str, name: str, value: Any) -> Change:
    def change(model: onnx.ModelProto) -> None:
        attribute = attribute_of(node_of(model, op_type), name)
        field = {int: "i", float: "f", bytes: "s"}[type(value)]
        setattr(attribute, field, value)

    return change


def set_size(name: str, axis: int, size: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for value in [*model.graph.input, *model.graph.value_info]:
            if value.name in (name, f"{name}_cast"):
                value.type.tensor_type.shape.dim[axis].dim_value = size

    return change


def set_constant(name: str, *shape: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == name:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name))
        stated = [value for value in model.graph.value_info if value.name == name]
        for value in stated:
            model.graph.value_info.remove(value)

    return change


def without_input(op_type: str, slot: int, other: int | None = None) -> Change:
    """Leaves an input out, or puts another one in its place."""

    def change(model: onnx.ModelProto) -> None:
        node = node_of(model, op_type)
        node.input[slot] = "" if other is None else node.input[other]

    return change


BIAS, SINK = Attention.attention_bias.slot, Attention.head_sink.slot
BIASED = Site(has_bias=True, has_sink=True)
OFFSET = Site(offset_rows=3)
TURNING = Site(offset_rows=3, frequencies=(0.5,) * 32)
SEARCHING = Site(head_size=64, gains=4, feeds_back=True)
CONTRADICTIONS: list[tuple[Site, Change, str]] = [
    (Site(), set_attribute(ENCODE, "bits", 7), "lloyd_max has no 7-bit form"),
    (Site(), set_attribute(ENCODE, "codec", b"zip"), "codec kind 'zip'"),
    (Site(), set_attribute(ENCODE, "bits", 3), "size of centroids for lloyd_max 3 is 16, not 8"),
    (Site(), set_attribute(ENCODE, "norm_correction", 3), "norm_correction is 3, not 0 or 1 or 2"),
    (Site(), set_attribute(ATTENTION, "causal", -1), "causal is -1, not 0 or 1"),
    (Site(), set_attribute(ATTENTION, "sliding_window", -4), "sliding_window is -4, below 0"),
    (Site(), set_attribute(ATTENTION, "softcap", -0.5), "softcap is -0.5, below 0"),
    (
        Site(),
        set_attribute(ATTENTION, "value_bits", 2),
        "value_centroids for lloyd_max 2 is 16, not 4",
    ),
    (Site(), set_attribute(ATTENTION, "key_codec", b"fp8"), "codec kind 'fp8'"),
    (Site(), set_size("past_key", 3, 17), "17 bytes, but lloyd_max 4 at head size 32 needs 18"),
    (Site(), set_attribute(ATTENTION, "key_bits", 5), "key_cache has rows of 18 bytes"),
    (
        Site(),
        set_constant("key_rotation", 32, 64),
        "width of rotation for lloyd_max 4 is 64, not 32",
    ),
    (Site(), set_size("past_key", 1, 3), "number of heads of vectors and past differs: 2 and 3"),
    (Site(), set_size("key", 3, 64), "head size of vectors and rotation differs: 32 and 64"),
    (Site(), set_size("query", 1, 3), "3 query heads are not a multiple of 2 KV heads"),
    (Site(), set_size("query", 3, 64), "head size of query and key_rotation differs: 32 and 64"),
    (Site(), set_constant("key_boundaries", 16), "boundaries for lloyd_max 4 is 16, not 15"),
    (Site(), set_constant("value_centroids", 8), "centroids for lloyd_max 4 is 8, not 16"),
    (Site(), set_constant("key_rotation", 32), "rotation has 1 dimensions, not 2"),
    (BIASED, set_size("attention_bias", 1, 3), "dimension 1 of attention_bias is 3, not 1 or 4"),
    (BIASED, set_size("attention_bias", 3, 4), "4 columns for 5 new tokens"),
    (BIASED, set_size("head_sink", 0, 2), "heads of query and head_sink differs: 2 and 4"),
    (BIASED, without_input(ATTENTION, SINK, BIAS), "head_sink has 4 dimensions, not 1"),
    (
        OFFSET,
        set_constant("key_offset", 3, 4, 32),
        "number of heads of offset and of the cache differs: 2 and 4",
    ),
    (
        OFFSET,
        set_constant("value_offset", 3, 2, 16),
        "head size of vectors and offset differs: 16 and 32",
    ),
    (
        OFFSET,
        set_constant("key_offset", 2, 2, 32),
        "rows of key_offset and value_offset differs: 2 and 3",
    ),
    (OFFSET, set_constant("value_offset", 0, 2, 32), "offset has no rows"),
    (OFFSET, set_constant("value_offset", 64), "offset has 1 dimensions, not 3"),
    (
        OFFSET,
        without_input(ATTENTION, Attention.value_offset.slot),
        "come together or not at all",
    ),
    (SEARCHING, set_constant("key_gains", 0), "gains has 0 numbers, not 1 to 16"),
    (SEARCHING, set_constant("key_gains", 17), "gains has 17 numbers, not 1 to 16"),
    (SEARCHING, set_constant("key_gains", 4, 4), "gains has 2 dimensions, not 1"),
    (
        SEARCHING,
        set_constant("key_feedback", 2, 64, 32),
        "head size of vectors and feedback differs: 32 and 64",
    ),
    (SEARCHING, set_constant("key_feedback", 2), "feedback has 1 dimensions, not 3"),
    (
        TURNING,
        set_constant("key_offset", 1, 2, 32),
        "offset turns and has one row, not one of cosines",
    ),
    (
        TURNING,
        set_constant("key_frequencies", 16),
        "head size of vectors and frequencies differs: 16 and 32",
    ),
    (TURNING, set_constant("key_frequencies", 2, 16), "frequencies has 2 dimensions, not 1"),
    (TURNING, without_input(ENCODE, Encode.offset.slot), "frequencies has no offset to turn"),
    (Site(value=INT3), set_attribute(ENCODE, "codec_index", -1), "codec_index is -1, below 0"),
    (Site(Codec(PROD, 4)), set_constant("key_rotation", 1), "rotation has 1 dimensions"),
    (Site(Codec(U8, 4)), set_constant("key_centroids", 1), "centroids for u8 4 is 1"),
]


@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize(("site", "change", "message"), CONTRADICTIONS)
def test_contradictions_are_refused(site: Site, change: Change, message: str) -> None:
    model = site.model()
    if site.has_bias:
        set_size("query", 2, 5)(model)
        set_size("attention_bias", 3, 1)(model)
        set_size("attention_bias", 1, 1)(model)
    check(model)
    change(model)
    with pytest.raises(InferenceError) as caught:
        check(model)
    assert message in str(caught.value)
    assert "TurboQuant" in str(caught.value), "names the operator"
    assert "present_" in str(caught.value) or "attended" in str(caught.value), "names the node"


@pytest.mark.usefixtures("schemas")
def test_wider_rows_are_inferred_as_they_are() -> None:
    codec = Codec(Q8_0, 8)
    shapes = inferred(Site(codec, codec, spare_bytes=3).model())
    assert shapes["present_key"][3] == row_layout(codec, 32).row_bytes + 3


@pytest.mark.usefixtures("schemas")
def test_element_types_are_checked() -> None:
    model = Site().model()
    node_of(model, "Cast").attribute[0].i = onnx.TensorProto.DOUBLE
    for value in model.graph.value_info:
        if value.name == "key_cast":
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    with pytest.raises(InferenceError, match="type"):
        check(model)


def test_without_the_schemas_a_missing_attribute_goes_unnoticed() -> None:
    """The negative twin: it is the schemas that catch it."""
    model = Site().model()
    node = node_of(model, ENCODE)
    node.attribute.remove(attribute_of(node, "bits"))
    onnx.checker.check_model(model)
