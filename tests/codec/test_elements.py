"""Bytes of the model's element types: exact for values that have the type, rounded for others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tq_onnx.codec import reference
from tq_onnx.codec.elements import ELEMENT_BITS, from_bytes, to_bytes
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import RAW

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def raw(element: str) -> Codec:
    return Codec(RAW, ELEMENT_BITS[element])


def some_bits(element: str) -> np.ndarray:
    """All patterns of 16 bits, many of 32, NaN included; as unsigned integers ``[N, 64]``."""
    if ELEMENT_BITS[element] == 16:
        return np.arange(1 << 16, dtype=np.uint16).reshape(-1, 64)
    return np.random.default_rng(0).integers(0, 1 << 32, (1024, 64), np.uint32)


@pytest.mark.parametrize("element", TYPES)
def test_every_pattern_survives(element: str) -> None:
    bits = some_bits(element)
    rows = to_bytes(bits.view(TYPES[element]), raw(element), element)
    quiet = np.isnan(bits.view(TYPES[element]).astype(np.float32))
    same = rows.view(bits.dtype) == bits
    # Signalling NaN may turn quiet where numpy goes through float32.
    assert same[~quiet].all()
    assert same.all() or element == "bfloat16"
    back = from_bytes(rows, raw(element), element)
    assert back.shape == bits.shape
    np.testing.assert_array_equal(back, bits.view(TYPES[element]).astype(np.float32))


def test_rows_are_little_endian_and_in_order() -> None:
    x = np.array([[1.0, -2.5]], np.float32)
    assert to_bytes(x, raw("float32"), "float32").tolist() == [[0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC0]]
    assert to_bytes(x, raw("float16"), "float16").tolist() == [[0x00, 0x3C, 0x00, 0xC1]]
    assert to_bytes(x, raw("bfloat16"), "bfloat16").tolist() == [[0x80, 0x3F, 0x20, 0xC0]]


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_wider_values_are_rounded_to_nearest_even(element: str) -> None:
    x = np.random.default_rng(3).standard_normal((200, 64)).astype(np.float32)
    ties = np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2.0**-11)
    x = np.concatenate([x * 1e-6, x, x * 1e4, [ties], [ties * 2.0**-20]]).astype(np.float32)
    expected = x.astype(TYPES[element]).view(np.uint16)
    assert np.array_equal(to_bytes(x, raw(element), element).view("<u2"), expected)


def test_overflow_is_infinite_and_nan_stays_nan() -> None:
    x = np.array([[3.4e38, 1e5, np.nan, -np.inf]], np.float32)
    half = from_bytes(to_bytes(x, raw("float16"), "float16"), raw("float16"), "float16")
    np.testing.assert_array_equal(half, [[np.inf, np.inf, np.nan, -np.inf]])
    bits = np.array([[0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800000]], np.uint32)
    narrow = to_bytes(bits.view(np.float32), raw("bfloat16"), "bfloat16").view("<u2")
    assert narrow.tolist() == [[0x7F80, 0x7FC0, 0xFFFF, 0xFF80]]


@pytest.mark.parametrize(("element", "bits"), [("float32", 16), ("float16", 32), ("bfloat16", 32)])
def test_a_codec_of_another_width_is_refused(element: str, bits: int) -> None:
    x = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match=f"raw {bits} does not hold elements of type {element}"):
        to_bytes(x, Codec(RAW, bits), element)
    with pytest.raises(ValueError, match=f"raw {bits} does not hold"):
        from_bytes(np.zeros((1, 256), np.uint8), Codec(RAW, bits), element)


@pytest.mark.parametrize("element", TYPES)
def test_the_oracle_loses_nothing(element: str) -> None:
    x = np.random.default_rng(5).standard_normal((2, 3, 5, 64)).astype(TYPES[element])
    rows = reference.encode(x, raw(element), None, None, element=element)
    assert rows.shape == (2, 3, 5, 64 * ELEMENT_BITS[element] // 8)
    decoded = reference.decode(rows, raw(element), None, None, element=element)
    assert decoded.dtype == np.float64
    np.testing.assert_array_equal(decoded, x.astype(np.float64))


def test_attention_of_the_oracle_is_plain_attention() -> None:
    random = np.random.default_rng(6)
    query, key, value = random.standard_normal((3, 1, 2, 4, 64)).astype(np.float32)
    caches = [reference.encode(x, raw("float32"), None, None) for x in (key, value)]
    output = reference.attention(
        query,
        *caches,
        np.array([0]),
        key=raw("float32"),
        value=raw("float32"),
        key_rotation=None,
        key_codebook=None,
        value_rotation=None,
        value_codebook=None,
        scale=0.125,
        causal=False,
    )
    scores = 0.125 * query.astype(float) @ key.astype(float).swapaxes(-1, -2)
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(output, weights @ value, atol=1e-14)
