"""Every codec kind: round trips, special rows, and each formula against one written elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.codec.vectors import KINDS, ROTATED, decode, encode, tables, unit_vectors
from tq_onnx.codec import fp8, reference
from tq_onnx.codec.bitpack import pack, unpack
from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8, UNIFORM_SIGNED
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, Q8_0_BLOCK, UNIFORM

Q8, E4M3, GAMMA = Codec(Q8_0, 8), Codec(FP8, 8), Codec(U8, 4)
UNIFORMS = [codec for codec in KINDS if codec.kind == UNIFORM]
PRODS = [codec for codec in KINDS if codec.kind == PROD]
# A vector's error relative to its norm, at worst; loose, the theory is in test_theory.py.
WORST = {LLOYD_MAX: 0.55, UNIFORM: 1.0, FP8: 0.045, Q8_0: 0.012, PROD: 0.75, U8: 0.25}
WORST |= {UNIFORM_SIGNED: 0.55}


@pytest.mark.parametrize("codec", KINDS, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-1, 2))
def test_round_trip(codec: Codec, head_size: int, seed: int, exponent: int) -> None:
    x = unit_vectors(3, head_size, seed) * 10.0**exponent
    rows = encode(x, codec)
    assert rows.dtype == np.uint8
    assert rows.shape == (3, row_layout(codec, head_size).row_bytes)
    decoded = decode(rows, codec, head_size)
    errors = np.linalg.norm(x - decoded, axis=-1) / 10.0**exponent
    more = 0.06 * (codec.kind == FP8 and exponent < 0) + 0.25 * (codec == Codec(LLOYD_MAX, 1))
    assert (errors < WORST[codec.kind] + more).all()
    assert (errors > 0).all()


@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_a_row_is_its_codes_and_its_fields(codec: Codec) -> None:
    layout = row_layout(codec, 80)
    rows = encode(unit_vectors(20, 80), codec)
    parts = [pack(unpack(rows, layout), layout)]
    for field in layout.fields:
        values = reference.fields_of(rows, layout)[field.name]
        assert values.shape == (20, field.count)
        parts.append(np.ascontiguousarray(values.astype(f"<f{field.size}")).view(np.uint8))
    assert np.array_equal(np.concatenate(parts, axis=-1), rows)


@pytest.mark.parametrize("codec", KINDS, ids=str)
@pytest.mark.parametrize("head_size", [64, 80])
def test_zero_vectors(codec: Codec, head_size: int) -> None:
    rows = encode(np.zeros((2, head_size), np.float32), codec)
    layout = row_layout(codec, head_size)
    for values in reference.fields_of(rows, layout).values():
        assert not values.any()
    decoded = decode(rows, codec, head_size)
    assert not decoded.any()
    # 0 is a boundary of every codebook, and ties go up; so does a sign of 0.
    sign = codec.levels if codec.kind == PROD else 0
    assert (unpack(rows, layout) == codec.levels // 2 + sign).all()


@pytest.mark.parametrize("codec", KINDS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_rows_that_are_not_finite_become_zero(codec: Codec, bad: float) -> None:
    x = np.random.RandomState(1).standard_normal((3, 64)).astype(np.float32)
    clean = encode(x, codec)
    x[1, 5] = bad
    rows = encode(x, codec)
    assert np.array_equal(rows[1], encode(np.zeros((1, 64)), codec)[0])
    assert np.array_equal(rows[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_large_rows(codec: Codec) -> None:
    # 1e25 squared is not finite in float32: zero for kinds that take a norm, clamped by the others.
    x = np.random.RandomState(1).standard_normal((2, 64)).astype(np.float32)
    x[1, 5] = 1e25
    rows = encode(x, codec)
    if codec.is_rotated:
        assert np.array_equal(rows[1], encode(np.zeros((1, 64)), codec)[0])
    else:
        decoded = decode(rows, codec, 64)[1]
        assert np.isfinite(decoded).all()
        highest = {FP8: 448.0, Q8_0: 127 * MAX_HALF, UNIFORM: (2**codec.bits - 1) * MAX_HALF}
        assert decoded[5] == pytest.approx(highest[codec.kind], abs=8)


@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_bytes_behind_a_row_are_not_read(codec: Codec) -> None:
    for head_size in (64, 80):
        rows = encode(unit_vectors(5, head_size), codec)
        wide = np.concatenate([rows, np.full((5, 22), 0xFF, np.uint8)], axis=-1)
        assert np.array_equal(decode(wide, codec, head_size), decode(rows, codec, head_size))


@pytest.mark.parametrize("codec", KINDS, ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_any_bytes_decode(codec: Codec, data: st.DataObject) -> None:
    # Slots that nobody wrote hold anything; without NaN in a field the vector is finite.
    layout = row_layout(codec, 24)
    row = data.draw(hnp.arrays(np.uint8, layout.row_bytes))
    fields = reference.fields_of(row, layout)
    decoded = decode(row, codec, 24)
    assert decoded.shape == (24,)
    if all(np.isfinite(values).all() for values in fields.values()):
        assert np.isfinite(decoded).all()


@pytest.mark.parametrize("codec", KINDS, ids=str)
def test_norm_correction_matters_where_it_can(codec: Codec) -> None:
    x = unit_vectors(10, 64)
    same = np.array_equal(encode(x, codec), encode(x, codec, norm_correction=False))
    assert same != codec.corrects_norm


@pytest.mark.parametrize("codec", ROTATED, ids=str)
def test_codes_are_the_nearest_centroids(codec: Codec) -> None:
    x = unit_vectors(50, 96)
    rotation, book = tables(codec, 96)
    assert rotation is not None and book is not None
    codes = unpack(encode(x, codec), row_layout(codec, 96)) & (codec.levels - 1)
    y = x @ rotation[:, :96].astype(float)
    assert np.array_equal(codes, np.abs(y[..., None] - book.centroids).argmin(-1))


# uniform


@pytest.mark.parametrize("codec", UNIFORMS, ids=str)
@settings(max_examples=50)
@given(seed=st.integers(0, 2**31), centre=st.sampled_from([0.0, 3.0, -100.0]))
def test_uniform_is_within_half_a_step(codec: Codec, seed: int, centre: float) -> None:
    x = np.random.RandomState(seed).standard_normal((4, 80)) + centre
    step = (x.max(-1, keepdims=True) - x.min(-1, keepdims=True)) / (2**codec.bits - 1)
    decoded = decode(encode(x, codec), codec, 80)
    # Scale and zero are float16: each off by at most half a unit in its last place.
    rounding = 2.0**-11 * (np.abs(x).max() + 2**codec.bits * step)
    assert (np.abs(decoded - x) <= step / 2 + rounding).all()
    codes = unpack(encode(x, codec), row_layout(codec, 80))
    assert np.array_equal(codes.min(-1), np.zeros(4))
    assert np.array_equal(codes.max(-1), np.full(4, 2**codec.bits - 1))


def test_uniform_by_hand() -> None:
    codec = Codec(UNIFORM, 2)
    x = np.array([[-1.0, 2.0, 0.0, 1.0, -0.4, 0.5, 1.5, -0.5]])
    row = encode(x, codec)
    # Steps of 1 from -1: halves go to the even code.
    assert unpack(row, row_layout(codec, 8)).tolist() == [[0, 3, 1, 2, 1, 2, 2, 0]]
    assert row[0, -4:].tolist() == [0x00, 0x3C, 0x00, 0xBC]  # 1.0 and -1.0
    assert decode(row, codec, 8).tolist() == [[-1, 2, 0, 1, 0, 1, 1, -1]]


@pytest.mark.parametrize("codec", UNIFORMS, ids=str)
@pytest.mark.parametrize("value", [0.5, -3.0, 1e6, -1e6])
def test_uniform_of_a_constant(codec: Codec, value: float) -> None:
    row = encode(np.full((1, 64), value), codec)
    assert not unpack(row, row_layout(codec, 64)).any()
    assert (decode(row, codec, 64) == np.clip(value, -MAX_HALF, MAX_HALF)).all()


# q8_0


def ggml_q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 32 floats as ggml's reference defines them: ``d = amax / 127``, ``q = x / d``."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, Q8_0_BLOCK)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    return np.round(blocks * inverse).astype(np.int8), d.astype(np.float16)


def test_q8_0_is_ggmls() -> None:
    # ggml rounds halves away from zero and multiplies by a reciprocal: no coordinate is near a tie.
    x = np.random.RandomState(0).standard_normal((500, 128)).astype(np.float32)
    x *= 10 ** np.random.RandomState(1).uniform(-3, 3, (500, 1))
    q, d = ggml_q8_0(x)
    rows = encode(x, Q8)
    layout = row_layout(Q8, 128)
    assert np.array_equal(unpack(rows, layout).view(np.int8), q.reshape(500, 128))
    assert np.array_equal(reference.fields_of(rows, layout)["scale"], d[..., 0])
    expected = (q * d.astype(float)).reshape(500, 128)
    np.testing.assert_array_equal(decode(rows, Q8, 128), expected)


def test_q8_0_blocks_have_scales_of_their_own() -> None:
    # 80 = 32 + 32 + 16: the last block is short.
    x = np.concatenate([np.full(32, 0.01), np.full(32, -1.0), np.full(16, 100.0)])[None]
    rows = encode(x, Q8)
    scales = reference.fields_of(rows, row_layout(Q8, 80))["scale"][0]
    np.testing.assert_allclose(scales, [0.01 / 127, 1 / 127, 100 / 127], rtol=2.0**-10)
    codes = unpack(rows, row_layout(Q8, 80)).view(np.int8)[0]
    assert codes.tolist() == [127] * 32 + [-127] * 32 + [127] * 16
    np.testing.assert_allclose(decode(rows, Q8, 80), x, rtol=2.0**-10)
    x[0, 32:64] = 0
    assert not decode(encode(x, Q8), Q8, 80)[0, 32:64].any()


# fp8


def test_fp8_values_are_those_of_ml_dtypes() -> None:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nan = np.isnan(values)
    assert np.flatnonzero(nan).tolist() == [0x7F, 0xFF]
    assert np.array_equal(fp8.VALUES[~nan], values[~nan])
    # Never written; read as 0, so that a stray byte spoils nothing.
    assert not fp8.VALUES[nan].any()


def test_fp8_rounds_as_ml_dtypes() -> None:
    positive = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    between = (positive[1:] + positive[:-1]) / 2
    beside = [np.nextafter(between, np.float32(end)) for end in (0, 500)]
    random = np.random.RandomState(0).standard_normal(20_000) * 10 ** np.linspace(-5, 2.0, 20_000)
    x = np.concatenate([positive, between, *beside, [1e-30], random[np.abs(random) < 448]])
    # From float32: ml_dtypes rounds float64 to that first.
    x = x.astype(np.float32)
    for values in (x, -x):
        expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(fp8.encode(values), expected)


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1e6, 3e38])
def test_fp8_saturates(value: float) -> None:
    assert fp8.encode(np.array([value, -value])).tolist() == [0x7E, 0xFE]


def test_fp8_rows_have_no_scale() -> None:
    x = np.linspace(-4, 4, 64)[None]
    expected = x.astype(ml_dtypes.float8_e4m3fn).astype(float)
    np.testing.assert_array_equal(decode(encode(x, E4M3), E4M3, 64), expected)


# u8


def test_u8_has_the_codes_of_int4_and_the_norm_in_float32() -> None:
    x = unit_vectors(50, 128) * np.linspace(1e-6, 1e6, 50)[:, None]
    int4 = encode(x, Codec(LLOYD_MAX, 4))
    rows = encode(x, GAMMA)
    assert rows.shape == (50, 132)
    assert np.array_equal(rows[:, :128], unpack(int4, row_layout(Codec(LLOYD_MAX, 4), 128)))
    stored = np.ascontiguousarray(rows[:, 128:]).view("<f4")[:, 0]
    assert np.array_equal(stored, np.linalg.norm(x, axis=-1).astype(np.float32))


# prod


@pytest.mark.parametrize("codec", PRODS, ids=str)
def test_prod_is_lloyd_max_and_signs_of_the_residual(codec: Codec) -> None:
    for correction in (True, False):
        x = unit_vectors(40, 80) * np.geomspace(1e-2, 1e3, 40)[:, None]
        rotation, book = tables(codec, 80)
        assert rotation is not None and book is not None
        turn, sketch = rotation[:, :80].astype(float), rotation[:, 80:].T.astype(float)
        rows = encode(x, codec, norm_correction=correction)
        layout = row_layout(codec, 80)
        codes, fields = unpack(rows, layout), reference.fields_of(rows, layout)
        indices, signs = codes & (codec.levels - 1), codes >> codec.index_bits
        y = x / np.linalg.norm(x, axis=-1, keepdims=True) @ turn
        assert np.array_equal(indices, np.searchsorted(book.boundaries, y, side="right"))
        coarse = fields["scale"] * book.centroids[indices].astype(float) @ turn.T
        residual = x - coarse
        assert np.array_equal(signs, residual @ sketch.T >= 0)
        norms = np.linalg.norm(residual, axis=-1, keepdims=True)
        np.testing.assert_allclose(fields["residual_norm"], norms, rtol=2.0**-11)
        fine = np.sqrt(np.pi / 2) / 80 * fields["residual_norm"] * ((2.0 * signs - 1) @ sketch)
        np.testing.assert_allclose(decode(rows, codec, 80), coarse + fine, atol=1e-12)


@pytest.mark.parametrize("codec", PRODS, ids=str)
def test_prod_is_read_in_one_product(codec: Codec) -> None:
    # What attention does: q [R | S^T] against the coordinates of the row.
    from tq_onnx.codec.quantise import coordinates

    x, queries = unit_vectors(10, 64), unit_vectors(6, 64, seed=1)
    rotation, book = tables(codec, 64)
    assert rotation is not None and book is not None
    rows, layout = encode(x, codec), row_layout(codec, 64)
    seen = coordinates(
        unpack(rows, layout), reference.fields_of(rows, layout), codec, book.centroids
    )
    assert seen.shape == (10, 128)
    scores = queries @ rotation.astype(float) @ seen.T
    np.testing.assert_allclose(scores, queries @ decode(rows, codec, 64).T, atol=1e-12)
