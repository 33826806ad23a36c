"""Find the role of each graph input, by its use first and by its name second.

Inputs that are no role of ``tq_onnx.plan.Interface`` are left out; a conversion keeps them,
but a caller has to know himself what to feed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.liveness import data_ancestors, live_nodes
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.ops.domain import MICROSOFT
from tq_onnx.plan import (
    CACHE_POSITIONS,
    IGNORED,
    LOGITS_TO_KEEP,
    NEW_LENGTHS,
    PAST_LENGTH,
    TOTAL_LENGTH,
    VISIBLE,
    ExtraInput,
    Interface,
)
from tq_onnx.recognise.caches import Cache
from tq_onnx.recognise.site import Site

_INTEGERS: Final = (ir.DataType.INT64, ir.DataType.INT32)
_MASKS: Final = (*_INTEGERS, ir.DataType.BOOL)

# What a number of tokens is for, told by the operator that it goes into, and by which input.
_READERS: Final = {
    ("ai.onnx", "TensorScatter", 2): PAST_LENGTH,
    ("ai.onnx", "ScatterND", 1): PAST_LENGTH,
    ("ai.onnx", "ScatterElements", 1): PAST_LENGTH,
    ("ai.onnx", "Attention", 6): TOTAL_LENGTH,
    (MICROSOFT, "GroupQueryAttention", 6): TOTAL_LENGTH,
    (MICROSOFT, "GroupQueryAttention", 16): NEW_LENGTHS,
}
_NAMES: Final = {
    "past_sequence_length": PAST_LENGTH,
    "past_length": PAST_LENGTH,
    "cumulative_length": PAST_LENGTH,
    "total_sequence_length": TOTAL_LENGTH,
    "cache_position": CACHE_POSITIONS,
    "num_logits_to_keep": LOGITS_TO_KEEP,
    "logits_to_keep": LOGITS_TO_KEEP,
}
_MASK: Final = "attention_mask"
_POSITIONS: Final = "position_ids"
_SCATTERS: Final = ("ScatterND", "ScatterElements", "TensorScatter")
# Values that are looked at to learn what an input is for; what is near tells.
_MOST_VALUES: Final = 200


@dataclass(frozen=True, eq=False)
class Roles:
    """The inputs and outputs of a decoder apart from its caches, as values of the graph."""

    tokens: ir.Value
    attention_mask: ir.Value | None
    position_ids: ir.Value | None
    logits: ir.Value
    fed: tuple[ExtraInput, ...] = ()
    vocabulary: int | None = None
    hidden: bool = False
    static: bool = False
    padding: bool = True
    right_padding: bool = False

    def interface(self) -> Interface:
        """Return their names."""
        mask, positions = self.attention_mask, self.position_ids
        return Interface(
            tokens=_name(self.tokens),
            attention_mask=None if mask is None else _name(mask),
            position_ids=None if positions is None else _name(positions),
            logits=_name(self.logits),
            fed=self.fed,
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            static=self.static,
            padding=self.padding,
            right_padding=self.right_padding,
        )

    def without_a_mask_by_use(self) -> Roles:
        """Return the roles without a mask that neither its name nor its length shows to be one."""
        mask = self.attention_mask
        named = mask is None or mask.name == _MASK
        return (
            self if named else replace(self, attention_mask=None, padding=True, right_padding=False)
        )


def find_roles(graph: ir.Graph, sites: Sequence[Site]) -> Roles | None:
    """Find the roles; None if there are no tokens to put in or no logits to get out."""
    caches = [cache for site in sites for cache in (site.key, site.value)]
    pasts = {cache.past for cache in caches}
    inputs = [value for value in graph.inputs if value not in pasts]
    tokens = token_input(inputs)
    logits = _logits(graph, {cache.present for cache in caches})
    if tokens is None or logits is None:
        return None
    sources = data_ancestors(value for site in sites for value in site.mask_sources)
    pairs = [
        value
        for value in inputs
        if value is not tokens and rank(value) == 2 and value.dtype in _MASKS
    ]
    # Positions make causal masks, too; they are no mask, whatever the name of their axis.
    masks = [value for value in pairs if value in sources and value.name != _POSITIONS]
    longer = [value for value in masks if differs(value, tokens)]
    mask = _choose(longer or masks, _MASK)
    if mask is None:
        mask = _named(pairs, _MASK)
    candidates = [value for value in pairs if value is not mask and value.dtype in _INTEGERS]
    aligned = [value for value in candidates if not differs(value, tokens)]
    positions = _named(candidates, _POSITIONS) or (aligned[0] if len(aligned) == 1 else None)
    named = (tokens, mask, positions)
    live = live_nodes([logits, *(cache.present for cache in caches)])
    fed = [
        _fed(value, tokens, sources)
        if any(use.node in live for use in value.uses())
        else ExtraInput(_name(value), IGNORED)
        for value in inputs
        if value not in named
    ]
    rows, width = _table_sizes(tokens)
    size = static_dim(logits, 2)
    counting = [mask is not None and _counts_by(mask, site) for site in sites]
    return Roles(
        tokens,
        mask,
        positions,
        logits,
        tuple(entry for entry in fed if entry is not None),
        rows,
        size is not None and size == width and size != rows,
        any(_keeps_its_size(cache) for cache in caches),
        not any(counting),
        all(counting),
    )


def token_ids(graph: ir.Graph) -> list[ir.Value]:
    """Return the inputs by which a table is looked up: token ids, and positions that have one."""
    return _looked_up(graph.inputs)


def _looked_up(inputs: Iterable[ir.Value]) -> list[ir.Value]:
    ids = [value for value in inputs if rank(value) == 2 and value.dtype in _INTEGERS]
    return [value for value in ids if look_up(value) is not None]


def token_input(inputs: Sequence[ir.Value]) -> ir.Value | None:
    """Return the input of the token ids, or of their embeddings; None if there is none."""
    looked_up = _looked_up(inputs)
    embedded = [value for value in inputs if rank(value) == 3 and value.dtype in FLOATS]
    return _choose(looked_up, "input_ids") or _choose(embedded, "inputs_embeds")


def _table_sizes(tokens: ir.Value) -> tuple[int | None, int | None]:
    """Return rows and width of the embedding table; no rows if the tokens are embedded already."""
    if rank(tokens) == 3:
        return None, static_dim(tokens, 2)
    node = look_up(tokens)
    table = None if node is None else node.inputs[0]
    if node is None or table is None:
        return None, None
    whole = (node.domain, node.op_type) == ("", "Gather")
    width = static_dim(table, 1) if whole else static_dim(node.outputs[0], 2)
    return static_dim(table, 0), width


def look_up(value: ir.Value) -> ir.Node | None:
    """Return the node that looks up a table by a value."""
    for node, index in value.uses():
        if node.domain == "" and (node.op_type in ("Cast", "Identity") or _keeps_pairs(node)):
            reader = look_up(node.outputs[0])
            if reader is not None:
                return reader
            continue
        table = node.inputs[0]
        if index != 1 or table is None or attribute_int(node, "axis", 0) != 0:
            continue
        kind = (node.domain, node.op_type)
        if kind == (MICROSOFT, "GatherBlockQuantized") or (
            kind == ("", "Gather") and rank(table) == 2 and rank(node.outputs[0]) in (3, None)
        ):
            return node
    return None


def _keeps_pairs(node: ir.Node) -> bool:
    """Return True if a node reshapes ids ``[B, T]`` to what they are."""
    source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
    if node.op_type != "Reshape" or source is None or {rank(source), rank(output)} != {2}:
        return False
    return dimension(source) is not None and dimension(source) == dimension(output)


def _logits(graph: ir.Graph, caches: Collection[ir.Value]) -> ir.Value | None:
    outputs = [
        value
        for value in graph.outputs
        if rank(value) == 3 and value.dtype in FLOATS and value not in caches
    ]
    return _choose(outputs, "logits")


def _fed(value: ir.Value, tokens: ir.Value, sources: Collection[ir.Value]) -> ExtraInput | None:
    name = _name(value)
    if rank(value) == 4:
        masks = value.dtype is ir.DataType.BOOL or (value.dtype in FLOATS and value in sources)
        # A mask for windows takes the window's size to make, which only the graph knows.
        return ExtraInput(name, VISIBLE) if masks and "sliding" not in name else None
    if value.dtype not in _INTEGERS or rank(value) not in (0, 1):
        return None
    role = _purpose(value) or _NAMES.get(name.rsplit(".", 1)[-1])
    if role == PAST_LENGTH and _as_many(value, tokens):
        role = CACHE_POSITIONS
    return None if role is None else ExtraInput(name, role)


def _counts_by(mask: ir.Value, site: Site) -> bool:
    """Return True if attention takes the number of tokens that a mask keeps for their place."""
    lengths = site.node.inputs[5] if site.node.op_type == "GroupQueryAttention" else None
    return lengths is not None and mask in data_ancestors([lengths])


def _purpose(value: ir.Value) -> str | None:
    """Return the role of a number by the nearest operator that tells."""
    pending, seen = [value], {value}
    for current in pending:
        for node, index in current.uses():
            role = _READERS.get((node.domain or "ai.onnx", node.op_type, index))
            if role is not None:
                return role
            new = [output for output in node.outputs if output not in seen]
            if len(seen) < _MOST_VALUES:
                pending.extend(new)
                seen.update(new)
    return None


def _as_many(value: ir.Value, tokens: ir.Value) -> bool:
    """Return True if a list has one entry for each new token."""
    if value.shape is None or len(value.shape) != 1:
        return False
    length = value.shape[0] if isinstance(value.shape[0], int) else value.shape[0].value
    return length is not None and length != 1 and length == dimension(tokens)


def _keeps_its_size(cache: Cache) -> bool:
    """Return True if a cache is as large after a call as before."""
    past, present = cache.past, cache.present
    if past is None:
        return False
    if cache.node.op_type in _SCATTERS:
        return True
    axis = 2 if rank(past) == 4 else 1
    before, after = dimension(past, axis), dimension(present, axis)
    return before is not None and before == after


def _choose(values: Sequence[ir.Value], name: str) -> ir.Value | None:
    """Return the only one, the one of that name, or the first."""
    return _named(values, name) or (values[0] if values else None)


def _named(values: Iterable[ir.Value], name: str) -> ir.Value | None:
    return next((value for value in values if value.name == name), None)


def differs(first: ir.Value, second: ir.Value) -> bool:
    """Return True if dimensions 1 are known to have different names or sizes."""
    left, right = dimension(first), dimension(second)
    return left is not None and right is not None and left != right


def dimension(value: ir.Value, axis: int = 1) -> int | str | None:
    """Return a dimension of a value, as a number or by its name; None if neither is known."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else dim.value


def _name(value: ir.Value) -> str:
    return value.name or ""
