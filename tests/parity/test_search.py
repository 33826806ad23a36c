"""TurboQuantEncode with gains and error feedback: every backend writes the oracle's rows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import to_array

from tests.parity.backends import BEST_AND_BODY, LEVELS, run
from tests.parity.compare import check_rows
from tests.parity.graphs import (
    KEY_LAYER,
    VALUE_LAYER,
    Attention,
    encode_model,
    feedback,
    rotation,
    step_model,
)
from tests.parity.test_encode import as_dtype, empty, special_rows, vectors
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.rotated import LLOYD_MAX, UNIFORM_SIGNED
from tq_onnx.codec.search import MAX_GAINS, gain_table
from tq_onnx.codec.spec import Codec, row_layout

# The evaluator computes in numpy, which warns where the operators mean to overflow.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

SEARCH_TIES = 5e-3
"""Share of the codes that may differ: one tie can change all codes of its row, or choose another
gain. Measured up to 1e-3."""

HEADS = 2

CODES = {bits: Codec(LLOYD_MAX, bits) for bits in range(1, 6)}
SIGNED = {bits: Codec(UNIFORM_SIGNED, bits) for bits in (3, 4)}


def encode(
    backend: str,
    codec: Codec,
    x: np.ndarray,
    *,
    gains: int,
    feeds: bool,
    correction: int = UNBIASED,
) -> np.ndarray:
    size, dtype = x.shape[-1], str(x.dtype)
    heads = x.shape[1] if feeds else 0
    how = {"norm_correction": correction, "gains": gains, "feedback_heads": heads}
    model = encode_model("key", codec, size, dtype, **how)
    past = np.zeros((*x.shape[:2], 0, row_layout(codec, size).row_bytes), np.uint8)
    feeds_of = {"key": x, "past_key": past, "past_length": np.array([0])}
    return run(backend, model, feeds_of)[0]


def check(backend: str, rows: np.ndarray, x: np.ndarray, codec: Codec, **how: int | bool) -> None:
    count = int(how.get("gains", MAX_GAINS)) or 1
    size, gains = x.shape[-1], gain_table(count, is_signed=codec.is_signed)
    check_rows(
        f"{backend}, searching",
        rows,
        x,
        codec,
        rotation(size, KEY_LAYER),
        norm_correction=int(how.get("correction", UNBIASED)),
        gains=gains,
        feedback=feedback(size, x.shape[1]) if how.get("feeds") else None,
        tie_rate=SEARCH_TIES,
    )


@pytest.mark.parametrize("backend", BEST_AND_BODY)
@pytest.mark.parametrize("feeds", [False, True], ids=["gains", "feedback"])
@pytest.mark.parametrize(
    ("codec", "head_size"),
    [
        (CODES[4], 128),
        (CODES[3], 80),
        (CODES[2], 64),
        (CODES[5], 24),
        (SIGNED[4], 128),
        (SIGNED[3], 80),
    ],
    ids=str,
)
def test_many_rows(codec: Codec, head_size: int, feeds: bool, backend: str) -> None:
    x = vectors(2, HEADS, 40, head_size).astype(np.float32)
    rows = encode(backend, codec, x, gains=MAX_GAINS, feeds=feeds)
    check(backend, rows, x, codec, feeds=feeds)


@pytest.mark.parametrize("backend", BEST_AND_BODY)
@pytest.mark.parametrize("correction", [0, 1, 2])
@pytest.mark.parametrize(
    ("codec", "gains", "feeds"),
    [
        (CODES[3], 0, False),
        (CODES[3], 5, False),
        (CODES[3], 3, True),
        (SIGNED[3], 0, False),
        (SIGNED[4], 10, False),
        (SIGNED[4], 4, True),
    ],
    ids=str,
)
def test_scales_and_tables(
    codec: Codec, gains: int, feeds: bool, correction: int, backend: str
) -> None:
    x = vectors(1, HEADS, 30, 64).astype(np.float32)
    rows = encode(backend, codec, x, gains=gains, feeds=feeds, correction=correction)
    check(backend, rows, x, codec, gains=gains, feeds=feeds, correction=correction)
    signs = reference.scales_of(rows, codec, 64) < 0
    assert signs.any() == (codec.is_signed and gains > 1)


@pytest.mark.parametrize("backend", BEST_AND_BODY)
@pytest.mark.parametrize("feeds", [False, True], ids=["gains", "feedback"])
@pytest.mark.parametrize("codec", [CODES[4], SIGNED[4]], ids=str)
def test_special_rows(codec: Codec, feeds: bool, backend: str) -> None:
    x = special_rows(80)
    rows = encode(backend, codec, x, gains=MAX_GAINS, feeds=feeds)
    check(backend, rows, x, codec, feeds=feeds)
    for bad in (3, 5, 7, 9, 11):
        assert np.array_equal(rows[0, 0, bad], rows[0, 0, 1])


@pytest.mark.parametrize("backend", ["evaluator", *BEST_AND_BODY])
def test_narrow_types(backend: str) -> None:
    x = as_dtype(vectors(1, HEADS, 40, 64), "float16")
    codec = CODES[4]
    check(backend, encode(backend, codec, x, gains=MAX_GAINS, feeds=True), x, codec, feeds=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("feeds", [False, True], ids=["gains", "feedback"])
@pytest.mark.parametrize("codec", [*CODES.values(), *SIGNED.values()], ids=str)
def test_levels_give_the_same_bytes(codec: Codec, feeds: bool, level: str) -> None:
    x = np.concatenate([special_rows(72), vectors(1, 1, 60, 72).astype(np.float32)], axis=2)
    scalar, own = (encode(b, codec, x, gains=MAX_GAINS, feeds=feeds) for b in ("scalar", level))
    assert np.array_equal(scalar, own)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["key_feedback", "key_centroids"])
def test_tables_may_come_with_a_call(name: str, level: str) -> None:
    x = vectors(1, HEADS, 20, 64).astype(np.float32)
    model = encode_model("key", 4, 64, "float32", gains=MAX_GAINS, feedback_heads=HEADS)
    proto = onnx.load_from_string(model)
    (table,) = (each for each in proto.graph.initializer if each.name == name)
    proto.graph.initializer.remove(table)
    given_type = proto.graph.input.add(name=name).type.tensor_type
    given_type.elem_type = table.data_type
    for dim in table.dims:
        given_type.shape.dim.add(dim_value=dim)
    feeds_of = {"key": x, "past_key": empty(x, 4), "past_length": np.array([0])}
    expected = run(level, model, feeds_of)[0]
    given = {**feeds_of, name: to_array(table)}
    assert np.array_equal(run(level, proto.SerializeToString(), given)[0], expected)


@pytest.mark.parametrize("backend", BEST_AND_BODY)
@pytest.mark.parametrize("value_bits", [4, 3, 32])
def test_only_keys_are_fed_back(value_bits: int, backend: str) -> None:
    x = vectors(1, HEADS, 12, 64).astype(np.float32)
    how = {"norm_correction": UNBIASED, "gains": 4, "feedback_heads": HEADS}
    spec = Attention(64, 4, value_bits, **how)
    _, keys, values = run(
        backend,
        step_model(spec),
        {
            "key": x,
            "value": x,
            "query": x,
            "past_key": np.zeros((1, HEADS, 0, 34), np.uint8),
            "past_value": np.zeros((1, HEADS, 0, 8 * value_bits + 2 * (value_bits < 16)), np.uint8),
            "past_length": np.array([0]),
        },
    )
    check(backend, keys, x, CODES[4], gains=4, feeds=True)
    turn, correction = rotation(64, VALUE_LAYER), {"norm_correction": UNBIASED}
    how_values = {**correction, "gains": gain_table(4), "tie_rate": SEARCH_TIES}
    check_rows(f"{backend}, searching", values, x, spec.value, turn, **how_values)


def test_a_wrong_backend_would_be_noticed() -> None:
    x = vectors(1, HEADS, 8, 64).astype(np.float32)
    plain = reference.encode(x, Codec(LLOYD_MAX, 4), rotation(64, KEY_LAYER), lloyd_max(4, 64))
    with pytest.raises(AssertionError):
        check("negative", plain, x, CODES[4], feeds=False)
    rows = encode("body", CODES[4], x, gains=MAX_GAINS, feeds=False)
    with pytest.raises(AssertionError):
        check("negative", rows, x, CODES[4], feeds=True)
