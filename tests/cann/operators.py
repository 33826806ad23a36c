"""Models of both operators for the host bridge: a decoder's attention over its caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from tests.cann.kernels import INT4, rotation_of, row_bytes
from tests.cann.session import Array
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, VERSION

#: The operators' nodes.
OURS = ("present_key", "present_value", "attended")

OUTPUTS = ("output", "present_key", "present_value")

ENCODE_ATTRIBUTES = {"codec": "lloyd_max", "bits": 4, "norm_correction": 1}
ATTENTION_ATTRIBUTES = {
    **{"causal": 1, "sliding_window": 0, "softcap": 0.0},
    **{"key_codec": "lloyd_max", "key_bits": 4, "value_codec": "lloyd_max", "value_bits": 4},
}


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
            while (near := _near_boundary(vectors.astype(dtype), layer)).any():
                vectors[near] = rng.standard_normal((near.sum(), self.head_size))
            made[kind] = vectors.astype(dtype)
        return made


def _near_boundary(vectors: Array, layer: int) -> Array:
    """Which vectors have a coordinate so near to a boundary that float32 sums may disagree.

    Either code is right there, and which one comes out depends on the order of a sum.
    """
    wide = vectors.astype(np.float64)
    unit = wide / np.linalg.norm(wide, axis=-1, keepdims=True)
    rotated = unit @ rotation_of(vectors.shape[-1], layer).astype(np.float64)
    boundaries = codebook_of(INT4, vectors.shape[-1]).boundaries.astype(np.float64)
    near: Array = (np.abs(rotated[..., None] - boundaries) < 1e-6).any(axis=(-2, -1))
    return near


def decoder_attention(
    dtype: str = "float32",
    head_size: int = 64,
    *,
    encode: Mapping[str, Any] | None = None,
    attention: Mapping[str, Any] | None = None,
    encode_inputs: tuple[str, ...] = (),
    attention_inputs: tuple[str, ...] = (),
) -> bytes:
    """Two encodes and the attention, between two nodes of the provider's own.

    Shapes are not in the model: the operators must check whatever arrives.

    Args:
        dtype: of vectors, query and output.
        head_size: of the constants.
        encode: attributes that differ.
        attention: attributes that differ.
        encode_inputs: names of optional inputs of the keys' encode; "" leaves one out.
        attention_inputs: likewise.
    """
    element = ir.DataType[{"float32": "FLOAT"}.get(dtype, dtype.upper())]
    book = codebook_of(INT4, head_size)
    constants = {"centroids": book.centroids, "boundaries": book.boundaries}
    constants |= {f"{kind}_rotation": rotation_of(head_size, i) for i, kind in enumerate("kv")}
    types = {"query": element, "key": element, "value": element, "past_length": ir.DataType.INT64}
    types |= {"past_key": ir.DataType.UINT8, "past_value": ir.DataType.UINT8}
    types |= dict.fromkeys((*encode_inputs, *attention_inputs), ir.DataType.FLOAT)
    inputs = {k: ir.Value(name=k, type=ir.TensorType(kind)) for k, kind in types.items() if k}
    values: dict[str, ir.Value | None] = {**inputs, "": None}
    for name, array in constants.items():
        tensor = ir.tensor(array, name=name)
        made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
        made.shape = ir.Shape(array.shape)
        values[name] = made
    nodes: list[ir.Node] = []

    def add(op: str, names: Sequence[str], output: str, kind: ir.DataType, **given: Any) -> None:
        domain = DOMAIN if op in {ENCODE, ATTENTION} else ""
        node = ir.node(op, [values[name] for name in names], given, domain=domain, name=output)
        node.outputs[0].name = output
        node.outputs[0].type = ir.TensorType(kind)
        values[output] = node.outputs[0]
        nodes.append(node)

    # The provider has no Neg of bfloat16.
    around = "Identity" if dtype == "bfloat16" else "Neg"
    add(around, ["query"], "negated", element)
    for kind, optional in (("key", encode_inputs), ("value", ())):
        tables = [f"{kind[0]}_rotation", "centroids", "boundaries"]
        names = [kind, f"past_{kind}", "past_length", *tables, *optional]
        given = {**ENCODE_ATTRIBUTES, **(encode or {})}
        add(ENCODE, names, f"present_{kind}", ir.DataType.UINT8, **given)
    tables = ["k_rotation", "centroids", "v_rotation", "centroids"]
    names = ["negated", "present_key", "present_value", "past_length", *tables, *attention_inputs]
    given = {"scale": head_size**-0.5, **ATTENTION_ATTRIBUTES, **(attention or {})}
    add(ATTENTION, names, "attended", element, **given)
    add(around, ["attended"], "output", element)
    graph = ir.Graph(
        list(inputs.values()),
        [value for name in OUTPUTS if (value := values[name]) is not None],
        nodes=nodes,
        initializers=[value for name in constants if (value := values[name]) is not None],
        opset_imports={"": 18, DOMAIN: VERSION},
        name="decoder_attention",
    )
    data: bytes = ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()
    return data
