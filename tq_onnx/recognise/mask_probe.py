"""Show that an input has one entry for each key, so that its length is the number of keys.

Exporters take the entries of an attention mask to the columns of the bias in dozens of ways: by
Unsqueeze and And, by GatherND, by ScatterND into a causal mask. So the way is not read but run, on
a few tokens behind a few cached ones:

* With as many entries as there are keys every layer's mask has one column for each key.
* With fewer it has other columns than keys, or cannot be computed, whatever the entries are: the
  original refuses such a call.

So in every call that the original takes, the input is as long as the keys, or longer. An input that
is one entry long is left out: its only entry stands for every key in any graph that broadcasts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeGuard

import numpy as np
import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.evaluate import Array
from tq_onnx.graph.liveness import data_ancestors, live_nodes
from tq_onnx.graph.sizerules import Sizes, sizes
from tq_onnx.graph.stepwise import Steps
from tq_onnx.graph.values import FLOATS
from tq_onnx.recognise.interface import Roles, dimension, look_up
from tq_onnx.recognise.site import Site

_BATCH: Final = 2
_NEW: Final = (1, 3)
_PAST: Final = 5
_MAX_NUMBERS: Final = 1 << 24
"""Numbers of an input that are made up for a call; a file may declare any size."""
_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass(frozen=True)
class _Call:
    """Sizes of a call."""

    batch: int  #: sequences
    new: int  #: new tokens
    past: int  #: tokens in the caches

    @property
    def total(self) -> int:
        """Keys."""
        return self.new + self.past

    def letters(self, site: Site, role: str) -> Mapping[str, int]:
        """Return the sizes that letters of the dimensions of a cache in this role stand for."""
        heads, shared, width = site.num_heads, site.kv_num_heads, site.size_of(role)
        numbers = {"B": self.batch, "T": self.new, "P": self.past, "S": self.total, "1": 1}
        numbers |= {"H": heads, "N": shared, "G": heads // shared, "D": width}
        return numbers | {
            left + right: numbers[left] * numbers[right] for left, right in ("BH", "BN", "HD", "ND")
        }


def has_an_entry_for_each_key(value: ir.Value, roles: Roles, sites: Sequence[Site]) -> bool:
    """Return True if an input ``[B, any]`` is shown to be as long as the keys of all layers."""
    graph = sites[0].node.graph
    if not isinstance(graph, ir.Graph) or value.dtype is None:
        return False
    masks: set[ir.Value] = set()
    for site in sites:
        site_masks = {mask for mask in site.mask_sources if value in data_ancestors([mask])}
        if not site_masks:
            return False
        masks |= site_masks
    whole = False
    for call in _calls(value, roles):
        if not _is_small([call.batch, call.total]):
            return False
        steps = Steps(graph, masks, _arrays(graph, value, roles, sites, call), [value])
        for length in range(2, call.total):
            for entries in _fillings(call.batch, length):
                results = steps.run({value: entries.astype(value.dtype.numpy())})
                if any(_columns(results.get(mask)) in (1, call.total) for mask in masks):
                    return False
        entries = np.ones((call.batch, call.total), value.dtype.numpy())
        results = steps.run({value: entries})
        whole |= all(_columns(results.get(mask)) == call.total for mask in masks)
    return whole


def _calls(value: ir.Value, roles: Roles) -> set[_Call]:
    fixed = [dimension(tensor, 0) for tensor in (roles.tokens, value)]
    batch = next((size for size in fixed if isinstance(size, int)), _BATCH)
    tokens = dimension(roles.tokens)
    # Some graphs take one token behind cached ones, or a first prompt, and nothing else.
    counts = (tokens,) if isinstance(tokens, int) else _NEW
    return {_Call(batch, new, _PAST) for new in counts}


def _columns(numbers: Array | None) -> int:
    """Return the last dimension of a mask; 0 if there is none."""
    return 0 if numbers is None or not numbers.ndim else int(numbers.shape[-1])


def _fillings(batch: int, length: int) -> Iterator[Array]:
    """Yield entries that may stand for a mask, for numbers of segments, for places."""
    yield np.ones((batch, length), np.int64)
    yield np.zeros((batch, length), np.int64)
    yield np.tile(np.arange(length), (batch, 1))


def _arrays(
    graph: ir.Graph,
    value: ir.Value,
    roles: Roles,
    sites: Sequence[Site],
    call: _Call,
) -> dict[ir.Value, Array]:
    """Return the numbers of other inputs, and of values of which only the sizes may matter."""
    masks = [mask for site in sites for mask in site.mask_sources]
    arrays: dict[ir.Value, Array] = {}
    names: dict[str, int] = {}

    def add(tensor: ir.Value, shape: Sequence[int | None]) -> None:
        if tensor.dtype in FLOATS and _is_small(shape):
            arrays[tensor] = np.zeros(shape, tensor.dtype.numpy())

    for site in sites:
        for role, cache in (("key", site.key), ("value", site.value)):
            letters = call.letters(site, role)
            for view, dims in cache.views.items():
                add(view, [letters.get(dim) for dim in dims])
            if cache.update is not None:
                add(cache.update.rows, [letters.get(dim) for dim in cache.update.rows_dims])
            if cache.past is not None:
                _name(names, sizes(cache.past), [letters.get(d) for d in cache.views[cache.past]])
    _name(names, sizes(roles.tokens), [call.batch, call.new])
    for tensor in graph.inputs:
        if tensor is not value and tensor not in arrays:
            _add_input(arrays, tensor, names, call)
    words = look_up(roles.tokens)
    if words is not None:
        shape = sizes(words.outputs[0])
        width = shape[-1] if shape else None
        add(words.outputs[0], [call.batch, call.new, width if isinstance(width, int) else None])
    for node in live_nodes(masks, cut=arrays.keys()):
        source = node.inputs[0] if node.domain == "" and node.op_type == "Shape" else None
        declared = sizes(source)
        if declared is None or source is None or source in arrays or source.dtype not in FLOATS:
            continue
        part = declared[attribute_int(node, "start", 0) : attribute_int(node, "end", len(declared))]
        numbers = [names.get(size) if isinstance(size, str) else size for size in part]
        if None not in numbers:
            arrays[node.outputs[0]] = np.array(numbers, np.int64)
    return arrays


def _is_small(shape: Sequence[int | None]) -> TypeGuard[Sequence[int]]:
    """Return True if numbers of this shape are known to be few enough to make them up."""
    return None not in shape and prod(size or 0 for size in shape) <= _MAX_NUMBERS


def _name(names: dict[str, int], shape: Sizes | None, numbers: Sequence[int | None]) -> None:
    for size, number in zip(shape or (), numbers, strict=False):
        if isinstance(size, str) and number is not None:
            names.setdefault(size, number)


def _add_input(
    arrays: dict[ir.Value, Array], tensor: ir.Value, names: Mapping[str, int], call: _Call
) -> None:
    """Add numbers that an input may have: positions where there is one for each new token."""
    shape = sizes(tensor)
    if shape is None or tensor.dtype is None:
        return
    dims = [names.get(size) if isinstance(size, str) else size for size in shape]
    if not _is_small(dims):
        return
    numbers = np.zeros(dims, tensor.dtype.numpy())
    if tensor.dtype in _INTEGERS and dims and dims[-1] == call.new:
        numbers = numbers + np.arange(call.past, call.total).astype(numbers.dtype)
    arrays[tensor] = numbers
