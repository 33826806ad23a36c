"""Models of both operators for the host bridge: a decoder's attention over its caches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulated_kernels import INT4, rotation_of, row_bytes
from tests.cann.session import Array
from tests.codec.clear import is_clear
from tests.operatormodels import (
    PRESENT_CACHES,
    OperatorModel,
    attention_attributes,
    codec_constants,
    encode_attributes,
    side_names,
)
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.planes import field_bytes
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.spec import Codec
from tq_onnx.ops.operators import Attention, Encode

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
    codec: Codec = INT4
    planes: bool = False

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.head_size, self.codec)

    @property
    def field_bytes(self) -> int:
        """Bytes of a row that lie apart."""
        return field_bytes(self.codec, self.head_size) if self.planes else 0

    def empty_cache(self, slots: int) -> Array:
        return np.zeros((self.batch, self.heads, slots, self.row_bytes), np.uint8)

    def vectors(self, tokens: int, dtype: str, seed: int = 0) -> dict[str, Array]:
        """The query, key and value of new tokens; no code of theirs depends on rounding."""
        rng = np.random.default_rng(seed)
        shape = (self.batch, self.heads * self.group, tokens, self.head_size)
        made = {"query": rng.standard_normal(shape).astype(dtype)}
        for layer, kind in enumerate(("key", "value")):
            vectors = rng.standard_normal((self.batch, self.heads, tokens, self.head_size))
            codec, rotation = self.codec, rotation_of(self.head_size, layer)
            book = codebook_of(codec, self.head_size)
            tables = tables_of(codec, rotation, book, norm_correction=True)
            while (near := ~is_clear(vectors.astype(dtype), codec, tables)).any():
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
    codec: Codec = INT4,
    constants: Mapping[str, Array] | None = None,
) -> bytes:
    """Two encodes and the attention, between two nodes of the provider's own.

    Shapes are not in the model: the operators must check whatever arrives.

    Args:
        dtype: of vectors, query and output.
        head_size: of the constants.
        encode: attributes that differ.
        attention: attributes that differ.
        optional: names of optional inputs that the keys' encode and the attention have.
        codec: of keys and values.
        constants: what is an initializer besides, by the names of ``side_names``; both encodes have
            those of their side.
    """
    given = constants or {}
    tables = {
        **codec_constants(codec, head_size, prefix="key_", layer=0),
        **codec_constants(codec, head_size, prefix="value_", layer=1),
        **given,
    }
    model = OperatorModel(dtype, constants=tables)
    # The provider has no Neg of bfloat16.
    around = "Identity" if dtype == "bfloat16" else "Neg"
    model.node(around, [model.input("query", model.dtype)], {"negated": model.dtype})
    for side, has in (("key", optional), ("value", ())):
        model.operator(
            Encode,
            {**encode_attributes(codec), **(encode or {})},
            f"present_{side}",
            names=side_names(side),
            optional=[
                each for each in Encode.inputs if each.name in has or f"{side}_{each.name}" in given
            ],
        )
    attended = model.operator(
        Attention,
        {**attention_attributes(codec, codec, head_size**-0.5), **(attention or {})},
        "attended",
        names={**PRESENT_CACHES, Attention.query: "negated"},
        optional=[each for each in Attention.inputs if each.name in optional or each.name in given],
    )
    model.node(around, [attended], {"output": model.dtype})
    data: bytes = model.build(OUTPUTS).SerializeToString()
    return data
