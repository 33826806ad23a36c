"""Rows of every codec kind: those of the reference pass, a bit that is wrong does not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.codec.clear import is_clear
from tq_onnx.codec import reference
from tq_onnx.codec.acceptance import RowFigures, judge_rows
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.kind import Tables
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.rotated import U8
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import CODECS, Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, RAW, UNIFORM

D, N, T = 80, 2, 6
PADDING = 4
CODED = [codec for codec in CODECS if not codec.is_raw]


def tables(codec: Codec) -> Tables:
    if not codec.is_rotated:
        return Tables()
    return tables_of(codec, rotation_of(codec, "qr", D, 0), codebook_of(codec, D), True)


def vectors() -> np.ndarray:
    return np.random.default_rng(2).standard_normal((1, N, T, D)).astype(np.float32)


def rows_of(codec: Codec, x: np.ndarray) -> np.ndarray:
    book = codebook_of(codec, D) if codec.is_rotated else None
    rows = reference.encode(x, codec, tables(codec).rotation, book)
    return np.concatenate([rows, np.zeros((*rows.shape[:-1], PADDING), np.uint8)], axis=-1)


def compared(rows: np.ndarray, codec: Codec, x: np.ndarray) -> RowFigures:
    return judge_rows(rows, x, codec, tables(codec))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("codec", [*CODED, Codec(RAW, 32)], ids=str)
def test_rows_of_the_reference_pass(codec: Codec, centered: bool) -> None:
    given = vectors().astype(np.float64)
    x = given - np.random.default_rng(4).standard_normal(given.shape) if centered else given
    rows = rows_of(codec, x)
    found = judge_rows(rows, x, codec, tables(codec), given=given if centered else None)
    assert found == RowFigures(x.size, 0, 0, 0)
    if centered:
        assert compared(rows, codec, given).wrong > x.size // 5


@pytest.mark.parametrize("codec", CODED, ids=str)
def test_every_wrong_bit_of_a_code_is_seen(codec: Codec) -> None:
    x = vectors()
    layout = row_layout(codec, D)
    for plane in layout.planes:
        for bit in range(8 if codec.kind != U8 else codec.bits):
            rows = rows_of(codec, x)
            rows[0, 1, 2, plane.offset + 3] ^= 1 << bit
            found = compared(rows, codec, x)
            # What an index leaves over changes all signs of its row.
            assert found.differing >= found.wrong >= 1
            assert found.differing == 1 or (codec.has_sketch and plane.shift < codec.index_bits)


@pytest.mark.parametrize("codec", [c for c in CODED if c.kind != FP8], ids=str)
def test_a_field_that_is_off_is_seen(codec: Codec) -> None:
    x = vectors()
    for field in row_layout(codec, D).fields:
        for index in range(field.count):
            rows = rows_of(codec, x)
            step = 4 if field.size == 2 else 1 << 6
            rows[0, 0, 1, field.offset + index * field.size] ^= step
            assert compared(rows, codec, x).steps >= 2


@pytest.mark.parametrize("codec", CODED, ids=str)
def test_bytes_behind_a_row_are_zero(codec: Codec) -> None:
    x = vectors()
    rows = rows_of(codec, x)
    rows[0, 0, 0, -1] = 1
    assert compared(rows, codec, x).wrong == 1


@pytest.mark.parametrize("codec", [Codec(UNIFORM, 4), Codec(Q8_0, 8)], ids=str)
def test_a_code_between_two_may_be_either(codec: Codec) -> None:
    x = np.zeros((1, 1, 1, D), np.float32)
    top = 127 if codec.kind == Q8_0 else 15
    # A step is one, and the second coordinate is almost half of one; codes 0 or 1.
    x[..., 0], x[..., 1] = top, 0.5 + 1e-7
    low = np.array(x)
    low[..., 1] = 0.4999
    assert compared(rows_of(codec, low), codec, x).wrong == 0
    assert compared(rows_of(codec, low), codec, x).differing == 1
    x[..., 1] = 0.501
    assert compared(rows_of(codec, low), codec, x).wrong == 1


def test_halves_may_be_seen_unrounded_by_bodies() -> None:
    codec, wide = Codec(FP8, 8), vectors()
    shown, rows = wide.astype(np.float16), rows_of(codec, wide)
    found = judge_rows(rows, shown, codec, Tables(), element="float16", unrounded=True)
    assert found.wrong == 0
    assert judge_rows(rows, shown, codec, Tables(), element="float16").wrong > 0
    rows = rows_of(codec, wide * np.float32(1.01))
    found = judge_rows(rows, shown, codec, Tables(), element="float16", unrounded=True)
    assert found.wrong > 0


@pytest.mark.parametrize("codec", CODED, ids=str)
def test_clear_vectors_keep_their_rows_when_sums_change(codec: Codec) -> None:
    x = np.random.default_rng(3).standard_normal((200, D))
    clear = x[is_clear(x, codec, tables(codec))]
    assert 20 < len(clear) <= 200
    nudged = clear * (1 + 1e-8 * np.random.default_rng(5).standard_normal(clear.shape))
    rows, others = rows_of(codec, clear), rows_of(codec, nudged)
    if codec.is_signed:  # whose scale is float32
        code_bytes = row_layout(codec, D).code_bytes
        rows, others = rows[..., :code_bytes], others[..., :code_bytes]
    if codec.kind not in {FP8, U8}:  # whose norm is float32, and whose roundings are few
        assert np.array_equal(rows, others)


def test_vectors_on_boundaries_are_not_clear() -> None:
    codec = Codec("lloyd_max", 4)
    book, turn = codebook_of(codec, D), rotation_of(codec, "qr", D, 0).astype(np.float64)
    y = np.full(D, 0.01)
    y[3] = 0
    y[0] = 3 * float(book.boundaries[-1])
    assert not is_clear((y / np.linalg.norm(y)) @ turn.T, codec, tables(codec))
