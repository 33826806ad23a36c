"""Both operators through onnxruntime: values, empty tensors, threads, levels and buffers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import onnxruntime as ort
import pytest

from tests.native.conftest import CODECS, INT4, RAW32, Feeds, encoded_vectors, judged_rows
from tests.native.single_node import FLOATS, attention_model, encode_model, make_session, run
from tests.parity.backends import BEST_LEVEL, LEVELS
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import BookVersion, codebook_of
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.rounding import EXACT
from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.codec.unrotated import UNIFORM
from tq_onnx.runtime.library import library_info

LEVELS_OF_8_BITS = [
    name for name in ("avx512vnni", "avx2", "neon") if name in library_info().isa_supported
]
"""With lanes of 32 bits, and of 16."""
MULTIPLIED = [
    *((each, BookVersion.INTEGERS) for each in CODECS if each.is_rotated and each.kind != PROD),
    *((each, BookVersion.INTEGERS) for each in CODECS if each.kind == UNIFORM),
    *((Codec(LLOYD_MAX, bits), version) for bits in (4, 5) for version in BookVersion),
]
"""Without ``prod``, whose signs are rounded apart, which the reference does not show."""


@pytest.fixture(params=BEST_LEVEL)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each level, with products of floats: rounding to 8 bits would hide too much."""
    monkeypatch.setenv("TQ_ONNX_ISA", request.param)
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "float")
    return request.param


def oracle(feeds: Feeds, key: Codec = INT4, value: Codec = INT4, **options: object) -> np.ndarray:
    arrays = {k: v.astype(np.float32) if v.dtype == FLOATS["bfloat16"][1] else v
              for k, v in feeds.items()}  # fmt: skip
    return reference.attention(
        arrays["query"], arrays["key_cache"], arrays["value_cache"], arrays["past_length"],
        key=key, value=value, key_rotation=arrays["key_rotation"],
        key_codebook=arrays["key_centroids"], value_rotation=arrays["value_rotation"],
        value_codebook=arrays["value_centroids"], attention_bias=arrays.get("attention_bias"),
        head_sink=arrays.get("head_sink"), key_offset=arrays.get("key_offset"),
        value_offset=arrays.get("value_offset"), **{"scale": 0.25, "causal": True, **options},
    )  # fmt: skip


def check_rows(
    found: np.ndarray, vectors: np.ndarray, codec: Codec, feeds: Feeds, ties: int = 1
) -> None:
    """Rows of the vectors, up to some ties; padding is zero."""
    assert judged_rows(found, vectors, codec, feeds).differing <= ties


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("offsets", "padding"), [(0, 0), (0, 5), (1, 0), (6, 3)])
def test_encode_agrees_with_numpy(
    level: str, codec: Codec, offsets: int, padding: int, encode_feeds: Callable[..., Feeds]
) -> None:
    size = 64 if padding else 80
    feeds = encode_feeds(
        codec=codec, offsets=offsets, padding=padding, size=size, tokens=30, slots=9
    )
    feeds["past_length"] = np.array([4, 0], np.int64)
    feeds["vectors"][1, 0, :3] = np.array([0, np.nan, np.inf], np.float32)[:, None]
    model = encode_model(codec=codec.kind, bits=codec.bits, offset=bool(offsets))
    if codec.is_raw:
        feeds["vectors"][1, 0, 1:3] = 0
    present = run(make_session(model), feeds)
    vectors = encoded_vectors(feeds)
    assert present.shape == (2, 2, 34, row_layout(codec, size).row_bytes + padding)
    for b, length in enumerate(feeds["past_length"]):
        written = slice(length, length + 30)
        check_rows(present[b, :, written], vectors[b], codec, feeds)
        present[b, :, written] = 0
        np.testing.assert_array_equal(present[b, :, :length], feeds["past"][b, :, :length])
        assert not present[b, :, max(9, length) :].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.is_raw], ids=str)
