"""TurboQuantDequantAttention's body against float64 attention, in both runtimes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.site import INT3, Arrays, Site
from tests.singleop import RUNTIMES, codec_of, run_ort, run_reference_evaluator

# Largest difference, relative to the largest output: float32 arithmetic, then the output's type.
TOLERANCE = {
    ir.DataType.FLOAT: 5e-6,
    ir.DataType.FLOAT16: 1e-3,
    ir.DataType.BFLOAT16: 8e-3,
}


def assert_attention(site: Site, feeds: Arrays, results: list[Any], **attributes: Any) -> None:
    """The output is float64 attention over the caches that the model itself made."""
    output, *presents = results
    wanted = site.attended(feeds, *presents, **attributes)
    assert output.shape == wanted.shape
    error = np.abs(output - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    assert error <= TOLERANCE[site.dtype]


def bias_for(site: Site, feeds: Arrays, rng: np.random.Generator, extra: int = 0) -> Any:
    batch, heads, new, _ = feeds["query"].shape
    total = int(feeds["past_length"].max()) + new
    return site.rounded(rng.standard_normal((batch, heads, new, total + extra)))


@pytest.mark.parametrize(
    ("causal", "sliding_window", "softcap", "has_bias"),
    list(product((0, 1), (0, 1, 3, 100), (0.0, 0.7), (False, True))),
)
def test_every_combination_of_attributes(
    *,
    causal: int,
    sliding_window: int,
    softcap: float,
    has_bias: bool,
    rng: Any,
) -> None:
    attributes = {"causal": causal, "sliding_window": sliding_window, "softcap": softcap}
    site = Site(has_bias=has_bias, value=INT3)
    feeds = site.feeds(rng, past_length=(4, 1), new=3, capacity=9)
    if has_bias:
        feeds["attention_bias"] = bias_for(site, feeds, rng)
    results = run_ort(site.model(**attributes), feeds)
    assert_attention(site, feeds, results, **attributes)


@pytest.mark.parametrize("bits", [(2, 4), (3, 3), (4, 5), (5, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_pair_of_codecs_and_type(bits: tuple[int, int], dtype: ir.DataType, rng: Any) -> None:
    site = Site(*map(codec_of, bits), dtype=dtype, heads=6, kv_heads=2, head_size=64)
    feeds = site.feeds(rng, past_length=(6,), new=2)
    assert_attention(site, feeds, run_ort(site.model(), feeds))


@pytest.mark.parametrize(("past", "new"), [(0, 1), (0, 4), (1, 1), (33, 1)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (4, 1), (6, 2)])
def test_lengths_and_groups(*, past: int, new: int, heads: int, kv_heads: int, rng: Any) -> None:
    site = Site(heads=heads, kv_heads=kv_heads, head_size=16)
    feeds = site.feeds(rng, past_length=(past,), new=new, batch=2)
    assert_attention(site, feeds, run_ort(site.model(), feeds))


@pytest.mark.parametrize("shape", list(product((1, 2), (1, 4), (1, 3), (1, 7, 11))))
def test_a_bias_is_broadcast_and_cut(shape: tuple[int, ...], rng: Any) -> None:
    site = Site(has_bias=True)
    feeds = site.feeds(rng, past_length=(4, 2), new=3)
    feeds["attention_bias"] = site.rounded(rng.standard_normal(shape))
    if shape[3] > 7:
        feeds["attention_bias"][..., 7:] = np.nan
    assert_attention(site, feeds, run_ort(site.model(), feeds))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(
    ("key_bits", "value_bits", "dtype"),
    [
        (4, 3, ir.DataType.FLOAT),
        (32, 32, ir.DataType.FLOAT),
        (4, 2, ir.DataType.FLOAT16),
        (16, 16, ir.DataType.FLOAT16),
        (3, 4, ir.DataType.BFLOAT16),
    ],
)
@pytest.mark.parametrize(("causal", "sliding_window", "softcap"), [(1, 0, 0.0), (0, 3, 0.7)])
def test_sinks(
    *,
    key_bits: int,
    value_bits: int,
    dtype: ir.DataType,
    causal: int,
    sliding_window: int,
    softcap: float,
    rng: Any,
) -> None:
    attributes = {"causal": causal, "sliding_window": sliding_window, "softcap": softcap}
    site = Site(
        *(codec_of(key_bits), codec_of(value_bits)),
        heads=6,
        dtype=dtype,
        has_bias=True,
        has_sink=True,
    )
    feeds = site.feeds(rng, past_length=(4, 1), new=3, capacity=9)
    feeds["attention_bias"] = bias_for(site, feeds, rng)
    feeds["attention_bias"][0, :, 1] = -np.inf  # sees nothing but its sink
    feeds["head_sink"] = site.rounded(np.array([0.5, -1.5, 3.0, 100.0, -100.0, -np.inf]))
    results = run_ort(site.model(**attributes), feeds)
    assert_attention(site, feeds, results, **attributes)
    assert not results[0][0, :, 1].any()
    # The negative twin: the comparison sees the sinks.
    del feeds["head_sink"]
    with pytest.raises(AssertionError):
        assert_attention(site, feeds, results, **attributes)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_sinks_of_minus_infinity_change_nothing(runtime: str, rng: Any) -> None:
    plain = Site()
    feeds = plain.feeds(rng, past_length=(4, 1), new=3)
    wanted = RUNTIMES[runtime](plain.model(), feeds)[0]
    feeds["attention_bias"] = np.zeros((1, 1, 1, 1), np.float32)
    feeds["head_sink"] = np.full(4, -np.inf, np.float32)
    model = Site(has_bias=True, has_sink=True).model()
    np.testing.assert_allclose(RUNTIMES[runtime](model, feeds)[0], wanted, atol=1e-6)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("sliding_window", [0, 3])
def test_padding_that_lengths_tell(runtime: str, sliding_window: int, rng: Any) -> None:
    site = Site(has_bias=True, has_padding=True)
    feeds = site.feeds(rng, past_length=(4, 1), new=3, capacity=9)
    feeds["attention_bias"] = bias_for(site, feeds, rng)
    feeds["left_padding"] = np.array([2, 3])
    results = RUNTIMES[runtime](site.model(sliding_window=sliding_window), feeds)
    assert_attention(site, feeds, results, sliding_window=sliding_window)
    assert not results[0][1, :, :2].any()  # positions 1 and 2 are padding
    # The negative twin: the comparison sees the padding.
    del feeds["left_padding"]
    with pytest.raises(AssertionError):
        assert_attention(site, feeds, results, sliding_window=sliding_window)


HALF_FLOAT32 = np.float32(-3.4028234663852886e38) / np.float32(2)
HALF_BFLOAT16 = np.float32(-3.3895313892515355e38) / 2


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "value", "hides"),
    [
        (ir.DataType.FLOAT, -np.inf, True),
        (ir.DataType.FLOAT, np.finfo(np.float32).min, True),
        (ir.DataType.FLOAT, HALF_FLOAT32, True),
        (ir.DataType.FLOAT, np.nextafter(HALF_FLOAT32, np.float32(0)), False),
        (ir.DataType.FLOAT, HALF_BFLOAT16, False),
        (ir.DataType.FLOAT, -65504.0, False),
        (ir.DataType.FLOAT16, -np.inf, True),
        (ir.DataType.FLOAT16, -65504.0, True),
        (ir.DataType.FLOAT16, -32752.0, True),
        (ir.DataType.FLOAT16, -32736.0, False),
        (ir.DataType.BFLOAT16, -np.inf, True),
        (ir.DataType.BFLOAT16, HALF_BFLOAT16 * 2, True),
        (ir.DataType.BFLOAT16, HALF_BFLOAT16, True),
        (ir.DataType.BFLOAT16, -1.0e38, False),
        (ir.DataType.BFLOAT16, -65504.0, False),
    ],
)
def test_which_bias_hides(*, dtype: ir.DataType, value: float, hides: bool, rng: Any) -> None:
    """Of a single key: hidden it gives zeros, and visible it has all the weight, however small."""
    site = Site(dtype=dtype, has_bias=True)
    feeds = site.feeds(rng)
    feeds["attention_bias"] = np.full((1, 1, 1, 1), value, np.float32)
    results = run_ort(site.model(), feeds)
    assert_attention(site, feeds, results)
    assert (not results[0].any()) == hides


@pytest.mark.parametrize("garbage", [0x00, 0xFF, 0x7E])
def test_what_is_hidden_contributes_nothing(garbage: int, rng: Any) -> None:
    """Rows beyond the tokens, of the future, out of the window and masked: NaN scales and all."""
    site = Site(has_bias=True)
    attributes = {"sliding_window": 4}
    feeds = site.feeds(rng, past_length=(6, 2), new=2, capacity=12)
    feeds["attention_bias"] = np.zeros((1, 1, 1, 8), np.float32)
    feeds["attention_bias"][..., 1] = -np.inf
    clean = run_ort(site.model(**attributes), feeds)
    spoilt = {name: feeds[name].copy() for name in ("past_key", "past_value")}
    for cache in spoilt.values():
        cache[0, :, [0, 1, 2, 8, 11]] = garbage
        cache[1, :, [1, 4, 9]] = garbage
    dirty = run_ort(site.model(**attributes), feeds | spoilt)
    np.testing.assert_array_equal(dirty[0], clean[0])
    assert np.isfinite(dirty[0]).all()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_future_is_not_read_even_if_it_is_garbage(runtime: str, rng: Any) -> None:
    site = Site()
    feeds = site.feeds(rng, new=4)
    output, *_ = RUNTIMES[runtime](site.model(), feeds)
    first = {
        name: array[:, :, :1] if name in ("query", "key", "value") else array
        for name, array in feeds.items()
    }
    alone, *_ = RUNTIMES[runtime](site.model(), first)
    np.testing.assert_allclose(output[:, :, :1], alone, atol=1e-6)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_query_that_sees_nothing_gives_exact_zeros(runtime: str, rng: Any) -> None:
    site = Site(has_bias=True)
    feeds = site.feeds(rng, past_length=(3,), new=3)
    bias = np.zeros((1, 1, 3, 6), np.float32)
    bias[0, 0, 1] = np.finfo(np.float32).min
    feeds["attention_bias"] = bias
    results = RUNTIMES[runtime](site.model(), feeds)
    assert not results[0][:, :, 1].any()
    assert results[0][:, :, [0, 2]].any(axis=-1).all()
    assert_attention(site, feeds, results)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_query_of_nan_spoils_its_own_row_only(runtime: str, rng: Any) -> None:
    site = Site(heads=4, kv_heads=2)
    feeds = site.feeds(rng, past_length=(3,), new=2)
    clean = RUNTIMES[runtime](site.model(), feeds)[0]
    feeds["query"] = feeds["query"].copy()
    feeds["query"][0, 1, 1, 0] = np.nan
    dirty = RUNTIMES[runtime](site.model(), feeds)[0]
    spoilt = np.zeros((1, 4, 2), bool)
    spoilt[0, 1, 1] = True
    assert np.isnan(dirty[spoilt]).all()
    np.testing.assert_array_equal(dirty[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("opset", [15, 17, 18, 20, 22, 24])
def test_the_model_around_it_may_have_any_opset_from_15(opset: int, rng: Any) -> None:
    """onnxruntime reads an inlined body with the opset of the graph that calls it."""
    site = Site(value=INT3, has_bias=True, opset=opset)
    feeds = site.feeds(rng, past_length=(4, 1), new=2)
    feeds["attention_bias"] = bias_for(site, feeds, rng, extra=2)
    results = run_ort(site.model(softcap=2.0, sliding_window=3), feeds)
    assert_attention(site, feeds, results, softcap=2.0, sliding_window=3)


@pytest.mark.parametrize("name", ["scale", "causal", "sliding_window", "softcap"])
def test_the_comparison_sees_every_attribute(name: str, rng: Any) -> None:
    """The negative twin: the oracle with one attribute changed does not agree."""
    attributes = {"scale": 0.2, "causal": 1, "sliding_window": 3, "softcap": 1.0}
    site = Site()
    feeds = site.feeds(rng, past_length=(4,), new=3)
    results = run_ort(site.model(**attributes), feeds)
    assert_attention(site, feeds, results, **attributes)
    with pytest.raises(AssertionError):
        assert_attention(site, feeds, results, **(attributes | {name: 0}))


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    new=st.integers(1, 4),
    room=st.integers(0, 6),
    group=st.integers(1, 3),
    causal=st.integers(0, 1),
    window=st.integers(0, 6),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
)
@settings(max_examples=40)
def test_any_shape(**choice: Any) -> None:
    attributes = {
        "causal": choice["causal"],
        "sliding_window": choice["window"],
        "softcap": choice["softcap"],
    }
    site = Site(heads=2 * choice["group"], kv_heads=2, head_size=16)
    rng = np.random.default_rng(choice["seed"])
    lengths = tuple(choice["lengths"])
    capacity = max(lengths) + choice["room"]
    feeds = site.feeds(rng, past_length=lengths, new=choice["new"], capacity=capacity)
    results = run_reference_evaluator(site.model(**attributes), feeds)
    assert_attention(site, feeds, results, **attributes)
