"""Bit planes: there and back, and byte by byte as documented."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tq_onnx.codec.bitpack import pack, unpack
from tq_onnx.codec.spec import LLOYD_MAX, LLOYD_MAX_BITS, Codec, row_layout

SHAPES = st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 24).map(lambda n: 8 * n))


@pytest.mark.parametrize("bits", LLOYD_MAX_BITS)
@given(data=st.data(), shape=SHAPES)
def test_round_trip(bits: int, data: st.DataObject, shape: tuple[int, ...]) -> None:
    layout = row_layout(Codec(LLOYD_MAX, bits), shape[-1])
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    packed = pack(codes, layout)
    assert packed.shape == (*shape[:-1], layout.scale_offset)
    assert packed.dtype == np.uint8
    scale = np.full((*shape[:-1], 2), 0xA5, np.uint8)
    assert np.array_equal(unpack(np.concatenate([packed, scale], axis=-1), layout), codes)


@pytest.mark.parametrize("bits", LLOYD_MAX_BITS)
@given(data=st.data(), shape=SHAPES)
def test_every_bit_is_used(bits: int, data: st.DataObject, shape: tuple[int, ...]) -> None:
    # Any bytes are some codes, and those codes give the bytes back: no bit is lost or shared.
    layout = row_layout(Codec(LLOYD_MAX, bits), shape[-1])
    rows = data.draw(hnp.arrays(np.uint8, (*shape[:-1], layout.scale_offset)))
    codes = unpack(rows, layout)
    assert (codes < 2**bits).all()
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


@pytest.mark.parametrize("bits", LLOYD_MAX_BITS)
def test_codes_too_wide_do_not_leak(bits: int) -> None:
    layout = row_layout(Codec(LLOYD_MAX, bits), 8)
    codes = np.array([2**bits, 0, 0, 0, 0, 0, 0, 0], np.uint8)
    assert not pack(codes, layout).any()
