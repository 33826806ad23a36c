"""Models of both operators for the host bridge: a decoder's attention over its caches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.cann.kernels import INT4, rotation_of, row_bytes
from tests.cann.session import Array
from tq_onnx.codec.acceptance import is_clear
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.quantise import tables_of
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.ops.singleop import (
    PRESENT_CACHES,
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
    side_names,
)

#: The operators' nodes.
OURS = ("present_key", "present_value", "attended")

OUTPUTS = ("output", "present_key", "present_value")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: ``heads`` KV heads with ``group`` query heads each."""

    head_size: int = 64
    group: int = 2
    heads: int = 2
    batch: int = 2

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.head_size)

    def empty_cache(self, slots: int) -> Array:
        return np.zeros((self.batch, self.heads, slots, self.row_bytes), np.uint8)

    def vectors(self, tokens: int, dtype: str, seed: int = 0) -> dict[str, Array]:
        """The query, key and value of new tokens; no code of theirs depends on rounding."""
        rng = np.random.default_rng(seed)
        shape = (self.batch, self.heads * self.group, tokens, self.head_size)
        made = {"query": rng.standard_normal(shape).astype(dtype)}
        for layer, kind in enumerate(("key", "value")):
            vectors = rng.standard_normal((self.batch, self.heads, tokens, self.head_size))
            book, rotation = codebook_of(INT4, self.head_size), rotation_of(self.head_size, layer)
            tables = tables_of(INT4, rotation, book, norm_correction=True)
            while (near := ~is_clear(vectors.astype(dtype), INT4, tables)).any():
                vectors[near] = rng.standard_normal((near.sum(), self.head_size))
            made[kind] = vectors.astype(dtype)
        return made


def decoder_attention(
    dtype: str = "float32",
    head_size: int = 64,
    *,
    encode: Mapping[str, Any] | None = None,
    attention: Mapping[str, Any] | None = None,
    optional: Collection[str] = (),
) -> bytes:
    """Two encodes and the attention, between two nodes of the provider's own.

    Shapes are not in the model: the operators must check whatever arrives.

    Args:
        dtype: of vectors, query and output.
        head_size: of the constants.
        encode: attributes that differ.
        attention: attributes that differ.
        optional: names of optional inputs that the keys' encode and the attention have.
    """
    constants = {
        **codec_constants(INT4, head_size, prefix="key_", layer=0),
        **codec_constants(INT4, head_size, prefix="value_", layer=1),
    }
    model = OperatorModel(dtype, constants=constants)
    # The provider has no Neg of bfloat16.
    around = "Identity" if dtype == "bfloat16" else "Neg"
    model.node(around, [model.input("query", model.dtype)], {"negated": model.dtype})
    for side, has in (("key", optional), ("value", ())):
        model.operator(
            Encode,
            {**encode_attributes(INT4), **(encode or {})},
            f"present_{side}",
            names=side_names(side),
            optional=[each for each in Encode.inputs if each.name in has],
        )
    attended = model.operator(
        Attention,
        {**attention_attributes(INT4, INT4, head_size**-0.5), **(attention or {})},
        "attended",
        names={**PRESENT_CACHES, Attention.query: "negated"},
        optional=[each for each in Attention.inputs if each.name in optional],
    )
    model.node(around, [attended], {"output": model.dtype})
    data: bytes = model.build(OUTPUTS).SerializeToString()
    return data
