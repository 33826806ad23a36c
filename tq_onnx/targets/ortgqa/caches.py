"""Put ONNX Runtime's GroupQueryAttention in the places of TurboQuant's operators.

The model is converted with the preset ``raw``, whose nodes have the queries, keys and values of
every dialect in one form. Each layer's three nodes are then replaced by GroupQueryAttention, whose
cache holds signed codes of 8 or 4 bits with one step per channel, or float16.

The CPU kernel has no float16 cache in a float32 model: what it would hold is made by rounding keys
and values to float16 in front of it, and keeping its cache in float16 between calls.

Refused: graphs that take no caches, that shorten them or compute with their sizes before attention,
and whatever GroupQueryAttention itself refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.channelcodes import ChannelCodes
from tq_onnx.conversion.layers import AttentionNode, ConvertedLayer, EncodeNode
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.builder import Builder
from tq_onnx.ops.domain import ATTENTION, DOMAIN, MICROSOFT
from tq_onnx.plan import METADATA_PLAN, ROLES, LayerPlan

FLOAT16: Final = "float16"
INT8: Final = "int8"
INT4: Final = "int4"

_STEPS: Final = slice(12, 14)
"""Inputs of GroupQueryAttention: steps of keys and of values."""

# numpy type of a cache, and how many coordinates an element of it holds.
STORED: Final = {FLOAT16: ("float16", 1), INT8: ("int8", 1), INT4: ("uint8", 2)}
_TYPES: Final = {
    "float16": ir.DataType.FLOAT16,
    "int8": ir.DataType.INT8,
    "uint8": ir.DataType.UINT8,
}


@dataclass(frozen=True, eq=False)
class LayerCodes:
    """The constants of the caches of a layer.

    Attributes:
        key: of keys behind their rotation.
        value: of values.
        rotation: of queries and keys, float32 ``[D, D]``; None for none.
    """

    key: ChannelCodes
    value: ChannelCodes
    rotation: npt.NDArray[np.float32] | None = None

    @property
    def both(self) -> tuple[ChannelCodes, ChannelCodes]:
        """Keys' first."""
        return self.key, self.value

    @property
    def tables(self) -> list[npt.NDArray[np.float32]]:
        """All constants, for a digest."""
        tables = [table for codes in self.both for table in (codes.offset, codes.steps)]
        return tables if self.rotation is None else [*tables, self.rotation]


def table_name(role: str, table: str, layer: int) -> str:
    """Return the name of a constant in the model."""
    return f"tq.{role}_{table}.{layer}"


def constants_in(model: ir.Model, layer: LayerPlan) -> LayerCodes:
    """Return the constants that a model has for the caches of a layer.

    Raises:
        UnsupportedModelError: its attention has no steps, or of another size.
    """
    key, value = (
        ChannelCodes(layer.key.channel_bits, _offset(model, role, layer), steps)
        for role, steps in zip(ROLES, _steps_in(model, layer), strict=True)
    )
    return LayerCodes(key, value, _table_in(model, "key", "rotation", layer.layer))


def _offset(model: ir.Model, role: str, layer: LayerPlan) -> npt.NDArray[np.float32]:
    """Return what is taken from keys or values, ``[N, D]``; zeros for nothing."""
    size = layer.kv_num_heads, layer.head_size
    offset = _table_in(model, role, "offset", layer.layer)
    if offset is not None and offset.size != np.prod(size):
        raise _unlike(f"the offset of {role}s has another size", layer)
    return np.zeros(size, np.float32) if offset is None else offset.reshape(size)


def _table_in(model: ir.Model, role: str, table: str, layer: int) -> npt.NDArray[np.float32] | None:
    """Return a constant that a model has; None if it has none of this name."""
    value = model.graph.initializers.get(table_name(role, table, layer))
    tensor = None if value is None else value.const_value
    return None if tensor is None else np.asarray(tensor.numpy(), np.float32)


def _steps_in(model: ir.Model, layer: LayerPlan) -> list[npt.NDArray[np.float32]]:
    """Return the steps ``[N, D]`` of keys and of values that the attention of a layer reads.

    Raises:
        UnsupportedModelError: it has none, or of another size.
    """
    outputs = {value.name: value for value in model.graph.outputs}
    present = outputs.get(layer.key.present)
    node = None if present is None else present.producer()
    size = (layer.kv_num_heads, layer.head_size)
    operands = () if node is None else node.inputs[_STEPS]
    tensors = [None if value is None else value.const_value for value in operands]
    tables = [np.asarray(tensor.numpy(), np.float32) for tensor in tensors if tensor is not None]
    if len(tables) != len(layer.caches) or any(table.size != np.prod(size) for table in tables):
        raise _unlike("GroupQueryAttention has no steps of each channel", layer)
    return [table.reshape(size) for table in tables]


