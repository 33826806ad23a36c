"""Puts into a model what its new nodes need: rotations, codebooks, function bodies, metadata.

Rotations are initializers of their own per layer (``tq.rotation.3``), codebooks are shared by all
caches of a codec and head size (``tq.centroids.4bit_d128``, ``tq.boundaries.4bit_d128``). Caches of
the codec ``raw`` have none of them: one number that nothing reads, ``tq.none``, takes their places.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tq_onnx.codec.codebook import lloyd_max
from tq_onnx.codec.rotation import make_rotation
from tq_onnx.codec.spec import Codec
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.plan import (
    METADATA_DIGEST,
    METADATA_PLAN,
    METADATA_PRESET,
    METADATA_VERSION,
    LayerPlan,
    Plan,
)
from tq_onnx.ops.domain import BODY_OPSET
from tq_onnx.ops.functions import function_protos

FUNCTION_IR_VERSION = 8
"""The first IR version with functions in a model."""


def rotation(build: Builder, plan: Plan, layer: LayerPlan, codec: Codec) -> ir.Value:
    """The rotation of a layer, float32 ``[D, D]``, for those of its caches that are rotated."""
    if codec.is_raw:
        return _none(build)

    def make() -> ir.Value:
        matrix = make_rotation(plan.rotation, layer.head_size, layer.layer, plan.seed)
        return build.constant(f"tq.rotation.{layer.layer}", matrix)

    return build.once(("rotation", layer.layer), make)


def centroids(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """The centroids of a codebook, float32 ``[L]``."""
    if codec.is_raw:
        return _none(build)
    array = lloyd_max(codec.bits, head_size).centroids
    return build.constant(f"tq.centroids.{codec.bits}bit_d{head_size}", array)


def boundaries(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """The decision boundaries of a codebook, float32 ``[L - 1]``."""
    if codec.is_raw:
        return _none(build)
    array = lloyd_max(codec.bits, head_size).boundaries
    return build.constant(f"tq.boundaries.{codec.bits}bit_d{head_size}", array)


def _none(build: Builder) -> ir.Value:
    """What stands for a table that the codec does without: an operator has no optional tables."""
    return build.constant("tq.none", np.zeros(1, np.float32))


def bake_functions(model: ir.Model, plan: Plan) -> None:
    """Adds the bodies of the operators, and the opset imports that they need.

    All layers of a plan share codecs and whether there are a bias and sinks, as functions have no
    overloads.
    The bodies import the model's own opset, which ONNX wants to be one for both; what they use
    means the same from opset 15 on, which is the oldest that a converted model has.
    """
    opset = model.opset_imports.get("", BODY_OPSET)
    layer = plan.layers[0]
    key = Codec(layer.key_codec, layer.key_bits)
    value = Codec(layer.value_codec, layer.value_bits)
    element = ir.DataType[layer.dtype].numpy().name
    for proto in function_protos(
        key, value, has_bias=layer.has_bias, has_sink=layer.has_sink, element=element
    ):
        function = ir.serde.deserialize_function(proto)
        function.opset_imports[""] = opset
        model.functions[function.identifier()] = function
        for domain, version in function.opset_imports.items():
            model.opset_imports.setdefault(domain, version)
    model.ir_version = max(model.ir_version, FUNCTION_IR_VERSION)


def bake_metadata(model: ir.Model, plan: Plan) -> None:
    """Writes into the model what was done to it."""
    model.metadata_props.update(
        {
            METADATA_PLAN: plan.to_json(),
            METADATA_PRESET: plan.preset,
            METADATA_DIGEST: plan.layout_digest,
            METADATA_VERSION: plan.tool_version,
        }
    )