def test_encode_of_narrow_vectors(
    level: str, dtype: str, codec: Codec, encode_feeds: Callable[..., Feeds]
) -> None:
    feeds = encode_feeds(codec=codec, size=64)
    feeds["vectors"] = feeds["vectors"].astype(FLOATS[dtype][1])
    present = run(make_session(encode_model(dtype, codec=codec.kind, bits=codec.bits)), feeds)
    # Quotients of narrow numbers often are ties.
    check_rows(present[:, :, 4:7], encoded_vectors(feeds), codec, feeds, ties=8)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_level_encodes_the_same_bytes(
    codec: Codec, encode_feeds: Callable[..., Feeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = encode_feeds(codec=codec, size=80, tokens=90, slots=4, offsets=3)
    feeds["vectors"] *= 10 ** np.linspace(-6, 6, 90)[:, None].astype(np.float32)
    model = encode_model(codec=codec.kind, bits=codec.bits, offset=True)
    results = []
    for name in LEVELS:
        monkeypatch.setenv("TQ_ONNX_ISA", name)
        results.append(run(make_session(model), feeds))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("key", CODECS, ids=str)
@pytest.mark.parametrize(("tokens", "offsets"), [(1, 0), (3, 5), (40, 0), (40, 1)])
def test_attention_agrees_with_numpy(
    level: str, key: Codec, tokens: int, offsets: int, attention_feeds: Callable[..., Feeds]
) -> None:
    """Rows that nobody sees hold garbage, and so do the bytes behind a row."""
    value = CODECS[(CODECS.index(key) * 5 + 2) % len(CODECS)]
    feeds = attention_feeds(key=key, value=value, size=64, slots=112, past=70, tokens=tokens,
                            group=5, offsets=offsets, padding=3)  # fmt: skip
    feeds["past_length"] = np.array([70, 3], np.int64)
    for side in ("key", "value"):
        for b, length in enumerate(feeds["past_length"]):
            feeds[f"{side}_cache"][b, :, length + tokens :] = 0xFF
    softcap = 5.0 if tokens == 3 else 0.0
    model = attention_model(
        key_codec=key.kind, key_bits=key.bits, value_codec=value.kind, value_bits=value.bits,
        offset=bool(offsets), scale=0.25, softcap=softcap,
    )  # fmt: skip
    output = run(make_session(model), feeds)
    expected = oracle(feeds, key, value, softcap=softcap)
    assert np.linalg.norm(output - expected) <= 2e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", LEVELS_OF_8_BITS)
@pytest.mark.parametrize(("codec", "version"), MULTIPLIED, ids=str)
def test_products_of_8_bits_round_as_the_reference_does(
    name: str,
    version: BookVersion,
    codec: Codec,
    monkeypatch: pytest.MonkeyPatch,
    attention_feeds: Callable[..., Feeds],
) -> None:
    """What remains is float noise, and steps that it takes across a half."""
    monkeypatch.setenv("TQ_ONNX_ISA", name)
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "8")
    feeds = attention_feeds(key=codec, value=codec, size=128, slots=112, past=99, tokens=1)
    if codec.is_rotated:
        book = codebook_of(codec, 128, version).centroids
        feeds |= {"key_centroids": book, "value_centroids": book}
    model = attention_model(
        key_codec=codec.kind, key_bits=codec.bits, value_codec=codec.kind, value_bits=codec.bits,
        scale=0.25,
    )  # fmt: skip
    output = run(make_session(model), feeds)
    rounding = library_info().roundings["8"]
    exact, rounded = (oracle(feeds, codec, codec, rounding=each) for each in (EXACT, rounding))
    error, distance, size = (
        np.linalg.norm(each) for each in (output - exact, output - rounded, exact)
    )
    if codec.is_rotated and version is BookVersion.UNROUNDED and codec.bits < 5:
        assert np.array_equal(rounded, exact)  # no integers at all
        assert error <= 1e-6 * size
    else:
        # Zeros of ``uniform`` are a part of what the reference leaves exact.
        assert distance <= (1e-3 if codec.is_rotated else 0.3) * error


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 8e-3)]
)
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_attention_with_a_bias_agrees_with_numpy(
    level: str, dtype: str, tolerance: float, bits: int, attention_feeds: Callable[..., Feeds]
) -> None:
    codec = Codec(LLOYD_MAX, bits)
    feeds = attention_feeds(
        key=codec, value=codec, size=64, slots=80, past=70, bias=True, offsets=2
    )
    rng = np.random.default_rng(7)
    bias = rng.standard_normal(feeds["attention_bias"].shape)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    feeds |= {"query": feeds["query"].astype(FLOATS[dtype][1]),
              "attention_bias": bias.astype(FLOATS[dtype][1])}  # fmt: skip
    model = attention_model(
        dtype, bias=True, offset=True, scale=0.25, key_bits=bits, value_bits=bits
    )
    output = run(make_session(model), feeds)
    expected = oracle(feeds, codec, codec)
    assert output.dtype == FLOATS[dtype][1]
    assert np.abs(output.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max()
    # The negative twin: the offsets make a difference.
    del feeds["value_offset"]
    without = oracle(feeds, codec, codec)
    assert np.abs(expected - without).max() > 3 * tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 8e-3)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_sinks_agree_with_numpy(
    level: str, dtype: str, tolerance: float, bias: bool, attention_feeds: Callable[..., Feeds]
) -> None:
    """Also without a bias, which no function body can be."""
    feeds = attention_feeds(size=64, slots=1300, past=1200, bias=bias, sink=True)
    feeds["head_sink"] = feeds["head_sink"] * 2 + 8  # to be felt among so many keys
    names = {"query", "attention_bias", "head_sink"} & feeds.keys()
    feeds |= {name: feeds[name].astype(FLOATS[dtype][1]) for name in names}
    output = run(make_session(attention_model(dtype, bias=bias, sink=True, scale=0.25)), feeds)
    expected = oracle(feeds)
    assert np.abs(output.astype(np.float64) - expected).max() <= tolerance * np.abs(expected).max()
    # The negative twin: sinks make a difference.
    del feeds["head_sink"]
    without = oracle(feeds)
    assert np.abs(expected - without).max() > 3 * tolerance * np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("float16", 16), ("bfloat16", 16)])
