"""Models of single operators, with their function bodies, as a converted model carries them.

Rotations are those of layer 0 for keys and of layer 1 for values, so that mixing them up shows.
A bfloat16 graph takes and gives float32, with casts around the operator: numpy has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rotation import make_rotation, rotation_of
from tq_onnx.codec.spec import KINDS, Codec, row_layout
from tq_onnx.codec.unrotated import RAW
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.functions import body_codecs, function_protos

KEY_LAYER, VALUE_LAYER = 0, 1

DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


def codec_of(bits: int | Codec) -> Codec:
    """A codec, or that of so many bits: ``lloyd_max``, and ``raw`` from 16 on."""
    if isinstance(bits, Codec):
        return bits
    return Codec(RAW if bits in KINDS[RAW].bits else LLOYD_MAX, bits)


@dataclass(frozen=True)
class Attention:
    """Everything about an attention node that is fixed in the graph."""

    head_size: int = 64
    key_bits: int | Codec = 4
    value_bits: int | Codec = 4
    dtype: str = "float32"
    scale: float = 0.125
    causal: bool = True
    sliding_window: int = 0
    softcap: float = 0.0
    has_bias: bool = False
    has_sink: bool = False
    has_offset: bool = False
    rotation: str = QR
    norm_correction: bool = True
    padding: int = 0  # bytes of a cache's rows behind those of the codec

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, but for what chooses its codecs in the body."""
        return {
            "scale": self.scale,
            "causal": int(self.causal),
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "key_codec": self.key.kind,
            "key_bits": self.key.bits,
            "value_codec": self.value.kind,
            "value_bits": self.value.bits,
        }

    @property
    def key(self) -> Codec:
        return codec_of(self.key_bits)

    @property
    def value(self) -> Codec:
        return codec_of(self.value_bits)


def rotation(head_size: int, layer: int) -> np.ndarray:
    return _rotation(head_size, layer)


@cache
def _rotation(head_size: int, layer: int) -> np.ndarray:
    return make_rotation(QR, head_size, layer)


@cache
def tables(
    codec: Codec, head_size: int, layer: int, kind: str = QR
) -> tuple[np.ndarray | None, Codebook | None]:
    """Rotation and codebook of a codec; None where it has none."""
    if not codec.is_rotated:
        return None, None
    return rotation_of(codec, kind, head_size, layer), codebook_of(codec, head_size)


