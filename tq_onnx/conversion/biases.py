"""Find the part of keys and values that the weights alone tell: the biases of their projections.

A key is K(p) = R(p) (W x + b), with R(p) the rotary embedding, or nothing, at position p. The part
R(p) b is the same in every text. Where b is long, as in Qwen2, a code spends its bits on it; so it
becomes the offset of the layer (``tq_onnx.conversion.scales``), which costs no accuracy whatever it
is: encoders take it away and attention gives it back.

From the new keys of a layer backwards through nodes that are linear in them, everything but
constants is set to zero, and the graph is evaluated: what it returns is R(p) b, p = 0, 1, ... With
other numbers in the places of the zeros, the same for all tokens, it returns keys of a text of one
token repeated, which tell how the layer turns its keys (``tq_onnx.codec.rotaryangles``). Positions
far behind those must turn by the same angles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.rotaryangles import (
    LARGEST_RESIDUAL,
    POSITIONS,
    STILL,
    Rotary,
    measure_rotary,
)
from tq_onnx.codec.spec import MAX_HEAD_SIZE
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.graph.constants import attribute_float
from tq_onnx.graph.dependence import dependents
from tq_onnx.graph.evaluate import Array, evaluate, turned
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import rank, static_dim
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.plan import (
    CACHE_POSITIONS,
    NEW_LENGTHS,
    PAST_LENGTH,
    ROLES,
    TOTAL_LENGTH,
    Interface,
    Role,
)
from tq_onnx.recognise.match import Recognition
from tq_onnx.recognise.operands import Vectors
from tq_onnx.recognise.positions import table_positions
from tq_onnx.recognise.site import Site

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

LEAST: Final = 0.1
"""Of the square root of D, which keys are about as long as: shorter biases are left in the keys,
where they are at most 1 % of the energy."""
LONG: Final = 2.0
"""Of the square root of D: biases that ruin 4-bit keys if they stay there."""

_FAR: Final = (1_000, 5_000, 40_000, 200_000)
"""Positions at which keys must turn by the angles of the first ones, where a graph has them."""
_MOST_CALLS: Final = 64
"""Of graphs that take a number of tokens that is fixed."""
_ROWS_RANK: Final = 2
_TEXTS: Final = 3
"""Coordinates in which one key is zero are not so in others."""

_SHAPES: Final = frozenset(
    {
        *("Identity", "Cast", "Neg", "Unsqueeze", "Squeeze", "Slice", "Split", "Reshape"),
        *("Transpose", "Expand", "Gather", "Flatten", "Div", "Pad", "Tile"),
        *("RotaryEmbedding", f"{MICROSOFT}.RotaryEmbedding"),
    }
)
"""Linear in their first input, if no other depends on the text."""
_SUMS: Final = frozenset({"Add", "Sub", "Sum", "Concat"})
"""Linear in all inputs together."""
_PRODUCTS: Final = frozenset({"Mul", "MatMul"})
"""Linear in one input, if no other depends on the text."""
_BIAS_SLOTS: Final[Mapping[str, int]] = {
    "Gemm": 2,
    "LayerNormalization": 2,
    f"{MICROSOFT}.MatMulNBits": 5,
    f"{MICROSOFT}.DynamicQuantizeMatMul": 4,
    f"{MICROSOFT}.MatMulIntegerToFloat": 6,
}
"""The input that an operator adds to its result."""


@dataclass(frozen=True, eq=False)
class LayerBias:
    """The constant parts of a layer's keys and values."""

    layer: int
    key: Float64  #: of the keys before they turn, ``[N, D]``
    value: Float64  #: of the values, ``[N, D]``
    #: how keys turn; None where that is not known, or keys would lose their places
    rotary: Rotary | None
    reason: str = ""  #: why it is not, a clause; empty if it is

    @property
    def norm(self) -> float:
        """The longest bias of the keys of a head."""
        return _norm(self.key)

    @property
    def is_long(self) -> bool:
        """True if quantised keys lose much by it."""
        return self.norm > LONG * float(np.sqrt(self.key.shape[-1]))


