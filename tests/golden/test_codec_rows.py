"""Stored bytes never change by accident: frozen vectors, frozen rows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from tests.codec.theory import unrounded
from tests.codec.vectors import KINDS, tables
from tq_onnx.codec import reference
from tq_onnx.codec.elements import ELEMENT_BITS
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotated import LLOYD_MAX, U8, UNIFORM_SIGNED
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.search import SIGNED_GAINS, gain_table
from tq_onnx.codec.spec import KINDS as KINDS_OF
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import RAW

GOLDEN = Path(__file__).parent / "codec_rows.npz"
INTEGERS = GOLDEN.with_name("integer_rows.npz")
"""Rows of the kinds that rotate, by codebooks of integers; the first file has those of others."""
FIRST_BITS = (2, 3, 4)
FIRST_SET = "0040c70d2ee35f49169342bbf7011d03a4bc865dbcd35b91b260d94217ef35ec"
"""SHA-256 of the names and bytes of the arrays that the first version froze, in sorted order."""


def test_what_the_first_version_froze_is_untouched() -> None:
    digest = hashlib.sha256()
    with np.load(GOLDEN) as golden:
        for name in sorted(name for name in golden if not name.startswith("kinds_")):
            digest.update(name.encode())
            digest.update(golden[name].tobytes())
    assert digest.hexdigest() == FIRST_SET


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("bits", FIRST_BITS)
def test_frozen_rows(bits: int, head_size: int) -> None:
    with np.load(GOLDEN) as golden:
        vectors, expected = golden[f"vectors_{head_size}"], golden[f"rows_{head_size}_{bits}"]
    codec, rotation = Codec(LLOYD_MAX, bits), make_rotation(QR, head_size, 0)
    # As a model of the first version encodes them, whose centroids are not rounded.
    rows = reference.encode(vectors, codec, rotation, unrounded(bits, head_size))
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("codec", [codec for codec in KINDS if not codec.is_signed], ids=str)
def test_frozen_rows_of_every_kind(codec: Codec, head_size: int) -> None:
    with np.load(INTEGERS if codec.is_rotated else GOLDEN) as golden:
        vectors = golden[f"kinds_vectors_{head_size}"]
        expected = golden[f"kinds_{head_size}_{codec.kind}_{codec.bits}"]
    used = tables(codec, head_size)
    assert np.array_equal(reference.encode(vectors, codec, *used), expected)
    # Rows that were frozen are rows that mean something.
    decoded = reference.decode(expected, codec, *used, head_size=head_size)
    error = np.linalg.norm(decoded - vectors, axis=-1)
    assert (error <= 0.75 * np.linalg.norm(vectors, axis=-1)).all()
    if codec.kind != U8:
        shifted = vectors.astype(np.float64) * (1 + 1e-8)
        assert np.array_equal(reference.encode(shifted, codec, *used), expected)


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize("bits", KINDS_OF[UNIFORM_SIGNED].bits)
def test_frozen_rows_of_integers(bits: int, head_size: int) -> None:
    codec = Codec(UNIFORM_SIGNED, bits)
    with np.load(INTEGERS) as golden:
        vectors = golden[f"kinds_vectors_{head_size}"]
    with np.load(GOLDEN.with_name("signed_rows.npz")) as golden:
        expected = golden[f"{head_size}_{bits}"]
    gains = gain_table(SIGNED_GAINS, is_signed=True)
    used = tables(codec, head_size)
    rows = reference.encode(vectors, codec, *used, UNBIASED, gains=gains)
    assert np.array_equal(rows, expected)
    decoded = reference.decode(expected, codec, *used, head_size=head_size)
    error = np.linalg.norm(decoded - vectors, axis=-1)
    assert (error <= 0.3 * np.linalg.norm(vectors, axis=-1)).all()


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
    book = unrounded(4, 64)
    rows = reference.encode(vectors, codec, make_rotation(QR, 64, 1), book)
    assert not np.array_equal(rows, expected)
