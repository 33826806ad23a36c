"""Which pieces of the bodies write and read the rows of a codec.

Both operators' bodies are put together from these tables (``tq_onnx.ops.bodies.operators``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from onnxscript import OnnxFunction

from tq_onnx.codec.spec import FP8, LLOYD_MAX, PROD, Q8_0, U8, UNIFORM, Codec
from tq_onnx.ops.bodies import elements, half, rotated, unrotated

Piece = OnnxFunction[..., Any]


@dataclass(frozen=True)
class Writer:
    """How the rows of a codec are made.

    Attributes:
        rows: vectors, then ``tables``, to rows.
        tables: which of the operator's tables it takes, in order.
        attributes: its own attributes.
        corrects_norm: whether it takes the operator's attribute ``norm_correction``.
    """

    rows: Piece
    tables: tuple[str, ...] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)
    corrects_norm: bool = False


@dataclass(frozen=True)
class Reader:
    """How attention reads the rows of a codec.

    Attributes:
        coordinates: rows, head size and, if the codec is rotated, centroids to coordinates.
        scales: rows and head size to the scales that multiply them; None if they are in already.
        attributes: the attributes of ``scales``.
    """

    coordinates: Piece
    scales: Piece | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)


_RAW_ROWS: Final[dict[str, Piece]] = {
    "float32": elements.float_rows,
    "float16": elements.half_rows,
    "bfloat16": elements.bfloat_rows,
}
_RAW_VALUES: Final[dict[str, Piece]] = {
    "float32": elements.floats_of_rows,
    "float16": elements.halves_of_rows,
    "bfloat16": elements.bfloats_of_rows,
}
_CENTROIDS: Final[dict[int, Piece]] = {
    2: rotated.centroids_of_2_bits,
    3: rotated.centroids_of_3_bits,
    4: rotated.centroids_of_4_bits,
    5: rotated.centroids_of_5_bits,
}
_UNIFORM: Final[dict[int, Piece]] = {
    2: unrotated.uniform_of_2_bits,
    3: unrotated.uniform_of_3_bits,
    4: unrotated.uniform_of_4_bits,
}
_PROD: Final[dict[int, Piece]] = {3: rotated.prod_of_3_bits, 4: rotated.prod_of_4_bits}
_ALL_TABLES: Final = ("rotation", "centroids", "boundaries")


def writer(codec: Codec, element: str) -> Writer:
    """How rows of the codec are made in a model of this element type."""
    if codec.kind == LLOYD_MAX:
        bits = {"bits": codec.bits}
        return Writer(rotated.lloyd_max_rows, _ALL_TABLES, bits, corrects_norm=True)
    if codec.kind == PROD:
        bits = {"index_bits": codec.index_bits}
        return Writer(rotated.prod_rows, _ALL_TABLES, bits, corrects_norm=True)
    if codec.kind == U8:
        return Writer(rotated.u8_rows, ("rotation", "boundaries"))
    if codec.kind == UNIFORM:
        return Writer(unrotated.uniform_rows, (), {"bits": codec.bits})
    if codec.kind == Q8_0:
        return Writer(unrotated.q8_0_rows)
    return Writer(unrotated.fp8_rows if codec.kind == FP8 else _RAW_ROWS[element])


def reader(codec: Codec, element: str) -> Reader:
    """How attention reads rows of the codec in a model of this element type."""
    if codec.kind == LLOYD_MAX:
        place = {"bits": codec.bits, "skip": 0}
        return Reader(_CENTROIDS[codec.bits], half.half_field, place)
    if codec.kind == U8:
        return Reader(rotated.centroids_of_bytes, rotated.float_field)
    if codec.kind == PROD:
        return Reader(_PROD[codec.bits])
    if codec.kind == UNIFORM:
        return Reader(_UNIFORM[codec.bits])
    if codec.kind == Q8_0:
        return Reader(unrotated.q8_0_values)
    return Reader(unrotated.fp8_values if codec.kind == FP8 else _RAW_VALUES[element])
