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
from tq_onnx.codec.codebook import Codebook, lloyd_max
from tq_onnx.codec.presets import QR
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import LLOYD_MAX, RAW, RAW_BITS, Codec, row_layout
from tq_onnx.ops.domain import ATTENTION, BODY_OPSET, DOMAIN, ENCODE, VERSION
from tq_onnx.ops.functions import function_protos

Arrays = dict[str, np.ndarray[Any, Any]]

NONE = np.zeros(1, np.float32)
"""What stands for the tables of ``raw``."""

ATTRIBUTES: dict[str, Any] = {"scale": 0.1, "causal": 1, "sliding_window": 0, "softcap": 0.0}


@cache
def _rotation(head_size: int, layer: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return make_rotation(QR, head_size, layer)


def codec_of(bits: int) -> Codec:
    """The codec that has so many bits: ``raw`` from 16 on."""
    return Codec(RAW if bits in RAW_BITS else LLOYD_MAX, bits)


@dataclass(frozen=True)
class Site:
    """One attention layer: encoders of key and value, and attention over both caches.

    Inputs that are floats enter as float32 and are cast to ``dtype`` inside, because numpy has no
    bfloat16; the output is cast back.
    """

    key_bits: int = 4
    value_bits: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    dtype: ir.DataType = ir.DataType.FLOAT
    has_bias: bool = False
    has_sink: bool = False
    norm_correction: int = 1
    opset: int = BODY_OPSET

    @property
    def key(self) -> Codec:
        return codec_of(self.key_bits)

    @property
    def value(self) -> Codec:
        return codec_of(self.value_bits)

    @property
    def key_rotation(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return NONE if self.key.is_raw else _rotation(self.head_size, 0)

    @property
    def value_rotation(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return NONE if self.value.is_raw else _rotation(self.head_size, 1)

    @property
    def element(self) -> str:
        return str(self.dtype.numpy().name)

    def codebook(self, codec: Codec) -> Codebook:
        if codec.is_raw:
            return Codebook(NONE, NONE, 0.0)
        return lloyd_max(codec.bits, self.head_size)

    def model(self, **attributes: Any) -> onnx.ModelProto:
        """The model, function bodies included; ``attributes`` override those of ATTRIBUTES."""
        build = _Builder(self)
        past_length = build.input("past_length", ir.DataType.INT64, ["lengths"])
        caches = []
        codebooks = []
        for name, codec, rotation in (
            ("key", self.key, self.key_rotation),
            ("value", self.value, self.value_rotation),
        ):
            width = row_layout(codec, self.head_size).row_bytes
            past = build.input(f"past_{name}", ir.DataType.UINT8, ["B", self.kv_heads, "P", width])
            book = self.codebook(codec)
            rotated = build.constant(f"{name}_rotation", rotation)
            centroids = build.constant(f"{name}_centroids", book.centroids)
            boundaries = build.constant(f"{name}_boundaries", book.boundaries)
            codebooks += [rotated, centroids]
            present = build.node(
                ENCODE,
                [
                    build.float_input(name, ["B", self.kv_heads, "T", self.head_size]),
                    past,
                    past_length,
                    rotated,
                    centroids,
                    boundaries,
                ],
                {
                    "codec": codec.kind,
                    "bits": codec.bits,
                    "norm_correction": self.norm_correction,
                },
                f"present_{name}",
            )
            present.type = ir.TensorType(ir.DataType.UINT8)
            present.shape = ir.Shape(["B", self.kv_heads, "S", width])
            caches.append(present)
        inputs = [
            build.float_input("query", ["B", self.heads, "T", self.head_size]),
            *caches,
            past_length,
            *codebooks,
        ]
        if self.has_bias:
            inputs.append(build.float_input("attention_bias", ["b0", "b1", "b2", "b3"]))
        if self.has_sink:
            inputs.append(build.float_input("head_sink", [self.heads]))
        codecs = {
            "key_codec": self.key.kind,
            "key_bits": self.key.bits,
            "value_codec": self.value.kind,
            "value_bits": self.value.bits,
        }
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
            arrays[name] = reference.encode(
                vectors, codec, rotation, self.codebook(codec), element=self.element
            )
        arrays["past_length"] = np.array(past_length, np.int64)
        return arrays

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
            rows = reference.encode(
                feeds[name],
                codec,
                rotation,
                self.codebook(codec),
                bool(self.norm_correction),
                element=self.element,
            )
            presents.append(reference.append(feeds[f"past_{name}"], rows, feeds["past_length"]))
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
        inputs: list[ir.Value],
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
            site.key,
            site.value,
            has_bias=site.has_bias,
            has_sink=site.has_sink,
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
    protos = function_protos(Codec(LLOYD_MAX, 4), Codec(LLOYD_MAX, 3), has_bias=True)
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
