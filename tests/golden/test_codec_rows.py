"""Stored bytes never change by accident: frozen vectors, frozen rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.elements import ELEMENT_BITS
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, LLOYD_MAX_BITS, RAW, Codec

GOLDEN = Path(__file__).parent / "codec_rows.npz"


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("bits", LLOYD_MAX_BITS)
def test_frozen_rows(bits: int, head_size: int) -> None:
    with np.load(GOLDEN) as golden:
        vectors, expected = golden[f"vectors_{head_size}"], golden[f"rows_{head_size}_{bits}"]
    codec, rotation = Codec(LLOYD_MAX, bits), make_rotation(QR, head_size, 0)
    rows = reference.encode(vectors, codec, rotation, lloyd_max(bits, head_size))
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("element", ELEMENT_BITS)
def test_frozen_raw_rows(element: str, head_size: int) -> None:
    with np.load(GOLDEN) as golden:
        vectors, expected = golden[f"vectors_{head_size}"], golden[f"rows_{head_size}_{element}"]
    codec = Codec(RAW, ELEMENT_BITS[element])
    rows = reference.encode(vectors, codec, None, None, element=element)
    assert np.array_equal(rows, expected)
    if element == "float32":
        assert np.array_equal(rows.view("<f4"), vectors)


def test_frozen_rows_notice_another_rotation() -> None:
    with np.load(GOLDEN) as golden:
        vectors, expected = golden["vectors_64"], golden["rows_64_4"]
    codec = Codec(LLOYD_MAX, 4)
    rows = reference.encode(vectors, codec, make_rotation(QR, 64, 1), lloyd_max(4, 64))
    assert not np.array_equal(rows, expected)
