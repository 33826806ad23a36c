"""Foretell the memory of a process that runs a model, from the graph alone.

    opening  =  process + weights + the largest weight
    running  =  process + weights + caches + 1.2 * (logits + values of a call)

Caches count their exact windows, and twice where they grow: past and present of a step. A call is
a piece of a prompt (``tq_onnx.runtime.generate.PROMPT_PIECE`` tokens); a step takes less. Weights
in half precision count twice, because ONNX Runtime computes with them in single precision on the
CPU. So do tables of embeddings that are multiplied with, too, and the weights of MatMulNBits: their
products get a packed copy.
docs/performance.md has forecasts beside what processes took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.activations import activation_bytes
from tq_onnx.graph.values import static_dim
from tq_onnx.plan import VISIBLE, Interface
from tq_onnx.runtime.generate import PROMPT_PIECE

PROCESS: Final = 178 << 20
"""Python, numpy, onnx and onnxruntime with a small model, resident, on Linux."""

RECOGNISED: Final = 30 << 20
"""The graph of an original, which stays in memory with what was recognised in it."""

_ARENA: Final = 1.2
"""ONNX Runtime's arena takes this much for each byte that is in use: its regions have gaps."""
_NEAR: Final = 8192
_FAR: Final = 65536
"""Contexts for which values are counted; between and beyond them they grow evenly."""
_FLAT_RANK: Final = 3
_HALVES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class CacheShape:
    """A cache, as far as its bytes go."""

    name: str | None  #: of the input; None in a graph for first prompts
    kv_num_heads: int  #: N
    row_bytes: int  #: bytes of a token in one head
    exact_rows: int = 0  #: rows of exact tokens besides those of the tokens
    block_size: int = 0  #: tokens of a page; 0 for a cache without pages


@dataclass(frozen=True)
class Values:
    """Bytes of the values of a call, logits included."""

    alone: int  #: in the first piece of a prompt
    near: int  #: at a context of 8,192 tokens
    far: int  #: at a context of 65,536 tokens

    def at(self, context: int) -> int:
        """Return the bytes at a context."""
        slope = (self.far - self.near) / (_FAR - _NEAR)
        return int(max(self.alone, self.near + slope * (context - _NEAR)))


@dataclass(frozen=True)
class Footprint:
    """The memory of a model."""

    weights: int  #: bytes of its weights as ONNX Runtime holds them
    largest: int  #: bytes of the largest one, which is there twice while the model is opened
    bytes_per_token: int  #: cache bytes of a token of one sequence
    window_bytes: int  #: cache bytes of the exact tokens of one sequence
    growing: bool  #: whether caches can only grow
    values: Values  #: of a call
    process: int = PROCESS  #: bytes of the process besides
    #: tokens that the graph gives its caches room for; None where callers choose
    slots: int | None = None
    #: caches besides that keep the newest tokens only: how many, and bytes of one
    rings: tuple[tuple[int, int], ...] = ()

    @property
    def opening(self) -> int:
        """Peak of the process until the model is open."""
        return self.process + self.weights + self.largest

    def caches(self, context: int, sequences: int = 1) -> int:
        """Return the bytes of the caches of some texts in a step."""
        ring_bytes = sum(min(context, tokens) * size for tokens, size in self.rings)
        cache_bytes = self.window_bytes + ring_bytes + context * self.bytes_per_token
        return sequences * cache_bytes * (2 if self.growing else 1)

    def peak(self, context: int, sequences: int = 1) -> int:
        """Return the peak of a process that reads and continues texts up to a context in tokens."""
        running = self.process + self.weights + self.caches(context, sequences)
        return max(self.opening, running + int(_ARENA * self.values.at(context)))

    def largest_context(self, memory: int, most: int, sequences: int = 1) -> int:
        """Return the tokens of the largest context that fits, at most ``most``; 0 for none."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.peak(middle, sequences) <= memory else (low, middle - 1)
            )
        return low


def slots_of(graph: ir.Graph, caches: Iterable[CacheShape]) -> int | None:
    """Return the tokens that a graph gives its caches room for; None where callers choose."""
    caches = list(caches)
    overlays = {cache.name: cache.exact_rows for cache in caches}
    sizes = [
        (static_dim(value, 1 if len(value.shape) == _FLAT_RANK else 2), overlays[value.name])
        for value in graph.inputs
        if value.name in overlays and value.shape is not None
    ]
    if any(cache.block_size for cache in caches):
        return None
    return min((size - rows for size, rows in sizes if size is not None), default=None)


def weights_of(graph: ir.Graph) -> tuple[int, int]:
    """Return the bytes of all weights of a graph in memory, and of the largest one."""
    total = largest = 0
    for value in graph.initializers.values():
        if value.const_value is None:
            continue
        size = value.const_value.nbytes * (2 if value.const_value.dtype in _HALVES else 1)
        readers = {node.op_type for node in value.consumers()}
        tied = "Gather" in readers and len(readers) > 1
        total += size * (2 if tied or readers == {"MatMulNBits"} else 1)
        largest = max(largest, size)
    return total, largest


def values_of(
    model: ir.Model, interface: Interface, caches: Iterable[CacheShape], heads: int
) -> Values:
    """Count the values of a call at several contexts.

    Args:
        model: the graph; it is not changed.
        heads: query heads of a layer, for the scores of fused attention; 0 where it has none.
    """
    held = {cache.name: cache for cache in caches}
    outputs = {value.name or "": value for value in model.graph.outputs}
    # Logits find no gap in the arena that is large enough.
    logits = 4 * PROMPT_PIECE * (static_dim(outputs[interface.logits], -1) or 0)
    counts = []
    for context in (PROMPT_PIECE, _NEAR, _FAR):
        shapes = _shapes(model.graph, interface, held, context)
        scores = 4 * heads * PROMPT_PIECE * context
        counts.append(logits + activation_bytes(model, shapes, outputs, scores))
    return Values(*counts)


def _shapes(
    graph: ir.Graph, names: Interface, caches: Mapping[str | None, CacheShape], context: int
) -> dict[str, list[int]]:
    """Return the shapes of all inputs in the last piece of a prompt."""
    new = PROMPT_PIECE
    seen = {entry.name for entry in names.fed if entry.role == VISIBLE}
    shapes = {}
    for value in graph.inputs:
        if value.name in graph.initializers or value.shape is None:
            continue
        name = value.name or ""
        stated = [static_dim(value, axis) for axis in range(len(value.shape))]
        if name == names.tokens:
            sizes = [new] if len(stated) == 1 else [1, new, *stated[2:]]
        elif name == names.attention_mask:
            sizes = [1, context]
        elif name == names.position_ids:
            sizes = [1, new]
        elif name in seen:
            sizes = [1, 1, new, context]
        elif name in caches:
            cache, past = caches[name], context - new
            pages = cache.block_size and -(-context // cache.block_size)
            sizes = (
                [pages, *stated[1:]]
                if pages
                else [1, past, stated[-1]]
                if len(stated) == _FLAT_RANK
                else [1, cache.kv_num_heads, past + cache.exact_rows, stated[-1]]
            )
        else:
            sizes = list(stated)
        shapes[name] = [dim or size or 1 for dim, size in zip(stated, sizes, strict=True)]
    return shapes