@dataclass(frozen=True, eq=False)
class Biases:
    """The constant parts of all layers whose keys or values have any that matter."""

    layers: Mapping[int, LayerBias] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """The longest bias that offsets take from the keys of a head, 0 without any."""
        biases = (bias.norm for bias in self.layers.values() if bias.rotary is not None)
        return max(biases, default=0.0)

    @property
    def turning(self) -> frozenset[int]:
        """The layers whose keys have an offset that turns with their slots."""
        return frozenset(
            index
            for index, bias in self.layers.items()
            if bias.rotary is not None and bias.rotary.frequencies.any() and bias.key.any()
        )

    def offsets(
        self,
        layer: int,
        center_from: int = 0,
        *,
        key_scale: Float32 | None = None,
        turns: bool = True,
    ) -> tuple[Float32, Float32]:
        """Return the offsets of a layer's keys and values; see ``Calibration.offsets``."""
        del center_from  # first tokens have the same biases
        bias = self.layers[layer]
        keys = np.zeros((1, *bias.key.shape)) if bias.rotary is None else bias.key[None]
        if bias.rotary is not None and layer in self.turning:
            keys = bias.rotary.turned_mean(bias.key) if turns else np.zeros_like(keys)
        scaled = keys if key_scale is None else keys / key_scale
        return scaled.astype(np.float32), bias.value[None].astype(np.float32)

    def frequencies(self, layer: int) -> Float32:
        """Return the angles by which the offset of a layer's keys turns, radians a slot ``[D]``."""
        bias = self.layers[layer]
        angles = np.float32(0) if bias.rotary is None else bias.rotary.frequencies
        return np.where(bias.key.any(axis=0), angles, np.float32(0))


NO_BIASES: Final = Biases()


def find_biases(model: ir.Model, recognition: Recognition) -> Biases:
    """Find the constant parts of keys and values in an original."""
    interface = recognition.interface
    if interface is None:
        return NO_BIASES
    search = _Search(model, interface, recognition)
    layers = (search.layer(site) for site in recognition.sites)
    return Biases({bias.layer: bias for bias in layers if bias is not None})


def expect_centered(biases: Biases, compressed: Collection[int], *, takes_no_offsets: str) -> None:
    """Refuse long biases of quantised keys that no offset takes away.

    Args:
        takes_no_offsets: why no layer can have an offset, a clause; empty if they can.
    """
    for layer in sorted(compressed & biases.layers.keys()):
        bias = biases.layers[layer]
        reason = takes_no_offsets or bias.reason
        if reason and bias.is_long:
            raise UnsupportedModelError(
                f"the keys have a bias of norm {bias.norm:.0f}, which would ruin quantized keys, "
                f"and {reason}",
                where=f"layer {layer}",
                fix="convert for the CPU (no `target`)"
                if takes_no_offsets
                else "give `calibrate`, or leave such layers uncompressed with `layers`",
            )


def constant_rows(model: ir.Model) -> Iterator[Float64]:
    """Yield the constants of a graph that are no longer than a head, and no single numbers."""
    values = {
        value.name: value.const_value
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        for value in node.inputs
        if value is not None and value.const_value is not None
    }
    seen = set()
    for tensor in values.values():
        if tensor is None or not tensor.dtype.is_floating_point():
            continue
        if not 1 < tensor.size <= MAX_HEAD_SIZE or max(tensor.shape.numpy()) != tensor.size:
            continue
        row = np.asarray(tensor.numpy(), np.float64).reshape(-1)
        if row.tobytes() not in seen:
            seen.add(row.tobytes())
            yield row


def _norm(vectors: Float64) -> float:
    return float(np.linalg.norm(vectors, axis=-1).max(initial=0.0))


@dataclass(frozen=True, eq=False)
class _Sources:
    """Where new rows stop to be linear, going backwards."""

    #: what stands there, and what its node adds to it; None for nothing
    values: Mapping[ir.Value, Array | None]
    constants: tuple[ir.Value, ...]  #: what is added further on
    by_attention: Array | None  #: what attention itself adds; None for nothing

    @property
    def biases(self) -> list[Array]:
        """All numbers that are added."""
        tensors = (value.const_value for value in self.constants)
        added = [tensor.numpy() for tensor in tensors if tensor is not None]
        operators = [*self.values.values(), self.by_attention]
        return [*added, *(bias for bias in operators if bias is not None)]


