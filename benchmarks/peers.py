"""The contenders: one class per operator family, each a decode step of one layer as an ONNX model.

A peer has a ``name`` and a ``contender(shape)``: a model that appends one token to caches of
``shape.context`` slots, in place, and attends to all of them; batch 1, head size ``HEAD_SIZE``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, DOMAIN, ENCODE, VERSION

HEAD_SIZE = 128
SCALE = HEAD_SIZE**-0.5
MICROSOFT = "com.microsoft"
Array = npt.NDArray[np.generic]
F32, F16, U8, I8 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.UINT8, ir.DataType.INT8
I32, I64 = ir.DataType.INT32, ir.DataType.INT64


@dataclass(frozen=True)
class Shape:
    """One decode step: ``context`` tokens are attended to, the new one included."""

    query_heads: int
    kv_heads: int
    context: int


@dataclass(frozen=True)
class Contender:
    """A model, the inputs that stay, and the caches of which there are many copies."""

    name: str
    model: bytes
    constants: dict[str, Array]
    caches: dict[str, tuple[str, Array]]
    """Input name to (output name, content); bound in place."""
    custom_ops: bool = False


class Peer(Protocol):
    """What is timed."""

    @property
    def name(self) -> str:
        """As in the table."""
        ...

    def contender(self, shape: Shape) -> Contender:
        """The step as a model."""
        ...


@dataclass(frozen=True)
class TurboQuant:
    """Two encodes and one attention, caches in place."""

    key_bits: int
    value_bits: int

    @property
    def name(self) -> str:
        """As in the table."""
        return f"turboquant k{self.key_bits}v{self.value_bits}"

    def _roles(self) -> tuple[tuple[str, int], ...]:
        return (("key", self.key_bits), ("value", self.value_bits))

    def contender(self, shape: Shape) -> Contender:
        """The step as a model, with caches of arbitrary codes."""
        rng = np.random.default_rng(0)
        heads, context = shape.kv_heads, shape.context
        constants = [_constant("rotation", make_rotation("qr", HEAD_SIZE, 0))]
        books = {}
        for role, bits in self._roles():
            book = lloyd_max(bits, HEAD_SIZE)
            books[role] = (
                _constant(f"{role}_centroids", book.centroids),
                _constant(f"{role}_boundaries", book.boundaries),
            )
            constants += books[role]
        inputs = {
            name: _value(name, dtype, rank)
            for name, dtype, rank in (
                ("query", F32, 4),
                ("key", F32, 4),
                ("value", F32, 4),
                ("past_key", U8, 4),
                ("past_value", U8, 4),
                ("past_length", I64, 1),
            )
        }
        nodes = []
        for role, bits in self._roles():
            operands = [inputs[role], inputs[f"past_{role}"], inputs["past_length"], constants[0]]
            attributes = {"codec": LLOYD_MAX, "bits": bits, "norm_correction": 1}
            nodes.append(
                ir.node(
                    ENCODE, [*operands, *books[role]], attributes, domain=DOMAIN, version=VERSION
                )
            )
        present_key, present_value = (node.outputs[0] for node in nodes)
        nodes.append(
            ir.node(
                ATTENTION,
                [
                    inputs["query"],
                    present_key,
                    present_value,
                    inputs["past_length"],
                    constants[0],
                    books["key"][0],
                    constants[0],
                    books["value"][0],
                ],
                {
                    "scale": SCALE,
                    "causal": 1,
                    "sliding_window": 0,
                    "softcap": 0.0,
                    "key_codec": LLOYD_MAX,
                    "key_bits": self.key_bits,
                    "value_codec": LLOYD_MAX,
                    "value_bits": self.value_bits,
                },
                domain=DOMAIN,
                version=VERSION,
            )
        )
        caches = {}
        for role, bits in self._roles():
            layout = row_layout(Codec(LLOYD_MAX, bits), HEAD_SIZE)
            rows = rng.integers(0, 256, (1, heads, context, layout.row_bytes), dtype=np.uint8)
            rows[..., layout.code_bytes :] = np.full(1, 11, "<f2").view(np.uint8)
            caches[f"past_{role}"] = (f"present_{role}", rows)
        return Contender(
            self.name,
            _model(
                list(inputs.values()),
                nodes,
                [
                    (nodes[2].outputs[0], "output", F32),
                    (present_key, "present_key", U8),
                    (present_value, "present_value", U8),
                ],
                constants,
            ),
            {
                "query": _normal(rng, (1, shape.query_heads, 1, HEAD_SIZE)),
                "key": _normal(rng, (1, heads, 1, HEAD_SIZE)),
                "value": _normal(rng, (1, heads, 1, HEAD_SIZE)),
                "past_length": np.array([context - 1], np.int64),
            },
            caches,
            custom_ops=True,
        )


@dataclass(frozen=True)
class GroupQueryAttention:
    """ONNX Runtime's GroupQueryAttention with its shared buffer."""

    cache: str
    """float32, float16, int8 or int4, the last two with per-tensor scales."""

    @property
    def name(self) -> str:
        """As in the table."""
        return f"GroupQueryAttention {self.cache}"

    def contender(self, shape: Shape) -> Contender:
        """The step as a model, with caches of random content."""
        rng = np.random.default_rng(0)
        heads, context = shape.kv_heads, shape.context
        float_type, dtype = (F16, np.float16) if self.cache == "float16" else (F32, np.float32)
        cache_type = {"int8": I8, "int4": U8}.get(self.cache, float_type)
        inputs = [
            _value("query", float_type, 3),
            _value("key", float_type, 3),
            _value("value", float_type, 3),
            _value("past_key", cache_type, 4),
            _value("past_value", cache_type, 4),
            _value("seqlens_k", I32, 1),
            _value("total_sequence_length", I32, 0),
        ]
        attributes: dict[str, object] = {
            "num_heads": shape.query_heads,
            "kv_num_heads": heads,
            "scale": SCALE,
        }
        operands: list[ir.Value | None] = list(inputs)
        scales = []
        if self.cache in ("int8", "int4"):
            bits = int(self.cache[3:])
            attributes |= {
                "k_quant_type": "PER_TENSOR",
                "v_quant_type": "PER_TENSOR",
                "kv_cache_bit_width": bits,
            }
            step = np.full(1, 4 / (2 ** (bits - 1) - 1), np.float32)
            scales = [_constant("k_scale", step), _constant("v_scale", step)]
            operands += [None] * 5 + scales
        node = ir.node(
            "GroupQueryAttention", operands, attributes, domain=MICROSOFT, version=1, num_outputs=3
        )
        content = _cache_content(rng, (1, heads, context, HEAD_SIZE), self.cache, dtype)
        return Contender(
            self.name,
            _model(
                inputs,
                [node],
                [
                    (node.outputs[0], "output", float_type),
                    (node.outputs[1], "present_key", cache_type),
                    (node.outputs[2], "present_value", cache_type),
                ],
                scales,
            ),
            {
                "query": _normal(rng, (1, 1, shape.query_heads * HEAD_SIZE), dtype),
                "key": _normal(rng, (1, 1, heads * HEAD_SIZE), dtype),
                "value": _normal(rng, (1, 1, heads * HEAD_SIZE), dtype),
                "seqlens_k": np.array([context - 1], np.int32),
                "total_sequence_length": np.array(context, np.int32),
            },
            {"past_key": ("present_key", content), "past_value": ("present_value", content)},
        )


