"""The lane of the operators: hostile inputs, attributes and types, through ONNX Runtime.

Half of the cases are those of ``tests/native``, which know what fits and compare with the
reference. The others are nodes that no converter writes: ONNX Runtime or the operator refuses
them, or they compute something, without harm.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.commands import Case
from tests.native import test_decoder_fuzz, test_fuzz
from tests.native.conftest import CODECS
from tests.native.single_node import make_session, run
from tests.operatormodels import (
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
)
from tests.recognise.test_random_graphs import RUN_ERRORS
from tests.singleop import DECODER_ATTRIBUTES, INPUTS, Array
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.ops.operators import BY_NAME, Attention, Encode

BYTES: Final = 2048
"""More than the choices of any case of ``tests/native`` take."""
JUDGED: Final = (
    *(test_fuzz.test_encode, test_fuzz.test_attention),
    *(test_decoder_fuzz.test_epsilon, test_decoder_fuzz.test_perm),
)
INTEGERS: Final = (0, 1, -1, 2, 3, 4, 5, 8, 16, 17, 32, 64, 1 << 31, (1 << 63) - 1, -(1 << 63))
FLOATS: Final = (0.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), -float("inf"))
STRINGS: Final = (b"", b"lloyd_max", b"raw", b"u8", b"prod", b"x" * 5000, b"\xff\x00", b"RAW")
SIZES: Final = (0, 1, 2, 3, 7, 9, 17, 512, 520)
UNNAMED: Final = (
    "Failed to load library",
    "std::",
    "bad_alloc",
    "vector::",
    "basic_string",
    "nknown exception",
)
"""What an exception says that no check of an operator made."""
ELEMENTS: Final = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    onnx.TensorProto.DOUBLE: np.dtype(np.float64),
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
    onnx.TensorProto.INT32: np.dtype(np.int32),
    onnx.TensorProto.INT64: np.dtype(np.int64),
    onnx.TensorProto.BOOL: np.dtype(np.bool_),
}


def check(draw: random.Random, folder: Path) -> Case:
    """Runs one operator."""
    case = Case(folder)
    if draw.random() < 0.5:
        _judged(case, draw)
    else:
        _wild(case, draw)
    return case


def warm() -> None:
    """Sessions are made when they are needed: threads do not survive a fork."""


def _judged(case: Case, draw: random.Random) -> None:
    """A case of ``tests/native``: it fits and equals the reference, or is refused by name."""
    op = draw.choice((*JUDGED, *INPUTS))
    name = op if isinstance(op, str) else op.__name__

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def one(data: st.DataObject) -> None:
        test_decoder_fuzz.test_decoder.hypothesis.inner_test(op=op, data=data)

    runner = one if isinstance(op, str) else op
    case.outcomes[name] = "right"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TQ_ONNX_PRODUCTS", "float")  # what these tests ask for
            if runner.hypothesis.fuzz_one_input(draw.randbytes(BYTES)) is None:
                case.outcomes[name] = "no case"
    except (Exception, pytest.fail.Exception) as error:
        case.outcomes[name] = "wrong"
        case.broken("wrong", f"{name}: {type(error).__name__}: {error}")


def _wild(case: Case, draw: random.Random) -> None:
    """A node with anything; no error but those of ONNX Runtime may come of it."""
    operator = draw.choice(list(BY_NAME.values()))
    codecs = draw.choice(CODECS), draw.choice(CODECS)
    size = draw.choice((8, 16, 64))
    dtype = draw.choice(("float32", "float32", "float16", "bfloat16"))
    optional = [each for each in operator.inputs if each.is_optional and draw.random() < 0.5]
    model = OperatorModel(dtype)
    model.operator(operator, _attributes(operator.name, codecs), "Y", optional=optional)
    proto = model.build(["Y"])
    feeds = _feeds(proto, _shapes(size, codecs), codecs, draw)
    edits = [draw.choice(EDITS) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    for edit in edits:
        edit(proto, feeds, draw)
    case.what = f"{operator.name}: {', '.join(edit.__name__ for edit in edits)}"
    case.outcomes[operator.name] = "runs"
    try:
        session = make_session(proto.SerializeToString())
        for _ in range(2):
            run(session, feeds)
    except RUN_ERRORS as error:
        case.outcomes[operator.name] = "refused"
        if any(word in str(error) for word in UNNAMED):
            case.broken("exception", str(error)[:300])
    except (ValueError, RuntimeError) as error:  # of what Python gives to ONNX Runtime
        case.outcomes[operator.name] = f"refused, {type(error).__name__}"


def _attributes(name: str, codecs: tuple[Codec, Codec]) -> dict[str, Any]:
    if name == Encode.name:
        return encode_attributes(codecs[0])
    if name == Attention.name:
        return attention_attributes(*codecs, 0.25)
    return dict(DECODER_ATTRIBUTES.get(name, {}))


@cache
def _tables(codec: Codec, size: int) -> dict[str, Array]:
    return codec_constants(codec, size)


def _shapes(size: int, codecs: tuple[Codec, Codec]) -> dict[str, tuple[int, ...]]:
    """Shapes that fit, by the names of inputs; those of new inputs are guessed."""
    batch, heads, tokens, slots = 2, 2, 3, 8
    widths = [row_layout(codec, size).row_bytes for codec in codecs]
    shapes: dict[str, tuple[int, ...]] = {
        "vectors": (batch, heads, tokens, size),
        "past": (batch, heads, slots, widths[0]),
        "past_length": (1,),
        "offset": (3, heads, size),
        "frequencies": (size,),
        "key_frequencies": (size,),
        "left_padding": (1,),
        "query": (batch, 2 * heads, tokens, size),
        "key_cache": (batch, heads, slots, widths[0]),
        "value_cache": (batch, heads, slots, widths[1]),
        "attention_bias": (batch, 1, tokens, slots),
        "head_sink": (2 * heads,),
        "key_offset": (3, heads, size),
        "value_offset": (2, heads, size),
        "X": (batch, heads, tokens, size),
        "scale": (size,),
        "cos_cache": (slots, size // 2),
        "sin_cache": (slots, size // 2),
        "position_ids": (batch, tokens),
        "data": (slots, size),
        "indices": (tokens,),
    }
    for prefix, codec in (("", codecs[0]), ("key_", codecs[0]), ("value_", codecs[1])):
        for name, table in _tables(codec, size).items():
            shapes[f"{prefix}{name}"] = table.shape
    return shapes


def _feeds(
    proto: onnx.ModelProto,
    shapes: dict[str, tuple[int, ...]],
    codecs: tuple[Codec, Codec],
    draw: random.Random,
) -> dict[str, Array]:
    rng = np.random.default_rng(draw.randrange(1000))
    feeds = {}
    for value in proto.graph.input:
        dtype = ELEMENTS[value.type.tensor_type.elem_type]
        shape = shapes.get(value.name, (2, 16, 16))
        drawn = rng.standard_normal(shape) if dtype.kind in "fV" else rng.integers(0, 5, shape)
        feeds[value.name] = drawn.astype(dtype)
    return feeds


def other_shape(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    name = draw.choice(list(feeds))
    shape = list(feeds[name].shape)
    kind = draw.randrange(4)
    if kind == 0:
        shape = [*shape, draw.choice((0, 1, 2))]
    elif kind == 1:
        shape = shape[1:]
    elif shape:
        shape[draw.randrange(len(shape))] = draw.choice(SIZES)
    if np.prod(shape, dtype=float) <= 1 << 20:
        feeds[name] = (
            np.resize(feeds[name], shape) if 0 not in shape else np.zeros(shape, feeds[name].dtype)
        )


def other_numbers(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    name = draw.choice(list(feeds))
    if feeds[name].size:
        at, kind = draw.randrange(feeds[name].size), feeds[name].dtype.kind
        number = draw.choice(INTEGERS) if kind in "iub" else draw.choice(FLOATS)
        info = np.iinfo(feeds[name].dtype) if kind in "iu" else None
        if info is not None:
            number = max(info.min, min(info.max, number))
        with np.errstate(all="ignore"):
            feeds[name].reshape(-1)[at if draw.random() < 0.5 else slice(None)] = number


def other_element(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    value = draw.choice(proto.graph.input)
    element = draw.choice(list(ELEMENTS))
    value.type.tensor_type.elem_type = element
    with np.errstate(all="ignore"):
        feeds[value.name] = feeds[value.name].astype(ELEMENTS[element])


def other_attribute(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    attributes = proto.graph.node[0].attribute
    if not attributes:
        return
    attribute = draw.choice(attributes)
    kind = draw.randrange(6)
    if kind == 0:
        attributes.remove(attribute)
    elif kind == 1:
        attribute.type = draw.choice((1, 2, 3, 6, 7, 8))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = draw.choice(INTEGERS)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = draw.choice(FLOATS)
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = draw.choice(STRINGS)
    else:
        attribute.ints.append(draw.choice(INTEGERS))


def more_attributes(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    name = draw.choice(("codec_index", "epsilon", "axis", "interleaved", "x", "window", "encoder"))
    attribute = proto.graph.node[0].attribute.add(name=name, type=onnx.AttributeProto.INT)
    attribute.i = draw.choice(INTEGERS)


def without_input(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    inputs = proto.graph.node[0].input
    if not inputs:
        return
    if draw.random() < 0.5:
        inputs[draw.randrange(len(inputs))] = ""
    else:
        del inputs[draw.randrange(len(inputs)) :]


def swapped_inputs(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    inputs = proto.graph.node[0].input
    inputs[:] = draw.sample(list(inputs), len(inputs))


def shared_input(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    inputs = proto.graph.node[0].input
    if inputs:
        inputs[draw.randrange(len(inputs))] = draw.choice(inputs)


def more_ends(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    node = proto.graph.node[0]
    if draw.random() < 0.5:
        node.input.append("more" if not node.input else node.input[0])
    else:
        node.output.append("more")


def constant_input(proto: onnx.ModelProto, feeds: dict[str, Array], draw: random.Random) -> None:
    """An input that is a constant: kernels may prepare it once."""
    value = draw.choice(proto.graph.input)
    array = feeds[value.name]
    if len(feeds) > 1 and array.nbytes <= 1 << 20:
        tensor = proto.graph.initializer.add(name=value.name, dims=array.shape)
        tensor.data_type = value.type.tensor_type.elem_type
        tensor.raw_data = np.ascontiguousarray(array).tobytes()
        del feeds[value.name]
        proto.graph.input.remove(value)


EDITS: Final = (
    *(other_shape, other_shape, other_shape, other_numbers, other_numbers, other_element),
    *(other_attribute, other_attribute, other_attribute, more_attributes, without_input),
    *(swapped_inputs, shared_input, more_ends, constant_input, constant_input),
)
