"""Bit planes: there and back, and byte by byte as documented."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tq_onnx.codec.bitpack import pack, unpack
from tq_onnx.codec.paged import exact_tokens, write
from tq_onnx.codec.pagewindow import PageWindow, page_width
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8
from tq_onnx.codec.spec import CODECS, KINDS, Codec, plane_widths, row_layout
from tq_onnx.codec.unrotated import FP8, Q8_0
from tq_onnx.codec.window import rounded

SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(2, 24).map(lambda n: 8 * n))
PACKED = [codec for codec in CODECS if not codec.is_raw]
"""Every codec that has codes."""


def tops(codec: Codec, head_size: int) -> np.ndarray:
    """The largest code of each coordinate."""
    return np.full(head_size, 2 ** sum(plane_widths(codec)) - 1, np.uint8)


@pytest.mark.parametrize("codec", PACKED, ids=str)
@settings(max_examples=25)
@given(data=st.data(), shape=SHAPES)
def test_round_trip(codec: Codec, data: st.DataObject, shape: tuple[int, ...]) -> None:
    layout = row_layout(codec, shape[-1])
    codes = data.draw(hnp.arrays(np.uint8, shape)) & tops(codec, shape[-1])
    packed = pack(codes, layout)
    assert packed.shape == (*shape[:-1], layout.code_bytes)
    assert packed.dtype == np.uint8
    behind = np.full((*shape[:-1], 7), 0xA5, np.uint8)
    assert np.array_equal(unpack(np.concatenate([packed, behind], axis=-1), layout), codes)


@pytest.mark.parametrize("codec", PACKED, ids=str)
@settings(max_examples=25)
@given(data=st.data(), shape=SHAPES)
def test_every_bit_is_used(codec: Codec, data: st.DataObject, shape: tuple[int, ...]) -> None:
    # Any bytes are some codes, and those codes give the bytes back: no bit is lost or shared.
    layout = row_layout(codec, shape[-1])
    rows = data.draw(hnp.arrays(np.uint8, (*shape[:-1], layout.code_bytes)))
    codes = unpack(rows, layout)
    assert (codes <= tops(codec, shape[-1])).all()
    assert np.array_equal(pack(codes, layout), rows)


def test_four_bits_by_hand() -> None:
    codes = np.arange(8, dtype=np.uint8)[None]
    packed = pack(codes, row_layout(Codec(LLOYD_MAX, 4), 8))
    assert packed.tolist() == [[0x40, 0x51, 0x62, 0x73]]


def test_two_bits_by_hand() -> None:
    codes = np.array([0, 1, 2, 3, 3, 2, 1, 0], np.uint8)
    packed = pack(codes, row_layout(Codec(LLOYD_MAX, 2), 8))
    # Byte 0 holds coordinates 0, 2, 4, 6; byte 1 holds 1, 3, 5, 7.
    assert packed.tolist() == [0b01_11_10_00, 0b00_10_11_01]


def test_three_bits_by_hand() -> None:
    codes = np.array([0, 1, 2, 3, 4, 5, 6, 7], np.uint8)
    packed = pack(codes, row_layout(Codec(LLOYD_MAX, 3), 8))
    # The low two bits as above, then one byte of the high bits, coordinate 0 lowest.
    assert packed.tolist() == [0b10_00_10_00, 0b11_01_11_01, 0b1111_0000]


def test_five_bits_by_hand() -> None:
    codes = np.array([0, 17, 2, 31, 4, 5, 22, 16], np.uint8)
    packed = pack(codes, row_layout(Codec(LLOYD_MAX, 5), 8))
    # The low nibbles as with four bits, then one byte of the high bits.
    assert packed.tolist() == [0x40, 0x51, 0x62, 0x0F, 0b1100_1010]


def test_prod_by_hand() -> None:
    # Three bits of an index and the sign above them: planes of 2, 1 and 1 bits.
    codes = np.array([0, 1, 2, 3, 4, 5, 6, 7], np.uint8) | np.array([8, 0] * 4, np.uint8)
    packed = pack(codes, row_layout(Codec(PROD, 4), 8))
    assert packed.tolist() == [0b10_00_10_00, 0b11_01_11_01, 0b1111_0000, 0b0101_0101]
    codes = np.array([0, 1, 2, 3, 3, 2, 1, 0], np.uint8) | np.array([4, 4, 0, 0] * 2, np.uint8)
    packed = pack(codes, row_layout(Codec(PROD, 3), 8))
    assert packed.tolist() == [0b01_11_10_00, 0b00_10_11_01, 0b0011_0011]


@pytest.mark.parametrize("kind", [FP8, Q8_0, U8])
def test_whole_bytes_are_the_codes(kind: str) -> None:
    codes = np.arange(240, 256, dtype=np.uint8)
    assert np.array_equal(pack(codes, row_layout(Codec(kind, KINDS[kind].bits[0]), 16)), codes)


@pytest.mark.parametrize(
    "codec", [codec for codec in PACKED if codec.bits < 8 and codec.kind != U8], ids=str
)
def test_codes_too_wide_do_not_leak(codec: Codec) -> None:
    layout = row_layout(codec, 16)
    codes = np.zeros(16, np.uint8)
    codes[0] = 2**codec.bits
    assert np.array_equal(pack(codes, layout), pack(np.zeros_like(codes), layout))


# Exact tokens in pages are what was written last, whatever was taken back before.


SLOTS, ROW, HEAD_SIZE = 64, 21, 32


@pytest.mark.parametrize(("recent", "sinks", "entries"), [(32, 4, 4), (9, 0, 1), (12, 3, 3)])
def test_entries_hold_the_last_vectors(recent: int, sinks: int, entries: int) -> None:
    width = page_width(ROW, entries, SLOTS, HEAD_SIZE)
    window = PageWindow(recent, sinks, HEAD_SIZE, SLOTS, ROW, width)
    draw = np.random.default_rng(recent)
    pages = draw.integers(0, 256, (2, 3, SLOTS, 1, width), np.uint8)
    table = np.array([2, 0])
    vectors = np.zeros((2, 1, 2 * SLOTS, HEAD_SIZE))
    end, found = 0, 0
    while end < 2 * SLOTS - 8:
        past, new = max(0, end - int(draw.integers(0, 9))), int(draw.integers(1, 9))
        end = past + new
        vectors[:, :, past:end] = draw.standard_normal((2, 1, new, HEAD_SIZE))
        for cache, sources in zip(pages, vectors, strict=True):
            rows = draw.integers(0, 256, (1, 1, new, ROW), np.uint8)
            packing = [(slice(0, new), past, table)]
            cache[:] = write(
                cache, rows, packing, window=window, vectors=sources[None, :, past:end]
            )
        calls = vectors[0][None, :, past:end], vectors[1][None, :, past:end]
        exact = exact_tokens((pages[0], pages[1]), calls, past, table, window)
        taken = exact.taken[0, 0].any(axis=0)
        expected = rounded(vectors[:, 0, :end][:, taken])
        np.testing.assert_array_equal(
            np.stack([exact.keys, exact.values])[:, 0, 0][:, taken], expected
        )
        found += int(taken[:past].sum())
    assert found > 100
