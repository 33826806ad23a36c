"""Models of one operator of the codec, with the tables that a conversion would bake into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.kind import NORM_KEPT, UNBIASED
from tq_onnx.codec.planes import field_bytes
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.operator import Input, Operator
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.ops.singleop import (
    attention_attributes,
    codec_constants,
    encode_attributes,
    single_operator,
)

Array = npt.NDArray[Any]

INT4: Final = Codec(LLOYD_MAX, 4)

_SOFTCAP: Final = 50.0

HEADS: Final = 2
"""KV heads of a model."""


@dataclass(frozen=True)
class Coding:
    """How rows are made.

    Attributes:
        codec: of keys and values.
        searches: whether over the gains of the presets, with the unbiased scale.
        offset_rows: rows of the offsets of a calibration; 0 for none.
        planes: whether codes and scales lie apart.
        suits_cann: whether CANN's own attention may read planes; else scores have a softcap.
    """

    codec: Codec = INT4
    searches: bool = False
    offset_rows: int = 0
    planes: bool = False
    suits_cann: bool = False

    def __str__(self) -> str:
        """Return the name for checks; empty for the plainest."""
        if self == Coding():
            return ""
        gains = " searched" if self.searches else ""
        offsets = f" offsets={self.offset_rows}" if self.offset_rows else ""
        planes = " in planes" + (" for CANN" if self.suits_cann else "") if self.planes else ""
        return f" {self.codec}{gains}{offsets}{planes}"


PLAIN: Final = Coding()


class Tables:
    """What rows of one head size are made with, the same in all runs.

    Args:
        head_size: D.
        coding: how rows are made.

    Attributes:
        codebook: of the codec.
        rotations: of keys and of values, float32 ``[D, D]``.
        norm_correction: what scales make up for.
        gains: float32 ``[G]``; None without a search.
        offsets: of keys and of values, float32 ``[K, N, D]``; both None without a calibration.
        field_bytes: bytes of a row that lie apart; 0 for rows.
        softcap: of scores; 0 for none.
    """

    def __init__(self, head_size: int, coding: Coding = PLAIN) -> None:
        """Draw the tables."""
        self.head_size = head_size
        self.codec = coding.codec
        self.codebook: Codebook = codebook_of(coding.codec, head_size)
        self.rotations: tuple[Array, Array] = (
            make_rotation("qr", head_size, 0),
            make_rotation("qr", head_size, 1),
        )
        self.norm_correction = UNBIASED if coding.searches else NORM_KEPT
        self.gains = gain_table(is_signed=coding.codec.is_signed) if coding.searches else None
        self.field_bytes = field_bytes(coding.codec, head_size) if coding.planes else 0
        self.softcap = _SOFTCAP if coding.planes and not coding.suits_cann else 0.0
        rng = np.random.default_rng(head_size)
        shape = (coding.offset_rows, HEADS, head_size)
        drawn = rng.standard_normal((2, *shape)).astype(np.float32)
        self.offsets: tuple[Array | None, Array | None] = (
            (drawn[0], drawn[1]) if coding.offset_rows else (None, None)
        )


def encode_model(tables: Tables, dtype: str) -> bytes:
    """Return a model of one TurboQuantEncode of keys."""
    return _model(
        Encode,
        encode_attributes(tables.codec, norm_correction=tables.norm_correction)
        | ({"planes": 1} if tables.field_bytes else {}),
        dtype,
        codec_constants(tables.codec, tables.head_size),
        {Encode.gains: tables.gains, Encode.offset: tables.offsets[0]},
    )


def attention_model(tables: Tables, dtype: str, scale: float) -> bytes:
    """Return a model of one TurboQuantDequantAttention."""
    codec, size = tables.codec, tables.head_size
    return _model(
        Attention,
        attention_attributes(codec, codec, scale)
        | ({"planes": 1, "softcap": tables.softcap} if tables.field_bytes else {}),
        dtype,
        {
            **codec_constants(codec, size, prefix="key_", layer=0),
            **codec_constants(codec, size, prefix="value_", layer=1),
        },
        dict(zip((Attention.key_offset, Attention.value_offset), tables.offsets, strict=True)),
    )


def _model(
    operator: type[Operator],
    attributes: Mapping[str, Any],
    dtype: str,
    constants: Mapping[str, Array],
    optional: Mapping[Input, Array | None],
) -> bytes:
    """Return a model of one operator, without the optional inputs that are None."""
    tables = {each: table for each, table in optional.items() if table is not None}
    named = {each.name: table for each, table in tables.items()}
    return single_operator(
        operator, attributes, dtype, constants={**constants, **named}, optional=list(tables)
    )
