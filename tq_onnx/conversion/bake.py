"""Put into a model what its new nodes need: rotations, codebooks, function bodies, metadata.

Rotations are initializers of their own per layer (``tq.rotation.3``; ``tq.rotation_sketch.3`` with
the projection of the codec ``prod`` beside it), codebooks are shared by all caches whose indices
have so many bits and whose heads have one size (``tq.centroids.4bit_d128``,
``tq.boundaries.4bit_d128``). Caches of a codec without them get one number that nothing reads,
``tq.none``, in their places. Gains (``tq.gains.16``) are shared by all encoders that search; keys
have matrices of error feedback per layer (``tq.key_feedback.3``), and frequencies where their
offset turns (``tq.key_frequencies.3``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.rotation import rotation_of
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.spec import Codec
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import BODY_OPSET
from tq_onnx.ops.features import features_of
from tq_onnx.ops.functions import body_codecs, body_encoders, function_protos
from tq_onnx.ops.operators import Encode
from tq_onnx.plan import (
    METADATA_DIGEST,
    METADATA_PLAN,
    METADATA_PRESET,
    METADATA_VERSION,
    ROLES,
    LayerPlan,
    Plan,
    Role,
)

FUNCTION_IR_VERSION = 8
"""The first IR version with functions in a model."""


def rotation_table(plan: Plan, layer: LayerPlan, codec: Codec) -> npt.NDArray[np.float32]:
    """Return what rotates a cache as the plan says, float32 ``[D, C]``."""
    return rotation_of(codec, plan.rotation, layer.head_size, layer.layer, plan.seed)


def rotation(build: Builder, plan: Plan, layer: LayerPlan, codec: Codec) -> ir.Value:
    """Return the rotation of a layer, float32 ``[D, C]``, for its rotated caches."""
    if not codec.is_rotated:
        return _none(build)
    name = "rotation_sketch" if codec.has_sketch else "rotation"

    def make() -> ir.Value:
        return build.constant(f"tq.{name}.{layer.layer}", rotation_table(plan, layer, codec))

    return build.once((name, layer.layer), make)


def centroids(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """Return the centroids of a codebook, float32 ``[L]``."""
    if not codec.is_rotated:
        return _none(build)
    array = codebook_of(codec, head_size).centroids
    return build.constant(f"tq.centroids.{_book(codec)}_d{head_size}", array)


def boundaries(build: Builder, codec: Codec, head_size: int) -> ir.Value:
    """Return the decision boundaries of a codebook, float32 ``[L - 1]``."""
    if not codec.is_rotated:
        return _none(build)
    array = codebook_of(codec, head_size).boundaries
    return build.constant(f"tq.boundaries.{_book(codec)}_d{head_size}", array)


def _book(codec: Codec) -> str:
    return f"{codec.kind}_{codec.bits}bit" if codec.is_signed else f"{codec.index_bits}bit"


def no_offset(build: Builder, layer: LayerPlan) -> ir.Value:
    """Return zeros ``[1, N, D]``, float32: the offset of a layer that has none."""
    sizes = (1, layer.kv_num_heads, layer.head_size)
    name = f"tq.no_offset.{sizes[1]}x{sizes[2]}"
    return build.constant(name, np.zeros(sizes, np.float32))


def gains(build: Builder, plan: Plan, codec: Codec) -> ir.Value | None:
    """Return the gains that encoders try, float32 ``[G]``; None in a model without a search."""
    if not plan.gains:
        return None
    if not codec.searches:
        return _none(build)
    name = "signed_gains" if codec.is_signed else "gains"
    table = gain_table(plan.gains, is_signed=codec.is_signed)
    return build.constant(f"tq.{name}.{plan.gains}", table)


def no_feedback(build: Builder, plan: Plan) -> ir.Value | None:
    """Return what stands for no error feedback; None where no encoder of the model has any."""
    return _none(build) if plan.feeds_back else None


def no_frequencies(build: Builder, plan: Plan) -> ir.Value | None:
    """Return what stands for an offset that does not turn; None where none of the model turns."""
    return _none(build) if plan.rotary else None


def encode_attributes(plan: Plan, layer: LayerPlan, role: Role) -> dict[str, Any]:
    """Return the attributes of the encoder of a cache.

    Where the body knows several encoders, one tells which of them a node means.
    """
    cache = layer.cache(role)
    known = body_encoders(plan.pairs, plan.feeds_back)
    chooses = len(known) > 1 and not plan.block_size
    index = known.index((cache.codec, cache.feedback))
    return {
        "codec": cache.codec.kind,
        "bits": cache.codec.bits,
        "norm_correction": plan.correction_of(cache.codec),
        **({Encode.codec_index.name: index} if chooses else {}),
        **_window(plan, layer),
    }


def attention_attributes(plan: Plan, layer: LayerPlan) -> dict[str, Any]:
    """Return the attributes of the attention of a layer.

    Where the body knows several codecs, some tell which of them a node means.
    """
    known = body_codecs(plan.pairs)
    attributes: dict[str, Any] = {
        "scale": layer.scale,
        "causal": int(layer.causal),
        "sliding_window": layer.sliding_window,
        "softcap": layer.softcap,
    }
    codecs = dict(zip(ROLES, layer.codecs, strict=True))
    for role, codec in codecs.items():
        attributes |= {f"{role}_codec": codec.kind, f"{role}_bits": codec.bits}
    if len(known) > 1 and not plan.block_size:
        attributes |= {f"{role}_codec_index": known.index(codecs[role]) for role in ROLES}
    return attributes | _window(plan, layer)


def _window(plan: Plan, layer: LayerPlan) -> dict[str, int]:
    """Return the attributes of a layer's window, and of planes; nothing in a model without both."""
    planes = {"planes": 1} if plan.planes else {}
    if not plan.has_window:
        return planes
    window = plan.window_of(layer)
    if not plan.block_size:
        rows = {"overlay_rows": window.overlay_rows}
        return {"recent": window.recent, "sinks": window.sinks, **rows, **planes}
    pages = plan.page_window if window.entries else None
    stride = 0 if pages is None else pages.row_stride
    return {"recent": window.recent, "sinks": window.sinks, "row_stride": stride}


