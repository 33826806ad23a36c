"""Count the positions that a graph has rows for, in its tables of rotations or of embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.liveness import live_nodes
from tq_onnx.graph.operators import kind
from tq_onnx.graph.values import keeps_numbers, static_dim
from tq_onnx.ops.domain import DOMAIN, MICROSOFT, ROTARY_EMBEDDING
from tq_onnx.ops.operators import RotaryEmbedding
from tq_onnx.plan import Interface
from tq_onnx.recognise.dialects.gqa import COS

_TABLES: Final[Mapping[str, int]] = {
    "RotaryEmbedding": 1,
    f"{MICROSOFT}.RotaryEmbedding": 2,
    f"{MICROSOFT}.GroupQueryAttention": COS,
    f"{DOMAIN}.{ROTARY_EMBEDDING}": RotaryEmbedding.cos_cache.slot,
}
"""The input that is the table of cosines ``[positions, width]``, by operator."""
_SAME_NUMBERS: Final = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Expand"})
"""Nodes between the input with the positions and a Gather by them."""


def table_positions(model: ir.Model, interface: Interface) -> int | None:
    """Return the tokens that a graph has rows for in its tables of positions.

    Longer texts do not run. This is no proof that all shorter ones do: tables that are cut out or
    computed within the graph are not seen.

    Returns:
        The rows of the smallest table; None if there is no table.
    """
    live = live_nodes(model.graph.outputs)
    # Not the nodes of an If: the branch for longer texts has another table.
    rows = (_rows(node, interface.position_ids) for node in model.graph if node in live)
    return min((count for count in rows if count is not None), default=None)


def _rows(node: ir.Node, position_ids: str | None) -> int | None:
    """Return the rows of the table that a node reads at the positions of tokens."""
    if kind(node) == "Gather":
        data, indices = node.inputs[:2]
        of_positions = position_ids is not None and position_ids in _sources(indices)
        first = attribute_int(node, "axis", 0) == 0
        return _constant_rows(data) if first and of_positions else None
    slot = _TABLES.get(kind(node))
    unused = slot == COS and not attribute_int(node, "do_rotary", 0)
    if slot is None or unused or slot >= len(node.inputs):
        return None
    return _constant_rows(node.inputs[slot])


def _sources(value: ir.Value | None) -> Iterator[str | None]:
    """Yield a value's name, and the names of the values that it has its numbers of."""
    while value is not None:
        yield value.name
        node = value.producer()
        keeps = node is not None and node.domain == "" and node.op_type in _SAME_NUMBERS
        value = node.inputs[0] if node is not None and keeps else None


def _constant_rows(value: ir.Value | None) -> int | None:
    """Return the rows of a constant table of two dimensions."""
    while value is not None and (node := value.producer()) is not None and keeps_numbers(node):
        value = node.inputs[0]
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    return static_dim(value, 0)