def test_raw_encode_keeps_every_bit(
    level: str, dtype: str, bits: int, encode_feeds: Callable[..., Feeds]
) -> None:
    feeds = encode_feeds(codec=RAW32, size=64)
    feeds["vectors"] = feeds["vectors"].astype(FLOATS[dtype][1])
    feeds["vectors"][0, 0, 0, :3] = (np.nan, -np.inf, -0.0)
    width = 64 * bits // 8
    feeds["past"] = feeds["past"][..., :width]
    present = run(make_session(encode_model(dtype, codec="raw", bits=bits)), feeds)
    rows = np.ascontiguousarray(feeds["vectors"]).view(np.uint8)
    np.testing.assert_array_equal(
        present, reference.append(feeds["past"], rows, feeds["past_length"])
    )


def test_raw_codecs_take_any_tables(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    """Nothing of them is read, constant or not."""
    encode_session = make_session(encode_model(codec="raw", bits=32))
    feeds = encode_feeds(codec=RAW32)
    expected = run(encode_session, feeds)
    odd = {"rotation": np.full((3, 1), np.nan, np.float32), "centroids": np.zeros(5, np.float32)}
    np.testing.assert_array_equal(run(encode_session, feeds | odd), expected)
    raw = {"key_codec": "raw", "key_bits": 32, "value_codec": "raw", "value_bits": 32}
    feeds = attention_feeds(key=RAW32, value=RAW32)
    expected = run(make_session(attention_model(**raw)), feeds)
    constants = {"value_rotation": np.full((16, 16), np.nan, np.float32)}
    del feeds["value_rotation"]
    output = run(make_session(attention_model(constants=constants, **raw)), feeds)
    np.testing.assert_array_equal(output, expected)
    assert np.isfinite(output).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_bias_at_half_of_the_lowest_value_hides(
    dtype: str, attention_feeds: Callable[..., Feeds]
) -> None:
    lowest = {"float32": -3.4028235e38, "float16": -65504.0, "bfloat16": -3.3895314e38}[dtype]
    feeds = attention_feeds(batch=1, bias=True)
    feeds["query"] = feeds["query"].astype(FLOATS[dtype][1])
    bias = np.zeros((1, 1, 3, 7))
    bias[..., 2] = lowest / 2
    bias[0, 0, 1] = lowest
    feeds["attention_bias"] = bias.astype(FLOATS[dtype][1])
    session = make_session(attention_model(dtype, bias=True, scale=0.25))
    clean = run(session, feeds).astype(np.float64)
    assert not clean[:, :, 1].any()
    assert clean[:, :, 0].any()
    spoiled = {**feeds, "key_cache": feeds["key_cache"].copy(),
               "value_cache": feeds["value_cache"].copy()}  # fmt: skip
    for name in ("key_cache", "value_cache"):
        spoiled[name][:, :, 2, -2:] = (0x00, 0x7E)  # scale NaN
    np.testing.assert_array_equal(run(session, spoiled).astype(np.float64), clean)
    # The twin: the same row, visible, does spoil the result.
    feeds["attention_bias"] = np.zeros((1, 1, 3, 7)).astype(FLOATS[dtype][1])
    assert np.isnan(run(session, {**spoiled, "attention_bias": feeds["attention_bias"]}).astype(
        np.float64)).all()  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"tokens": 0}, (2, 2, 8, 10)),
        ({"batch": 0}, (0, 2, 8, 10)),
        ({"heads": 0}, (2, 0, 8, 10)),
        ({"slots": 0, "tokens": 0}, (2, 2, 0, 10)),
        ({"slots": 0}, (2, 2, 3, 10)),
    ],
)
def test_encode_of_nothing(
    level: str, sizes: dict[str, int], shape: tuple[int, ...], encode_feeds: Callable[..., Feeds]
) -> None:
    feeds = encode_feeds(**sizes)
    if sizes.get("slots") == 0:
        feeds["past_length"] = np.zeros(1, np.int64)
    present = run(make_session(encode_model()), feeds)
    assert present.shape == shape
    if sizes.get("tokens") == 0:
        np.testing.assert_array_equal(present, feeds["past"])


