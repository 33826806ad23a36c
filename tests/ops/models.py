"""Small models that hold the operators, built with onnx-ir, and the two runtimes they run in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from tq_onnx.codec import reference
from tq_onnx.codec.codebook import Codebook, codebook_of
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.spec import BITS, LLOYD_MAX, RAW, RAW_BITS, Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.functions import body_codecs, function_protos

Arrays = dict[str, np.ndarray[Any, Any]]

NONE = np.zeros(1, np.float32)
"""What stands for tables that a codec does without."""

ATTRIBUTES: dict[str, Any] = {"scale": 0.1, "causal": 1, "sliding_window": 0, "softcap": 0.0}


@cache
def _rotation(codec: Codec, head_size: int, layer: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rotation_of(codec, QR, head_size, layer) if codec.is_rotated else NONE


def codec_of(bits: int) -> Codec:
    """The ``lloyd_max`` that has so many bits, or ``raw`` from 16 on."""
    return Codec(RAW if bits in RAW_BITS else LLOYD_MAX, bits)


INT4 = codec_of(4)
INT3 = codec_of(3)
INT2 = codec_of(2)
FLOATS = codec_of(32)

CODECS = [Codec(kind, bits) for kind in BITS if kind != RAW for bits in BITS[kind]]
"""All that quantise."""


@dataclass(frozen=True)
class Site:
    """One attention layer: encoders of key and value, and attention over both caches.

    Inputs that are floats enter as float32 and are cast to ``dtype`` inside, because numpy has no
    bfloat16; the output is cast back. ``others`` are codecs of other layers that the bodies must
    know; caches have ``spare_bytes`` behind their rows.
    """

    key: Codec = INT4
    value: Codec = INT4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    dtype: ir.DataType = ir.DataType.FLOAT
    has_bias: bool = False
    has_sink: bool = False
    offset_rows: int = 0
    spare_bytes: int = 0
    others: tuple[tuple[Codec, Codec], ...] = ()
    norm_correction: int = 1
    opset: int = BODY_OPSET

    @property
    def pairs(self) -> tuple[tuple[Codec, Codec], ...]:
        return (*self.others, (self.key, self.value))

    @property
    def key_rotation(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return _rotation(self.key, self.head_size, 0)

    @property
    def value_rotation(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return _rotation(self.value, self.head_size, 1)

    def offset(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Of the keys or the values; a constant of the model."""
        rng = np.random.default_rng(len(name))
        shape = (self.offset_rows, self.kv_heads, self.head_size)
        return (2 * rng.standard_normal(shape)).astype(np.float32)

    def width(self, codec: Codec) -> int:
        """Bytes of a row of the cache."""
        return row_layout(codec, self.head_size).row_bytes + self.spare_bytes

    @property
    def element(self) -> str:
        return str(self.dtype.numpy().name)

    def codebook(self, codec: Codec) -> Codebook:
        return codebook_of(codec, self.head_size) if codec.is_rotated else Codebook(NONE, NONE, 0.0)

    def model(self, **attributes: Any) -> onnx.ModelProto:
        """The model, function bodies included; ``attributes`` override those of ATTRIBUTES."""
        build = _Builder(self)
        past_length = build.input("past_length", ir.DataType.INT64, ["lengths"])
        known = body_codecs(self.pairs)
        caches = []
        codebooks = []
        offsets = []
        for name, codec, rotation in (
            ("key", self.key, self.key_rotation),
            ("value", self.value, self.value_rotation),
        ):
            width = self.width(codec)
            past = build.input(f"past_{name}", ir.DataType.UINT8, ["B", self.kv_heads, "P", width])
            book = self.codebook(codec)
            rotated = build.constant(f"{name}_rotation", rotation)
            centroids = build.constant(f"{name}_centroids", book.centroids)
            boundaries = build.constant(f"{name}_boundaries", book.boundaries)
            codebooks += [rotated, centroids]
            offset = (
                [build.constant(f"{name}_offset", self.offset(name))] if self.offset_rows else []
            )
            offsets += offset
            present = build.node(
                ENCODE,
                [
                    build.float_input(name, ["B", self.kv_heads, "T", self.head_size]),
                    past,
                    past_length,
                    rotated,
                    centroids,
                    boundaries,
                    *offset,
                ],
                {
                    "codec": codec.kind,
                    "bits": codec.bits,
                    "norm_correction": self.norm_correction,
                }
                | ({"codec_index": known.index(codec)} if len(known) > 1 else {}),
                f"present_{name}",
            )
            present.type = ir.TensorType(ir.DataType.UINT8)
            present.shape = ir.Shape(["B", self.kv_heads, "S", width])
            caches.append(present)
        inputs: list[ir.Value | None] = [
            build.float_input("query", ["B", self.heads, "T", self.head_size]),
            *caches,
            past_length,
            *codebooks,
            build.float_input("attention_bias", list("abcd")) if self.has_bias else None,
            build.float_input("head_sink", [self.heads]) if self.has_sink else None,
            *offsets,
        ]
        while inputs[-1] is None:
            inputs.pop()
        codecs = {
            "key_codec": self.key.kind,
            "key_bits": self.key.bits,
            "value_codec": self.value.kind,
            "value_bits": self.value.bits,
        }
        if len(known) > 1:
            codecs["key_codec_index"] = known.index(self.key)
            codecs["value_codec_index"] = known.index(self.value)
        attended = build.node(ATTENTION, inputs, ATTRIBUTES | attributes | codecs, "attended")
        attended.type = ir.TensorType(self.dtype)
        attended.shape = ir.Shape(["B", self.heads, "T", self.head_size])
        return build.finish([build.cast(attended, ir.DataType.FLOAT, "output"), *caches])

    def feeds(
        self,
        rng: np.random.Generator,
        *,
        past_length: tuple[int, ...] = (0,),
        new: int = 1,
        capacity: int | None = None,
        batch: int | None = None,
    ) -> Arrays:
        """Random inputs; capacity defaults to the longest past. Bias, if any, is the caller's."""
        batch = batch or len(past_length)
        rows = max(past_length) if capacity is None else capacity
        shape = (batch, self.kv_heads, new, self.head_size)
        arrays: Arrays = {
            "query": rng.standard_normal((batch, self.heads, new, self.head_size)),
            "key": rng.standard_normal(shape) * 3,
            "value": rng.standard_normal(shape),
        }
        arrays = {name: self.rounded(array) for name, array in arrays.items()}
        for name, codec, rotation in (
            ("past_key", self.key, self.key_rotation),
            ("past_value", self.value, self.value_rotation),
        ):
            vectors = rng.standard_normal((batch, self.kv_heads, rows, self.head_size))
            past = reference.encode(
                vectors, codec, rotation, self.codebook(codec), element=self.element
            )
            arrays[name] = self.widened(past)
        arrays["past_length"] = np.array(past_length, np.int64)
        return arrays

    def widened(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows with the spare bytes of the cache behind them."""
        return np.pad(rows, [(0, 0)] * 3 + [(0, self.spare_bytes)])

    def rounded(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 values that the element type holds exactly."""
        return array.astype(self.dtype.numpy()).astype(np.float32)

    def expected(self, feeds: Arrays, **attributes: Any) -> tuple[np.ndarray[Any, Any], ...]:
        """What the oracle says: output float64, present_key, present_value."""
        presents = []
        for name, codec, rotation in (
            ("key", self.key, self.key_rotation),
            ("value", self.value, self.value_rotation),
        ):
            vectors = feeds[name]
            if self.offset_rows:
                batch, _, new, _ = vectors.shape
                lengths = feeds["past_length"]
                offset = reference.offset_rows(self.offset(name), lengths, batch, new)
                vectors = vectors - offset
            rows = reference.encode(
                vectors,
                codec,
                rotation,
                self.codebook(codec),
                bool(self.norm_correction),
                element=self.element,
            )
            past = feeds[f"past_{name}"]
            presents.append(reference.append(past, self.widened(rows), feeds["past_length"]))
        return (self.attended(feeds, *presents, **attributes), *presents)

    def attended(
        self, feeds: Arrays, key_cache: Any, value_cache: Any, **attributes: Any
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Float64 attention over given caches."""
        options = ATTRIBUTES | attributes
        bias, sink = feeds.get("attention_bias"), feeds.get("head_sink")
        return reference.attention(
            feeds["query"],
            key_cache,
            value_cache,
            feeds["past_length"],
            key=self.key,
            value=self.value,
            key_rotation=self.key_rotation,
            key_codebook=self.codebook(self.key).centroids,
            value_rotation=self.value_rotation,
            value_codebook=self.codebook(self.value).centroids,
            attention_bias=None if bias is None else bias.astype(self.dtype.numpy()),
            head_sink=sink,
            key_offset=self.offset("key") if self.offset_rows else None,
            value_offset=self.offset("value") if self.offset_rows else None,
            scale=options["scale"],
            causal=bool(options["causal"]),
            sliding_window=options["sliding_window"],
            softcap=options["softcap"],
            element=self.element,
        )


class _Builder:
    def __init__(self, site: Site) -> None:
        self.site = site
        self.inputs: list[ir.Value] = []
        self.constants: list[ir.Value] = []
        self.nodes: list[ir.Node] = []

    def input(self, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def float_input(self, name: str, shape: list[int | str]) -> ir.Value:
        value = self.input(name, ir.DataType.FLOAT, shape)
        return self.cast(value, self.site.dtype, f"{name}_cast")

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        result = self.node("Cast", [value], {"to": int(dtype)}, name, domain="")
        result.type = ir.TensorType(dtype)
        result.shape = value.shape
        return result

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        self.constants.append(value)
        return value

    def node(
        self,
        op_type: str,
        inputs: list[ir.Value] | list[ir.Value | None],
        attributes: dict[str, Any],
        output: str,
        domain: str = DOMAIN,
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain, name=output)
        node.outputs[0].name = output
        self.nodes.append(node)
        return node.outputs[0]

    def finish(self, outputs: list[ir.Value]) -> onnx.ModelProto:
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.nodes,
            initializers=self.constants,
            opset_imports={"": self.site.opset, DOMAIN: VERSION},
            name="site",
        )
        site = self.site
        functions = function_protos(
            site.pairs,
            has_bias=site.has_bias,
            has_sink=site.has_sink,
            has_offset=site.offset_rows > 0,
            element=site.element,
        )
        model = ir.Model(graph, ir_version=9, functions=[ir.from_proto(f) for f in functions])
        return ir.to_proto(model)


def function_model(
    name: str,
    types: dict[str, ir.DataType],
    shapes: dict[str, list[int | str]],
    output: ir.DataType,
) -> onnx.ModelProto:
    """A model that calls one piece of the bodies on inputs of these types."""
    protos = function_protos([(INT4, INT3)])
    values = [
        ir.Value(name=key, type=ir.TensorType(dtype), shape=ir.Shape(shapes[key]))
        for key, dtype in types.items()
    ]
    node = ir.node(name, values, domain=DOMAIN, name=name)
    (result,) = node.outputs
    result.name = "result"
    result.type = ir.TensorType(output)
    graph = ir.Graph(
        values, [result], nodes=[node], opset_imports={"": BODY_OPSET, DOMAIN: VERSION}, name=name
    )
    functions = [ir.from_proto(proto) for proto in protos]
    return ir.to_proto(ir.Model(graph, ir_version=9, functions=functions))


def run_ort(
    model: onnx.ModelProto,
    feeds: Arrays,
    level: Any = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> list[np.ndarray[Any, Any]]:
    """onnxruntime's CPU provider, no library registered: the function bodies run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def run_reference_evaluator(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray[Any, Any]]:
    """onnx.reference."""
    return ReferenceEvaluator(model).run(None, feeds)


RUNTIMES = {"onnxruntime": run_ort, "reference evaluator": run_reference_evaluator}
