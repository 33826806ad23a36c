"""Both operators through onnxruntime: values, empty tensors, threads, levels and buffers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.codec.theory import unrounded
from tests.native.conftest import CODECS, INT4, RAW32, Feeds, encoded_vectors, judged_rows
from tests.native.single_node import FLOATS, attention_model, encode_model, make_session, run
from tests.parity.backends import BEST
from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.rounding import EXACT
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import UNIFORM
from tq_onnx.runtime.library import library_info

LEVELS_OF_8_BITS = [
    name for name in ("avx512vnni", "avx2", "neon") if name in library_info().isa_supported
]
"""With lanes of 32 bits, and of 16."""
MULTIPLIED = [
    *((each, False) for each in CODECS if each.is_rotated and each.kind != PROD),
    *((each, False) for each in CODECS if each.kind == UNIFORM),
    *((Codec(LLOYD_MAX, bits), True) for bits in (4, 5)),
]
"""Without ``prod``, whose signs are rounded apart, which the reference does not show."""


@pytest.fixture(params=(BEST,))
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


@pytest.mark.parametrize("name", LEVELS_OF_8_BITS)
@pytest.mark.parametrize(("codec", "is_unrounded"), MULTIPLIED, ids=str)
def test_products_of_8_bits_round_as_the_reference_does(
    name: str,
    is_unrounded: bool,
    codec: Codec,
    monkeypatch: pytest.MonkeyPatch,
    attention_feeds: Callable[..., Feeds],
) -> None:
    """What remains is float noise, and steps that it takes across a half."""
    monkeypatch.setenv("TQ_ONNX_ISA", name)
    monkeypatch.setenv("TQ_ONNX_PRODUCTS", "8")
    feeds = attention_feeds(key=codec, value=codec, size=128, slots=112, past=99, tokens=1)
    if codec.is_rotated:
        book = (unrounded(codec.bits, 128) if is_unrounded else codebook_of(codec, 128)).centroids
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
    if is_unrounded and codec.bits < 5:
        assert np.array_equal(rounded, exact)  # no integers at all
        assert error <= 1e-6 * size
    else:
        # Zeros of ``uniform`` are a part of what the reference leaves exact.
        assert distance <= (1e-3 if codec.is_rotated else 0.3) * error


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
