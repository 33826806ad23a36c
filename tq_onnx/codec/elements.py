"""Floats to and from the bytes of a model's element type: what the rows of ``raw`` hold.

numpy knows no bfloat16, so an element type goes by its name: arrays of bfloat16 values come as
float32, or as whatever other type numpy can turn into float32.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.spec import Codec

ELEMENT_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16}
"""Bits of the element types of models."""

ELEMENTS: Final = {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}
"""Element types as this room names them, by the names in plans."""

_BFLOAT16_SHIFT: Final = 16
"""A bfloat16 is the upper half of the float32 of the same value."""


def to_bytes(vectors: npt.NDArray[np.generic], codec: Codec, element: str) -> npt.NDArray[np.uint8]:
    """Return the elements of vectors, little endian; exact, NaN included, if they have this type.

    Args:
        vectors: floats ``[..., D]``, rounded to nearest even where they are wider.

    Returns:
        uint8 ``[..., D * codec.bits / 8]``.

    Raises:
        ValueError: the codec does not have the width of the element type.
    """
    _check(codec, element)
    if element == "bfloat16":
        stored = _round_to_bfloat16(np.asarray(vectors, np.float32))
    else:
        with np.errstate(over="ignore"):
            stored = np.asarray(vectors, np.dtype(element).newbyteorder("<"))
    return np.ascontiguousarray(stored).view(np.uint8)


def from_bytes(rows: npt.NDArray[np.uint8], codec: Codec, element: str) -> npt.NDArray[np.floating]:
    """Return the floats in rows ``[..., W]``: ``[..., D]``, float16 or float32.

    Raises:
        ValueError: the codec does not have the width of the element type.
    """
    _check(codec, element)
    contiguous = np.ascontiguousarray(rows)
    if element == "bfloat16":
        upper = contiguous.view("<u2").astype(np.uint32)
        return (upper << _BFLOAT16_SHIFT).view(np.float32)
    return contiguous.view(np.dtype(element).newbyteorder("<"))


def _check(codec: Codec, element: str) -> None:
    if ELEMENT_BITS[element] != codec.bits:
        raise ValueError(f"{codec} does not hold elements of type {element}")


def _round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    half_way = np.uint32(0x7FFF) + ((bits >> _BFLOAT16_SHIFT) & 1)
    # Rounding up could turn a NaN into an infinity: it keeps its upper half, and stays quiet.
    upper = np.where(np.isnan(values), bits | np.uint32(0x400000), bits + half_way)
    stored: npt.NDArray[np.uint16] = (upper >> _BFLOAT16_SHIFT).astype("<u2")
    return stored
