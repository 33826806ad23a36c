"""Caches whose codes and fields lie apart, for kernels that take both as tensors of their own.

The tensor is uint8 ``[B, N, S, W]``, whatever is in it. With planes the bytes of each sequence hold,
R being the overlay's rows (``tq_onnx.codec.window``; 0 without one) and F the bytes of a row's
fields:

    codes     [N, S - R, W - F]
    fields    [N, S - R, F]
    overlay   [N, R, W]

So the codes of a sequence are one contiguous tensor, and so are its fields; a sequence of a batch can
be taken out, repeated or moved as before. A cache with fewer rows than R has an overlay of these.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.spec import Codec, row_layout

Bytes = npt.NDArray[np.uint8]


def field_bytes(codec: Codec, head_size: int) -> int:
    """Return the bytes of the fields of a row, which planes keep apart.

    Raises:
        ValueError: rows of this codec do not lie in planes.
    """
    if not codec.is_rotated:
        raise ValueError(f"rows of {codec} do not lie in planes, only those of codecs that rotate")
    layout = row_layout(codec, head_size)
    return layout.row_bytes - layout.code_bytes


def rows_of_planes(cache: Bytes, fields: int, overlay_rows: int = 0) -> Bytes:
    """Return planes as rows.

    Args:
        cache: uint8 ``[B, N, S, W]`` with planes.
        fields: F; 0 for a cache of rows, which is returned as it is.
        overlay_rows: R.

    Returns:
        uint8 ``[B, N, S, W]``, the overlay first.
    """
    if not fields:
        return cache
    batch, heads, slots, width = cache.shape
    overlay, codes = min(overlay_rows, slots), width - fields
    flat = cache.reshape(batch, -1)
    ends = np.cumsum([heads * (slots - overlay) * codes, heads * (slots - overlay) * fields])
    parts = np.split(flat, ends, axis=1)
    shapes = ((slots - overlay, codes), (slots - overlay, fields), (overlay, width))
    coded, behind, front = (
        part.reshape(batch, heads, *shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return np.concatenate([front, np.concatenate([coded, behind], axis=-1)], axis=2)


def planes_of_rows(rows: Bytes, fields: int, overlay_rows: int = 0) -> Bytes:
    """Return rows as planes; the inverse of ``rows_of_planes``."""
    if not fields:
        return rows
    batch, overlay = len(rows), min(overlay_rows, rows.shape[2])
    front, behind = rows[:, :, :overlay], rows[:, :, overlay:]
    codes = rows.shape[-1] - fields
    parts = (behind[..., :codes], behind[..., codes:], front)
    flat = np.concatenate([part.reshape(batch, -1) for part in parts], axis=1)
    return flat.reshape(rows.shape)
