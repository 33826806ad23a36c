"""A converted model with exposed internals: the inputs and results of its TurboQuant nodes.

``expose_internals`` makes inner values of the model graph outputs, in memory only; weights in
external data stay where they are. What a node computed can so be compared with the numpy reference
on the node's own inputs, whichever backend ran it, with nothing else in between.

A probe needs a session of its own: a value that is an output is neither fused away nor freed, and
all of them are copied in every call, so that this session shows neither the speed nor the memory of
the model as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.acceptance import RowFigures, judge_rows
from tq_onnx.codec.codebook import Codebook
from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.quantise import tables_of
from tq_onnx.codec.reference import offset_rows
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.layers import ConvertedLayer, EncodeNode, converted_layers
from tq_onnx.errors import UnsupportedModelError, located
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.plan import METADATA_PLAN, LayerPlan, Plan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import made_up_embeddings
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.runtime.session import make_session
from tq_onnx.runtime.signature import signature_of
from tq_onnx.targets.registry import target_of_plan

Array = npt.NDArray[Any]

_VIEWS: Final = frozenset({"Reshape", "Flatten", "Identity", "Squeeze", "Unsqueeze"})


@dataclass(frozen=True, eq=False)
class EncodeNames:
    """Names of what one encode node reads and writes, and its baked tables.

    Attributes:
        node: name of the node.
        codec: codec of the cache.
        norm_correction: whether the scale makes up for the lost norm.
        vectors: the new vectors.
        past_length: tokens that the cache held before.
        present: the cache.
        rotation: float32 ``[D, C]``; None for a codec that does not rotate.
        codebook: centroids and boundaries; None likewise.
        head_size: D.
        offset: what is taken from vectors, float32 ``[P, N, D]``; None in a model without.
    """

    node: str
    codec: Codec
    norm_correction: bool
    vectors: str
    past_length: str
    present: str
    rotation: npt.NDArray[np.float32] | None
    codebook: Codebook | None
    head_size: int
    offset: npt.NDArray[np.float32] | None = None

    @property
    def centroids(self) -> npt.NDArray[np.float32] | None:
        """The centroids of the codebook, if there is one."""
        return None if self.codebook is None else self.codebook.centroids

    def centered(
        self, vectors: Array, past_length: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """What is encoded of vectors ``[B, N, T, D]`` that go behind so many tokens."""
        wide: npt.NDArray[np.float64] = np.asarray(vectors, np.float64)
        if self.offset is None:
            return wide
        batch, _, new, _ = wide.shape
        return wide - offset_rows(self.offset, past_length, batch, new)

    def judge(
        self,
        rows: Array,
        vectors: Array,
        past_length: npt.NDArray[np.int64],
        dtype: str,
        *,
        unrounded: bool = False,
    ) -> RowFigures:
        """Compare new rows ``[B, N, T, W]`` with what the reference makes of the vectors.

        Args:
            rows: uint8 ``[B, N, T, W]``.
            vectors: floats ``[B, N, T, D]``.
            past_length: tokens in front of them, int64 ``[B]`` or ``[1]``.
            dtype: the model's element type, as the plan has it.
            unrounded: as for ``judge_rows``.
        """
        tables = tables_of(self.codec, self.rotation, self.codebook, self.norm_correction)
        return judge_rows(
            rows,
            self.centered(vectors, past_length),
            self.codec,
            tables,
            given=None if self.offset is None else vectors,
            element=ELEMENTS[dtype],
            unrounded=unrounded,
        )


@dataclass(frozen=True, eq=False)
class LayerNames:
    """Names of what one layer's nodes read and write.

    Attributes:
        plan: what the layer is.
        key: its encode node for keys.
        value: its encode node for values.
        node: name of the attention node.
        query: its query.
        bias: its additive mask; None if it has none.
        sink: its heads' sinks; None if it has none.
        output: its result.
    """

    plan: LayerPlan
    key: EncodeNames
    value: EncodeNames
    node: str
    query: str
    bias: str | None
    sink: str | None
    output: str

    @property
    def caches(self) -> tuple[EncodeNames, EncodeNames]:
        """Both encode nodes, keys first."""
        return self.key, self.value

    @property
    def is_shortened(self) -> bool:
        """Whether a cache is returned without some of its rows, and no call sees all of them."""
        presents = self.plan.key.present, self.plan.value.present
        return presents != (self.key.present, self.value.present)

    def watched(self) -> list[str]:
        """Outputs that the probe adds to the graph."""
        names = [self.key.vectors, self.value.vectors, self.key.past_length, self.query]
        return [*names, self.output, *(name for name in (self.bias, self.sink) if name)]


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe that is ready to be opened with or without the library.

    Attributes:
        model: the serialised model.
        external_data: folder of its external data.
        layers: the layers laid open.
        plan: the conversion.
    """

    model: bytes
    external_data: Path
    layers: tuple[LayerNames, ...]
    plan: Plan

    def decoder(
        self,
        *,
        library: bool,
        threads: int | None = None,
        exact: bool = False,
        ep: ExecutionProvider = CPU,
        most: int | None = None,
    ) -> Decoder:
        """A decoder of batch 1 whose ``watched`` holds the inner values.

        Args:
            library: as for ``make_session``, like all but the last.
            threads: threads within an operator.
            exact: whether the kernels multiply floats.
            ep: where it runs.
            most: capacity of caches that cannot grow because they are on a device.
        """
        session = make_session(
            self.model,
            library=library,
            threads=threads,
            external_data=self.external_data,
            memory_reuse=library,
            exact=exact,
            ep=ep,
        )
        watch = dict.fromkeys(name for layer in self.layers for name in layer.watched())
        signature = signature_of(session, self.plan)
        caches = {cache.pair.present for cache in signature.caches}
        return Decoder(
            session,
            signature,
            capacity=(signature.slots or most) if ep.has_own_memory else None,
            watch=[name for name in watch if name not in caches],
            embeddings=made_up_embeddings(session, self.plan.interface),
        )


