"""Rotary embeddings in halves, as one node or spelled out, as ``RotaryEmbedding``.

    Y = X * cos + concat(-X2, X1) * sin

X is ``[B, N, T, D]``, its halves along the last axis are X1 and X2. The tables are constants,
float32 ``[P, D / 2]``, looked into by positions that stay on the host.

Recognised are RotaryEmbedding of ONNX 23, with cosines and sines or with tables and positions, that
of com.microsoft, both with heads before tokens or in one row of ``[B, T, N * D]``, and arithmetic:
an Add whose nodes do, for numbers drawn at random, what the formula says. The angles may be
computed in any way (``tq_onnx.ascend.lowering.angles``). Interleaved and partial embeddings are
left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from tq_onnx.ascend.lowering.angles import Angles, position_ids, read_angles, read_table, table
from tq_onnx.ascend.lowering.claims import ELEMENTS
from tq_onnx.graph.builder import Builder
from tq_onnx.graph.constants import attribute_float, attribute_int
from tq_onnx.graph.evaluate import evaluate
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.operators import kind
from tq_onnx.graph.sizerules import Size, sizes
from tq_onnx.graph.values import label, rank, static_dim, substitute
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.ops.operators import RotaryEmbedding

_MICROSOFT: Final = f"{MICROSOFT}.RotaryEmbedding"
_TOLERANCE: Final = {ir.DataType.FLOAT: 1e-5, ir.DataType.FLOAT16: 2e-2}
_TURN: Final = (0, 2, 1, 3)


@dataclass(frozen=True, eq=False)
class _Rotation:
    """A rotary embedding."""

    source: ir.Value  #: X, ``[B, N, T, D]`` or ``[B, T, N * D]``
    angles: Angles  #: its tables and positions
    output: ir.Value  #: Y, of the shape of X

    @property
    def head_size(self) -> int:
        """D."""
        return 2 * int(self.angles.cosines.shape[1])


def lower_rotary(
    model: ir.Model, build: Builder, positions: int, misses: list[str] | None = None
) -> int:
    """Replace every rotary embedding over whole heads in halves; return how many were replaced.

    Args:
        model: a converted model whose values have shapes; changed in place, what is left without a
            reader stays.
        positions: rows of the tables, where the graph computes its angles.
        misses: gets a clause for each rotary embedding whose angles are not those of positions.
    """
    finder = _Finder(positions)
    count = 0
    for node in list(model.graph):
        try:
            rotation = finder.find(node)
        except NoMatch:
            continue
        if rotation is not None:
            with build.before(node, label(node)):
                substitute(rotation.output, _rotated(build, rotation))
            count += 1
    if misses is not None:
        misses += finder.misses
    return count


def _rotated(build: Builder, rotation: _Rotation) -> ir.Value:
    angles, source = rotation.angles, rotation.source
    cosines = table(build, RotaryEmbedding.cos_cache.name, angles.cosines)
    sines = table(build, RotaryEmbedding.sin_cache.name, angles.sines)
    ids = position_ids(build, angles.positions)
    dtype = source.dtype
    turned = source
    if rank(source) == 3:
        turned = _heads_first(build, source, rotation.head_size)
    inputs = {
        RotaryEmbedding.X: turned,
        RotaryEmbedding.cos_cache: cosines,
        RotaryEmbedding.sin_cache: sines,
        RotaryEmbedding.position_ids: ids,
    }
    rotated = build.operator(RotaryEmbedding, inputs, dtype=dtype, shape=sizes(turned))
    if rank(source) == 4:
        return rotated
    batch, tokens, wide = _row_sizes(source)
    back = build.op(
        "Transpose",
        [rotated],
        "tokens_first",
        dtype=dtype,
        shape=[batch, tokens, wide // rotation.head_size, rotation.head_size],
        perm=_TURN,
    )
    shape = build.integers(0, 0, wide)
    return build.op("Reshape", [back, shape], "merge_heads", dtype=dtype, shape=sizes(source))


def _heads_first(build: Builder, source: ir.Value, head_size: int) -> ir.Value:
    """Return ``[B, T, N * D]`` as ``[B, N, T, D]``."""
    batch, tokens, wide = _row_sizes(source)
    heads = wide // head_size
    split = build.op(
        "Reshape",
        [source, build.integers(0, 0, heads, head_size)],
        "split_heads",
        dtype=source.dtype,
        shape=[batch, tokens, heads, head_size],
    )
    return build.op(
        "Transpose",
        [split],
        "heads_first",
        dtype=source.dtype,
        shape=[batch, heads, tokens, head_size],
        perm=_TURN,
    )


def _row_sizes(source: ir.Value) -> tuple[Size, Size, int]:
    batch, tokens, wide = sizes(source) or (None, None, None)
    assert isinstance(wide, int)  # by _one_node
    return batch, tokens, wide


class _Finder:
    """Finds rotary embeddings; layers that share their angles have them evaluated once."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._known: dict[tuple[object, ...], Angles | NoMatch] = {}

    @property
    def misses(self) -> list[str]:
        """Why angles were not found to be those of positions."""
        return [angles.reason for angles in self._known.values() if isinstance(angles, NoMatch)]

    def find(self, node: ir.Node) -> _Rotation | None:
        """Return the rotary embedding that a node is, or the last step of."""
        if node.outputs[0].dtype not in ELEMENTS:
            return None
        if kind(node) in ("RotaryEmbedding", _MICROSOFT):
            return self._one_node(node)
        return self._spelled_out(node) if kind(node) == "Add" else None

    def _one_node(self, node: ir.Node) -> _Rotation:
        is_microsoft = kind(node) == _MICROSOFT
        inputs = [*node.inputs, None, None, None][:4]
        source = inputs[0]
        ids, cosines, sines = inputs[1:] if is_microsoft else (inputs[3], inputs[1], inputs[2])
        if source is None or cosines is None or sines is None:
            raise NoMatch("the rotary embedding has no tables", node)
        half, wide = static_dim(cosines, -1), static_dim(source, -1)
        if half is None or wide is None or static_dim(sines, -1) != half:
            raise NoMatch("the size of the heads is not known", node)
        size = 2 * half
        _check_attributes(node, size)
        if rank(source) not in (3, 4) or wide % size or (rank(source) == 4 and wide != size):
            raise NoMatch("the rotary embedding turns a part of the heads", node)
        heads = attribute_int(node, "num_heads", 0)
        if rank(source) == 3 and heads not in (
            (0, wide // size) if is_microsoft else (wide // size,)
        ):
            raise NoMatch(f"the rotary embedding has {heads} heads", node)
        if ids is None:
            angles = self._angles(cosines, sines, ("B", "T", half))
        else:
            angles = self._tables(cosines, sines, ids)
        return _Rotation(source, angles, node.outputs[0])

    def _tables(self, cosines: ir.Value, sines: ir.Value, ids: ir.Value) -> Angles:
        if rank(ids) != 2:
            raise NoMatch("the positions are not given token by token")

        def read() -> Angles:
            return Angles(read_table(cosines), read_table(sines), ids)

        return self._remembered((cosines, sines, ids), read)

    def _angles(self, cosines: ir.Value, sines: ir.Value, shape: tuple[str | int, ...]) -> Angles:
        return self._remembered(
            (cosines, sines, *shape),
            lambda: read_angles(cosines, sines, shape, self._positions),
        )

    def _remembered(self, key: tuple[object, ...], read: Callable[[], Angles]) -> Angles:
        if key not in self._known:
            try:
                self._known[key] = read()
            except NoMatch as miss:
                self._known[key] = miss
        angles = self._known[key]
        if isinstance(angles, NoMatch):
            raise angles
        return angles

    def _spelled_out(self, node: ir.Node) -> _Rotation:
        for source, cosines, sines in _candidates(node):
            size = static_dim(source, -1)
            if rank(source) != 4 or size is None or size % 2:
                continue
            if source.dtype is not node.outputs[0].dtype or not _is_rotation(
                node, source, cosines, sines, size
            ):
                continue
            angles = self._angles(cosines, sines, ("B", 1, "T", size))
            halves = [np.split(numbers, 2, -1) for numbers in (angles.cosines, angles.sines)]
            if all(np.array_equal(first, second) for first, second in halves):
                (cos, _), (sin, _) = halves
                half = Angles(
                    np.ascontiguousarray(cos), np.ascontiguousarray(sin), angles.positions
                )
                return _Rotation(source, half, node.outputs[0])
        raise NoMatch("the nodes are no rotary embedding", node)


def _check_attributes(node: ir.Node, head_size: int) -> None:
    """Refuse what makes one node another embedding."""
    wrong = (
        attribute_int(node, "interleaved", 0)
        or attribute_int(node, "is_packed_batching", 0)
        or attribute_int(node, "rotary_embedding_dim", 0) not in (0, head_size)
        or attribute_float(node, "scale", 1.0) != 1
    )
    if wrong:
        raise NoMatch("the rotary embedding is not in halves over whole heads", node)


def _candidates(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value, ir.Value]]:
    """Yield candidates for X, cos and sin of X * cos + concat(-X2, X1) * sin."""
    makers = [None if value is None else value.producer() for value in node.inputs]
    for straight, across in (makers, reversed(makers)):
        if straight is None or across is None or kind(straight) != "Mul" or kind(across) != "Mul":
            continue
        for index in (0, 1):
            turned, sines = across.inputs[index], across.inputs[1 - index]
            maker = None if turned is None else turned.producer()
            if maker is None or kind(maker) != "Concat" or len(maker.inputs) != 2:
                continue
            for place in (0, 1):
                source, cosines = straight.inputs[place], straight.inputs[1 - place]
                if source is not None and cosines is not None and sines is not None:
                    yield source, cosines, sines


def _is_rotation(
    node: ir.Node, source: ir.Value, cosines: ir.Value, sines: ir.Value, size: int
) -> bool:
    """Return True if a node makes X * cos + concat(-X2, X1) * sin of whatever numbers."""
    if source.dtype is None or {source, cosines, sines} & {node.outputs[0]}:
        return False
    sizes = [static_dim(source, axis) or fallback for axis, fallback in enumerate((2, 2, 3, size))]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(sizes)
    cos, sin = rng.standard_normal((2, sizes[0], 1, sizes[2], size))
    dtype = source.dtype.numpy()
    inputs = {
        value: numbers.astype(dtype)
        for value, numbers in ((source, x), (cosines, cos), (sines, sin))
    }
    if len(inputs) != 3:
        return False
    try:
        (result,) = evaluate([node.outputs[0]], inputs)
    except NoMatch:
        return False
    first, second = np.split(x, 2, -1)
    expected = x * cos + np.concatenate([-second, first], -1) * sin
    return result.shape == expected.shape and bool(
        np.allclose(result.astype(np.float64), expected, 0, _TOLERANCE[source.dtype])
    )
