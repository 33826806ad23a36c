"""A model with ONNX Runtime's own caches in place of TurboQuant's, to compare with.

The model is converted with the preset ``raw``, whose nodes have the queries, keys and values of
every dialect in one form. Each layer's three nodes are then replaced by ONNX Runtime's
GroupQueryAttention, whose cache holds signed codes of 8 or 4 bits with one step per channel, or
float16. Nothing is written to disk.

The CPU kernel has no float16 cache in a float32 model: what it would hold is made by rounding keys
and values to float16 in front of it, and keeping its cache in float16 between calls.

Refused: graphs that take no caches, that shorten them or compute with their sizes before attention,
and whatever GroupQueryAttention itself refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.conversion.layers import AttentionNode, ConvertedLayer, converted_layers
from tq_onnx.conversion.pipeline import Prepared
from tq_onnx.errors import UnsupportedModelError, located
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.copying import copy_graph
from tq_onnx.ops.domain import ATTENTION, DOMAIN, MICROSOFT
from tq_onnx.plan import METADATA_PLAN, LayerPlan
from tq_onnx.runtime.cache import CacheSpec, bytes_per_token
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import Signature

FLOAT16: Final = "float16"
INT8: Final = "int8"
INT4: Final = "int4"

_BITS: Final = {INT8: 8, INT4: 4}
# numpy type of a cache, and how many coordinates an element of it holds.
_STORED: Final = {FLOAT16: ("float16", 1), INT8: ("int8", 1), INT4: ("uint8", 2)}
_TYPES: Final = {
    "float16": ir.DataType.FLOAT16,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
}

Steps = Sequence[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""Per layer the steps of keys and of values, ``[N, D]`` each."""


@dataclass(frozen=True, eq=False)
class OrtCacheModel:
    """A model with ONNX Runtime's caches.

    Attributes:
        model: the serialised model.
        external_data: folder of its external data.
        signature: names and caches.
    """

    model: bytes
    external_data: Path
    signature: Signature

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token of one sequence, all layers."""
        return bytes_per_token(self.signature.caches)

    def decoder(self, *, threads: int | None = None) -> Decoder:
        """Make a growing decoder of batch 1.

        Raises:
            UnsupportedModelError: this onnxruntime has no such cache.
        """
        try:
            session = make_session(
                self.model, library=False, threads=threads, external_data=self.external_data
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                "this onnxruntime has no GroupQueryAttention with such a cache for this model",
                fix="onnxruntime 1.31 has int8 and int4 in float32 and float16 models",
            ) from error
        return Decoder(session, self.signature, where="the model with ONNX Runtime's caches")


def with_ort_caches(prepared: Prepared, cache: str, steps: Steps = ()) -> OrtCacheModel:
    """Replace the attention of a ``raw`` conversion.

    Args:
        prepared: the conversion; it is not changed.
        cache: ``FLOAT16``, ``INT8`` or ``INT4``.
        steps: for ``INT8`` and ``INT4`` the steps of every layer.

    Raises:
        UnsupportedModelError: the model cannot have such caches.
    """
    model = copy_graph(prepared.loaded.model)
    build = Builder(model.graph)
    specs = []
    with located(prepared.loaded.path):
        layers = converted_layers(model, prepared.plan)
    for index, found in enumerate(layers):
        layer = found.plan
        own_steps = steps[index] if steps else None
        _replace(build, model.graph, found, cache, own_steps)
        type_name, packed = _STORED[cache]
        row = layer.head_size // packed
        specs += [CacheSpec(pair, type_name, layer.kv_num_heads, row) for pair in layer.caches]
    _forget_ours(model)
    signature = Signature(prepared.plan.interface, tuple(specs), fixed_capacity=False)
    return OrtCacheModel(
        ir.to_proto(model).SerializeToString(), prepared.loaded.path.parent, signature
    )


def _replace(
    build: Builder,
    graph: ir.Graph,
    converted: ConvertedLayer,
    cache: str,
    steps: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None,
) -> None:
    """Put GroupQueryAttention in the place of one layer's three nodes."""
    layer, attention, encoders = converted.plan, converted.attention, converted.encoders
    if converted.sharing:
        raise _unlike("other layers read the same caches", layer)
    if converted.is_shortened:
        raise _unlike("the caches are shortened before they are returned", layer)
    pasts = [_new_type(encoder.past, graph.inputs, cache, layer) for encoder in encoders]
    element = ir.DataType[layer.dtype]
    scope = f"layers.{layer.layer}.groupquery"
    with build.before(attention.node, scope):
        operands: list[ir.Value | None] = [
            _rows(build, attention.query, layer.num_heads * layer.head_size, element)
        ]
        for encoder in encoders:
            vectors = encoder.vectors
            if cache == FLOAT16:
                vectors = _cast(build, _cast(build, vectors, ir.DataType.FLOAT16), element)
            operands.append(_rows(build, vectors, layer.kv_num_heads * layer.head_size, element))
        operands += [_cast(build, past, element) if cache == FLOAT16 else past for past in pasts]
        operands += _lengths(build, attention)
        operands += [None, None, None]  # tables of rotary embeddings, positions
        operands += [_given(attention.bias, 0.0), _given(attention.sink, -np.inf)]
        attributes: dict[str, int | float | str] = {
            "num_heads": layer.num_heads,
            "kv_num_heads": layer.kv_num_heads,
            "scale": layer.scale,
        }
        if layer.softcap:
            attributes["softcap"] = layer.softcap
        if layer.sliding_window:
            attributes["local_window_size"] = layer.sliding_window
        if steps is not None:
            for role, values in zip(("key", "value"), steps, strict=True):
                name = f"tq.{cache}.{role}_steps.{layer.layer}"
                operands.append(build.constant(name, values.reshape(1, len(values), 1, -1)))
            attributes |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": _BITS[cache],
            }
        while operands[-1] is None:
            operands.pop()
        stored = element if cache == FLOAT16 else _TYPES[_STORED[cache][0]]
        result, *presents = build.ops(
            "GroupQueryAttention",
            operands,
            "GroupQueryAttention",
            dtype=None,
            shapes=[None, None, None],
            domain=MICROSOFT,
            attributes=attributes,
        )
        result.dtype = element
        for present in presents:
            present.dtype = stored
        if cache == FLOAT16:
            presents = [_cast(build, present, ir.DataType.FLOAT16) for present in presents]
        output = _heads(build, result, layer, element)
    attention.output.replace_all_uses_with(output, replace_graph_outputs=True)
    for encoder, present in zip(encoders, presents, strict=True):
        _publish(graph, encoder.output, present, layer)
    graph.remove([operator.node for operator in converted.operators], safe=True)