def _none(build: Builder) -> ir.Value:
    """Return the stand-in for a table that the codec does not need: no table is optional."""
    return build.constant("tq.none", np.zeros(1, np.float32))


def bake_functions(model: ir.Model, plan: Plan) -> None:
    """Add the bodies of the operators, if they have any, and the opset imports that these need.

    One body of each operator serves all layers, as functions have no overloads: for all of their
    codecs, and with all inputs that one of them has.
    The bodies import the model's own opset, which ONNX wants to be one for both; what they use
    means the same from opset 15 on, which is the oldest that a converted model has.
    """
    if plan.block_size:
        return
    protos = function_protos(
        plan.pairs,
        features=features_of(plan),
        element=ir.DataType[plan.layers[0].dtype].numpy().name,
    )
    add_functions(model, protos)


def add_functions(model: ir.Model, protos: Iterable[onnx.FunctionProto]) -> None:
    """Add function bodies in the model's own opset, and the imports that they need."""
    opset = model.opset_imports.get("", BODY_OPSET)
    for proto in protos:
        function = ir.serde.deserialize_function(proto)
        function.opset_imports[""] = opset
        model.functions[function.identifier()] = function
        for domain, version in function.opset_imports.items():
            model.opset_imports.setdefault(domain, version)
    model.ir_version = max(model.ir_version, FUNCTION_IR_VERSION)


def bake_metadata(model: ir.Model, plan: Plan) -> None:
    """Write into the model what was done to it."""
    model.metadata_props.update(
        {
            METADATA_PLAN: plan.to_json(),
            METADATA_PRESET: plan.preset,
            METADATA_DIGEST: plan.layout_digest,
            METADATA_VERSION: plan.tool_version,
        }
    )
