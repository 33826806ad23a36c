"""Rows of every codec kind: those of the reference pass, a bit that is wrong does not."""

from __future__ import annotations

import numpy as np
import pytest

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotated import PROD, U8
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import CODECS, Codec, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0, RAW, UNIFORM
from tq_onnx.measure.probe import EncodeNames
from tq_onnx.measure.reconstruction import largest_error, theory
from tq_onnx.measure.rowcomparison import RowFigures, compare_rows

D, N, T = 80, 2, 6
PADDING = 4
START = np.array([3])
CODED = [codec for codec in CODECS if not codec.is_raw]


def names_of(codec: Codec, offset: np.ndarray | None = None) -> EncodeNames:
    return EncodeNames(
        node="node",
        codec=codec,
        norm_correction=True,
        vectors="",
        past_length="",
        present="",
        rotation=rotation_of(codec, "qr", D, 0) if codec.is_rotated else None,
        codebook=codebook_of(codec, D) if codec.is_rotated else None,
        head_size=D,
        offset=offset,
    )


def vectors() -> np.ndarray:
    return np.random.default_rng(2).standard_normal((1, N, T, D)).astype(np.float32)


def rows_of(names: EncodeNames, x: np.ndarray) -> np.ndarray:
    rows = reference.encode(names.centered(x, START), names.codec, names.rotation, names.codebook)
    return np.concatenate([rows, np.zeros((*rows.shape[:-1], PADDING), np.uint8)], axis=-1)


def compared(rows: np.ndarray, names: EncodeNames, x: np.ndarray) -> RowFigures:
    return compare_rows(rows, x, names, START, "FLOAT", body=False)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("codec", [*CODED, Codec(RAW, 32)], ids=str)
def test_rows_of_the_reference_pass(codec: Codec, centered: bool) -> None:
    rng = np.random.default_rng(4)
    offset = rng.standard_normal((5, N, D)).astype(np.float32) if centered else None
    names, x = names_of(codec, None if codec.is_raw else offset), vectors()
    assert compared(rows_of(names, x), names, x) == RowFigures(x.size, 0, 0, 0)
    if centered and not codec.is_raw:
        plain = compared(rows_of(names, x), names_of(codec), x)
        assert plain.wrong > x.size // 4


@pytest.mark.parametrize("codec", CODED, ids=str)
def test_every_wrong_bit_of_a_code_is_seen(codec: Codec) -> None:
    names, x = names_of(codec), vectors()
    layout = row_layout(codec, D)
    for plane in layout.planes:
        for bit in range(8 if codec.kind != U8 else codec.bits):
            rows = rows_of(names, x)
            rows[0, 1, 2, plane.offset + 3] ^= 1 << bit
            found = compared(rows, names, x)
            # What an index leaves over changes all signs of its row.
            assert found.wrong >= 1
            assert found.differing == 1


@pytest.mark.parametrize("codec", [c for c in CODED if c.kind != FP8], ids=str)
def test_a_field_that_is_off_is_seen(codec: Codec) -> None:
    names, x = names_of(codec), vectors()
    for field in row_layout(codec, D).fields:
        for index in range(field.count):
            rows = rows_of(names, x)
            step = 4 if field.size == 2 else 1 << 6
            rows[0, 0, 1, field.offset + index * field.size] ^= step
            assert compared(rows, names, x).steps >= 2


@pytest.mark.parametrize("codec", CODED, ids=str)
def test_bytes_behind_a_row_are_zero(codec: Codec) -> None:
    names, x = names_of(codec), vectors()
    rows = rows_of(names, x)
    rows[0, 0, 0, -1] = 1
    assert compared(rows, names, x).wrong == 1


@pytest.mark.parametrize("codec", [Codec(UNIFORM, 4), Codec(Q8_0, 8)], ids=str)
def test_a_code_between_two_may_be_either(codec: Codec) -> None:
    names, x = names_of(codec), np.zeros((1, 1, 1, D), np.float32)
    top = 127 if codec.kind == Q8_0 else 15
    # A step is one, and the second coordinate is almost half of one; codes 0 or 1.
    x[..., 0], x[..., 1] = top, 0.5 + 1e-7
    low = np.array(x)
    low[..., 1] = 0.4999
    assert compared(rows_of(names, low), names, x).wrong == 0
    assert compared(rows_of(names, low), names, x).differing == 1
    x[..., 1] = 0.501
    assert compared(rows_of(names, low), names, x).wrong == 1


def test_halves_may_be_seen_unrounded_by_bodies() -> None:
    names, wide = names_of(Codec(FP8, 8)), vectors()
    shown, rows = wide.astype(np.float16), rows_of(names, wide)
    found = compare_rows(rows, shown, names, START, "FLOAT16", body=True)
    assert found.wrong == 0
    wide *= 1.01
    found = compare_rows(rows_of(names, wide), shown, names, START, "FLOAT16", body=True)
    assert found.wrong > 0


@pytest.mark.parametrize("codec", [c for c in CODED if not c.is_rotated], ids=str)
def test_no_row_errs_by_more_than_its_steps_allow(codec: Codec) -> None:
    x = np.random.default_rng(1).standard_normal((2000, D)) * 2.0 ** np.arange(-3, 5)[
        :, None
    ].repeat(250, axis=0)
    decoded = reference.decode(
        reference.encode(x, codec, None, None), codec, None, None, head_size=D
    )
    shares = ((x - decoded) ** 2).sum(axis=-1) / largest_error(x, codec)
    assert shares.max() <= 1
    assert shares.mean() > 0.1
    worse = decoded + 2 * (decoded - x)
    assert (((x - worse) ** 2).sum(axis=-1) / largest_error(x, codec)).max() > 1


def test_what_theory_says() -> None:
    assert theory(Codec(UNIFORM, 4), D, True) is None
    assert theory(Codec(RAW, 16), D, True) == 0
    # One bit less, and the residual estimated without bias: pi / 2 of what it was.
    three = theory(Codec("lloyd_max", 3), D, False)
    found = theory(Codec(PROD, 4), D, False)
    assert three is not None and found is not None
    assert found == pytest.approx(three * (np.pi / 2 + 1 / D), rel=0.03)
