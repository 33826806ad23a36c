"""The decoder's own operators as in ``test_fuzz.py``: right numbers or an error of the operator.

``FITS`` restates what they accept. Dimensions may be zero and the others then of any size;
positions and indices may be anything that 64 bits hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.native.conftest import Feeds
from tests.native.fuzzing import FUZZ, spoiled
from tests.native.single_node import Array, make_session
from tests.ops.decoder_oracles import ORACLES, TOLERANCE, TYPES
from tests.singleop import INPUTS, decoder_model
from tq_onnx.ops.domain import GATHER, RMS_NORMALIZATION, ROTARY_EMBEDDING, SWISH, TRANSPOSE

HIGHEST, LOWEST = np.iinfo(np.int64).max, np.iinfo(np.int64).min

#: Beside a dimension of zero. NumPy makes no array whose other dimensions overflow together.
HUGE = [2**20, 2**31, 2**32 + 1, 2**40, 2**59]
#: Positions and indices that come near something.
FAR = [HIGHEST, HIGHEST - 1, LOWEST, LOWEST + 1, 2**31, -(2**31), 2**32, 2**32 + 1, 2**61, -(2**61)]
ODD_FLOATS = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0, 65504, 1e5], np.float32)

dims = st.sampled_from([0, 1, 2, 3, 4, 6, 9])


@functools.cache
def session_of(op: str, dtype: ir.DataType) -> ort.InferenceSession:
    return make_session(decoder_model(op, dtype).SerializeToString(), threads=2)


def shape_of(data: st.DataObject, rank: int) -> list[int]:
    """Now and then long, or with a dimension that only a tensor without elements can have."""
    shape = data.draw(st.lists(dims, min_size=rank, max_size=rank))
    if rank and data.draw(st.integers(0, 7)) == 0:
        shape[data.draw(st.integers(0, rank - 1))] = data.draw(st.sampled_from([40, 600, 1100]))
    if 0 in shape and rank > 1 and data.draw(st.booleans()):
        at = data.draw(st.sampled_from([at for at, dim in enumerate(shape) if dim] or [0]))
        others = math.prod(dim for dim in [*shape[:at], *shape[at + 1 :]] if dim)
        shape[at] = data.draw(st.sampled_from([size for size in HUGE if size * others < 2**60]))
    return shape


def numbers_of(data: st.DataObject, rng: np.random.Generator, shape: list[int], end: int) -> Array:
    """Positions or indices up to ``end``; now and then one from anywhere."""
    lowest = data.draw(st.sampled_from([0, -end]))
    numbers = rng.integers(lowest, max(end, lowest + 1), shape, dtype=np.int64)
    if numbers.size and data.draw(st.integers(0, 2)) == 0:
        near = [-1, 0, end - 1, end, -end, -end - 1]
        numbers.flat[rng.integers(numbers.size)] = data.draw(st.sampled_from([*near, *FAR]))
    return numbers


def feeds_of(data: st.DataObject, op: str, dtype: ir.DataType) -> Feeds:
    """Inputs that mostly fit each other, as float32 that the type holds."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))

    def floats(*sizes: int) -> Array:
        made = rng.standard_normal(sizes, np.float32)
        if made.size and data.draw(st.integers(0, 3)) == 0:
            made.flat[rng.integers(made.size)] = rng.choice(ODD_FLOATS)
        with np.errstate(over="ignore"):
            return made.astype(dtype.numpy()).astype(np.float32)

    rank = {GATHER: 2, ROTARY_EMBEDDING: 4, TRANSPOSE: 4}.get(op) or data.draw(st.integers(0, 4))
    shape = shape_of(data, rank)
    if op == ROTARY_EMBEDDING and data.draw(st.booleans()):
        shape[3] += shape[3] % 2
    feeds: Feeds = {INPUTS[op][0]: floats(*shape)}
    if op == RMS_NORMALIZATION:
        feeds["scale"] = rng.standard_normal(min([*shape, 1100][-2:])).astype(np.float32)
    if op == ROTARY_EMBEDDING:
        rows, half = data.draw(st.sampled_from([0, 1, 5, 40])), min(shape[3] // 2, 1100)
        feeds["cos_cache"], feeds["sin_cache"] = rng.standard_normal((2, rows, half), np.float32)
        feeds["sin_cache"] = feeds["sin_cache"][data.draw(st.sampled_from([0, 0, 0, 1])) :]
        # One of both is zero where the other is huge.
        tokens = shape[2] + data.draw(st.sampled_from([0, 0, 0, 1]))
        possible = [0] if tokens > 1101 else [1, shape[0] if shape[0] * tokens <= 2**16 else 1]
        sizes = [data.draw(st.sampled_from(possible)), tokens]
        feeds["position_ids"] = numbers_of(data, rng, sizes, rows)
    if op == GATHER:
        sizes = shape_of(data, data.draw(st.sampled_from([1, 1, 2, 2, 2, 0, 3])))
        feeds["indices"] = numbers_of(data, rng, sizes, shape[0])
    return spoiled(data, feeds)


def in_range(numbers: Array, least: int, end: int) -> bool:
    return all(least <= number < end for number in numbers.ravel().tolist())


def _rotary_embedding_fits(feeds: Feeds) -> bool:
    x, cosines, positions = feeds["X"], feeds["cos_cache"], feeds["position_ids"]
    return (
        x.ndim == 4
        and x.shape[3] % 2 == 0
        and cosines.shape[1:] == (x.shape[3] // 2,)
        and feeds["sin_cache"].shape == cosines.shape
        and positions.shape in {(rows, x.shape[2]) for rows in (1, x.shape[0])}
        and in_range(positions, 0, len(cosines))
    )


def _gather_fits(feeds: Feeds) -> bool:
    data, indices = feeds["data"], feeds["indices"]
    return data.ndim == 2 and indices.ndim in {1, 2} and in_range(indices, -len(data), len(data))


FITS: dict[str, Callable[[Feeds], bool]] = {
    RMS_NORMALIZATION: lambda feeds: (
        feeds["X"].ndim > 0 and feeds["scale"].shape == feeds["X"].shape[-1:]
    ),
    ROTARY_EMBEDDING: _rotary_embedding_fits,
    SWISH: lambda feeds: True,
    TRANSPOSE: lambda feeds: feeds["X"].ndim == 4,
    GATHER: _gather_fits,
}


def output_shape(op: str, feeds: Feeds) -> tuple[int, ...]:
    if op == GATHER:
        return (*feeds["indices"].shape, feeds["data"].shape[1])
    shape = feeds["X"].shape
    return (shape[0], shape[2], shape[1], shape[3]) if op == TRANSPOSE else shape


def assert_right(op: str, dtype: ir.DataType, output: Array, feeds: Feeds) -> None:
    assert output.shape == output_shape(op, feeds)
    if output.size == 0:
        return
    with np.errstate(all="ignore"):
        expected = ORACLES[op](feeds)
    tolerance = 0.0
    if op not in {TRANSPOSE, GATHER}:
        tolerance = TOLERANCE[dtype]
    if op in {RMS_NORMALIZATION, ROTARY_EMBEDDING}:
        # One number that is not finite or has no square is the whole vector's.
        ordinary = (np.abs(feeds["X"]) < 1e4).all(axis=-1)
        output, expected = output[ordinary], expected[ordinary]
        tolerance *= np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", INPUTS)
@settings(FUZZ, max_examples=300)
@given(st.data())
def test_decoder(op: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(TYPES))
    feeds = feeds_of(data, op, dtype)
    session = session_of(op, dtype)
    if op == GATHER:
        sizes = (*feeds["indices"].shape, *feeds["data"].shape[1:])
        assume(math.prod(size for size in sizes if size) < 2**60)
    if FITS[op](feeds):
        assert_right(op, dtype, session.run(None, feeds)[0], feeds)
        return
    with pytest.raises(Exception, match=f"{op}: "):
        session.run(None, feeds)


ORDINARY = st.sampled_from([0.0, -0.0, 1e-45, 1e-30, 1e-6, 1.0, 3e38])


@settings(FUZZ, max_examples=60)
@given(ORDINARY | st.floats(width=32), st.booleans())
def test_epsilon(epsilon: float, is_zero: bool) -> None:
    model = decoder_model(RMS_NORMALIZATION, attributes={"epsilon": epsilon}).SerializeToString()
    if not 0 <= epsilon < math.inf:
        with pytest.raises(Exception, match=f"{RMS_NORMALIZATION}: epsilon is "):
            make_session(model)
        return
    x = np.array([[0, 0, 0], [0.5, -1, 2]], np.float32) * (not is_zero)
    scale = np.array([1, -2, 3], np.float32)
    output = make_session(model).run(None, {"X": x, "scale": scale})[0]
    with np.errstate(all="ignore"):
        squares = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
        expected = x / np.sqrt(squares + np.float32(epsilon)) * scale
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-30)


@settings(FUZZ, max_examples=60)
@given(st.permutations(range(4)) | st.lists(st.sampled_from([*range(-4, 5), *FAR]), max_size=6))
def test_perm(perm: list[int]) -> None:
    attributes = {"perm": ir.AttrInt64s("perm", perm)}
    model = decoder_model(TRANSPOSE, attributes=attributes).SerializeToString()
    if perm == [0, 2, 1, 3]:
        make_session(model)
        return
    with pytest.raises(Exception, match=f"{TRANSPOSE}: "):
        make_session(model)