class Builder:
    """Collects the inputs, nodes and initializers of one graph."""

    def __init__(self, spec: Attention) -> None:
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def input(self, name: str, dtype: ir.DataType, shape: list[str | int]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def floats(self, name: str, shape: list[str | int]) -> ir.Value:
        if self.dtype != ir.DataType.BFLOAT16:
            return self.input(name, self.dtype, shape)
        outside = self.input(name, ir.DataType.FLOAT, shape)
        return self.node(
            "Cast", [outside], f"{name}_bf16", self.dtype, attributes={"to": int(self.dtype)}
        )

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.initializers:
            self.initializers[name] = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        return self.initializers[name]

    def node(
        self,
        kind: str,
        inputs: Sequence[ir.Value | None],
        output: str,
        dtype: ir.DataType,
        *,
        attributes: dict[str, Any],
        domain: str = "",
    ) -> ir.Value:
        node = ir.node(kind, inputs, attributes, domain=domain, name=f"make_{output}")
        node.outputs[0].name = output
        node.outputs[0].type = ir.TensorType(dtype)
        self.nodes.append(node)
        return node.outputs[0]

    def width(self, codec: Codec) -> int:
        """Bytes of a cache's rows."""
        return row_layout(codec, self.spec.head_size).row_bytes + self.spec.padding

    def encode(self, side: str, codec: Codec) -> ir.Value:
        """``<side>`` and ``past_<side>`` to ``present_<side>``."""
        head_size, row_bytes = self.spec.head_size, self.width(codec)
        vectors = self.floats(side, ["B", "N", "T", head_size])
        past = self.input(f"past_{side}", ir.DataType.UINT8, ["B", "N", "P", row_bytes])
        inputs = [vectors, past, self.past_length(), *self.codec(side, codec)]
        if self.spec.has_offset:
            inputs.append(self.offset(side))
        correction = int(self.spec.norm_correction and codec.corrects_norm)
        attributes = {"codec": codec.kind, "bits": codec.bits, "norm_correction": correction}
        present = self.node(
            ENCODE,
            inputs,
            f"present_{side}",
            ir.DataType.UINT8,
            attributes=attributes | self.index("codec_index", codec),
            domain=DOMAIN,
        )
        present.shape = ir.Shape(["B", "N", "S", row_bytes])
        return present

    def index(self, name: str, codec: Codec) -> dict[str, int]:
        """Which of the body's codecs, where it knows more than one."""
        known = body_codecs([(self.spec.key, self.spec.value)])
        return {name: known.index(codec)} if len(known) > 1 else {}

    def codec(self, side: str, codec: Codec) -> list[ir.Value | None]:
        """Rotation, centroids and boundaries."""
        layer = KEY_LAYER if side == "key" else VALUE_LAYER
        turn, book = tables(codec, self.spec.head_size, layer, self.spec.rotation)
        if turn is None or book is None:
            return [self.constant("none", np.zeros(1, np.float32))] * 3
        return [
            self.constant(f"{side}_rotation", turn),
            self.constant(f"{side}_centroids", book.centroids),
            self.constant(f"{side}_boundaries", book.boundaries),
        ]

    def past_length(self) -> ir.Value:
        return self.shared("past_length", ir.DataType.INT64, ["L"])

    def offset(self, side: str) -> ir.Value:
        return self.shared(f"{side}_offset", ir.DataType.FLOAT, ["O", "N", self.spec.head_size])

    def shared(self, name: str, dtype: ir.DataType, shape: list[str | int]) -> ir.Value:
        """An input that several nodes take."""
        for value in self.inputs:
            if value.name == name:
                return value
        return self.input(name, dtype, shape)

    def attention(self, key: ir.Value, value: ir.Value) -> ir.Value:
        spec = self.spec
        query = self.floats("query", ["B", "H", "T", spec.head_size])
        inputs: list[ir.Value | None] = [
            *(query, key, value, self.past_length()),
            *self.codec("key", spec.key)[:2],
            *self.codec("value", spec.value)[:2],
        ]
        bias = sink = None
        if spec.has_bias:
            bias = self.floats("attention_bias", ["B1", "H1", "T1", "S1"])
        if spec.has_sink:
            sink = self.floats("head_sink", ["H"])
        offsets = [self.offset(side) for side in ("key", "value") if spec.has_offset]
        optional = [bias, sink, *offsets]
        while optional and optional[-1] is None:
            optional.pop()
        inputs += optional
        attributes = spec.attributes | self.index("key_codec_index", spec.key)
        attributes |= self.index("value_codec_index", spec.value)
        narrow = self.dtype == ir.DataType.BFLOAT16
        name = "output_bf16" if narrow else "output"
        output = self.node(
            ATTENTION, inputs, name, self.dtype, attributes=attributes, domain=DOMAIN
        )
        if narrow:
            to = {"to": int(ir.DataType.FLOAT)}
            output = self.node("Cast", [output], "output", ir.DataType.FLOAT, attributes=to)
        output.shape = ir.Shape(["B", "H", "T", spec.head_size])
        return output

    def model(self, outputs: list[ir.Value]) -> bytes:
        spec = self.spec
        protos = function_protos(
            [(spec.key, spec.value)],
            has_bias=spec.has_bias,
            has_sink=spec.has_sink,
            has_offset=spec.has_offset,
            element=spec.dtype,
        )
        used = {value for node in self.nodes for value in node.inputs}
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.nodes,
            initializers=[value for value in self.initializers.values() if value in used],
            opset_imports={"": BODY_OPSET, DOMAIN: VERSION},
            name="parity",
        )
        functions = [ir.serde.deserialize_function(proto) for proto in protos]
        model = ir.Model(graph, ir_version=9, functions=functions)
        return ir.to_proto(model).SerializeToString()


@cache
def encode_model(
    side: str, bits: int | Codec, head_size: int, dtype: str, *, norm_correction: bool = True
) -> bytes:
    """Inputs: side, past_<side>, past_length. Output: present_<side>."""
    spec = Attention(head_size, bits, bits, dtype, norm_correction=norm_correction)
    builder = Builder(spec)
    return builder.model([builder.encode(side, spec.key)])


@cache
def attention_model(spec: Attention) -> bytes:
    """Inputs: key_cache, value_cache, past_length, query, attention_bias?, head_sink?, and
    key_offset and value_offset if they are there.

    Output: output.
    """
    builder = Builder(spec)
    caches = [
        builder.input(f"{side}_cache", ir.DataType.UINT8, ["B", "N", "S", builder.width(codec)])
        for side, codec in (("key", spec.key), ("value", spec.value))
    ]
    return builder.model([builder.attention(*caches)])


@cache
def step_model(spec: Attention) -> bytes:
    """One layer's decode step: both encoders, and attention over what they wrote.

    Inputs: key, past_key, past_length, value, past_value, query, and the optional ones of
    ``attention_model``. Outputs: output, present_key, present_value.
    """
    builder = Builder(spec)
    key, value = builder.encode("key", spec.key), builder.encode("value", spec.value)
    return builder.model([builder.attention(key, value), key, value])