PEERS: tuple[Peer, ...] = (
    TurboQuant(4, 4),
    TurboQuant(3, 3),
    TurboQuant(2, 2),
    GroupQueryAttention("float32"),
    GroupQueryAttention("float16"),
    GroupQueryAttention("int8"),
    GroupQueryAttention("int4"),
)
YARDSTICK = "GroupQueryAttention float32"


def _model(
    inputs: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    outputs: Sequence[tuple[ir.Value, str, ir.DataType]],
    initializers: Sequence[ir.Value] = (),
) -> bytes:
    for value, name, dtype in outputs:
        value.name, value.type = name, ir.TensorType(dtype)
    graph = ir.Graph(
        inputs,
        [value for value, _, _ in outputs],
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 18, MICROSOFT: 1, DOMAIN: VERSION},
        name="decode_step",
    )
    return ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()


def _value(name: str, dtype: ir.DataType, rank: int) -> ir.Value:
    shape = ir.Shape([None] * rank)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)


def _constant(name: str, array: Array) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor
    )


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32
) -> Array:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _cache_content(
    rng: np.random.Generator, shape: tuple[int, ...], cache: str, dtype: npt.DTypeLike
) -> Array:
    if cache == "int8":
        return rng.integers(-127, 128, shape, dtype=np.int8)
    if cache == "int4":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    return _normal(rng, shape, dtype)
