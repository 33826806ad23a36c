"""Bad inputs and attributes of the contiguous operators."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.native.badcalls import (
    HIGHEST,
    LOWEST,
    Bad,
    assert_not_made,
    assert_refused,
    bad,
    each,
    numbers,
    rows,
    zeros,
)
from tests.native.conftest import RAW32, Feeds
from tests.native.single_node import (
    ATTENTION_DEFAULTS,
    ENCODE_DEFAULTS,
    Array,
    attention_model,
    encode_model,
    make_session,
    run,
)
from tests.operatormodels import single_operator
from tests.ops.site import FLOATS, Site
from tests.parity.backends import BEST
from tests.parity.backends import run as run_on
from tests.parity.windows import behind_overlays, with_window
from tests.singleop import optional_inputs, with_features
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import KINDS, Codec
from tq_onnx.codec.window import Window
from tq_onnx.ops.domain import ATTENTION, ENCODE
from tq_onnx.ops.features import LEFT_PADDING, OFFSETS, ROTARY_OFFSETS
from tq_onnx.ops.operator import Operator
from tq_onnx.ops.operators import Attention, Encode

ENCODE_CASES = [
    bad("vectors has shape [2, 3, 16], expected 4", vectors=zeros(2, 3, 16)),
    bad("head size 12, expected a multiple of 8", vectors=zeros(2, 2, 3, 12)),
    bad("head size 0, expected a multiple of 8", vectors=zeros(2, 2, 3, 0)),
    bad("head size 520, expected a multiple of 8", vectors=zeros(1, 1, 1, 520)),
    bad("past has shape [2, 2, 10], expected 4", past=rows(2, 2, 10)),
    bad(
        "past has row width 9, but lloyd_max 4 rows of head size 16 have 10 bytes",
        past=rows(2, 2, 8, 9),
    ),
    bad(
        "lloyd_max 4 rows of head size 16 have 10 bytes and may be padded to 65536",
        past=rows(2, 2, 8, 70000),
    ),
    bad("past has row width 0", past=rows(2, 2, 8, 0)),
    bad("[3, 2, 8, 10], expected [2, 2, 8, 10]", past=rows(3, 2, 8, 10)),
    bad("[2, 1, 8, 10], expected [2, 2, 8, 10]", past=rows(2, 1, 8, 10)),
    bad("rotation has shape [16, 8], expected [16, 16]", rotation=zeros(16, 8)),
    bad("rotation has shape [256], expected [16, 16]", rotation=zeros(256)),
    bad("centroids has shape [8], expected [16]", centroids=zeros(8)),
    bad("boundaries has shape [16], expected [15]", boundaries=zeros(16)),
    bad("past_length has shape [], expected 1 dimension", past_length=np.array(4, np.int64)),
    bad("past_length has 3 elements, expected 1 or 2", past_length=numbers(1, 2, 3)),
    bad("past_length has 0 elements, expected 1 or 2", past_length=numbers()),
    bad("past_length[1] is -1, expected 0 or more", past_length=numbers(1, -1)),
    bad("expected 0 or more", past_length=numbers(LOWEST)),
    bad("past_length[0] is 9, but past has only 8 slots", past_length=numbers(9)),
    bad(f"is {HIGHEST}, but past has only 8 slots", past_length=numbers(HIGHEST)),
]

ATTENTION_CASES = [
    bad("query has shape [4, 3, 16], expected 4", query=zeros(4, 3, 16)),
    bad("query has head size 20", query=zeros(2, 4, 3, 20)),
    bad(
        "query has 3 heads, expected a multiple of the 2 heads of key_cache",
        query=zeros(2, 3, 3, 16),
    ),
    bad("multiple of the 0 heads", key_cache=rows(2, 0, 8, 10), value_cache=rows(2, 0, 8, 10)),
    bad(
        "key_cache has row width 8, but lloyd_max 4 rows of head size 16 have 10 bytes",
        key_cache=rows(2, 2, 8, 8),
    ),
    bad("value_cache has row width 6", value_cache=rows(2, 2, 8, 6)),
    bad(
        "value_cache has shape [2, 2, 7, 10], expected [2, 2, 8, 10]", value_cache=rows(2, 2, 7, 10)
    ),
    bad("expected [2, 2, 8, 10]", value_cache=rows(2, 1, 8, 10)),
    bad(
        "key_cache has shape [1, 2, 8, 10], expected [2, 2, 8, 10]",
        key_cache=rows(1, 2, 8, 10),
        value_cache=rows(1, 2, 8, 10),
    ),
    bad("expected 4 dimensions", key_cache=rows(1, 2, 2, 8, 10)),
    bad("key_rotation has shape [15, 16]", key_rotation=zeros(15, 16)),
    bad("value_rotation has shape [16]", value_rotation=zeros(16)),
    bad("key_centroids has shape [15], expected [16]", key_centroids=zeros(15)),
    bad("value_centroids has shape [4, 4]", value_centroids=zeros(4, 4)),
    bad(
        "past_length 6 plus 3 new tokens is more than the 8 slots of key_cache",
        past_length=numbers(6),
    ),
    bad("past_length[0] is -1", past_length=numbers(-1, 0)),
    bad(f"past_length[1] is {HIGHEST}, but", past_length=numbers(0, HIGHEST)),
    bad("attention_bias has shape [1, 3, 7]", attention_bias=zeros(1, 3, 7)),
    bad("broadcasts to [2, 4, 3, 7]", attention_bias=zeros(3, 1, 3, 7)),
    bad("broadcasts to [2, 4, 3, 7]", attention_bias=zeros(1, 2, 3, 7)),
    bad("broadcasts to [2, 4, 3, 7]", attention_bias=zeros(1, 1, 2, 7)),
    bad("broadcasts to [2, 4, 3, 7]", attention_bias=zeros(1, 1, 3, 6)),
    bad("broadcasts to [2, 4, 3, 7]", attention_bias=zeros(1, 1, 3, 0)),
    bad("head_sink has shape [2], expected [4]", head_sink=zeros(2)),
    bad("head_sink has shape [1], expected [4]", head_sink=zeros(1)),
    bad("head_sink has shape [5], expected [4]", head_sink=zeros(5)),
    bad("head_sink has shape [0], expected [4]", head_sink=zeros(0)),
    bad("head_sink has shape [], expected [4]", head_sink=zeros()),
    bad("head_sink has shape [1, 4], expected [4]", head_sink=zeros(1, 4)),
]


@each(ENCODE_CASES)
def test_encode_refuses(case: Bad, encode_feeds: Callable[..., Feeds]) -> None:
    assert_refused(encode_model(), encode_feeds(), case, ENCODE)


@each(ATTENTION_CASES)
def test_attention_refuses(case: Bad, attention_feeds: Callable[..., Feeds]) -> None:
    model = attention_model(bias=True, sink=True)
    assert_refused(model, attention_feeds(bias=True, sink=True), case, ATTENTION)


OFFSET_SHAPES = [
    bad("offset has shape [2, 16], expected 3 dimensions", offset=zeros(2, 16)),
    bad("offset has shape [1, 1, 16], expected [1, 2, 16]", offset=zeros(1, 1, 16)),
    bad("offset has shape [1, 2, 8], expected [1, 2, 16]", offset=zeros(1, 2, 8)),
    bad("offset has shape [0, 2, 16], expected 1 to 64 rows", offset=zeros(0, 2, 16)),
    bad("offset has shape [65, 2, 16], expected 1 to 64 rows", offset=zeros(65, 2, 16)),
]


@each(OFFSET_SHAPES)
def test_offsets_of_another_shape_are_refused(
    case: Bad, encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    assert_refused(encode_model(offset=True), encode_feeds(offsets=64), case, ENCODE)
    model, good = attention_model(offset=True), attention_feeds(offsets=64)
    both = {f"{side}_offset": case.changes["offset"] for side in ("key", "value")}
    assert_refused(model, good, Bad(f"key_{case.message}", both), ATTENTION)
    alone = {"value_offset": both["value_offset"]}
    assert_refused(model, good, Bad("value_offset has shape", alone), ATTENTION)


def test_offsets_come_together(attention_feeds: Callable[..., Feeds]) -> None:
    feeds = attention_feeds(offsets=3)
    with pytest.raises(Exception, match=re.escape("value_offset has shape [1, 2, 16], expected")):
        run(
            make_session(attention_model(offset=True)),
            feeds | {"value_offset": feeds["value_offset"][:1]},
        )
    for missing in ("key_offset", "value_offset"):
        rest = {name: array for name, array in feeds.items() if name != missing}
        with pytest.raises(Exception, match=f"{ATTENTION}: {missing} is missing, expected"):
            run(make_session(attention_model(offset=True, without=missing)), rest)


def test_the_rotation_of_prod_is_twice_as_wide(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    prod = Codec(PROD, 4)
    feeds = encode_feeds(codec=prod)
    session = make_session(encode_model(codec="prod"))
    with pytest.raises(Exception, match=re.escape("has shape [16, 16], expected [16, 32]")):
        run(session, feeds | {"rotation": feeds["rotation"][:, :16]})
    run(session, feeds)
    # Its codebook has one bit less.
    with pytest.raises(Exception, match=re.escape("centroids has shape [16], expected [8]")):
        run(session, feeds | {"centroids": zeros(16)})
    feeds = attention_feeds(key=prod)
    session = make_session(attention_model(key_codec="prod"))
    with pytest.raises(Exception, match=re.escape("key_rotation has shape [16, 16], expected")):
        run(session, feeds | {"key_rotation": feeds["key_rotation"][:, :16]})
    assert np.isfinite(run(session, feeds)).all()
    # A constant of another shape waits for the first call.
    constants = {"key_rotation": feeds.pop("key_rotation")[:, :16]}
    session = make_session(attention_model(key_codec="prod", constants=constants))
    with pytest.raises(Exception, match=re.escape("key_rotation has shape [16, 16], expected")):
        run(session, feeds)


PADDINGS = [
    bad("left_padding[0] is -1, expected 0 or more", left_padding=numbers(-1, 0)),
    bad("left_padding[1] is 9, but key_cache has only 8 slots", left_padding=numbers(0, 9)),
    bad(f"[0] is {HIGHEST}, but key_cache has only 8 slots", left_padding=numbers(HIGHEST)),
    bad("left_padding has 3 elements, expected 1 or 2", left_padding=numbers(1, 2, 3)),
    bad("left_padding has 0 elements, expected 1 or 2", left_padding=numbers()),
    bad("left_padding has shape [], expected 1 dimension", left_padding=np.array(1, np.int64)),
]


@each(PADDINGS)
def test_padding_that_cannot_be(case: Bad, attention_feeds: Callable[..., Feeds]) -> None:
    good = {**attention_feeds(), "left_padding": numbers(1, 8)}
    assert_refused(attention_model(padding=True), good, case, ATTENTION)
    assert not run(make_session(attention_model(padding=True)), good)[1].any()  # only padding


@pytest.mark.parametrize("bias", [False, True])
def test_sinks_are_of_the_type_of_the_query(
    bias: bool, attention_feeds: Callable[..., Feeds]
) -> None:
    session = make_session(attention_model(bias=bias, sink=True))
    good = attention_feeds(bias=bias, sink=True)
    assert np.isfinite(run(session, good)).all()
    half = good["head_sink"].astype(np.float16)
    with pytest.raises(Exception, match="Unexpected input data type"):
        run(session, {**good, "head_sink": half})


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"bits": 6}, "bits is 6, expected 1 or 2 or 3 or 4 or 5 for lloyd_max"),
        ({"bits": -(2**40)}, "expected 1 or 2 or 3 or 4 or 5 for lloyd_max"),
        ({"bits": None}, "attribute bits is missing"),
        ({"bits": "four"}, "attribute bits is missing or of another type"),
        ({"codec": "uniform", "bits": 5}, "bits is 5, expected 2 or 3 or 4 for uniform"),
        ({"codec": "fp8_e4m3"}, "bits is 4, expected 8 for fp8_e4m3"),
        ({"codec": "prod", "bits": 2}, "bits is 2, expected 3 or 4 for prod"),
        ({"codec": "fp8"}, f"codec is 'fp8', expected one of {', '.join(KINDS)}"),
        ({"codec": ""}, f"codec is '', expected one of {', '.join(KINDS)}"),
        ({"codec": "raw"}, "bits is 4, expected 16 or 32 for raw of float"),
        ({"codec": "raw", "bits": 2**40}, "expected 16 or 32 for raw of float"),
        ({"codec": None}, "attribute codec is missing"),
        ({"norm_correction": 3}, "norm_correction is 3, expected 0, 1 or 2"),
        ({"norm_correction": None}, "attribute norm_correction is missing"),
        ({"planes": 2}, "planes is 2, expected 0 to 1"),
        ({"planes": 1, "recent": 4}, "planes is 1, but entries in spare rows need rows"),
    ],
)
def test_encode_refuses_attributes(attributes: dict[str, object], message: str) -> None:
    assert_not_made(encode_model(**attributes), message, ENCODE)


def test_a_codec_that_is_no_utf8_is_named_in_ascii() -> None:
    model = encode_model().replace(b"lloyd_max", b"lloyd\xff\x1b[m")
    with pytest.raises(Exception, match=re.escape(r"codec is 'lloyd\xff\x1b[m', expected one of")):
        make_session(model)
    with pytest.raises(Exception, match=re.escape(f"codec is '{'x' * 64}...', expected")):
        make_session(encode_model(codec="x" * 1000))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"key_bits": 6}, "key_bits is 6, expected 1 or 2 or 3 or 4 or 5 for lloyd_max"),
        ({"value_bits": 8}, "value_bits is 8, expected 1 or 2 or 3 or 4 or 5 for lloyd_max"),
        ({"value_codec": "fp8"}, f"value_codec is 'fp8', expected one of {', '.join(KINDS)}"),
        ({"value_codec": "raw"}, "value_bits is 4, expected 16 or 32 for raw of float"),
        ({"value_codec": "u8", "value_bits": 8}, "value_bits is 8, expected 4 for u8"),
        ({"value_codec": "q8_0"}, "value_bits is 4, expected 8 for q8_0"),
        ({"scale": float("nan")}, "scale is not a finite number"),
        ({"scale": float("inf")}, "scale is not a finite number"),
        ({"scale": None}, "attribute scale is missing"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"softcap": float("nan")}, "softcap is "),
        ({"causal": 2}, "causal is 2, expected 0 or 1"),
        ({"causal": None}, "attribute causal is missing"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"sliding_window": None}, "attribute sliding_window is missing"),
        ({"planes": -1}, "planes is -1, expected 0 to 1"),
    ],
)
def test_attention_refuses_attributes(attributes: dict[str, object], message: str) -> None:
    assert_not_made(attention_model(**attributes), message, ATTENTION)


SEARCHES = [
    bad("gains has shape [0], expected 1 to 16 numbers", gains=zeros(0)),
    bad("gains has shape [17], expected 1 to 16 numbers", gains=zeros(17)),
    bad("gains has shape [2, 2], expected", gains=zeros(2, 2)),
    bad("feedback has shape [2, 16, 8], expected [2, 16, 16]", feedback=zeros(2, 16, 8)),
    bad("feedback has shape [1, 16, 16], expected [2, 16, 16]", feedback=zeros(1, 16, 16)),
    bad("feedback has", feedback=zeros(2)),
]


@each(SEARCHES)
def test_tables_of_a_search_are_refused(case: Bad, encode_feeds: Callable[..., Feeds]) -> None:
    good = encode_feeds() | {"gains": zeros(1) + 1, "feedback": zeros(1)}
    model = encode_model(search=True)
    plain = run(make_session(encode_model()), encode_feeds())
    assert np.array_equal(run(make_session(model), good), plain)
    assert_refused(model, good, case, ENCODE)
    session = make_session(encode_model(search=True, codec="u8", norm_correction=0))
    run(session, encode_feeds(codec=Codec("u8", 4)) | {"gains": zeros(0), "feedback": zeros(0)})


def test_planes_have_rows_that_are_rotated_and_not_padded(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    wide = rows(2, 2, 8, 12)
    for make, feeds, name in (
        (encode_model, encode_feeds(), "past"),
        (attention_model, attention_feeds(), "value_cache"),
    ):
        session = make_session(make(planes=1))
        run(session, feeds)
        run(make_session(make()), feeds | {name: wide})  # rows may be padded
        message = f"planes is 1, but {name} has row width 12 of codec lloyd_max, expected"
        with pytest.raises(Exception, match=message):
            run(session, feeds | {name: wide})
    session = make_session(encode_model(planes=1, codec="raw", bits=32))
    with pytest.raises(Exception, match="has row width 64 of codec raw, expected a codec that rot"):
        run(session, encode_feeds(codec=RAW32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_raw_has_the_width_of_its_elements(dtype: str) -> None:
    message = f"bits is 32, expected 16 for raw of {dtype}"
    with pytest.raises(Exception, match=message):
        make_session(encode_model(dtype, codec="raw", bits=32))
    with pytest.raises(Exception, match=f"key_{message}"):
        make_session(attention_model(dtype, key_codec="raw", key_bits=32))
    make_session(encode_model(dtype, codec="raw", bits=16))


def test_raw_rows_of_another_width_are_refused(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    width = "row width 63, but raw 32 rows of head size 16 have 64 bytes"
    session = make_session(encode_model(codec="raw", bits=32))
    good = encode_feeds(codec=RAW32)
    with pytest.raises(Exception, match=f"past has {width}"):
        run(session, good | {"past": rows(2, 2, 8, 63)})
    assert run(session, good).shape == (2, 2, 8, 64)
    session = make_session(attention_model(value_codec="raw", value_bits=32))
    good = attention_feeds(value=RAW32)
    with pytest.raises(Exception, match=f"value_cache has {width}"):
        run(session, good | {"value_cache": rows(2, 2, 8, 63)})
    # The other side keeps its tables.
    with pytest.raises(Exception, match=re.escape("key_centroids has shape [0], expected [16]")):
        run(session, good | {"key_centroids": zeros(0)})
    assert np.isfinite(run(session, good)).all()


@pytest.mark.parametrize("model", [encode_model(), attention_model()])
@pytest.mark.parametrize("level", ["avx1024", "AVX2", "x" * 1000])
def test_unknown_levels_are_refused(
    model: bytes, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_ONNX_ISA", level)
    with pytest.raises(
        Exception, match=f"TQ_ONNX_ISA is '{level}', but here this library has only .*scalar"
    ):
        make_session(model)
    monkeypatch.setenv("TQ_ONNX_ISA", "scalar")
    make_session(model)


def test_an_exception_never_leaves_the_library() -> None:
    """The interpreter must survive a refusal at kernel creation and exit cleanly."""
    code = (
        "from tests.native.single_node import *\n"
        "try: make_session(encode_model(bits=7))\n"
        "except Exception: print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert (done.returncode, done.stdout) == (0, "refused\n")


GOOD = np.linspace(-np.pi, np.pi, 16, dtype=np.float32)
TURNING = with_features({OFFSETS: True, ROTARY_OFFSETS: True, LEFT_PADDING: True})


def turning_model(operator: type[Operator]) -> bytes:
    attributes = ENCODE_DEFAULTS if operator is Encode else ATTENTION_DEFAULTS
    optional = optional_inputs(TURNING, operator)
    return single_operator(operator, attributes, "float32", optional=optional)


def frequencies(value: float, at: int) -> Array:
    changed = GOOD.copy()
    changed[at] = value
    return changed


ROTARIES = [
    bad("frequencies has shape [8], expected [16]", frequencies=GOOD[:8]),
    bad("frequencies has shape [1, 16], expected [16]", frequencies=GOOD[None]),
    bad("frequencies has shape [0], expected [16]", frequencies=GOOD[:0]),
    bad(
        "frequencies of coordinate 3 is nan, expected radians from -pi to pi",
        frequencies=frequencies(np.nan, 3),
    ),
    bad("of coordinate 0 is -inf, expected", frequencies=frequencies(-np.inf, 0)),
    bad("of coordinate 15 is 3.15", frequencies=frequencies(3.15, 15)),
    bad("offset has shape [1, 2, 16]", offset=zeros(1, 2, 16)),
    bad("expected [3, 2, 16]", offset=zeros(3, 4, 16)),
    bad("expected 1 to 64 rows", offset=zeros(65, 2, 16)),
]


@each(ROTARIES)
def test_frequencies_that_cannot_be(
    case: Bad, encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    padding = {"left_padding": numbers(1, 2)}
    good = {**encode_feeds(offsets=2), "frequencies": GOOD, **padding}
    assert_refused(turning_model(Encode), good, case, ENCODE)
    good = {**attention_feeds(offsets=2), "key_frequencies": GOOD, **padding}
    good["value_offset"] = good["value_offset"][:1]  # any number of rows
    ((name, array),) = case.changes.items()
    begins = "key_" if case.message.startswith(("frequencies", "offset")) else ""
    keys = Bad(f"{begins}{case.message}", {f"key_{name}": array})
    assert_refused(turning_model(Attention), good, keys, ATTENTION)


def test_frequencies_need_an_offset(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    model = single_operator(Encode, ENCODE_DEFAULTS, "float32", optional=[Encode.frequencies])
    with pytest.raises(Exception, match=f"{ENCODE}: offset is missing, expected it with freq"):
        run(make_session(model), {**encode_feeds(), "frequencies": GOOD})
    # One number is none.
    run(make_session(model), {**encode_feeds(), "frequencies": GOOD[:1]})
    model = single_operator(
        Attention, ATTENTION_DEFAULTS, "float32", optional=[Attention.key_frequencies]
    )
    with pytest.raises(Exception, match=f"{ATTENTION}: key_offset is missing, expected it with"):
        run(make_session(model), {**attention_feeds(), "key_frequencies": GOOD})
    run(make_session(model), {**attention_feeds(), "key_frequencies": GOOD[:1]})


ROTARY_PADDINGS = [
    bad("left_padding[0] is -1, expected 0 or more", left_padding=numbers(-1, 0)),
    bad("left_padding[1] is 99, but present has only", left_padding=numbers(0, 99)),
    bad("left_padding has 3 elements, expected 1 or 2", left_padding=numbers(1, 2, 3)),
]


@each(ROTARY_PADDINGS)
def test_padding_of_an_encoder(case: Bad, encode_feeds: Callable[..., Feeds]) -> None:
    good = {**encode_feeds(offsets=2), "frequencies": GOOD, "left_padding": numbers(1, 2)}
    assert_refused(turning_model(Encode), good, case, ENCODE)
    # Offsets that do not turn do not heed it.
    run(make_session(turning_model(Encode)), {**good, **case.changes, "frequencies": GOOD[:1]})


WINDOWED = with_window(Site(head_size=16), 4, 2)


@pytest.mark.parametrize(
    ("window", "sentence"),
    [
        (Window(-1, 2, 30), "recent is -1, expected 0 to 4096"),
        (Window(4, 4097, 30), "sinks is 4097, expected 0 to 4096"),
        (Window(2049, 2048, 30), "recent and sinks together are 4097"),
        (
            Window(4, 2, 23),
            "overlay_rows is 23, but 6 entries of head size 16 need 24 rows of past",
        ),
        (Window(4, 2, 1 << 40), "overlay_rows is 1099511627776"),
    ],
)
def test_windows_that_cannot_be(window: Window, sentence: str) -> None:
    site = replace(WINDOWED, window=window)
    feeds = site.feeds(np.random.default_rng(0), past_length=(0,), new=1)
    with pytest.raises(Exception, match=sentence):
        run_on(BEST, site.model().SerializeToString(), feeds)


def test_raw_caches_have_no_entries() -> None:
    site = Site(key=FLOATS, value=FLOATS, head_size=16, window=Window(1, 0, 1))
    feeds = site.feeds(np.random.default_rng(0), past_length=(0,), new=1)
    with pytest.raises(Exception, match="caches of raw have no entries"):
        run_on(BEST, site.model().SerializeToString(), feeds)


def windowed_feeds(**others: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds = WINDOWED.feeds(rng, past_length=(5,), new=1)
    return feeds | behind_overlays(WINDOWED, feeds, rng) | others


def test_a_past_that_the_overlay_leaves_no_room_for() -> None:
    feeds = windowed_feeds()
    for name in ("past_key", "past_value"):
        feeds[name] = feeds[name][:, :, :-1]
    with pytest.raises(Exception, match=r"past_length\[0\] is 5, but past has only 4 slots"):
        run_on(BEST, WINDOWED.model().SerializeToString(), feeds)


def test_more_tokens_than_tags() -> None:
    with pytest.raises(Exception, match=r"past_length\[0\] is 4294967295"):
        feeds = windowed_feeds(past_length=np.array([2**32 - 1], np.int64))
        run_on(BEST, WINDOWED.model().SerializeToString(), feeds)


@pytest.mark.parametrize("missing", ["new_keys", "new_values"])
def test_vectors_of_the_call_are_needed(missing: str) -> None:
    model = WINDOWED.model()
    node = next(each for each in model.graph.node if each.name == "attended")
    slot = len(node.input) - (2 if missing == "new_keys" else 1)
    node.input[slot] = ""
    with pytest.raises(Exception, match=f"{missing} has type another type, expected float"):
        run_on(BEST, model.SerializeToString(), windowed_feeds())