@dataclass(frozen=True, eq=False)
class OrtLayer:
    """Replaces the nodes of one layer.

    Attributes:
        build: makes nodes.
        graph: the graph.
        converted: the layer as it is.
        cache: ``FLOAT16``, ``INT8`` or ``INT4``.
        codes: constants; None for float16.
    """

    build: Builder
    graph: ir.Graph
    converted: ConvertedLayer
    cache: str
    codes: LayerCodes | None

    def replace(self) -> tuple[ir.Value, list[ir.Value]]:
        """Return attention ``[B, H, T, D]`` and both caches, which are in their places."""
        build, layer, attention = self.build, self.converted.plan, self.converted.attention
        if self.converted.sharing:
            raise _unlike("other layers read the same caches", layer)
        if self.converted.is_shortened:
            raise _unlike("the caches are shortened before they are returned", layer)
        encoders = self.converted.encoders
        pasts = [self._retyped(encoder.past) for encoder in encoders]
        element = ir.DataType[layer.dtype]
        with build.before(attention.node, f"layers.{layer.layer}.groupquery"):
            query = self._rotated(attention.query)
            operands: list[ir.Value | None] = [self._rows(query, layer.num_heads)]
            for encoder in encoders:
                operands.append(self._rows(self._transformed(encoder), layer.kv_num_heads))
            if self.cache == FLOAT16:
                pasts = [_cast(build, past, element) for past in pasts]
            operands += [*pasts, *_lengths(build, attention)]
            operands += [None, None, None]  # tables of rotary embeddings, positions
            operands += [_given(attention.bias, 0.0), _given(attention.sink, -np.inf)]
            operands += self._steps()
            while operands[-1] is None:
                operands.pop()
            stored = element if self.cache == FLOAT16 else _TYPES[STORED[self.cache][0]]
            result, *presents = build.ops(
                "GroupQueryAttention",
                operands,
                "GroupQueryAttention",
                dtype=None,
                shapes=[None, None, None],
                domain=MICROSOFT,
                attributes=self._attributes(),
            )
            result.dtype = element
            for present in presents:
                present.dtype = stored
            if self.cache == FLOAT16:
                presents = [_cast(build, present, ir.DataType.FLOAT16) for present in presents]
            output = self._heads(result)
        attention.output.replace_all_uses_with(output, replace_graph_outputs=True)
        for encoder, present in zip(encoders, presents, strict=True):
            self._publish(encoder.output, present)
        nodes = [operator.node for operator in self.converted.operators]
        self.graph.remove(nodes, safe=True)
        return output, presents

    def _attributes(self) -> dict[str, int | float | str]:
        layer = self.converted.plan
        attributes: dict[str, int | float | str] = {
            "num_heads": layer.num_heads,
            "kv_num_heads": layer.kv_num_heads,
            "scale": layer.scale,
        }
        if layer.softcap:
            attributes["softcap"] = layer.softcap
        if layer.sliding_window:
            attributes["local_window_size"] = layer.sliding_window
        if self.codes is not None:
            attributes |= {
                "k_quant_type": "PER_CHANNEL",
                "v_quant_type": "PER_CHANNEL",
                "kv_cache_bit_width": self.codes.key.bits,
            }
        return attributes

    def _steps(self) -> list[ir.Value]:
        """Return the steps of keys and of values, ``[1, N, 1, D]``."""
        if self.codes is None:
            return []
        return [
            self._constant(role, "steps", codes.steps[None, :, None])
            for role, codes in zip(("key", "value"), self.codes.both, strict=True)
        ]

    def _rotated(self, vectors: ir.Value) -> ir.Value:
        """Multiply queries or keys ``[B, H, T, D]`` with the rotation."""
        if self.codes is None or self.codes.rotation is None:
            return vectors
        element = ir.DataType[self.converted.plan.dtype]
        matrix = self._constant("key", "rotation", self.codes.rotation.astype(element.numpy()))
        return self.build.op("MatMul", [vectors, matrix], "rotated", dtype=element)

    def _transformed(self, encoder: EncodeNode) -> ir.Value:
        """Return what goes into a cache, ``[B, N, T, D]``."""
        element = ir.DataType[self.converted.plan.dtype]
        vectors = encoder.vectors
        if self.codes is None:
            return _cast(self.build, _cast(self.build, vectors, ir.DataType.FLOAT16), element)
        codes = self.codes.key if encoder.role == "key" else self.codes.value
        if encoder.role == "key":
            vectors = self._rotated(vectors)
        if not codes.offset.any():
            return vectors
        offset = self._constant(
            encoder.role, "offset", codes.offset[None, :, None].astype(element.numpy())
        )
        return self.build.op("Sub", [vectors, offset], "centered", dtype=element)

    def _constant(self, role: str, table: str, array: npt.NDArray[np.generic]) -> ir.Value:
        name = table_name(role, table, self.converted.plan.layer)
        return self.build.constant(name, np.ascontiguousarray(array))

    def _rows(self, value: ir.Value, heads: int) -> ir.Value:
        """Put heads side by side: ``[B, H, T, D]`` to ``[B, T, H * D]``."""
        layer, build = self.converted.plan, self.build
        element, width = ir.DataType[layer.dtype], heads * layer.head_size
        turned = build.op("Transpose", [value], "turned", dtype=element, perm=[0, 2, 1, 3])
        return build.op("Reshape", [turned, build.integers(0, 0, width)], "rows", dtype=element)

    def _heads(self, value: ir.Value) -> ir.Value:
        """Split heads: ``[B, T, H * D]`` to ``[B, H, T, D]``."""
        layer, build = self.converted.plan, self.build
        element = ir.DataType[layer.dtype]
        sizes = build.integers(0, 0, layer.num_heads, layer.head_size)
        split = build.op("Reshape", [value, sizes], "split", dtype=element)
        return build.op("Transpose", [split], "heads", dtype=element, perm=[0, 2, 1, 3])

    def _publish(self, old: ir.Value, new: ir.Value) -> None:
        """Make ``new`` the graph output that ``old`` was."""
        readers = [use.node.op_type for use in old.uses() if use.node.op_type != ATTENTION]
        if readers:
            raise _unlike(
                "a node computes with the size of a cache before the cache is made",
                self.converted.plan,
            )
        outputs = self.graph.outputs
        index = next(i for i, value in enumerate(outputs) if value is old)
        old.name, new.name = f"{old.name}/replaced", old.name
        new.shape = ir.Shape([*list(old.shape or [None] * 4)[:3], self._width])
        outputs[index] = new

    def _retyped(self, past: ir.Value | None) -> ir.Value:
        """Give a cache input its new type."""
        if past is None or not any(value is past for value in self.graph.inputs):
            raise _unlike("the graph takes no caches, or changes them first", self.converted.plan)
        past.type = ir.TensorType(_TYPES[STORED[self.cache][0]])
        past.shape = ir.Shape([*list(past.shape or [None] * 4)[:3], self._width])
        return past

    @property
    def _width(self) -> int:
        return self.converted.plan.head_size // STORED[self.cache][1]


