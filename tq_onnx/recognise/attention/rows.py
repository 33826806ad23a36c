"""Check the new rows of a cache, for all dialects."""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.recognise.caches import PAST, ROWS, Reach

_HALF_NOISE: Final = 2e-3
_FLOAT_NOISE: Final = 1e-6


def rows(reach: Reach) -> ir.Value:
    """Return the new rows of a cache that is updated outside of its reader.

    Returns:
        the rows in the layout that the update gives them: ``[B, N, T, D]``, or turned
        (``Cache.turn``).
    """
    update, node = reach.update, reach.anchor.node
    assert update is not None
    if sorted(update.rows_dims) != sorted(ROWS):
        raise NoMatch(f"the new rows have the layout {', '.join(update.rows_dims)}", node)
    if update.past is not None and update.views[update.past] != PAST:
        raise NoMatch(
            f"cache {update.past.name} has the layout {', '.join(update.views[update.past])}", node
        )
    if rank(update.rows) not in (4, None):
        raise NoMatch(f"the new rows are of rank {rank(update.rows)}", node)
    dtype = update.rows.dtype or (update.past.dtype if update.past is not None else None)
    if dtype not in FLOATS:
        raise NoMatch(f"cache {reach.anchor.present.name} has the element type {dtype}", node)
    return update.rows


def snapped(scale: float, head_size: int, dtype: ir.DataType) -> float:
    """Return a scale; D^-0.5 if roundings of the element type explain the difference from that."""
    usual = head_size**-0.5
    near = _FLOAT_NOISE if dtype is ir.DataType.FLOAT else _HALF_NOISE
    return usual if abs(scale - usual) <= near * usual else scale


def sizes(letter: str, *reaches: Reach) -> list[int | None]:
    """Return a dimension of all new rows and pasts; None where the graph does not tell it."""
    dimensions: list[int | None] = []
    for reach in reaches:
        update = reach.update
        if update is None:
            continue
        dimensions.append(update.size(letter))
        if update.past is not None and letter in update.views[update.past]:
            dimensions.append(static_dim(update.past, update.views[update.past].index(letter)))
    return dimensions


def check_slots(key: Reach, value: Reach, *, masked: bool) -> None:
    """Check that keys and values share slots, and that a mask hides the slots without a token."""
    sources = [() if reach.update is None else reach.update.sources for reach in (key, value)]
    if sources[0] != sources[1]:
        raise NoMatch("the keys and the values are written to different slots", key.anchor.node)
    if not masked and key.update is not None and key.update.past_length is not None:
        raise NoMatch("nothing hides the slots of the cache that hold no key", key.reader)