class _Search:
    """Evaluates the constant parts of one model."""

    def __init__(self, model: ir.Model, interface: Interface, recognition: Recognition) -> None:
        self._model, self._interface = model, interface
        caches = [cache for site in recognition.sites for cache in (site.key, site.value)]
        self._pasts = {cache.past for cache in caches if cache.past is not None}
        inputs = model.graph.inputs
        self._tokens = next(value for value in inputs if value.name == interface.tokens)
        roots = [self._tokens, *self._pasts]
        self._contents = dependents(model.graph, roots, by_size=False)
        self._rows_of_graph: list[Float64] | None = None

    def layer(self, site: Site) -> LayerBias | None:
        """Return the biases of a layer; None without any that matters."""
        reason = ""
        parts = {}
        for role in ROLES:
            try:
                parts[role] = self._constants(site, role)
            except NoMatch as miss:
                parts[role], reason = self._added(site, role), reason or miss.reason
        least = LEAST * site.head_size**0.5
        if all(_norm(part) < least for part in parts.values()):
            return None
        key, value = (parts[role] for role in ROLES)
        if not reason and key.any():
            try:
                return self._turning(site, key, value)
            except NoMatch as miss:
                reason = miss.reason
        still = Rotary(np.zeros(site.head_size, np.float32), STILL, "no bias")
        rotary, reason = (
            (None, f"it is not known how they turn ({reason})") if reason else (still, "")
        )
        return LayerBias(site.layer, key, value, rotary, reason)

    def _turning(self, site: Site, key: Float64, value: Float64) -> LayerBias:
        """Return the biases of a layer whose keys turn in a way that is known."""
        rotary = self._rotary(site, key)
        reason = ""
        if site.key.cut is not None and rotary.frequencies.any():
            reason = "a cache that is shortened moves them to other slots"
        return LayerBias(site.layer, key, value, None if reason else rotary, reason)

    def _added(self, site: Site, role: Role) -> Float64:
        """Return the longest of the biases that cannot be computed, as if nothing changed it."""
        size = (site.kv_num_heads, site.head_size)
        heads = [
            np.asarray(bias, np.float64).reshape(-1, site.head_size)
            for bias in self._sources(site, role).biases
            if bias.size % site.head_size == 0
        ]
        longest = max(heads, key=_norm, default=np.zeros(size))
        return np.broadcast_to(longest[np.linalg.norm(longest, axis=-1).argmax()], size)

    def _constants(self, site: Site, role: Role) -> Float64:
        """Return the constant part ``[N, D]`` of new rows at position 0, where none is turned."""
        padded = np.zeros((site.kv_num_heads, site.head_size))
        vectors = site.new_key if role == "key" else site.new_value
        sources = self._sources(site, role)
        # Behind a norm a bias is no constant.
        if vectors.norm is None and any(bias.any() for bias in sources.biases):
            rows = self._rows(site, role, sources, 0, static_dim(self._tokens, 1) or 1)
            padded[:, : rows.shape[-1]] = rows[:, 0]
        return padded

    def _rotary(self, site: Site, bias: Float64) -> Rotary:
        """Return how the keys of a layer turn."""
        sources, spread = self._sources(site, "key"), float(np.sqrt((bias**2).mean()))

        def rows(start: int, count: int, text: int = 0) -> Float64:
            return self._rows(
                site, "key", sources, start, count, spread=spread * (text > 0), seed=text
            )

        calls = self._calls(site)
        texts = [
            np.concatenate([rows(*call, text) for call in calls], axis=1) for text in range(_TEXTS)
        ]
        if self._rows_of_graph is None:
            self._rows_of_graph = [*constant_rows(self._model)]
        measured = measure_rotary(np.stack(texts), self._rows_of_graph)
        rotary = measured.rotary
        if rotary is None:
            raise NoMatch(measured.reason)
        for start in _FAR if rotary.frequencies.any() else ():
            try:
                far = rows(start, calls[0][1])
            except NoMatch:  # a table ends before that
                break
            apart = rotary.unturned(far, start) - bias[:, None]
            if (apart**2).mean() > LARGEST_RESIDUAL * (bias**2).mean():
                raise NoMatch(f"at position {start:,} by other angles than at the first ones")
        return rotary

    def _calls(self, site: Site) -> list[tuple[int, int]]:
        """Return the calls that measure how keys turn: past tokens and new ones of each."""
        tables = (table_positions(self._model, self._interface), self._own_positions(site))
        longest = min([POSITIONS, *(size for size in tables if size is not None)])
        each = static_dim(self._tokens, 1) or longest
        # A graph without caches begins with the first token.
        starts = range(0, longest, each)[:_MOST_CALLS] if site.key.past is not None else [0]
        if len(starts) * each <= 1:
            raise NoMatch("the graph takes no text of two tokens and more")
        return [(start, each) for start in starts]

    def _own_positions(self, site: Site) -> int | None:
        return None if site.rotation is None else static_dim(site.rotation.cos, 0)

    def _sources(self, site: Site, role: Role) -> _Sources:
        """Return what new rows are linear in."""
        values: dict[ir.Value, Array | None] = {}
        constants: list[ir.Value] = []
        seen: set[ir.Value] = set()
        vectors = site.new_key if role == "key" else site.new_value
        pending = [vectors.value]
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            node = value.producer()
            operands = None if node is None else self._operands(node)
            if value not in self._contents:
                constants.append(value)
            elif operands is None:
                values[value] = None if node is None else _own_bias(node)
            else:
                pending += operands
        return _Sources(values, tuple(constants), vectors.bias)

    def _operands(self, node: ir.Node) -> list[ir.Value] | None:
        """Return what a node is linear in, and what it adds; None for any other node."""
        inputs = [value for value in node.inputs if value is not None]
        varying = [index for index, value in enumerate(inputs) if value in self._contents]
        name = kind(node)
        if name in _SUMS:
            return inputs
        if name in _SHAPES and varying == [0]:
            return inputs[:1]
        if name not in _PRODUCTS or len(varying) != 1:
            return None
        factor = inputs[1 - varying[0]]
        sizes = {static_dim(factor, axis) for axis in range(rank(factor) or 0)}
        # A projection has weights; a square matrix of a head's size turns or permutes a head.
        if name == "MatMul" and not (
            len(sizes) == 1 and (sizes.pop() or MAX_HEAD_SIZE) < MAX_HEAD_SIZE
        ):
            return None
        return [inputs[varying[0]]]

    def _rows(
        self,
        site: Site,
        role: Role,
        sources: _Sources,
        start: int,
        count: int,
        *,
        spread: float = 0.0,
        seed: int = 0,
    ) -> Float64:
        """Return new rows ``[N, T, D]`` of tokens that all have the same numbers in the sources.

        Args:
            count: of the tokens, T.
            spread: deviation of what is added to the constants.
        """
        arrays: dict[ir.Value, Array] = dict(self._inputs(start, count))
        generator = np.random.default_rng(seed)
        for source, bias in sources.values.items():
            numbers = site.kv_num_heads * site.size_of(role)
            arrays[source] = _filled(source, bias, (count, numbers), spread, generator)
        vectors = site.new_key if role == "key" else site.new_value
        (rows,) = evaluate([vectors.value], arrays)
        if vectors.bias is not None:
            rows = rows + vectors.bias
        heads = _by_head(np.asarray(rows, np.float64), vectors, site, role)
        if role == "value" or site.rotation is None:
            return heads
        cos, sin = evaluate([site.rotation.cos, site.rotation.sin], arrays)
        places = np.arange(start, start + count)
        if site.rotation.positions is not None:
            (positions,) = evaluate([site.rotation.positions], arrays)
            places = positions[0]
        if len(cos) <= places.max():
            raise NoMatch("the table of cosines ends")
        cos, sin = (np.asarray(table[places], np.float64) for table in (cos, sin))
        interleaved = bool(site.rotation.interleaved)
        width = site.rotation.width
        return turned(heads, cos, sin, is_interleaved=interleaved, width=width)

    def _inputs(self, start: int, count: int) -> Iterator[tuple[ir.Value, Array]]:
        """Yield the inputs of a call of ``count`` tokens behind ``start`` others."""
        interface, places = self._interface, np.arange(start, start + count)
        roles = {extra.name: extra.role for extra in interface.fed}
        numbers = {PAST_LENGTH: start, TOTAL_LENGTH: start + count, NEW_LENGTHS: count}
        for value in self._model.graph.inputs:
            if value.dtype is None or value.shape is None:
                continue
            dtype, name = value.dtype.numpy(), value.name
            sizes = [static_dim(value, axis) or 1 for axis in range(len(value.shape))]
            role = roles.get(name or "", "")
            if value in self._pasts:
                yield value, np.broadcast_to(np.zeros((), dtype), [*sizes[:2], start, *sizes[3:]])
            elif value is self._tokens:
                yield value, np.broadcast_to(np.zeros((), dtype), [1, count, *sizes[2:]])
            elif name == interface.attention_mask:
                yield value, np.ones((1, start + count), dtype)
            elif name == interface.position_ids:
                yield value, np.broadcast_to(places.astype(dtype), [*sizes[:-1], count])
            elif role == CACHE_POSITIONS:
                yield value, places.astype(dtype)
            elif role in numbers:
                yield value, np.full(sizes, numbers[role], dtype)


