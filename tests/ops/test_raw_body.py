"""The bodies with the codec ``raw``: lossless to the bit, and beside a quantised cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.ops.rows import assert_same_rows
from tests.ops.site import FLOATS, Site
from tests.ops.test_attention_body import assert_attention, bias_for
from tests.singleop import RUNTIMES, codec_of, run_ort

FLOAT, HALF, BFLOAT = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
PAIRS = [
    *((*pair, FLOAT) for pair in ((32, 32), (32, 4), (3, 32))),
    *((*pair, dtype) for dtype in (HALF, BFLOAT) for pair in ((16, 16), (2, 16), (16, 4))),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def every_float16() -> np.ndarray[Any, Any]:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def every_bfloat16() -> np.ndarray[Any, Any]:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def many_float32() -> np.ndarray[Any, Any]:
    """Every exponent and sign with mantissas at both ends, and any bits at all."""
    ends = np.array([0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF], np.uint32)
    corners = (np.arange(1 << 9, dtype=np.uint32)[:, None] << 23 | ends).ravel()
    bits = np.random.default_rng(1).integers(0, 1 << 32, (1 << 16) - len(corners), np.uint32)
    return np.concatenate([corners, bits]).view(np.float32)


VALUES = {FLOAT: many_float32, HALF: every_float16, BFLOAT: every_bfloat16}
BITS = {FLOAT: 32, HALF: 16, BFLOAT: 16}


def elements(rows: np.ndarray[Any, Any], dtype: ir.DataType) -> np.ndarray[Any, Any]:
    """The elements of rows as unsigned integers."""
    return rows.reshape(-1).view(f"<u{BITS[dtype] // 8}")


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_every_value_is_stored_to_the_bit(runtime: str, dtype: ir.DataType, rng: Any) -> None:
    bits = BITS[dtype]
    site = Site(codec_of(bits), codec_of(bits), heads=1, kv_heads=1, head_size=64, dtype=dtype)
    feeds = site.feeds(rng, new=1024)
    values = VALUES[dtype]()
    feeds["key"] = values.reshape(1, 1, 1024, 64)
    _, keys, _ = RUNTIMES[runtime](site.model(), feeds)
    stored = elements(keys, dtype)
    expected = elements(site.expected(feeds)[1], dtype)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(stored[~is_nan], expected[~is_nan])
    # A NaN loses sign and payload, and nothing else becomes one.
    quiet = {FLOAT: 0x7FC00000, HALF: 0x7E00, BFLOAT: 0x7FC0}[dtype]
    assert is_nan.any()
    assert (stored[is_nan] == quiet).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_every_value_is_read_to_the_bit(runtime: str, dtype: ir.DataType, rng: Any) -> None:
    """A sequence of one key gives its value back."""
    bits = BITS[dtype]
    site = Site(codec_of(bits), codec_of(bits), heads=1, kv_heads=1, head_size=64, dtype=dtype)
    feeds = site.feeds(rng, batch=1024)
    values = VALUES[dtype]()
    feeds["value"] = values.reshape(1024, 1, 1, 64)
    # A value that is not finite spoils its vector only.
    output, *_ = RUNTIMES[runtime](site.model(), feeds)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(output.ravel()[finite], values[finite])
    assert not np.isfinite(output.ravel()[~finite]).any()


@pytest.mark.parametrize(("key_bits", "value_bits", "dtype"), PAIRS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_pair_of_codecs(
    *, key_bits: int, value_bits: int, dtype: ir.DataType, has_bias: bool, rng: Any
) -> None:
    site = Site(
        *(codec_of(key_bits), codec_of(value_bits)),
        heads=6,
        kv_heads=2,
        dtype=dtype,
        has_bias=has_bias,
    )
    feeds = site.feeds(rng, past_length=(6, 2), new=3, capacity=11)
    if has_bias:
        feeds["attention_bias"] = bias_for(site, feeds, rng, extra=2)
    attributes = {"sliding_window": 5, "softcap": 2.0}
    results = run_ort(site.model(**attributes), feeds)
    assert_same_rows(site, feeds, results[1:], site.expected(feeds, **attributes)[1:])
    assert_attention(site, feeds, results, **attributes)


@pytest.mark.parametrize("opset", [15, 18, 21, 24])
@pytest.mark.parametrize(("key_bits", "value_bits", "dtype"), PAIRS, ids=str)
def test_the_model_around_it_may_have_any_opset_from_15(
    opset: int, key_bits: int, value_bits: int, dtype: ir.DataType, rng: Any
) -> None:
    site = Site(codec_of(key_bits), codec_of(value_bits), dtype=dtype, opset=opset)
    feeds = site.feeds(rng, past_length=(4, 1), new=2)
    results = run_ort(site.model(), feeds)
    assert_same_rows(site, feeds, results[1:], site.expected(feeds)[1:])
    assert_attention(site, feeds, results)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_vector_that_is_not_finite_spoils_only_who_sees_it(runtime: str, rng: Any) -> None:
    site = Site(FLOATS, FLOATS)
    feeds = site.feeds(rng, past_length=(3,), new=3)
    clean, *_ = RUNTIMES[runtime](site.model(), feeds)
    for name, bad in (("key", np.nan), ("value", np.nan), ("value", np.inf)):
        spoilt = feeds | {name: feeds[name].copy()}
        spoilt[name][0, 0, 1, 7] = bad  # position 4, heads 0 and 1
        output, *_ = RUNTIMES[runtime](site.model(), spoilt)
        np.testing.assert_array_equal(output[:, 2:], clean[:, 2:])
        np.testing.assert_array_equal(output[:, :2, 0], clean[:, :2, 0])
        reached = output[:, :2, 1:] if name == "key" else output[:, :2, 1:, 7]
        assert not np.isfinite(reached).any()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_is_hidden_contributes_nothing(runtime: str, rng: Any) -> None:
    site = Site(FLOATS, FLOATS, has_bias=True)
    attributes = {"sliding_window": 4}
    feeds = site.feeds(rng, past_length=(6, 2), new=2, capacity=12)
    feeds["attention_bias"] = np.zeros((1, 1, 1, 8), np.float32)
    feeds["attention_bias"][..., 1] = -np.inf
    clean = RUNTIMES[runtime](site.model(**attributes), feeds)
    spoilt = {name: feeds[name].copy() for name in ("past_key", "past_value")}
    for cache in spoilt.values():
        cache[0, :, [0, 1, 2, 8, 11]] = 0xFF
        cache[1, :, [1, 4, 9]] = 0xFF
    dirty = RUNTIMES[runtime](site.model(**attributes), feeds | spoilt)
    np.testing.assert_array_equal(dirty[0], clean[0])
    assert np.isfinite(dirty[0]).all()
