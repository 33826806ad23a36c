"""Bad inputs and attributes: one sentence that names the operator, and the session lives on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.native.conftest import RAW32, Feeds
from tests.native.single_node import Array, attention_model, encode_model, make_session, run
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import KINDS, Codec
from tq_onnx.ops.domain import ATTENTION, ENCODE

HUGE = np.iinfo(np.int64).max


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def lengths(*values: int) -> Array:
    return np.array(values, np.int64)


U8 = np.uint8
ENCODE_CASES: dict[str, tuple[Mapping[str, Array], str]] = {
    "vectors of rank 3": ({"vectors": zeros(2, 3, 16)}, "vectors has shape [2, 3, 16], expected 4"),
    "head size 12": ({"vectors": zeros(2, 2, 3, 12)}, "head size 12, expected a multiple of 8"),
    "head size 0": ({"vectors": zeros(2, 2, 3, 0)}, "head size 0, expected a multiple of 8"),
    "head size 520": ({"vectors": zeros(1, 1, 1, 520)}, "head size 520, expected a multiple of 8"),
    "past of rank 3": (
        {"past": zeros(2, 2, 10, dtype=U8)},
        "past has shape [2, 2, 10], expected 4",
    ),
    "row width": (
        {"past": zeros(2, 2, 8, 9, dtype=U8)},
        "past has row width 9, but lloyd_max 4 rows of head size 16 have 10 bytes",
    ),
    "row width 70000": (
        {"past": zeros(2, 2, 8, 70000, dtype=U8)},
        "lloyd_max 4 rows of head size 16 have 10 bytes and may be padded to 65536",
    ),
    "row width 0": ({"past": zeros(2, 2, 8, 0, dtype=U8)}, "past has row width 0"),
    "batch": ({"past": zeros(3, 2, 8, 10, dtype=U8)}, "[3, 2, 8, 10], expected [2, 2, 8, 10]"),
    "heads": ({"past": zeros(2, 1, 8, 10, dtype=U8)}, "[2, 1, 8, 10], expected [2, 2, 8, 10]"),
    "rotation": ({"rotation": zeros(16, 8)}, "rotation has shape [16, 8], expected [16, 16]"),
    "rotation of rank 1": ({"rotation": zeros(256)}, "rotation has shape [256], expected [16, 16]"),
    "centroids": ({"centroids": zeros(8)}, "centroids has shape [8], expected [16]"),
    "boundaries": ({"boundaries": zeros(16)}, "boundaries has shape [16], expected [15]"),
    "scalar past_length": (
        {"past_length": np.array(4, np.int64)},
        "past_length has shape [], expected 1 dimension",
    ),
    "number of lengths": (
        {"past_length": lengths(1, 2, 3)},
        "past_length has 3 elements, expected 1 or 2",
    ),
    "no lengths": ({"past_length": lengths()}, "past_length has 0 elements, expected 1 or 2"),
    "negative length": (
        {"past_length": lengths(1, -1)},
        "past_length[1] is -1, expected 0 or more",
    ),
    "lowest length": ({"past_length": lengths(-HUGE - 1)}, "expected 0 or more"),
    "length beyond the past": (
        {"past_length": lengths(9)},
        "past_length[0] is 9, but past has only 8 slots",
    ),
    "overflowing length": ({"past_length": lengths(HUGE)}, f"is {HUGE}, but past has only 8 slots"),
}

ATTENTION_CASES: dict[str, tuple[Mapping[str, Array], str]] = {
    "query of rank 3": ({"query": zeros(4, 3, 16)}, "query has shape [4, 3, 16], expected 4"),
    "head size 20": ({"query": zeros(2, 4, 3, 20)}, "query has head size 20"),
    "heads not a multiple": (
        {"query": zeros(2, 3, 3, 16)},
        "query has 3 heads, expected a multiple of the 2 heads of key_cache",
    ),
    "cache without heads": (
        {"key_cache": zeros(2, 0, 8, 10, dtype=U8), "value_cache": zeros(2, 0, 8, 10, dtype=U8)},
        "multiple of the 0 heads",
    ),
    "key row width": (
        {"key_cache": zeros(2, 2, 8, 8, dtype=U8)},
        "key_cache has row width 8, but lloyd_max 4 rows of head size 16 have 10 bytes",
    ),
    "value row width": (
        {"value_cache": zeros(2, 2, 8, 6, dtype=U8)},
        "value_cache has row width 6",
    ),
    "value slots": (
        {"value_cache": zeros(2, 2, 7, 10, dtype=U8)},
        "value_cache has shape [2, 2, 7, 10], expected [2, 2, 8, 10]",
    ),
    "value heads": ({"value_cache": zeros(2, 1, 8, 10, dtype=U8)}, "expected [2, 2, 8, 10]"),
    "cache batch": (
        {"key_cache": zeros(1, 2, 8, 10, dtype=U8), "value_cache": zeros(1, 2, 8, 10, dtype=U8)},
        "key_cache has shape [1, 2, 8, 10], expected [2, 2, 8, 10]",
    ),
    "key_cache of rank 5": (
        {"key_cache": zeros(1, 2, 2, 8, 10, dtype=U8)},
        "expected 4 dimensions",
    ),
    "key rotation": ({"key_rotation": zeros(15, 16)}, "key_rotation has shape [15, 16]"),
    "value rotation": ({"value_rotation": zeros(16)}, "value_rotation has shape [16]"),
    "key centroids": ({"key_centroids": zeros(15)}, "key_centroids has shape [15], expected [16]"),
    "value centroids": ({"value_centroids": zeros(4, 4)}, "value_centroids has shape [4, 4]"),
    "too many tokens": (
        {"past_length": lengths(6)},
        "past_length 6 plus 3 new tokens is more than the 8 slots of key_cache",
    ),
    "negative length": ({"past_length": lengths(-1, 0)}, "past_length[0] is -1"),
    "overflowing length": ({"past_length": lengths(0, HUGE)}, f"past_length[1] is {HUGE}, but"),
    "bias of rank 3": ({"attention_bias": zeros(1, 3, 7)}, "attention_bias has shape [1, 3, 7]"),
    "bias batch": ({"attention_bias": zeros(3, 1, 3, 7)}, "broadcasts to [2, 4, 3, 7]"),
    "bias heads": ({"attention_bias": zeros(1, 2, 3, 7)}, "broadcasts to [2, 4, 3, 7]"),
    "bias tokens": ({"attention_bias": zeros(1, 1, 2, 7)}, "broadcasts to [2, 4, 3, 7]"),
    "short bias": ({"attention_bias": zeros(1, 1, 3, 6)}, "broadcasts to [2, 4, 3, 7]"),
    "empty bias": ({"attention_bias": zeros(1, 1, 3, 0)}, "broadcasts to [2, 4, 3, 7]"),
    "sinks of the other heads": ({"head_sink": zeros(2)}, "head_sink has shape [2], expected [4]"),
    "one sink for all": ({"head_sink": zeros(1)}, "head_sink has shape [1], expected [4]"),
    "too many sinks": ({"head_sink": zeros(5)}, "head_sink has shape [5], expected [4]"),
    "no sinks": ({"head_sink": zeros(0)}, "head_sink has shape [0], expected [4]"),
    "scalar sink": ({"head_sink": zeros()}, "head_sink has shape [], expected [4]"),
    "sinks of rank 2": ({"head_sink": zeros(1, 4)}, "head_sink has shape [1, 4], expected [4]"),
}


@pytest.mark.parametrize("name", ENCODE_CASES)
def test_encode_refuses(name: str, encode_feeds: Callable[..., Feeds]) -> None:
    changes, message = ENCODE_CASES[name]
    session = make_session(encode_model())
    good = encode_feeds()
    before = run(session, good)
    with pytest.raises(Exception, match=re.escape(message)) as error:
        run(session, {**good, **changes})
    assert f"{ENCODE}: " in str(error.value)
    np.testing.assert_array_equal(run(session, good), before)


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_refuses(name: str, attention_feeds: Callable[..., Feeds]) -> None:
    changes, message = ATTENTION_CASES[name]
    session = make_session(attention_model(bias=True, sink=True))
    good = attention_feeds(bias=True, sink=True)
    before = run(session, good)
    with pytest.raises(Exception, match=re.escape(message)) as error:
        run(session, {**good, **changes})
    assert f"{ATTENTION}: " in str(error.value)
    np.testing.assert_array_equal(run(session, good), before)


OFFSETS = {
    "rank 2": (zeros(2, 16), "{0} has shape [2, 16], expected 3 dimensions"),
    "heads": (zeros(1, 1, 16), "{0} has shape [1, 1, 16], expected [1, 2, 16]"),
    "size": (zeros(1, 2, 8), "{0} has shape [1, 2, 8], expected [1, 2, 16]"),
    "no rows": (zeros(0, 2, 16), "{0} has shape [0, 2, 16], expected 1 to 64 rows"),
    "too many rows": (zeros(65, 2, 16), "{0} has shape [65, 2, 16], expected 1 to 64 rows"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_of_another_shape_are_refused(
    name: str, encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    array, message = OFFSETS[name]
    session = make_session(encode_model(offset=True))
    good = encode_feeds(offsets=64)
    with pytest.raises(Exception, match=re.escape(f"{ENCODE}: {message.format('offset')}")):
        run(session, good | {"offset": array})
    run(session, good)
    session = make_session(attention_model(offset=True))
    good = attention_feeds(offsets=64)
    message = re.escape(f"{ATTENTION}: {message.format('key_offset')}")
    with pytest.raises(Exception, match=message):
        run(session, good | {"key_offset": array, "value_offset": array})
    with pytest.raises(Exception, match=f"{ATTENTION}: value_offset has shape"):
        run(session, good | {"value_offset": array})
    run(session, good)


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


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (lengths(-1, 0), "left_padding[0] is -1, expected 0 or more"),
        (lengths(0, 9), "left_padding[1] is 9, but key_cache has only 8 slots"),
        (lengths(HUGE), f"left_padding[0] is {HUGE}, but key_cache has only 8 slots"),
        (lengths(1, 2, 3), "left_padding has 3 elements, expected 1 or 2"),
        (lengths(), "left_padding has 0 elements, expected 1 or 2"),
        (np.array(1, np.int64), "left_padding has shape [], expected 1 dimension"),
    ],
)
def test_padding_that_cannot_be(
    padding: Array, message: str, attention_feeds: Callable[..., Feeds]
) -> None:
    session = make_session(attention_model(padding=True))
    good = {**attention_feeds(), "left_padding": lengths(1, 8)}
    before = run(session, good)
    with pytest.raises(Exception, match=re.escape(f"{ATTENTION}: {message}")):
        run(session, {**good, "left_padding": padding})
    np.testing.assert_array_equal(run(session, good), before)
    assert not before[1].any()  # sees nothing but padding


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
    with pytest.raises(Exception, match=re.escape(message)) as error:
        make_session(encode_model(**attributes))
    assert f"{ENCODE}: " in str(error.value)


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
    with pytest.raises(Exception, match=re.escape(message)) as error:
        make_session(attention_model(**attributes))
    assert f"{ATTENTION}: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("gains", zeros(0), "gains has shape [0], expected 1 to 16 numbers"),
        ("gains", zeros(17), "gains has shape [17], expected 1 to 16 numbers"),
        ("gains", zeros(2, 2), "gains has shape [2, 2], expected"),
        ("feedback", zeros(2, 16, 8), "feedback has shape [2, 16, 8], expected [2, 16, 16]"),
        ("feedback", zeros(1, 16, 16), "feedback has shape [1, 16, 16], expected [2, 16, 16]"),
        ("feedback", zeros(2), "feedback has"),
    ],
)
def test_tables_of_a_search_are_refused(
    name: str, array: Array, message: str, encode_feeds: Callable[..., Feeds]
) -> None:
    good = encode_feeds() | {"gains": zeros(1) + 1, "feedback": zeros(1)}
    session = make_session(encode_model(search=True))
    assert np.array_equal(run(session, good), run(make_session(encode_model()), encode_feeds()))
    with pytest.raises(Exception, match=re.escape(f"{ENCODE}: ")) as error:
        run(session, good | {name: array})
    assert message in str(error.value)
    session = make_session(encode_model(search=True, codec="u8", norm_correction=0))
    run(session, encode_feeds(codec=Codec("u8", 4)) | {"gains": zeros(0), "feedback": zeros(0)})


def test_planes_have_rows_that_are_rotated_and_not_padded(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    wide = zeros(2, 2, 8, 12, dtype=U8)
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
        run(session, good | {"past": zeros(2, 2, 8, 63, dtype=U8)})
    assert run(session, good).shape == (2, 2, 8, 64)
    session = make_session(attention_model(value_codec="raw", value_bits=32))
    good = attention_feeds(value=RAW32)
    with pytest.raises(Exception, match=f"value_cache has {width}"):
        run(session, good | {"value_cache": zeros(2, 2, 8, 63, dtype=U8)})
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
        Exception, match=f"TQ_ONNX_ISA is '{level}', but this machine has only .*scalar"
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
