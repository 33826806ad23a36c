"""Integers in two's complement with a scale of either sign: what other kernels rely on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.vectors import relative_error, tables, unit_vectors
from tq_onnx.codec.kind import NORM_KEPT, UNBIASED
from tq_onnx.codec.reference import decode, encode
from tq_onnx.codec.rotated import UNIFORM_SIGNED
from tq_onnx.codec.search import SIGNED_GAINS, gain_table
from tq_onnx.codec.spec import KINDS, Codec

BITS = KINDS[UNIFORM_SIGNED].bits
D = 128
GAINS = gain_table(SIGNED_GAINS, is_signed=True)


def rows_of(x: np.ndarray, bits: int, gains: np.ndarray = GAINS) -> np.ndarray:
    codec = Codec(UNIFORM_SIGNED, bits)
    return encode(x, codec, *tables(codec, x.shape[-1]), UNBIASED, gains=gains)


def integers_of_nibbles(rows: np.ndarray) -> np.ndarray:
    """What a reader of signed 4-bit integers finds: ``[n, 128]``."""
    low = (rows[:, : D // 2] << 4).view(np.int8) >> 4
    high = rows[:, : D // 2].view(np.int8) >> 4
    return np.concatenate([low, high], axis=-1)


def test_a_row_of_4_bits_is_signed_nibbles_and_a_float() -> None:
    x = 7.5 * unit_vectors(60, D)
    codec, (turn, book) = Codec(UNIFORM_SIGNED, 4), tables(Codec(UNIFORM_SIGNED, 4), D)
    rows = rows_of(x, 4)
    assert rows.shape == (60, D // 2 + 4)
    scales = np.ascontiguousarray(rows[:, D // 2 :]).view("<f4").astype(np.float64)
    assert turn is not None
    expected = scales * integers_of_nibbles(rows) @ turn.T.astype(np.float64)
    np.testing.assert_allclose(decode(rows, codec, turn, book), expected, rtol=1e-12, atol=1e-12)
    assert (scales < 0).any() and (scales > 0).any()
    np.testing.assert_allclose((expected * x).sum(-1), (x * x).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_the_negative_vector_is_the_negative_row(bits: int) -> None:
    codec, x = Codec(UNIFORM_SIGNED, bits), unit_vectors(200, D)
    one, other = (decode(rows_of(v, bits), codec, *tables(codec, D)) for v in (x, -x))
    assert np.array_equal(one, -other)


@pytest.mark.parametrize("bits", BITS)
def test_both_signs_and_several_steps_lose_less(bits: int) -> None:
    codec, x = Codec(UNIFORM_SIGNED, bits), unit_vectors(500, D)
    used = tables(codec, D)

    def error(gains: np.ndarray | None) -> float:
        return relative_error(
            x, decode(encode(x, codec, *used, NORM_KEPT, gains=gains), codec, *used)
        )

    one_step, one_sign, all_gains = error(None), error(GAINS[GAINS > 0]), error(GAINS)
    assert all_gains < one_sign < one_step


def test_tables_of_gains() -> None:
    assert np.array_equal(GAINS[::2], -GAINS[1::2])
    assert gain_table(1, is_signed=True).tolist() == [1]
    with pytest.raises(ValueError, match="of 5 gains of both signs"):
        gain_table(5, is_signed=True)


def test_frozen_rows() -> None:
    """Plane by plane, so that whoever reads rows later finds the layout here."""
    identity, x = np.eye(8, dtype=np.float32), np.arange(-4, 4)[None] / 2
    found = {}
    for bits in BITS:
        codec = Codec(UNIFORM_SIGNED, bits)
        _, book = tables(codec, 8)
        assert book is not None and book.step is not None
        gain = np.array([2 * book.step * np.linalg.norm(x)], np.float32)
        rows = encode(x, codec, identity, book, UNBIASED, gains=gain)
        found[bits] = rows.tobytes().hex()
    # -4 .. 3 in steps of 0.5. Of 4 bits, -4 and 0 share a byte. Of 3 bits, the lower two of -4, -2,
    # 0 and 2 share one, of -3, -1, 1 and 3 the next; the signs are in the last.
    assert found == {4: "0c1d2e3f0000003f", 3: "88dd0f0000003f"}
