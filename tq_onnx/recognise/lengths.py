"""Read the number of tokens from an input other than the caches: the attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from tq_onnx.graph.constants import attribute_int
from tq_onnx.graph.values import FLOATS, rank, static_dim
from tq_onnx.recognise.attention.tokensizes import TokenSizes
from tq_onnx.recognise.interface import Roles, differs, dimension
from tq_onnx.recognise.mask_probe import has_an_entry_for_each_key
from tq_onnx.recognise.site import Site

_RESHAPERS: Final = frozenset(
    {
        *("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand", "Slice"),
        *("Not", "And", "Or", "Equal", "Greater", "Less", "Sub", "Mul", "Add", "Where"),
    }
)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Inputs whose shapes tell how many tokens there are, whatever the size of the caches."""

    #: dimension 1 is the total length, the attention mask; more than that where the graph takes
    #: from a longer mask what it needs
    total: ir.Value
    tokens: ir.Value  #: dimension 1 is the number of new tokens
    past: ir.Value  #: a cache, whose size no past length exceeds


def find_lengths(roles: Roles, sites: Sequence[Site], seen: TokenSizes) -> Lengths | None:
    """Find inputs that tell the past length without the caches; None if there are none.

    That needs an input that flows into the mask of every layer, and whose length is by its name
    another than that of the tokens: the attention mask ``[B, S]``. It has to have an entry for each
    key, and the tokens one for each query.
    """
    mask = roles.attention_mask
    if mask is None or rank(roles.tokens) not in (2, 3) or not differs(mask, roles.tokens):
        return None
    if any(_adds_tokens(node) for node in sites[0].node.graph or ()):
        return None
    past = next((site.key.past for site in sites if not site.counts_tokens), None)
    if past is None or rank(past) != 4 or not _may_tell(mask, past):
        return None
    shown = _one_query_each(sites, seen) and has_an_entry_for_each_key(mask, roles, sites)
    return Lengths(mask, roles.tokens, past) if shown else None


def _may_tell(mask: ir.Value, past: ir.Value) -> bool:
    """Return True if the length of a mask may differ from that of the caches and is its own."""
    free = not isinstance(dimension(mask), int) and dimension(mask) != dimension(past, 2)
    return free and not _lengthened(mask)


def _one_query_each(sites: Sequence[Site], seen: TokenSizes) -> bool:
    """Return True if every layer has one query for each of the tokens that go in."""
    queries = [site.query for site in sites]
    return all(seen.of(query.value, query.token_axis) == seen.new_tokens for query in queries)


def _adds_tokens(node: ir.Node) -> bool:
    """Return True if vectors are joined token after token, like a prompt of images and words."""
    if node.op_type != "Concat" or node.domain != "" or len(node.inputs) < 2:
        return False
    output = node.outputs[0]
    symbolic = any(value is None or static_dim(value, 1) is None for value in node.inputs)
    joins_tokens = symbolic and attribute_int(node, "axis", 0) in (1, -2)
    return rank(output) == 3 and output.dtype in FLOATS and joins_tokens


def _lengthened(mask: ir.Value) -> bool:
    """Return True if a mask is made longer before its use: it tells only past tokens then."""
    pending, seen = [mask], {mask}
    for value in pending:
        for node, _ in value.uses():
            if node.op_type in ("Concat", "Pad"):
                return True
            if node.op_type in _RESHAPERS:
                new = [output for output in node.outputs if output not in seen]
                pending.extend(new)
                seen.update(new)
    return False
