"""TurboQuantEncode: rows out of the ordinary, of every codec, by its body and the best kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.numpy_helper import to_array

from tests.ops.site import CODECS, FLOATS, INT3, Arrays, Site
from tests.parity.backends import BACKENDS, BEST, run
from tests.parity.compare import assert_rows, assert_same_rows
from tests.singleop import INT4, codec_of
from tq_onnx.codec import fp8, reference
from tq_onnx.codec.acceptance import TIE_SHARE, UNROUNDED_TIE_SHARE
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.kind import MAX_HALF, NORM_KEPT, NOT_CORRECTED, UNBIASED
from tq_onnx.codec.rotated import LLOYD_MAX, UNIFORM_SIGNED
from tq_onnx.codec.search import MAX_GAINS
from tq_onnx.codec.spec import KINDS, Codec
from tq_onnx.codec.unrotated import FP8, Q8_0, UNIFORM

# The oracle computes in numpy, which warns where the operators mean to overflow.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
D = 80
"""Not a power of two, and with a last block of 16 for q8_0."""
BAD = (np.nan, np.inf, -np.inf)
SEARCH_TIES = 5e-3
"""Share of the codes that may differ: one tie can change all codes of its row, or choose another
gain. Measured up to 1e-3."""


def site_of(codec: Codec, head_size: int = D, heads: int = 1, **how: Any) -> Site:
    """A layer whose keys and values have one codec."""
    return Site(codec, codec, heads=heads, kv_heads=heads, head_size=head_size, **how)


def encode(backend: str, site: Site, x: Any, **more: Any) -> np.ndarray:
    """New keys in a growing cache."""
    empty = np.zeros((*x.shape[:2], 0, site.width(site.key)), np.uint8)
    feeds = {"key": x.astype(np.float32), "past_key": empty, "past_length": np.array([0]), **more}
    model = site.model(outputs=["present_key"]).SerializeToString()
    return run(backend, model, feeds)[0]


def check(site: Site, rows: np.ndarray, x: Any, **how: Any) -> int:
    return assert_rows(rows, x, site.key, site.tables("key"), element=site.element, **how)


def zero(site: Site) -> np.ndarray:
    """The row of the zero vector."""
    vector = np.zeros((1, 1, site.head_size))
    turn, book = site.key_rotation, site.codebook(site.key)
    return reference.encode(vector, site.key, turn, book, **site.search("key"))[0, 0]


def vectors(*shape: int, seed: int = 0) -> np.ndarray:
    """Rows of very different norms, in float32."""
    random = np.random.RandomState(seed)
    x = random.standard_normal(shape)
    return (x * 10 ** random.uniform(-3, 2, (*shape[:-1], 1))).astype(np.float32)


def special_rows() -> np.ndarray:
    """``[1, 1, T, 80]``: zeros, constants, single spikes, magnitudes, steps and halves of steps."""
    x = vectors(1, 1, 60, D)[0, 0].astype(np.float64)
    # Below, squares are subnormal in float32: codes are any, and scales round to zero.
    x[:30] *= (10.0 ** np.linspace(-14, 12, 30))[:, None]
    spikes = np.zeros((4, D))
    spikes[0, 0], spikes[1, 79], spikes[2, 40], spikes[3, 64:] = 1, -3, 1e4, 0.25
    constants = np.repeat([[0.0], [-0.0], [1.0], [-2.5], [1e5], [-1e7]], D, axis=1)
    ramp = np.arange(D) % 16
    steps = np.stack([ramp, ramp / 2, ramp - 7.5, (np.arange(D) % 4) * 1.0, np.arange(D) - 40.0])
    # Halves between two E4M3 numbers, and beyond the largest.
    positive = fp8.VALUES[:127].astype(float)
    halves = np.resize((positive[1:] + positive[:-1]) / 2, (2, D))
    large = np.resize([447.9, 448, 463, 464, 465, 1e6, -448, -470], (1, D))
    rows = [spikes, constants, steps, halves, -halves, large, x]
    return np.concatenate(rows)[None, None].astype(np.float32)


SEARCHING = {
    "": {},
    "gains": {"gains": MAX_GAINS, "norm_correction": UNBIASED},
    "feedback": {"gains": MAX_GAINS, "norm_correction": UNBIASED, "feeds_back": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("codec", "how"),
    [
        *((codec, "") for codec in CODECS),
        *((Codec(*kind), how) for kind in ((LLOYD_MAX, 4), (UNIFORM_SIGNED, 4))
          for how in ("gains", "feedback")),
    ],
    ids=str,
)  # fmt: skip
def test_special_rows(codec: Codec, how: str, backend: str) -> None:
    site, x = site_of(codec, **SEARCHING[how]), special_rows()
    rows = encode(backend, site, x)
    check(site, rows, x, tie_rate=0.2)
    assert np.array_equal(rows[0, 0, 4], zero(site))
    # Rows that are not finite, or have no finite square, are zero vectors, and alone so.
    bad = x.copy()
    numbers = (*BAD, *([3e38, 2e19] if codec.is_rotated else []))
    places = 20 + 2 * np.arange(len(numbers))
    for place, number in zip(places, numbers, strict=True):
        bad[0, 0, place, place] = number
    spoilt = encode(backend, site, bad)
    assert (spoilt[0, 0, places] == zero(site)).all()
    others = np.setdiff1d(np.arange(x.shape[2]), places)
    assert np.array_equal(spoilt[:, :, others], rows[:, :, others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", [*CODECS, FLOATS], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT], ids=str)
def test_many_rows(codec: Codec, dtype: ir.DataType, backend: str) -> None:
    if codec.is_raw:
        codec = codec_of(int(8 * dtype.itemsize))
    site = site_of(codec, 64 if codec.bits % 2 else 128, 2, dtype=dtype)
    x = site.rounded(vectors(2, 2, 50, site.head_size))
    ties = TIE_SHARE if codec.is_rotated else UNROUNDED_TIE_SHARE[site.element]
    check(site, encode(backend, site, x), x, tie_rate=ties)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_on_boundaries(backend: str) -> None:
    """Most coordinates are halfway up to float32 rounding; either code will do, but no other."""
    for bits in KINDS[LLOYD_MAX].bits:
        site = site_of(codec_of(bits), 128)
        boundaries = lloyd_max(bits, 128).boundaries.astype(np.float64)
        y = np.random.RandomState(bits).choice(boundaries, (1, 1, 200, 128))
        y[..., 64:] = np.sqrt((1 - np.sum(y[..., :64] ** 2, -1, keepdims=True)).clip(0) / 64)
        x = (y @ np.linalg.inv(site.key_rotation.astype(np.float64))).astype(np.float32)
        assert check(site, encode(backend, site, x), x, tie_rate=0.3) > 0
    for codec in (codec for codec in CODECS if codec.kind in (UNIFORM, Q8_0)):
        random = np.random.RandomState(codec.bits)
        top = 2**codec.bits - 1 if codec.kind == UNIFORM else 127
        steps = random.randint(0, top, (1, 1, 200, D)) + 0.5
        steps[..., ::32] = top  # of every block
        if codec.kind == UNIFORM:
            steps[..., 1] = 0
        scale = 10 ** random.uniform(-3, 3, (1, 1, 200, 1))
        low = scale * random.uniform(-top, 0, (1, 1, 200, 1)) * (codec.kind == UNIFORM)
        x = (steps * scale + low).astype(np.float32)
        site = site_of(codec)
        assert check(site, encode(backend, site, x), x, tie_rate=0.5) > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_largest_floats(codec: Codec, backend: str) -> None:
    # Squares and differences of these are not finite in float32. Zero is not halfway.
    x = np.zeros((1, 1, 4, D), np.float32)
    x[0, 0, 0, :2] = 1e25, -2e25
    x[0, 0, 1, :2] = 3.4e38, 1.0
    x[0, 0, 2, :2] = 3e38, -2e38
    x[0, 0, 3] = 2.0
    site = site_of(codec)
    expected = reference.encode(x, codec, site.key_rotation, site.codebook(codec))
    rows = encode(backend, site, x)
    assert np.array_equal(rows, expected)
    if codec.kind == UNIFORM:
        scale = rows[0, 0, 2, site.layout(codec).field("scale").offset :][:2]
        assert np.ascontiguousarray(scale).view("<f2")[0] == MAX_HALF


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_float16_scale(backend: str) -> None:
    # Norms that sweep the exponents of float16, subnormal ones included, at and beside its ties.
    norms = np.concatenate(
        [
            np.arange(1, 40) * 2.0**-25,
            2.0 ** np.arange(-24, 17) * (1 + 2.0**-11),
            2.0 ** np.arange(-24, 17) * (1 + 3 * 2.0**-11),
            [65503.0, 65504.0, 65519.9, 65520.0, 65536.0, 1e9],
        ]
    )
    x = vectors(1, 1, len(norms), 64).astype(np.float64)
    x = (x * norms[:, None] / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
    site = site_of(INT4, 64)
    check(site, encode(backend, site, x), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_e4m3_is_written_and_read(backend: str, rng: Any) -> None:
    """All codes, midpoints between neighbours and the floats beside them, and what saturates."""
    site = site_of(Codec(FP8, 8), 64)
    positive = fp8.VALUES[:0x7F]
    middles = (positive[:-1] + positive[1:]) / 2
    edges = np.array([448, 449, 464, 480, 1e4, 3e38, 1e-9, 1e-40], np.float32)
    half = np.concatenate(
        [positive, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), edges]
    )
    values = np.resize(np.concatenate([half, -half]), (1, 1, 17, 64)).astype(np.float32)
    np.testing.assert_array_equal(encode(backend, site, values), fp8.encode(values))
    # Read back: one key, whose value the output is. NaN, which nobody writes, is 0.
    feeds = site.feeds(rng, past_length=(1,) * 4, new=1, capacity=2)
    feeds["past_value"][:, 0, 0] = np.arange(256).reshape(4, 64)
    feeds["value"][:] = 0
    feeds["past_key"][:], feeds["key"][:] = 0, 0
    output, *_ = run(backend, site.model().SerializeToString(), feeds)
    np.testing.assert_array_equal(2 * output.ravel(), fp8.VALUES)


def raw_values(dtype: ir.DataType) -> np.ndarray:
    """Every number of 16 bits; of float32 every exponent and sign with mantissas at both ends."""
    if dtype is HALF:
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    if dtype is BFLOAT:
        return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    ends = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF], np.uint32)
    corners = (np.arange(1 << 9, dtype=np.uint32)[:, None] << 23 | ends).ravel()
    bits = np.random.default_rng(1).integers(0, 1 << 32, (1 << 16) - len(corners), np.uint32)
    return np.concatenate([corners, bits]).view(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT], ids=str)
def test_raw_keeps_every_value_to_the_bit(backend: str, dtype: ir.DataType, rng: Any) -> None:
    codec = codec_of(int(8 * dtype.itemsize))
    site, values = site_of(codec, 64, dtype=dtype), raw_values(dtype)
    x = values.reshape(1, 1, 1024, 64)
    stored, expected = (
        np.ascontiguousarray(rows).reshape(-1).view(f"<u{codec.bits // 8}")
        for rows in (
            encode(backend, site, x),
            reference.encode(x, codec, None, None, element=site.element),
        )
    )
    is_nan = np.isnan(values)
    assert is_nan.any()
    np.testing.assert_array_equal(stored[~is_nan], expected[~is_nan])
    if backend == "body":
        # A NaN loses sign and payload, and nothing else becomes one.
        quiet = {FLOAT: 0x7FC00000, HALF: 0x7E00, BFLOAT: 0x7FC0}[dtype]
        assert (stored[is_nan] == quiet).all()
    elif dtype is FLOAT:
        np.testing.assert_array_equal(stored[is_nan], values[is_nan].view(np.uint32))
    # Read: a sequence of one key gives its value back; one that is not finite spoils its vector.
    feeds = site.feeds(rng, batch=1024) | {"value": values.reshape(1024, 1, 1, 64)}
    output = run(backend, site.model().SerializeToString(), feeds)[0].ravel()
    finite = np.isfinite(values)
    np.testing.assert_array_equal(output[finite], values[finite])
    assert not np.isfinite(output[~finite]).any()


CODES = {bits: Codec(LLOYD_MAX, bits) for bits in range(1, 6)}
SIGNED = {bits: Codec(UNIFORM_SIGNED, bits) for bits in (3, 4)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("codec", "head_size", "gains", "correction"),
    [
        *((CODES[4], 128, MAX_GAINS, UNBIASED), (CODES[3], 80, MAX_GAINS, UNBIASED)),
        *((CODES[2], 64, MAX_GAINS, NORM_KEPT), (CODES[5], 24, MAX_GAINS, NOT_CORRECTED)),
        *((CODES[3], 64, 0, UNBIASED), (CODES[3], 64, 5, NOT_CORRECTED)),
        *((CODES[3], 64, 3, NORM_KEPT), (SIGNED[3], 64, 0, NORM_KEPT)),
        *((SIGNED[4], 128, MAX_GAINS, UNBIASED), (SIGNED[3], 80, MAX_GAINS, NORM_KEPT)),
        *((SIGNED[4], 64, 10, NOT_CORRECTED), (SIGNED[4], 64, 4, UNBIASED)),
    ],
    ids=str,
)
def test_searches(codec: Codec, head_size: int, gains: int, correction: int, backend: str) -> None:
    x = vectors(2, 2, 40, head_size)
    site = site_of(codec, head_size, 2, gains=gains, norm_correction=correction)
    for each in (site, replace(site, feeds_back=True))[: 1 + bool(gains)]:
        rows = encode(backend, each, x)
        check(each, rows, x, tie_rate=SEARCH_TIES)
        signs = reference.scales_of(rows, codec, head_size) < 0
        assert signs.any() == (codec.is_signed and gains > 1)
        # The negative twin: another search is seen.
        with pytest.raises(AssertionError):
            check(replace(each, feeds_back=not each.feeds_back), rows, x, tie_rate=SEARCH_TIES)


@pytest.mark.parametrize("backend", ["evaluator", *BACKENDS])
def test_searches_of_narrow_types(backend: str) -> None:
    site = site_of(INT4, 64, 2, dtype=HALF, **SEARCHING["feedback"])
    x = site.rounded(vectors(1, 2, 40, 64))
    check(site, encode(backend, site, x), x, tie_rate=SEARCH_TIES)


@pytest.mark.parametrize("name", ["key_feedback", "key_centroids"])
def test_tables_may_come_with_a_call(name: str) -> None:
    site = site_of(INT4, 64, 2, **SEARCHING["feedback"])
    x = vectors(1, 2, 20, 64)
    proto = site.model(outputs=["present_key"])
    (table,) = (each for each in proto.graph.initializer if each.name == name)
    proto.graph.initializer.remove(table)
    given_type = proto.graph.input.add(name=name).type.tensor_type
    given_type.elem_type = table.data_type
    for dim in table.dims:
        given_type.shape.dim.add(dim_value=dim)
    feeds: Arrays = {"key": x, "past_length": np.array([0]), name: to_array(table)}
    feeds["past_key"] = np.zeros((1, 2, 0, site.width(INT4)), np.uint8)
    given = run(BEST, proto.SerializeToString(), feeds)[0]
    assert np.array_equal(given, encode(BEST, site, x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [INT4, INT3, FLOATS], ids=str)
def test_only_keys_are_fed_back(value: Codec, backend: str, rng: Any) -> None:
    how = {**SEARCHING["feedback"], "gains": 4}
    site = Site(INT4, value, heads=2, kv_heads=2, head_size=64, **how)
    feeds = site.feeds(rng, new=12)
    _, *presents = run(backend, site.model().SerializeToString(), feeds)
    assert_same_rows(site, feeds, presents, tie_rate=SEARCH_TIES)


def spoil(rows: np.ndarray, place: int, bit: int) -> np.ndarray:
    changed = rows.copy()
    changed[0, 0, 3, place] ^= bit
    return changed


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_wrong_rows_would_be_noticed(codec: Codec) -> None:
    """The oracle's own rows, with one code in a thousand, or one field, changed."""
    site, x = site_of(codec, 64), vectors(1, 1, 50, 64)
    rows = encode("body", site, x)
    check(site, rows, x)
    for wrong in (
        spoil(rows, 5, 1),
        spoil(rows, -2, 4),
        np.concatenate([rows, np.ones_like(rows[..., :2])], axis=-1),
        rows[:, :, ::-1],
    ):
        with pytest.raises(AssertionError):
            check(site, wrong, x)
    if codec.is_rotated:
        with pytest.raises(AssertionError):
            assert_rows(rows, x, codec, site.tables("value"))
