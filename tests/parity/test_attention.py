"""One layer, encoders and attention: its body and the best kernels against the oracle.

Every row of the table is a call of both operators: new rows go to their slots and nowhere else, and
attention over the caches that came of it is the oracle's. The other levels are held to the same
numbers in custom_ops/tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.covering import covering
from tests.ops.site import CODECS, FLOATS, INT3, Arrays, Site
from tests.parity.backends import BACKENDS, BEST, run
from tests.parity.compare import assert_same_rows, check_attention
from tests.parity.windows import behind_overlays, with_window
from tests.singleop import INT4, codec_of
from tq_onnx.codec.presets import NO_ROTATION, PRESETS, QR, Preset
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.spec import KINDS, Codec
from tq_onnx.codec.unrotated import FP8, Q8_0, UNIFORM
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    HEAD_SINK,
    LEFT_PADDING,
    OFFSETS,
    Features,
)

# The oracle computes in numpy, which warns where the operators mean to overflow.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

HALF, BFLOAT = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
TYPES = (ir.DataType.FLOAT, HALF, BFLOAT)
OPSETS = (15, 18, 21, 24)
LOWEST = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}

PLAIN = Site(head_size=64)
BIAS = replace(PLAIN, has_bias=True)
SINKS = replace(BIAS, has_sink=True)
PADDED = replace(PLAIN, has_padding=True)
RAW = replace(PLAIN, key=FLOATS, value=FLOATS)


@dataclass(frozen=True)
class Case:
    """One call of the operators."""

    site: Site = PLAIN
    past: tuple[int, ...] = (16,)
    new: int = 1
    batch: int = 0  # 0: as many as there are lengths
    capacity: int | None = None
    bias: str = ""
    sharpness: float = 1.0
    padding: tuple[int, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


def long(site: Site, **how: Any) -> Case:
    """Behind more keys than one task takes."""
    return Case(replace(site, head_size=128, heads=8), past=(1099,), **how)


def prompt(site: Site, **how: Any) -> Case:
    """Enough queries for tiles."""
    return Case(replace(site, head_size=128), new=128, past=(100,), **how)


def of_preset(preset: Preset, dtype: ir.DataType, head_size: int, heads: int) -> Site:
    """A layer as ``convert`` would make it."""
    bits = int(8 * dtype.itemsize)
    plain = preset.rotation == NO_ROTATION or head_size & (head_size - 1)
    return Site(
        preset.key.for_elements(bits),
        preset.value.for_elements(bits),
        heads=2 * heads,
        kv_heads=heads,
        head_size=head_size,
        dtype=dtype,
        rotation=QR if plain else preset.rotation,
        norm_correction=preset.norm_correction,
        offset_rows=5,
        spare_bytes=6,
    )


MIXED = [
    (Codec(PROD, 4), INT4, ((FLOATS, FLOATS),)),
    (FLOATS, FLOATS, ((Codec(PROD, 4), INT4),)),
    (Codec(FP8, 8), Codec(UNIFORM, 4), ((FLOATS, FLOATS),)),
    (Codec(Q8_0, 8), INT4, ()),
    (INT4, INT3, ((Codec(PROD, 3), Codec(U8, 4)), (FLOATS, FLOATS))),
    (Codec(U8, 4), codec_of(5), ((INT4, Codec(UNIFORM, 3)),)),
]
"""Codecs of keys and values, and of other layers of the same model."""

CASES: dict[str, Case] = {
    # Codecs, with all head sizes, element types and opsets of the model around them.
    **{
        str(codec): Case(
            Site(
                *(codec, codec),
                head_size=(64, 80, 96, 128, 256)[(2 * at + at % 2) % 5],
                dtype=TYPES[(at + at % 2) % 3],
                opset=OPSETS[(at + at % 2 * (2 + at // 4)) % 4],
            ),
            past=(4, 1),
            new=3,
            capacity=6,
        )
        for at, codec in enumerate(CODECS)
    },
    **{
        f"preset-{name}": Case(
            of_preset(preset, TYPES[at % 3], (64, 80, 128, 96, 256)[at % 5], 1 + at % 3),
            past=(9,),
            new=(1, 2, 17)[at % 3],
            capacity=(None, 32)[at % 2],
        )
        for at, (name, preset) in enumerate(PRESETS.items())
    },
    **{
        f"mixed-{at}": Case(
            Site(
                *(key, value, 6, 3, 64),
                has_bias=at % 3 > 0,
                has_sink=at % 3 > 1,
                offset_rows=(1, 5, 2)[at % 3],
                spare_bytes=3,
                others=others,
                opset=OPSETS[at % 4],
            ),
            past=(6, 2),
            new=3,
            capacity=11,
            bias="full" if at % 3 else "",
            attributes={"sliding_window": 6, "softcap": 1.5 if at % 2 else 0.0},
        )
        for at, (key, value, others) in enumerate(MIXED)
    },
    **{
        f"mixed-{dtype}": Case(
            Site(Codec(PROD, 4), codec_of(16), dtype=dtype, others=((codec_of(16), INT4),)),
            past=(4, 1),
            new=2,
        )
        for dtype in (HALF, BFLOAT)
    },
    **{
        f"{bits}-bits-T{new}": Case(
            replace(PLAIN, key=codec_of(bits), value=codec_of(1 + bits % 5)), past=(past,), new=new
        )
        for bits in KINDS[LLOYD_MAX].bits
        for new, past in ((1, 40), (17, 0))
    },
    "24": Case(replace(PLAIN, head_size=24, key=INT3), past=(20,), new=3),
    # Lengths, and slots behind the last token, which hold garbage.
    "T1-no-past": Case(past=(0,)),
    "T128": Case(past=(0,), new=128, batch=2),
    "T128-past": prompt(PLAIN),
    "S1100": long(PLAIN),
    "S700-T2": Case(replace(PLAIN, heads=10, key=INT3, value=INT3), past=(700,), new=2),
    "fixed": Case(past=(20,), capacity=64),
    "fixed-T17": Case(past=(20,), new=17, capacity=64),
    "partly-growing": Case(past=(6,), new=3, capacity=8),
    "one-length": Case(past=(3,), new=2, batch=3),
    "own-lengths": Case(past=(14, 0, 5), new=2),
    "own-lengths-fixed": Case(past=(40, 0, 5), new=17, capacity=64),
    **{
        f"group-{group}": Case(
            replace(PLAIN, head_size=128, heads=group, kv_heads=1), past=(19,), new=2
        )
        for group in (1, 4, 5, 8)
    },
    # Attributes.
    "not-causal": Case(past=(14, 0, 5), new=3, capacity=20, attributes={"causal": 0}),
    "window-1": Case(past=(8,), new=5, attributes={"sliding_window": 1}),
    "window-8": Case(past=(30,), new=17, attributes={"sliding_window": 8}),
    "window-beyond": Case(past=(30,), new=2, attributes={"sliding_window": 1000}),
    "window-not-causal": Case(past=(6,), new=9, attributes={"causal": 0, "sliding_window": 4}),
    "softcap": Case(past=(30,), new=3, sharpness=8, attributes={"softcap": 5.0}),
    "sharp": Case(past=(300,), new=4, sharpness=6),
    "scale": Case(past=(30,), attributes={"scale": 0.3}),
    "softcap-window-bias": Case(
        BIAS, past=(20,), new=17, bias="full", attributes={"softcap": 5.0, "sliding_window": 8}
    ),
    # Bias.
    **{
        f"bias-{kind}": Case(BIAS, past=(12,), batch=2, new=3, bias=kind)
        for kind in ("full", "heads", "row", "column", "hidden-rows", "all-hidden")
    },
    "bias-longer": Case(BIAS, past=(12, 4), new=3, bias="longer", capacity=30),
    "bias-not-causal": Case(BIAS, past=(3,), new=17, bias="full", attributes={"causal": 0}),
    "left-padding": Case(BIAS, past=(20,), batch=3, new=2, bias="left-padding"),
    "left-padding-prompt": Case(BIAS, past=(0,), batch=3, new=17, bias="left-padding"),
    # The same by their number: in every form of a task, also where some queries are padding.
    "padded-T1": Case(PADDED, past=(40,), batch=3, padding=(7, 0, 41)),
    "padded-T2": Case(replace(PADDED, heads=10), past=(20, 9), new=2, padding=(3,)),
    "padded-T17": Case(PADDED, past=(0,), batch=3, new=17, padding=(3, 16, 17)),
    "padded-T128-past": prompt(PADDED, batch=2, padding=(70, 130)),
    "padded-S1100": long(PADDED, batch=2, padding=(600, 3)),
    "padded-fixed": Case(PADDED, past=(20, 5), new=3, capacity=64, padding=(4, 60)),
    "padded-window": Case(
        PADDED, past=(9,), batch=2, new=17, padding=(12, 0), attributes={"sliding_window": 8}
    ),
    "padded-not-causal": Case(
        PADDED, past=(6,), batch=2, new=9, padding=(8, 0), attributes={"causal": 0}
    ),
    "padded-bias-sink-softcap": Case(
        replace(SINKS, has_padding=True),
        past=(30,),
        batch=2,
        new=5,
        bias="full",
        padding=(32, 3),
        attributes={"softcap": 5.0},
    ),
    "padded-raw": Case(replace(RAW, has_padding=True), past=(20, 3), new=17, padding=(25, 3)),
    # Sinks: in every form of a task, with every other attribute, and alone.
    "sink-T1": Case(replace(SINKS, heads=6), past=(40, 7), bias="row"),
    "sink-T17": Case(SINKS, past=(9,), new=17, bias="full"),
    "sink-T128-past": prompt(SINKS, bias="row"),
    "sink-S1100": long(SINKS, bias="zero"),
    "sink-S1100-window": long(SINKS, bias="zero", attributes={"sliding_window": 600}),
    "sink-window-softcap": Case(
        SINKS,
        past=(30,),
        new=17,
        bias="full",
        sharpness=8,
        attributes={"sliding_window": 8, "softcap": 5.0},
    ),
    "sink-not-causal": Case(SINKS, past=(6,), new=5, bias="full", attributes={"causal": 0}),
    "sink-hidden-rows": Case(SINKS, past=(6,), batch=2, new=5, bias="hidden-rows"),
    "sink-all-hidden": Case(SINKS, past=(6,), new=2, bias="all-hidden"),
    "sink-raw": Case(replace(RAW, has_bias=True, has_sink=True), past=(60,), new=2, bias="full"),
    # Raw: alone, beside codes, and in every form that a kernel tells apart.
    "raw-T1": Case(RAW, past=(40,)),
    "raw-24-T17": Case(replace(RAW, head_size=24), past=(9,), new=17),
    "raw-80-group": Case(replace(RAW, head_size=80, heads=10), past=(150,), new=2),
    "raw-512": Case(replace(RAW, head_size=512), past=(20,), new=3, attributes={"scale": 0.04}),
    "raw-T128-past": prompt(RAW),
    "raw-S1100": long(RAW),
    "raw-keys": Case(replace(RAW, value=INT4), past=(70,), new=3),
    "raw-values": Case(replace(RAW, key=INT3), past=(70,), new=3),
    "raw-own-lengths-fixed": Case(RAW, past=(40, 0, 5), new=17, capacity=64),
    "raw-window-softcap": Case(
        RAW, past=(30,), new=17, sharpness=8, attributes={"sliding_window": 8, "softcap": 5.0}
    ),
    "raw-not-causal": Case(RAW, past=(8,), new=17, attributes={"causal": 0}),
    "raw-left-padding": Case(
        replace(RAW, has_bias=True), past=(20,), batch=3, new=17, bias="left-padding"
    ),
    **{
        f"raw-{key}-{value}-{dtype}": Case(
            Site(codec_of(key), codec_of(value), head_size=128, dtype=dtype),
            past=(past,),
            new=new,
            capacity=90,
        )
        for dtype, new, past in ((HALF, 1, 60), (BFLOAT, 17, 5))
        for key, value in ((16, 16), (16, 2), (4, 16))
    },
    # Element types, with all that has numbers of the type.
    **{
        f"{dtype}-T{new}-{bias}": Case(
            replace(SINKS, head_size=128, dtype=dtype), past=(past,), batch=2, new=new, bias=bias
        )
        for dtype in (HALF, BFLOAT)
        for new, past, bias in (
            *((1, 60, "zero"), (17, 5, "full")),
            *((2, 12, "left-padding"), (2, 9, "hidden-rows")),
        )
    },
}


def feeds_of(case: Case) -> Arrays:
    """The inputs of a case; a slot that no query may see holds garbage, whose fields are NaN."""
    site, rng = case.site, np.random.default_rng(len(repr(case)))
    batch = case.batch or len(case.past)
    feeds = site.feeds(
        rng, past_length=case.past, new=case.new, capacity=case.capacity, batch=batch
    )
    feeds["query"] = site.rounded(feeds["query"] * case.sharpness)
    lengths = np.broadcast_to(case.past, batch)
    hidden = np.zeros(batch, int)
    if case.bias:
        feeds["attention_bias"] = bias_of(case, rng, batch)
    if case.bias == "left-padding":
        hidden = 3 * np.arange(batch) + 1
    if case.padding:
        feeds["left_padding"] = np.array(case.padding)
        hidden = np.broadcast_to(case.padding, batch)
    for side in ("past_key", "past_value"):
        for rows, length, first in zip(feeds[side], lengths, hidden, strict=True):
            rows[:, length:] = 0xFF
            rows[:, :first] = 0xFF
    if site.has_sink:
        sinks = rng.uniform(-2, 4, site.heads)
        sinks[-1] = -np.inf
        feeds["head_sink"] = site.rounded(sinks)
    return feeds


def bias_of(case: Case, rng: np.random.Generator, batch: int) -> Any:
    """As exporters write it: lowest values, or minus infinity, hide."""
    heads, total = case.site.heads, max(case.past) + case.new
    shape = {
        "full": (batch, heads, case.new, total),
        "heads": (1, heads, 1, total),
        "row": (1, 1, 1, total),
        "zero": (1, 1, 1, 1),
        "column": (batch, 1, case.new, 1),
        "longer": (batch, 1, case.new, total + 7),
    }.get(case.bias, (batch, 1, case.new, total))
    values = rng.standard_normal(shape)
    lowest = LOWEST.get(case.site.element, -3.4028234663852886e38)
    if case.bias in ("zero", "left-padding"):
        values[:] = 0
    if case.bias == "longer":
        values[..., total:] = np.nan
    elif case.bias == "left-padding":
        for b in range(batch):
            values[b, ..., : 3 * b + 1] = -np.inf if b == 1 else lowest
    elif case.bias == "hidden-rows":
        values[:, :, 1] = lowest
        values[0, :, 0, 2] = -np.inf
    elif case.bias == "all-hidden":
        values[:] = -np.inf
    return case.site.rounded(values)


def solved(backend: str, case: Case, feeds: Arrays) -> list[Any]:
    return run(backend, case.site.model(**case.attributes).SerializeToString(), feeds)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_oracle(name: str, backend: str) -> None:
    case = CASES[name]
    feeds = feeds_of(case)
    before = {name: array.tobytes() for name, array in feeds.items()}
    output, *presents = solved(backend, case, feeds)
    assert before == {name: array.tobytes() for name, array in feeds.items()}
    assert_same_rows(case.site, feeds, presents)
    expected = case.site.attended(feeds, *presents, **case.attributes)
    assert np.isfinite(expected).all()
    check_attention(case.site.element, output, expected)


FEATURES = (ATTENTION_BIAS, HEAD_SINK, OFFSETS, EXACT_WINDOW, LEFT_PADDING)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", covering(FEATURES), ids=lambda row: f"{len(row)}-features")
def test_every_pair_of_features(backend: str, features: Features, rng: Any) -> None:
    site = Site(
        head_size=16,
        has_bias=ATTENTION_BIAS in features,
        has_sink=HEAD_SINK in features,
        has_padding=LEFT_PADDING in features,
        offset_rows=3 if OFFSETS in features else 0,
    )
    case = Case(site, (6, 2), 3, capacity=11, bias="full" if site.has_bias else "")
    feeds = feeds_of(case)
    if site.has_padding:
        feeds["left_padding"] = np.array([2, 3])
    if EXACT_WINDOW in features:
        site = with_window(site, 4, 2)
        feeds |= behind_overlays(site, feeds, rng)
    output, *presents = run(backend, site.model().SerializeToString(), feeds)
    if site.window:
        overlay = slice(0, site.window.overlay_rows)
        for present, expected in zip(presents, site.expected_presents(feeds), strict=True):
            np.testing.assert_array_equal(present[:, :, overlay], expected[:, :, overlay])
    else:
        assert_same_rows(site, feeds, presents)
    check_attention(site.element, output, site.attended(feeds, *presents))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["T128-past", "padded-T17", "sink-T17", "softcap-window-bias"])
def test_a_bad_query_spoils_only_itself(name: str, backend: str) -> None:
    case = CASES[name]
    feeds = feeds_of(case)
    feeds["query"][0, 1, 4, 9] = np.nan
    output, *presents = solved(backend, case, feeds)
    expected = case.site.attended(feeds, *presents, **case.attributes)
    assert np.isnan(expected[0, 1, 4]).all()
    assert np.isfinite(np.delete(expected, 4, axis=2)).all()
    check_attention("float32", output, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("site", [PLAIN, RAW], ids=["codes", "raw"])
def test_a_bad_row_spoils_only_who_sees_it(site: Site, backend: str) -> None:
    case = Case(site, past=(50,), new=3)
    feeds = feeds_of(case)
    clean, *_ = solved(backend, case, feeds)
    feeds["past_value"][0, 0, 49] = 0xFF
    spoilt, *_ = solved(backend, case, feeds)
    assert np.isnan(spoilt[:, :2]).all()
    np.testing.assert_array_equal(spoilt[:, 2:], clean[:, 2:])
    if site is PLAIN:
        return
    feeds = feeds_of(case)
    feeds["value"][0, 0, 1, 7] = np.inf  # of raw alone, and of the second token
    spoilt, *_ = solved(backend, case, feeds)
    np.testing.assert_array_equal(spoilt[:, :, 0], clean[:, :, 0])
    assert not np.isfinite(spoilt[:, :2, 1:, 7]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "without"),
    [
        *(("sink-T17", "head_sink"), ("sink-S1100", "head_sink"), ("padded-T17", "left_padding")),
        *(("mixed-5", "offset_rows"), ("bias-full", "attention_bias")),
        *((name, name) for name in ("scale", "softcap")),
        *(("window-8", "sliding_window"), ("not-causal", "causal")),
    ],
)
def test_the_comparison_sees(name: str, without: str, backend: str) -> None:
    """The negative twin: an oracle that lacks something says something else."""
    case = CASES[name]
    feeds = feeds_of(case)
    output, *presents = solved(backend, case, feeds)
    site = replace(case.site, offset_rows=0) if without == "offset_rows" else case.site
    rest = {key: array for key, array in feeds.items() if key != without}
    attributes = {key: value for key, value in case.attributes.items() if key != without}
    with np.errstate(all="ignore"), pytest.raises(AssertionError):
        check_attention(site.element, output, site.attended(rest, *presents, **attributes))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "value", "hides"),
    [
        (ir.DataType.FLOAT, -np.inf, True),
        (ir.DataType.FLOAT, HALF_FLOAT32 := np.float32(-3.4028234663852886e38) / 2, True),
        (ir.DataType.FLOAT, np.nextafter(HALF_FLOAT32, np.float32(0)), False),
        (ir.DataType.FLOAT, HALF_BFLOAT16 := np.float32(LOWEST["bfloat16"]) / 2, False),
        (ir.DataType.FLOAT, -65504.0, False),
        (HALF, -np.inf, True),
        (HALF, -65504.0, True),
        (HALF, -32752.0, True),
        (HALF, -32736.0, False),
        (BFLOAT, -np.inf, True),
        (BFLOAT, HALF_BFLOAT16, True),
        (BFLOAT, -1.0e38, False),
        (BFLOAT, -65504.0, False),
    ],
)
def test_which_bias_hides(
    *, backend: str, dtype: ir.DataType, value: float, hides: bool, rng: Any
) -> None:
    """Of a single key: hidden it gives zeros, and visible it has all the weight, however small."""
    site = replace(BIAS, dtype=dtype)
    feeds = site.feeds(rng) | {"attention_bias": np.full((1, 1, 1, 1), value, np.float32)}
    output, *presents = run(backend, site.model().SerializeToString(), feeds)
    check_attention(site.element, output, site.attended(feeds, *presents))
    assert (not output.any()) == hides


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", [*CODECS, FLOATS], ids=str)
def test_what_is_hidden_contributes_nothing(codec: Codec, backend: str, rng: Any) -> None:
    """Rows beyond the tokens, out of the window and masked: fields of NaN and infinity and all."""
    site = Site(codec, codec, has_bias=True, head_size=40)
    model = site.model(sliding_window=4).SerializeToString()
    feeds = site.feeds(rng, past_length=(6, 2), new=2, capacity=12)
    feeds["attention_bias"] = np.zeros((1, 1, 1, 8), np.float32)
    feeds["attention_bias"][..., 1] = -np.inf
    clean = run(backend, model, feeds)[0]
    for garbage in (0x00, 0xFF, 0x7C, 0x7E):
        spoilt = {name: feeds[name].copy() for name in ("past_key", "past_value")}
        for cache in spoilt.values():
            cache[0, :, [0, 1, 2, 8, 11]] = garbage
            cache[1, :, [1, 4, 9]] = garbage
        dirty = run(backend, model, feeds | spoilt)[0]
        np.testing.assert_array_equal(dirty, clean)
        assert np.isfinite(dirty).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_any_codes_are_read_alike(codec: Codec, rng: Any) -> None:
    """Codes that no encoder writes (NaN of E4M3, -128, upper bits of u8) mean the same."""
    site = Site(codec, codec, head_size=80)
    feeds = site.feeds(rng, past_length=(38,), new=2)
    codes = site.width(codec) - sum(f.count * f.size for f in site.layout(codec).fields)
    for name in ("past_key", "past_value"):
        drawn = rng.integers(0, 256, (*feeds[name].shape[:3], codes), np.uint8)
        if codec.kind == FP8:
            # Not the large ones, whose scores would leave one key alone.
            drawn = np.where(drawn & 0x7F < 0x48, drawn, 0xFF - (drawn & 0x80)).astype(np.uint8)
        feeds[name][..., :codes] = drawn
    for backend in BACKENDS:
        output, *presents = run(backend, site.model().SerializeToString(), feeds)
        expected = site.attended(feeds, *presents)
        assert np.isfinite(expected).all()
        check_attention("float32", output, expected)


def test_same_result_every_time() -> None:
    case = CASES["S1100"]
    feeds = feeds_of(case)
    first, *_ = (solved(BEST, case, feeds)[0] for _ in range(2))
    for _ in range(4):
        assert np.array_equal(solved(BEST, case, feeds)[0], first)