def _own_bias(node: ir.Node) -> Array | None:
    """Return what an operator adds to its result; None for nothing."""
    slot = _BIAS_SLOTS.get(kind(node))
    value = node.inputs[slot] if slot is not None and slot < len(node.inputs) else None
    if value is None or value.const_value is None:
        return None
    factor = attribute_float(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0
    return np.asarray(value.const_value.numpy(), np.float64) * factor


def _filled(
    source: ir.Value,
    bias: Array | None,
    sizes: tuple[int, int],
    spread: float,
    generator: np.random.Generator,
) -> Array:
    """Return what stands in the place of a source: the same numbers for each token.

    Args:
        sizes: tokens, and numbers of each in all heads; where the other dimensions hold less,
            heads are among the rows.
    """
    count, numbers = sizes
    dims = [static_dim(source, axis) for axis in range(rank(source) or 0)]
    if len(dims) < _ROWS_RANK or dims[-1] is None or source.dtype is None:
        raise NoMatch(f"the shape of {source.name} is not known")
    axes = [axis for axis, size in enumerate(dims[:-1]) if size is None]
    axes += [axis for axis, size in enumerate(dims[:-1]) if size == count and not axes]
    if not axes:
        raise NoMatch(f"it is not known which dimension of {source.name} has the tokens")
    tokens = axes[-1]
    token_sizes = [1 if axis == tokens else size or 1 for axis, size in enumerate(dims)]
    token_sizes[tokens] = max(numbers // prod(token_sizes[min(tokens, 1) :]), 1)
    token = (
        np.zeros(token_sizes)
        if bias is None
        else np.broadcast_to(bias, token_sizes).astype(np.float64)
    )
    token = token + spread * generator.standard_normal(token_sizes)
    repeats = [count if axis == tokens else 1 for axis in range(len(token_sizes))]
    filled: Array = np.tile(token, repeats).astype(source.dtype.numpy())
    return filled


def _by_head(rows: Float64, vectors: Vectors, site: Site, role: Role) -> Float64:
    """Return new rows ``[N, T, D]`` of one sequence."""
    heads, size = site.kv_num_heads, site.size_of(role)
    if site.packed:
        start = (site.num_heads + (heads if role == "value" else 0)) * site.head_size
        rows = rows[..., start : start + heads * size]
    if vectors.is_flat:
        heads_NTD: Float64 = rows[0].reshape(-1, heads, size).swapaxes(0, 1)
        return heads_NTD
    letters = ["N" if letter == "H" else letter for letter in vectors.dims]
    heads_BNTD = rows.transpose([letters.index(letter) for letter in "BNTD"])
    rows_NTD: Float64 = heads_BNTD[0]
    return rows_NTD