def expose_internals(
    path: Path, *, loaded: LoadedModel | None = None, layers: Collection[int] | None = None
) -> Probe:
    """Make what the TurboQuant nodes of a converted model read and write its outputs, in memory.

    Args:
        path: the model file; errors name it.
        loaded: the model, if it was read already, or was made in memory; it is not changed.
        layers: indices of the layers; None for all.

    Raises:
        UnsupportedModelError: the model was not converted, or lacks nodes that its plan promises.
    """
    loaded = loaded or load(path)
    model = loaded.model.clone()
    with located(path):
        text = model.metadata_props.get(METADATA_PLAN)
        if text is None:
            raise UnsupportedModelError("this model was not converted by tq-onnx")
        plan = Plan.from_json(text)
        target = target_of_plan(plan)
        if not target.has_operators:
            raise UnsupportedModelError(
                f"a model for {target.name} has standard operators in the place of ours",
                fix="verify the same conversion without --target",
            )
        names = tuple(
            _layer(layer)
            for layer in converted_layers(model, plan)
            if layers is None or layer.plan.layer in layers
        )
    _make_outputs(model.graph, _watched(names), views=target.exposes_views)
    return Probe(ir.to_proto(model).SerializeToString(), loaded.path.parent, names, plan)


def _layer(layer: ConvertedLayer) -> LayerNames:
    attention = layer.attention
    key, value = (_encoder(encoder, layer.plan.head_size) for encoder in layer.encoders)
    return LayerNames(
        plan=layer.plan,
        key=key,
        value=value,
        node=attention.name,
        query=_name(attention.query),
        bias=_name(attention.bias),
        sink=_name(attention.sink),
        output=_name(attention.output),
    )


def _encoder(encoder: EncodeNode, head_size: int) -> EncodeNames:
    rotation = codebook = None
    if encoder.codec.is_rotated:
        rotation = _table(encoder, encoder.rotation)
        centroids = _table(encoder, encoder.centroids)
        codebook = Codebook(centroids, _table(encoder, encoder.boundaries), float("nan"))
    correction = encoder.node.attributes.get("norm_correction")
    return EncodeNames(
        node=encoder.name,
        codec=encoder.codec,
        norm_correction=correction is None or bool(correction.as_int()),
        vectors=_name(encoder.vectors),
        past_length=_name(encoder.past_length),
        present=_name(encoder.output),
        rotation=rotation,
        codebook=codebook,
        head_size=head_size,
        offset=None if encoder.offset is None else _table(encoder, encoder.offset),
    )


def _table(encoder: EncodeNode, value: ir.Value) -> npt.NDArray[np.float32]:
    if value.const_value is None:
        raise UnsupportedModelError(f"{value.name} is not baked into the model", where=encoder.name)
    return np.asarray(value.const_value.numpy(), np.float32)


@overload
def _name(value: ir.Value) -> str: ...


@overload
def _name(value: ir.Value | None) -> str | None: ...


def _name(value: ir.Value | None) -> str | None:
    return None if value is None else str(value.name)


def _watched(layers: Collection[LayerNames]) -> dict[str, ir.TypeAndShape]:
    """Outputs that the probe adds to the graph, with the types that the plan tells."""
    found: dict[str, ir.TypeAndShape] = {}
    for layer in layers:
        for name in layer.watched():
            length = name == layer.key.past_length
            dtype = ir.DataType.INT64 if length else ir.DataType[layer.plan.dtype]
            rank = 1 if length or name == layer.sink else 4
            found.setdefault(name, ir.TypeAndShape(ir.TensorType(dtype), ir.Shape([None] * rank)))
    return found


def _make_outputs(graph: ir.Graph, wanted: Mapping[str, ir.TypeAndShape], *, views: bool) -> None:
    """Make values graph outputs that are none yet.

    Args:
        graph: the graph, which is changed.
        wanted: types by name; a shape is used only where a value has none.
        views: whether a view of another value may be an output, see ``_negated_twice``.
    """
    values = {
        value.name: value
        for node in graph
        for value in (*node.inputs, *node.outputs)
        if value is not None
    }
    present = {value.name for value in graph.outputs}
    for name, given in wanted.items():
        if name in present:
            continue
        value = values[name]
        value.type = given.type
        if value.shape is None:
            value.shape = given.shape
        maker = value.producer()
        if not views and maker is not None and maker.op_type in _VIEWS and _is_float(value):
            value = _negated_twice(graph, value)
        graph.outputs.append(value)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _negated_twice(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Return the same numbers under the same name, computed and not copied.

    A view that is an output of the graph cannot share its input's memory. onnxruntime-cann 1.24.4
    then copies that without waiting for the stream on which it is computed.
    """
    name, value.name = value.name, f"{value.name}/view"
    for step in ("once", "twice"):
        node = ir.node("Neg", [value], name=f"{name}/{step}")
        (made,) = node.outputs
        made.type, made.shape = value.type, value.shape
        made.name = name if step == "twice" else f"{name}/{step}"
        graph.append(node)
        value = made
    return value