@pytest.mark.parametrize(
    "sizes",
    [{"tokens": 0}, {"batch": 0}, {"group": 0}, {"slots": 0, "tokens": 0, "past": 0}],
)
def test_attention_of_nothing(
    level: str, sizes: dict[str, int], attention_feeds: Callable[..., Feeds]
) -> None:
    feeds = attention_feeds(**sizes)
    output = run(make_session(attention_model()), feeds)
    assert output.shape == feeds["query"].shape
    assert output.size == 0


@pytest.mark.parametrize(("tokens", "group"), [(1, 2), (1, 5), (7, 3), (90, 2)])
def test_the_number_of_threads_does_not_show(
    level: str, tokens: int, group: int, attention_feeds: Callable[..., Feeds]
) -> None:
    feeds = attention_feeds(tokens=tokens, group=group, past=1500, slots=1600, size=64)
    model = attention_model(scale=0.125)
    first, *others = (run(make_session(model, threads), feeds) for threads in (1, 2, 7))
    for other in others:
        np.testing.assert_array_equal(other, first)
    # Splitting the batch does not show either, and the twin: another query does.
    alone = {k: v[1:] if v.ndim == 4 else v for k, v in feeds.items()}
    np.testing.assert_array_equal(run(make_session(model), alone), first[1:])
    assert (run(make_session(model), {**feeds, "query": feeds["query"][::-1]}) != first).any()


