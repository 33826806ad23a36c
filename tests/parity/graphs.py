"""Models of single operators, with their function bodies, as a converted model carries them.

Rotations are those of layer 0 for keys and of layer 1 for values, so that mixing them up shows.
A bfloat16 graph takes and gives float32, with casts around the operator: numpy has no bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, RAW, RAW_BITS, Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.functions import function_protos

KEY_LAYER, VALUE_LAYER = 0, 1

DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


def codec_of(bits: int) -> Codec:
    """The codec that has so many bits: ``raw`` from 16 on."""
    return Codec(RAW if bits in RAW_BITS else LLOYD_MAX, bits)


@dataclass(frozen=True)
class Attention:
    """Everything about an attention node that is fixed in the graph."""

    head_size: int = 64
    key_bits: int = 4
    value_bits: int = 4
    dtype: str = "float32"
    scale: float = 0.125
    causal: bool = True
    sliding_window: int = 0
    softcap: float = 0.0
    has_bias: bool = False
    has_sink: bool = False

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


class Builder:
    """Collects the inputs, nodes and initializers of one graph."""

    def __init__(self, dtype: str) -> None:
        self.element = dtype
        self.dtype = DTYPES[dtype]
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
        inputs: list[ir.Value],
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

    def encode(
        self, side: str, bits: int, head_size: int, *, norm_correction: bool = True
    ) -> ir.Value:
        """``<side>`` and ``past_<side>`` to ``present_<side>``."""
        codec = codec_of(bits)
        row_bytes = row_layout(codec, head_size).row_bytes
        vectors = self.floats(side, ["B", "N", "T", head_size])
        past = self.input(f"past_{side}", ir.DataType.UINT8, ["B", "N", "P", row_bytes])
        present = self.node(
            ENCODE,
            [vectors, past, self.past_length(), *self.codec(side, bits, head_size)],
            f"present_{side}",
            ir.DataType.UINT8,
            attributes={"codec": codec.kind, "bits": bits, "norm_correction": int(norm_correction)},
            domain=DOMAIN,
        )
        present.shape = ir.Shape(["B", "N", "S", row_bytes])
        return present

    def codec(self, side: str, bits: int, head_size: int) -> list[ir.Value]:
        """Rotation, centroids and boundaries."""
        if codec_of(bits).is_raw:
            return [self.constant("none", np.zeros(1, np.float32))] * 3
        book = lloyd_max(bits, head_size)
        layer = KEY_LAYER if side == "key" else VALUE_LAYER
        return [
            self.constant(f"{side}_rotation", rotation(head_size, layer)),
            self.constant(f"{side}_centroids", book.centroids),
            self.constant(f"{side}_boundaries", book.boundaries),
        ]

    def past_length(self) -> ir.Value:
        for value in self.inputs:
            if value.name == "past_length":
                return value
        return self.input("past_length", ir.DataType.INT64, ["L"])

    def attention(self, spec: Attention, key: ir.Value, value: ir.Value) -> ir.Value:
        query = self.floats("query", ["B", "H", "T", spec.head_size])
        inputs = [
            *(query, key, value, self.past_length()),
            *self.codec("key", spec.key_bits, spec.head_size)[:2],
            *self.codec("value", spec.value_bits, spec.head_size)[:2],
        ]
        if spec.has_bias:
            inputs.append(self.floats("attention_bias", ["B1", "H1", "T1", "S1"]))
        if spec.has_sink:
            inputs.append(self.floats("head_sink", ["H"]))
        attributes: dict[str, Any] = {
            "scale": spec.scale,
            "causal": int(spec.causal),
            "sliding_window": spec.sliding_window,
            "softcap": spec.softcap,
            "key_codec": spec.key.kind,
            "key_bits": spec.key_bits,
            "value_codec": spec.value.kind,
            "value_bits": spec.value_bits,
        }
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

    def model(self, outputs: list[ir.Value], spec: Attention) -> bytes:
        protos = function_protos(
            spec.key,
            spec.value,
            has_bias=spec.has_bias,
            has_sink=spec.has_sink,
            element=self.element,
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
    side: str, bits: int, head_size: int, dtype: str, *, norm_correction: bool = True
) -> bytes:
    """Inputs: side, past_<side>, past_length. Output: present_<side>."""
    builder = Builder(dtype)
    present = builder.encode(side, bits, head_size, norm_correction=norm_correction)
    return builder.model([present], Attention(head_size, bits, bits))


@cache
def attention_model(spec: Attention) -> bytes:
    """Inputs: key_cache, value_cache, past_length, query, attention_bias?, head_sink?.

    Output: output.
    """
    builder = Builder(spec.dtype)
    caches = [
        builder.input(
            f"{side}_cache",
            ir.DataType.UINT8,
            ["B", "N", "S", row_layout(codec_of(bits), spec.head_size).row_bytes],
        )
        for side, bits in (("key", spec.key_bits), ("value", spec.value_bits))
    ]
    return builder.model([builder.attention(spec, *caches)], spec)


@cache
def step_model(spec: Attention) -> bytes:
    """One layer's decode step: both encoders, and attention over what they wrote.

    Inputs: key, past_key, past_length, value, past_value, query. Outputs: output, present_key,
    present_value.
    """
    builder = Builder(spec.dtype)
    key = builder.encode("key", spec.key_bits, spec.head_size)
    value = builder.encode("value", spec.value_bits, spec.head_size)
    return builder.model([builder.attention(spec, key, value), key, value], spec)
