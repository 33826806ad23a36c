"""Models of one operator of the codec, with the tables that a conversion would bake into them."""

from __future__ import annotations

from typing import Any, Final

import numpy.typing as npt

from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.ops.singleop import (
    attention_attributes,
    codec_constants,
    encode_attributes,
    single_operator,
)

INT4: Final = Codec(LLOYD_MAX, 4)
"""The codec of the kernels for CANN."""


class Tables:
    """Rotations and codebook for one head size, the same in all runs.

    Args:
        head_size: D.
    """

    def __init__(self, head_size: int) -> None:
        self.head_size = head_size
        self.codebook: Codebook = codebook_of(INT4, head_size)
        self.rotations: tuple[npt.NDArray[Any], npt.NDArray[Any]] = (
            make_rotation("qr", head_size, 0),
            make_rotation("qr", head_size, 1),
        )


def encode_model(tables: Tables, dtype: str) -> bytes:
    """Return a model of one TurboQuantEncode of keys."""
    constants = codec_constants(INT4, tables.head_size)
    return single_operator(Encode, encode_attributes(INT4), dtype, constants=constants)


def attention_model(tables: Tables, dtype: str, scale: float) -> bytes:
    """Return a model of one TurboQuantDequantAttention."""
    constants = {
        **codec_constants(INT4, tables.head_size, prefix="key_", layer=0),
        **codec_constants(INT4, tables.head_size, prefix="value_", layer=1),
    }
    attributes = attention_attributes(INT4, INT4, scale)
    return single_operator(Attention, attributes, dtype, constants=constants)
