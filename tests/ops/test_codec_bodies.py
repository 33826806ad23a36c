"""Every codec's bodies against the oracle: rows, attention, what is hidden, what is not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from tests.covering import covering
from tests.ops.rows import assert_same_rows
from tests.ops.site import CODECS, FLOATS, Site
from tests.ops.test_attention_body import assert_attention, bias_for
from tests.ops.windows import behind_overlays, with_window
from tests.singleop import INT4, RUNTIMES, run_ort, run_reference_evaluator
from tq_onnx.codec import fp8
from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, RAW, UNIFORM
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    HEAD_SINK,
    LEFT_PADDING,
    OFFSETS,
    Features,
)
from tq_onnx.ops.operators import Attention

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
OPSETS = (15, 18, 21, 24)
HALVES = Codec(RAW, 16)

# Every codec; all head sizes, element types and opsets with some codec.
CASES = [
    pytest.param(
        codec,
        HEAD_SIZES[(2 * place + turn) % 5],
        DTYPES[(place + turn) % 3],
        OPSETS[(place + 2 * turn + turn * (place // 4)) % 4],
        id=str(codec),
    )
    for place, codec in enumerate(CODECS)
    for turn in (place % 2,)
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("codec", "head_size", "dtype", "opset"), CASES)
def test_rows_and_attention(
    *, runtime: str, codec: Codec, head_size: int, dtype: ir.DataType, opset: int, rng: Any
) -> None:
    site = Site(codec, codec, head_size=head_size, dtype=dtype, opset=opset)
    feeds = site.feeds(rng, past_length=(4, 1), new=3, capacity=6)
    results = RUNTIMES[runtime](site.model(), feeds)
    assert_same_rows(site, feeds, results[1:], site.expected(feeds)[1:])
    assert_attention(site, feeds, results)


# Codecs of keys and values, and of other layers of the same model.
MIXED = [
    (Codec(PROD, 4), INT4, ((FLOATS, FLOATS),)),
    (FLOATS, FLOATS, ((Codec(PROD, 4), INT4),)),
    (Codec(FP8, 8), Codec(UNIFORM, 4), ((FLOATS, FLOATS),)),
    (Codec(Q8_0, 8), INT4, ()),
    (INT4, Codec(LLOYD_MAX, 3), ((Codec(PROD, 3), Codec(U8, 4)), (FLOATS, FLOATS))),
    (Codec(U8, 4), Codec(LLOYD_MAX, 5), ((INT4, Codec(UNIFORM, 3)),)),
]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("place", range(len(MIXED)))
def test_mixed_models_with_everything(runtime: str, place: int, rng: Any) -> None:
    """Bodies that choose, offsets, masks, sinks, caches wider than their rows."""
    key, value, others = MIXED[place]
    attributes = {"sliding_window": 6, "softcap": 1.5 if place % 2 else 0.0}
    site = Site(
        *(key, value, 6, 3, 64),
        has_bias=place % 3 > 0,
        has_sink=place % 3 > 1,
        offset_rows=(1, 5, 0)[place % 3] or 2,
        spare_bytes=3,
        others=others,
        opset=OPSETS[place % 4],
    )
    feeds = site.feeds(rng, past_length=(6, 2), new=3, capacity=11)
    if site.has_bias:
        feeds["attention_bias"] = bias_for(site, feeds, rng)
    if site.has_sink:
        feeds["head_sink"] = rng.standard_normal(6).astype(np.float32)
    results = RUNTIMES[runtime](site.model(**attributes), feeds)
    assert_same_rows(site, feeds, results[1:], site.expected(feeds, **attributes)[1:])
    assert_attention(site, feeds, results, **attributes)


FEATURES = (ATTENTION_BIAS, HEAD_SINK, OFFSETS, EXACT_WINDOW, LEFT_PADDING)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("features", covering(FEATURES), ids=lambda row: f"{len(row)}-features")
def test_every_pair_of_features(runtime: str, features: Features, rng: Any) -> None:
    site = Site(
        head_size=16,
        has_bias=ATTENTION_BIAS in features,
        has_sink=HEAD_SINK in features,
        has_padding=LEFT_PADDING in features,
        offset_rows=3 if OFFSETS in features else 0,
    )
    if EXACT_WINDOW in features:
        site = with_window(site, 4, 2)
    feeds = site.feeds(rng, past_length=(6, 2), new=3, capacity=11)
    if site.window:
        feeds |= behind_overlays(site, feeds, rng)
    if site.has_bias:
        feeds["attention_bias"] = bias_for(site, feeds, rng)
    if site.has_sink:
        feeds["head_sink"] = rng.standard_normal(site.heads).astype(np.float32)
    if site.has_padding:
        feeds["left_padding"] = np.array([2, 3])
    results = RUNTIMES[runtime](site.model(), feeds)
    presents = site.expected_presents(feeds)
    if site.window:
        overlay = slice(0, site.window.overlay_rows)
        for present, expected in zip(results[1:], presents, strict=True):
            np.testing.assert_array_equal(present[:, :, overlay], expected[:, :, overlay])
    else:
        assert_same_rows(site, feeds, results[1:], presents)
    assert_attention(site, feeds, results)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_two_layers_of_other_codecs_in_one_model(level: str, rng: Any) -> None:
    """No level of optimisation makes a branch lose what it captures, or its constants."""
    inner = (Codec(PROD, 4), Codec(UNIFORM, 4))
    sites = (
        Site(FLOATS, FLOATS, others=(inner,), offset_rows=2),
        Site(*inner, others=(inner, (FLOATS, FLOATS)), offset_rows=2),
    )
    models = [site.model() for site in sites]
    fed = [site.feeds(rng, past_length=(4, 1), new=2) for site in sites]
    model = models[0]
    second = onnx.compose.add_prefix(models[1], "b_")
    for node in second.graph.node:
        node.op_type = node.op_type.removeprefix("b_")
    for name in ("node", "initializer", "input", "output", "value_info"):
        getattr(model.graph, name).extend(getattr(second.graph, name))
    feeds = fed[0] | {f"b_{name}": array for name, array in fed[1].items()}
    results = run_ort(model, feeds, getattr(onnxruntime.GraphOptimizationLevel, level))
    for site, feed, own in zip(sites, fed, (results[:3], results[3:]), strict=True):
        assert_same_rows(site, feed, own[1:], site.expected(feed)[1:])
        assert_attention(site, feed, own)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16], ids=str)
def test_mixed_models_of_16_bits(dtype: ir.DataType, rng: Any) -> None:
    site = Site(Codec(PROD, 4), INT4, dtype=dtype, others=((HALVES, HALVES),), offset_rows=5)
    for each in (site, replace(site, key=HALVES, value=HALVES, others=((site.key, site.value),))):
        feeds = each.feeds(rng, past_length=(4, 1), new=2)
        results = run_ort(each.model(), feeds)
        assert_same_rows(each, feeds, results[1:], each.expected(feeds)[1:])
        assert_attention(each, feeds, results)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("rows", [1, 5])
def test_offsets(runtime: str, rows: int, rng: Any) -> None:
    """Slots before, at and behind the last row of the offsets, in sequences of their own length."""
    site = Site(offset_rows=rows, heads=6)
    feeds = site.feeds(rng, past_length=(6, 0, 3), new=4, capacity=12)
    attributes = {"softcap": 2.0, "sliding_window": 5}
    results = RUNTIMES[runtime](site.model(**attributes), feeds)
    assert_same_rows(site, feeds, results[1:], site.expected(feeds, **attributes)[1:])
    assert_attention(site, feeds, results, **attributes)
    # The negative twin: the comparison sees the offsets.
    with pytest.raises(AssertionError):
        assert_attention(replace(site, offset_rows=0), feeds, results, **attributes)


@pytest.mark.parametrize("has_sink", [False, True])
def test_an_input_that_is_left_out_in_the_middle(has_sink: bool, rng: Any) -> None:
    site = Site(offset_rows=2, has_sink=has_sink)
    model = site.model()
    (node,) = [node for node in model.graph.node if node.op_type == Attention.name]
    empty = [
        node.input[each.slot] == "" for each in (Attention.attention_bias, Attention.head_sink)
    ]
    assert empty == [True, not has_sink]
    feeds = site.feeds(rng, past_length=(2,), new=2)
    if has_sink:
        feeds["head_sink"] = rng.standard_normal(4).astype(np.float32)
    for run in RUNTIMES.values():
        assert_attention(site, feeds, run(model, feeds))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_hidden_contributes_nothing(codec: Codec, rng: Any) -> None:
    """Rows beyond the tokens, out of the window and masked: fields of NaN and infinity and all."""
    run = run_ort if codec.kind in (UNIFORM, U8) else run_reference_evaluator
    site = Site(codec, codec, has_bias=True, head_size=40)
    attributes = {"sliding_window": 4}
    feeds = site.feeds(rng, past_length=(6, 2), new=2, capacity=12)
    feeds["attention_bias"] = np.zeros((1, 1, 1, 8), np.float32)
    feeds["attention_bias"][..., 1] = -np.inf
    clean = run(site.model(**attributes), feeds)
    model = site.model(**attributes)
    for garbage in (0xFF, 0x7C, 0x7F):
        spoilt = {name: feeds[name].copy() for name in ("past_key", "past_value")}
        for cache in spoilt.values():
            cache[0, :, [0, 1, 2, 8, 11]] = garbage
            cache[1, :, [1, 4, 9]] = garbage
        dirty = run(model, feeds | spoilt)
        np.testing.assert_array_equal(dirty[0], clean[0])
        assert np.isfinite(dirty[0]).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_row_that_is_not_finite_is_the_zero_vector(codec: Codec, rng: Any) -> None:
    site = Site(codec, codec)
    feeds = site.feeds(rng, new=4)
    spoilt, zeroed = feeds["key"].copy(), feeds["key"].copy()
    bad = [np.nan, np.inf, -np.inf] + ([2e19] if codec.is_rotated else [])
    for token, number in enumerate(bad):
        spoilt[0, 1, token, 5] = number
        zeroed[0, 1, token] = 0
    feeds["key"] = spoilt
    feeds["value"] = zeroed
    _, keys, values = run_ort(site.model(), feeds)
    np.testing.assert_array_equal(keys[0, 1, : len(bad)], values[0, 1, : len(bad)])
    layout = row_layout(codec, site.head_size)
    assert not keys[0, 1, : len(bad), layout.code_bytes :].any()
    codes = slice(layout.code_bytes)
    np.testing.assert_array_equal(keys[..., codes], site.expected(feeds)[1][..., codes])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_spare_bytes_change_nothing(runtime: str, rng: Any) -> None:
    """They are zero in new rows and behind the cache, kept in old ones, and not read."""
    plain = Site(Codec(Q8_0, 8), Codec(PROD, 3), head_size=40)
    wide = replace(plain, spare_bytes=7)
    feeds = plain.feeds(rng, past_length=(4, 2), new=3, capacity=5)
    wanted = RUNTIMES[runtime](plain.model(), feeds)
    for name in ("past_key", "past_value"):
        feeds[name] = wide.widened(feeds[name])
        feeds[name][..., -7:] = 0xFF
    results = RUNTIMES[runtime](wide.model(), feeds)
    np.testing.assert_array_equal(results[0], wanted[0])
    for got, other in zip(results[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(got[..., :-7], other)
        spare = got[..., -7:]
        assert (spare[0, :, :4] == 0xFF).all()
        assert not spare[0, :, 4:].any()
        assert not spare[1, :, 2:5].any()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_e4m3_is_written_and_read(runtime: str, rng: Any) -> None:
    """All codes, midpoints between neighbours and the floats beside them, and what saturates."""
    codec = Codec(FP8, 8)
    site = Site(codec, codec, heads=1, kv_heads=1, head_size=64)
    positive = fp8.VALUES[:0x7F]
    middles = (positive[:-1] + positive[1:]) / 2
    edges = np.array([448, 449, 464, 480, 1e4, 3e38, 1e-9, 1e-40], np.float32)
    half = np.concatenate(
        [positive, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), edges]
    )
    values = np.resize(np.concatenate([half, -half]), (1, 1, 17, 64)).astype(np.float32)
    feeds = site.feeds(rng, new=17) | {"key": values}
    _, keys, _ = RUNTIMES[runtime](site.model(), feeds)
    np.testing.assert_array_equal(keys, fp8.encode(values))
    # Read back: one key, whose value the output is. NaN, which nobody writes, is 0.
    feeds = site.feeds(rng, past_length=(1,) * 4, new=1, capacity=2)
    feeds["past_value"][:, 0, 0] = np.arange(256).reshape(4, 64)
    feeds["value"][:] = 0
    feeds["past_key"][:], feeds["key"][:] = 0, 0
    output, *_ = RUNTIMES[runtime](site.model(), feeds)
    np.testing.assert_array_equal(2 * output.ravel(), fp8.VALUES)


@pytest.mark.parametrize("codec", [Codec(UNIFORM, 4), Codec(UNIFORM, 3), Codec(Q8_0, 8)], ids=str)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rows_at_the_edges_of_float32(runtime: str, codec: Codec, rng: Any) -> None:
    """Constant rows, zeros, one coordinate alone, a range that float32 does not have."""
    site = Site(codec, codec, head_size=40)
    feeds = site.feeds(rng, new=6)
    key = feeds["key"]
    key[0, 0, 0] = 2.5
    key[0, 0, 1] = 0
    key[0, 0, 2] = 0
    key[0, 0, 2, 39] = -7
    key[0, 0, 3] = np.linspace(-3e38, 3e38, 40)
    key[0, 0, 4] *= 1e5
    key[0, 0, 5] *= 1e-12
    results = RUNTIMES[runtime](site.model(), feeds)
    assert_same_rows(site, feeds, results[1:], site.expected(feeds)[1:])
    stored = results[1][0, 0, 3, row_layout(codec, 40).field("scale").offset :][:2]
    assert np.ascontiguousarray(stored).view("<f2")[0] == MAX_HALF