def test_threads_and_levels_encode_the_same_bytes(
    encode_feeds: Callable[..., Feeds], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = encode_feeds(tokens=65, slots=300, size=128)
    results = []
    for name in LEVELS:
        monkeypatch.setenv("TQ_ONNX_ISA", name)
        results += [run(make_session(encode_model(), threads), feeds) for threads in (1, 2, 7)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def run_in_place(session: ort.InferenceSession, feeds: Feeds, value: ort.OrtValue) -> ort.IOBinding:
    """A call with one buffer as past and present."""
    binding = session.io_binding()
    for name, array in feeds.items():
        if name != "past":
            binding.bind_cpu_input(name, array)
    binding.bind_ortvalue_input("past", value)
    binding.bind_ortvalue_output("present", value)
    session.run_with_iobinding(binding)
    return binding


def test_one_buffer_as_past_and_present_is_written_in_place(
    encode_feeds: Callable[..., Feeds],
) -> None:
    feeds = encode_feeds(slots=8, tokens=2)
    feeds["past_length"] = np.array([3, 6], np.int64)
    session = make_session(encode_model())
    expected = run(session, feeds)
    # The caller's own memory: no copy of it may stand between.
    cache = feeds["past"].copy()
    value = ort.OrtValue.ortvalue_from_numpy(cache)
    assert value.data_ptr() == cache.ctypes.data
    binding = run_in_place(session, feeds, value)
    assert binding.get_outputs()[0].data_ptr() == cache.ctypes.data
    np.testing.assert_array_equal(cache, expected)


def test_in_place_leaves_the_other_rows_alone(encode_feeds: Callable[..., Feeds]) -> None:
    """Rows beyond the written ones hold a pattern that no copy or clearing would leave."""
    feeds = encode_feeds(slots=50, tokens=1)
    feeds["past_length"] = np.array([7], np.int64)
    cache = np.full_like(feeds["past"], 0xA5)
    value = ort.OrtValue.ortvalue_from_numpy(cache)
    run_in_place(make_session(encode_model()), feeds, value)
    untouched = np.delete(cache, 7, axis=2)
    assert (untouched == 0xA5).all()
    assert (cache[:, :, 7] != 0xA5).any()


def test_growing_equals_fixed_capacity(encode_feeds: Callable[..., Feeds]) -> None:
    session = make_session(encode_model())
    feeds = encode_feeds(slots=12, tokens=4)
    fixed = run(session, feeds)
    grown = run(session, {**feeds, "past": feeds["past"][:, :, :4]})
    assert grown.shape[2] == 8
    np.testing.assert_array_equal(fixed[:, :, :8], grown)
    np.testing.assert_array_equal(fixed[:, :, 8:], feeds["past"][:, :, 8:])


def test_prefill_in_pieces_gives_the_same_bytes(encode_feeds: Callable[..., Feeds]) -> None:
    session = make_session(encode_model())
    feeds = encode_feeds(slots=0, tokens=11, size=128)
    feeds["past_length"] = np.zeros(1, np.int64)
    whole = run(session, feeds)
    pieces = feeds["past"]
    for begin, end in ((0, 5), (5, 6), (6, 11)):
        pieces = run(
            session,
            {**feeds, "past": pieces, "past_length": np.array([begin], np.int64),
             "vectors": feeds["vectors"][:, :, begin:end]},
        )  # fmt: skip
    np.testing.assert_array_equal(pieces, whole)


def test_a_constant_rotation_gives_the_same_bits(attention_feeds: Callable[..., Feeds]) -> None:
    """The kernel transposes a constant value rotation once, another one at every run."""
    feeds = attention_feeds(past=20, slots=30)
    expected = run(make_session(attention_model()), feeds)
    constants = {"value_rotation": feeds.pop("value_rotation")}
    output = run(make_session(attention_model(constants=constants)), feeds)
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize(
    "codec", [INT4, Codec(LLOYD_MAX, 5), Codec(PROD, 4), Codec(U8, 4)], ids=str
)
def test_a_constant_hadamard_rotation_is_applied_fast(
    codec: Codec,
    level: str,
    encode_feeds: Callable[..., Feeds],
    attention_feeds: Callable[..., Feeds],
) -> None:
    """As a constant it is recognised, otherwise it is a matrix like any other."""
    rotation = rotation_of(codec, "hadamard", 128, 3)
    feeds = encode_feeds(codec=codec, size=128, tokens=50) | {"rotation": rotation}
    name = {"codec": codec.kind, "bits": codec.bits}
    slow = run(make_session(encode_model(**name)), feeds)
    rest = {k: v for k, v in feeds.items() if k != "rotation"}
    fast = run(make_session(encode_model(constants={"rotation": rotation}, **name)), rest)
    for rows in (fast, slow):
        check_rows(rows[:, :, 4:], encoded_vectors(feeds), codec, feeds)
    feeds = attention_feeds(key=codec, value=codec, size=128, slots=90, past=80)
    constants = {"key_rotation": rotation, "value_rotation": rotation}
    attributes = {"key_codec": codec.kind, "key_bits": codec.bits,
                  "value_codec": codec.kind, "value_bits": codec.bits}  # fmt: skip
    rest = {k: v for k, v in feeds.items() if k not in constants}
    session = make_session(attention_model(constants=constants, scale=0.25, **attributes))
    expected = oracle(feeds | constants, codec, codec)
    assert np.abs(run(session, rest) - expected).max() <= 2e-4 * np.abs(expected).max()


def test_codec_index_is_not_looked_at(
    encode_feeds: Callable[..., Feeds], attention_feeds: Callable[..., Feeds]
) -> None:
    feeds = encode_feeds()
    np.testing.assert_array_equal(
        run(make_session(encode_model(codec_index=7)), feeds),
        run(make_session(encode_model()), feeds),
    )
    feeds = attention_feeds()
    np.testing.assert_array_equal(
        run(make_session(attention_model(key_codec_index=3, value_codec_index=-1)), feeds),
        run(make_session(attention_model()), feeds),
    )


def test_only_these_symbols_are_exported() -> None:
    path = str(library_info().path)
    names = {"RegisterCustomOps", "tq_layout_digest", "tq_library_info"}
    names |= {"CreateEpFactories", "ReleaseEpFactory"}
    library = ctypes.CDLL(path)
    assert all(hasattr(library, name) for name in names)
    with pytest.raises(AttributeError):
        _ = library.scalar_kernels
    if sys.platform.startswith("linux"):  # nm comes with the compiler that test_native.py needs
        listing = subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        )
        assert {line.split()[-1] for line in listing.stdout.splitlines()} == names
