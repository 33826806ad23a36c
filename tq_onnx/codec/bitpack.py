"""Codes to bit planes and back: the only place in Python where the bit order is written.

Input: codes uint8 ``[..., D]``, each below 2^bits. Output: bytes uint8 ``[..., code_bytes]``,
the planes of ``tq_onnx.codec.spec.RowLayout`` in byte order, without the fields. In a plane of w
bits with n = D * w / 8 bytes, byte i holds coordinate i + k * n in its bits [k * w, (k + 1) * w).
The highest bit of two's complement is turned (``Codec.sign_bit``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.spec import RowLayout


def pack(codes: npt.NDArray[np.uint8], layout: RowLayout) -> npt.NDArray[np.uint8]:
    """Pack codes; return uint8 ``[..., layout.code_bytes]``.

    Args:
        codes: uint8 ``[..., D]``; bits above the codec's are dropped.
    """
    codes = codes ^ np.uint8(layout.codec.sign_bit)
    rows = np.zeros((*codes.shape[:-1], layout.code_bytes), np.uint8)
    for plane in layout.planes:
        part = (codes >> plane.shift) & ((1 << plane.width) - 1)
        groups = part.reshape(*part.shape[:-1], 8 // plane.width, plane.size)
        for k in range(8 // plane.width):
            rows[..., plane.offset : plane.offset + plane.size] |= groups[..., k, :] << (
                k * plane.width
            )
    return rows


def unpack(rows: npt.NDArray[np.uint8], layout: RowLayout) -> npt.NDArray[np.uint8]:
    """Unpack the codes of whole rows; return uint8 ``[..., D]``.

    Args:
        rows: uint8 ``[..., W]``; bytes behind the planes are ignored.
    """
    codes = np.zeros((*rows.shape[:-1], layout.head_size), np.uint8)
    for plane in layout.planes:
        packed = rows[..., plane.offset : plane.offset + plane.size]
        mask = (1 << plane.width) - 1
        groups = [(packed >> (k * plane.width)) & mask for k in range(8 // plane.width)]
        codes |= np.concatenate(groups, axis=-1) << plane.shift
    codes ^= np.uint8(layout.codec.sign_bit)
    return codes