def _publish(graph: ir.Graph, old: ir.Value, new: ir.Value, layer: LayerPlan) -> None:
    """Make ``new`` the graph output that ``old`` was."""
    readers = [use.node.op_type for use in old.uses() if use.node.op_type != ATTENTION]
    if readers:
        raise _unlike("a node computes with the size of a cache before the cache is made", layer)
    index = next(i for i, value in enumerate(graph.outputs) if value is old)
    old.name, new.name = f"{old.name}/replaced", old.name
    shape = list(old.shape or [None] * 4)
    new.shape = ir.Shape([*shape[:3], None])
    graph.outputs[index] = new


def _new_type(
    past: ir.Value | None, inputs: Sequence[ir.Value], cache: str, layer: LayerPlan
) -> ir.Value:
    """Give a cache input its new type."""
    if past is None or not any(value is past for value in inputs):
        raise _unlike("the graph takes no caches, or changes them first", layer)
    type_name, packed = _STORED[cache]
    past.type = ir.TensorType(_TYPES[type_name])
    past.shape = ir.Shape([*list(past.shape or [None] * 4)[:3], layer.head_size // packed])
    return past


def _lengths(build: Builder, attention: AttentionNode) -> list[ir.Value]:
    """Return the tokens after the call less one, int32 ``[B]``, and their number, int32 ``[]``."""
    new = build.dim(attention.query, 2, "new")
    total = build.op("Add", [attention.past_length, new], "total", dtype=ir.DataType.INT64)
    last = build.op("Sub", [total, build.integers(1)], "last", dtype=ir.DataType.INT64)
    one = build.op("Gather", [total, build.number(0)], "count", dtype=ir.DataType.INT64)
    return [_cast(build, last, ir.DataType.INT32), _cast(build, one, ir.DataType.INT32)]


def _rows(build: Builder, value: ir.Value | None, width: int, element: ir.DataType) -> ir.Value:
    """Put heads side by side: ``[B, H, T, D]`` to ``[B, T, H * D]``."""
    turned = build.op("Transpose", [value], "turned", dtype=element, perm=[0, 2, 1, 3])
    return build.op("Reshape", [turned, build.integers(0, 0, width)], "rows", dtype=element)


def _heads(build: Builder, value: ir.Value, layer: LayerPlan, element: ir.DataType) -> ir.Value:
    """Split heads: ``[B, T, H * D]`` to ``[B, H, T, D]``."""
    sizes = build.integers(0, 0, layer.num_heads, layer.head_size)
    split = build.op("Reshape", [value, sizes], "split", dtype=element)
    return build.op("Transpose", [split], "heads", dtype=element, perm=[0, 2, 1, 3])


def _given(value: ir.Value | None, nothing: float) -> ir.Value | None:
    """Return an optional input; None for a filler, all of whose numbers are ``nothing``."""
    if value is None or value.const_value is None:
        return value
    return None if (value.const_value.numpy().astype(np.float32) == nothing).all() else value


def _cast(build: Builder, value: ir.Value | None, dtype: ir.DataType) -> ir.Value:
    return build.op("Cast", [value], "cast", dtype=dtype, to=dtype.value)


def _forget_ours(model: ir.Model) -> None:
    """Remove functions, opset and plan, which only TurboQuant's nodes needed."""
    for identifier in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[identifier]
    model.opset_imports.pop(DOMAIN, None)
    model.opset_imports.setdefault(MICROSOFT, 1)
    model.metadata_props.pop(METADATA_PLAN, None)


def _unlike(what: str, layer: LayerPlan) -> UnsupportedModelError:
    return UnsupportedModelError(what, where=f"layer {layer.layer}")