def put_caches(
    model: ir.Model,
    layers: Sequence[ConvertedLayer],
    cache: str,
    codes: Sequence[LayerCodes | None],
) -> list[tuple[ir.Value, list[ir.Value]]]:
    """Replace the attention of a ``raw`` conversion, in place, and all that only it needed.

    Args:
        model: the conversion.
        layers: its layers.
        cache: ``FLOAT16``, ``INT8`` or ``INT4``.
        codes: for ``INT8`` and ``INT4`` the constants of every layer.

    Returns:
        Of each layer what attention gives, and both caches.

    Raises:
        UnsupportedModelError: the model cannot have such caches.
    """
    build = Builder(model.graph)
    replaced = [
        OrtLayer(build, model.graph, layer, cache, constants).replace()
        for layer, constants in zip(layers, codes, strict=True)
    ]
    for identifier in [key for key in model.functions if key[0] == DOMAIN]:
        del model.functions[identifier]
    model.opset_imports.pop(DOMAIN, None)
    model.opset_imports.setdefault(MICROSOFT, 1)
    model.metadata_props.pop(METADATA_PLAN, None)
    return replaced


def _lengths(build: Builder, attention: AttentionNode) -> list[ir.Value]:
    """Return the tokens after the call less one, int32 ``[B]``, and their number, int32 ``[]``."""
    new = build.dim(attention.query, 2, "new")
    total = build.op("Add", [attention.past_length, new], "total", dtype=ir.DataType.INT64)
    last = build.op("Sub", [total, build.integers(1)], "last", dtype=ir.DataType.INT64)
    batch = build.dim(attention.query, 0, "batch")
    of_each = build.op("Expand", [last, batch], "last_of_each", dtype=ir.DataType.INT64)
    count = build.op("Gather", [total, build.number(0)], "count", dtype=ir.DataType.INT64)
    return [_cast(build, of_each, ir.DataType.INT32), _cast(build, count, ir.DataType.INT32)]


def _given(value: ir.Value | None, filler: float) -> ir.Value | None:
    """Return an optional input; None for a filler, all of whose numbers are ``filler``."""
    if value is None or value.const_value is None:
        return value
    return None if (value.const_value.numpy().astype(np.float32) == filler).all() else value


def _cast(build: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    return build.op("Cast", [value], "cast", dtype=dtype, to=dtype.value)


def _unlike(what: str, layer: LayerPlan) -> UnsupportedModelError:
    return UnsupportedModelError(what, where=f"layer {layer.layer}")
